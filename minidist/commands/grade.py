"""`minidist grade`: points for a submission, and a leaderboard of several.

Proved by: tests/lesson/test_grade.py
"""

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from minidist.base.errors import UsageError, quoted
from minidist.base.files import writing
from minidist.commands.command import Argument, Exit, Option, say
from minidist.commands.flags import above_zero


def grade(
    files: Annotated[
        list[Path], Argument(help="submissions, .py or .ipynb; with --leaderboard the results.json of several")
    ],
    assignment: Annotated[
        str | None, Option(help="a lesson (04), an exercise (04.ring_all_reduce), or cs336, cse234, llmsys")
    ] = None,
    seed: Annotated[int, Option(min=0, help="draws some of the cases; the same for a class")] = 0,
    json_path: Annotated[
        Path | None, Option("--json", metavar="PATH", help="where Gradescope's results.json goes; of several, a folder")
    ] = None,
    seconds: Annotated[float, Option(help="limit of one run of an answer", callback=above_zero)] = 30.0,
    memory: Annotated[int, Option(min=1, help="limit of an answer's memory, in MB")] = 1024,
    messages: Annotated[int, Option(min=1, help="limit of messages, in multiples of our solution's")] = 100,
    leaderboard: Annotated[bool, Option("--leaderboard", help="rank the results of several submissions")] = False,
) -> None:
    """Grade submissions: right answers, bytes and virtual time within par.

    The exit code is 0 when every point is given, 1 when some are not, 2 for wrong flags. A submission's functions run
    in another process, which has inputs and no expected answers, in an empty folder and within limits. It can still
    read and write what you can: run it in a container.
    """
    # Imported here: `minidist --help` must not load every exercise.
    from minidist.course.lesson import grade as grading
    from minidist.course.lesson.runner import Limits

    if leaderboard:
        rows = grading.leaderboard(files)
        _print_leaderboard(rows)
        _write(json_path, rows)
        return
    if assignment is None:
        raise UsageError("--assignment is missing: a lesson such as 04, or cs336, cse234 or llmsys")
    limits = Limits(run_s=seconds, memory=memory << 20, messages=messages)
    paths = _results_of(files, json_path)

    complete = True
    for file, path in zip(files, paths, strict=True):
        # What is written first is 0 points, which stay if this process is killed.
        first = partial(_write_unfinished, path)
        result = grading.grade(file, assignment, seed, limits, first)
        print(result.text())
        _write(path, result.results())
        complete = complete and result.score == result.most
    if len(files) > 1 and json_path is not None:
        _print_leaderboard(grading.leaderboard([path for path in paths if path is not None]))
    if not complete:
        raise Exit(1)


def _results_of(files: list[Path], json_path: Path | None) -> list[Path | None]:
    """Return where the results of each submission go; raises UsageError where two of them have one name."""
    if len(files) == 1 or json_path is None:
        return [json_path] * len(files)
    names = [file.stem for file in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two submissions are called {quoted(twice)}, and their results would be one file; rename one")
    with writing("the results", json_path, "choose another folder for --json"):
        json_path.mkdir(parents=True, exist_ok=True)
    return [json_path / f"{name}.json" for name in names]


def _print_leaderboard(rows: list[dict[str, Any]]) -> None:
    print(f"{'':>3}  {'submission':<24} {'points':>7} {'bytes':>12} {'virtual time':>14}")
    for place, row in enumerate(rows, 1):
        print(
            f"{place:>3}  {row['submission']:<24} {row['points']:>7g} {row['bytes']:>10,.0f} B"
            f" {row['microseconds']:>11,.3f} µs"
        )


def _write_unfinished(path: Path | None, unfinished: Any) -> None:
    _write(path, unfinished.results(), silent=True)


def _write(path: Path | None, value: object, silent: bool = False) -> None:
    if path is not None:
        with writing("the results", path, "choose another --json"):
            path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        if not silent:
            say(f"written: {path}")
