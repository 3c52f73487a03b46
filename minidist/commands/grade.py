"""`minidist grade`: points for a submission, and a leaderboard of several.

Proved by: tests/lesson/test_grade.py
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from minidist.base.errors import UsageError
from minidist.base.files import writing
from minidist.commands.flags import above_zero
from minidist.commands.output import say


def grade(
    files: Annotated[
        list[Path], typer.Argument(help="a submission, .py or .ipynb; with --leaderboard the results.json of several")
    ],
    assignment: Annotated[
        str | None, typer.Option(help="a lesson (04), an exercise (04.ring_all_reduce), or cs336, cse234, llmsys")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="draws some of the cases; the same for a class")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="write Gradescope's results.json here")
    ] = None,
    seconds: Annotated[float, typer.Option(help="limit of one run of an answer", callback=above_zero)] = 30.0,
    memory: Annotated[int, typer.Option(min=1, help="limit of an answer's memory, in MB")] = 1024,
    messages: Annotated[int, typer.Option(min=1, help="limit of messages, in multiples of our solution's")] = 100,
    leaderboard: Annotated[bool, typer.Option("--leaderboard", help="rank the results of several submissions")] = False,
) -> None:
    """Grade a submission: right answers, bytes and virtual time within par.

    The exit code is 0 when every point is given, 1 when some are not, 2 for wrong flags. The submission's functions run
    in another process, which has inputs and no expected answers, in an empty folder and within limits. It can still
    read and write what you can: run it in a container.
    """
    # Imported here: `minidist --help` must not load every exercise.
    from minidist.course.lesson import grade as grading
    from minidist.course.lesson.runner import Limits

    if leaderboard:
        rows = grading.leaderboard(files)
        print(f"{'':>3}  {'submission':<24} {'points':>7} {'bytes':>12} {'virtual time':>14}")
        for place, row in enumerate(rows, 1):
            print(
                f"{place:>3}  {row['submission']:<24} {row['points']:>7g} {row['bytes']:>10,.0f} B"
                f" {row['microseconds']:>11,.3f} µs"
            )
        _write(json_path, rows)
        return
    if len(files) != 1:
        raise UsageError(f"{len(files)} submissions; grade one at a time, or --leaderboard for the results of several")
    if assignment is None:
        raise UsageError("--assignment is missing: a lesson such as 04, or cs336, cse234 or llmsys")
    limits = Limits(run_s=seconds, memory=memory << 20, messages=messages)
    # What is written first is 0 points, which stay if this process is killed.
    result = grading.grade(
        files[0], assignment, seed, limits, lambda unfinished: _write(json_path, unfinished.results(), silent=True)
    )
    print(result.text())
    _write(json_path, result.results())
    if result.score < result.most:
        raise typer.Exit(1)


def _write(path: Path | None, value: object, silent: bool = False) -> None:
    if path is not None:
        with writing("the results", path, "choose another --json"):
            path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        if not silent:
            say(f"written: {path}")
