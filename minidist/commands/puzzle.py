"""`minidist puzzle`: sixty puzzles of a few lines, with the reader's own run as a picture.

Proved by: tests/lesson/test_puzzles.py
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from minidist.base.errors import UsageError, quoted_path
from minidist.base.files import writing
from minidist.commands.command import Argument, Option, Result, json_or_table, say

if TYPE_CHECKING:
    from minidist.course.lesson.puzzles import Puzzle


@json_or_table
def puzzle(
    name: Annotated[str | None, Argument(help="a puzzle, such as m03; default: a list of all")] = None,
    file: Annotated[Path | None, Argument(help="your answer, such as m03.py; default: write a stub")] = None,
    print_only: Annotated[bool, Option("--print", help="print the stub instead of writing a file")] = False,
) -> Result:
    """Fill a few lines: puzzles about messages, memory and schedules, each with a target and a picture of your run.

    minidist puzzle m03 writes m03.py, in which ____ stands where you write; minidist puzzle m03 m03.py judges it and
    writes the run, step by step, to m03.html. The exit code is 0 when the answer is right and at the target, else 1.
    """
    from minidist.course import puzzle as puzzles

    if name is None:
        return _list()
    if print_only and file is not None:
        raise UsageError("--print prints the stub; leave it out to judge a file")
    one = puzzles.find(name)
    return _stub(one, print_only) if file is None else _judge(one, file)


def _list() -> Result:
    """Return the three rows, with what is solved."""
    from minidist.course.puzzle import rows, solved, target_of

    try:
        done = solved()
    except UsageError as error:
        done = []
        say(f"minidist: {error}")
    table = rows()
    found = {
        row: [{"puzzle": p.name, "title": p.title, "solved": p.name in done, "target": target_of(p)} for p in puzzles]
        for row, puzzles in table.items()
    }

    def show() -> None:
        for row, puzzles in found.items():
            print(f"{row}: {sum(bool(p['solved']) for p in puzzles)} of {len(puzzles)} solved")
            for p in puzzles:
                print(f"  {p['puzzle']} {'solved' if p['solved'] else '      '}  {p['title']:<32}  {p['target']}")
        left = [p["puzzle"] for puzzles in found.values() for p in puzzles if not p["solved"]]
        print(f"next: minidist puzzle {left[0]}" if left else "all are solved")

    return Result(found, show)


def _stub(one: "Puzzle", print_only: bool) -> Result:
    """Write the stub of a puzzle, or print it."""
    from minidist.course.puzzle import sheet, task

    text, path = sheet(one), Path(f"{one.name}.py")
    if print_only:
        return Result({"puzzle": one.name, "stub": text}, lambda: print(text, end=""))
    if path.exists():
        raise UsageError(f"{path} exists already; minidist puzzle {one.name} {path} judges it, or move it away")
    with writing("the stub", path, "change to a folder that you can write, or add --print"):
        path.write_text(text, encoding="utf-8")
    say(f"written: {path}")
    todo = f"Write in the place of each ____ in {path}, then: minidist puzzle {one.name} {path}"
    return Result({"puzzle": one.name, "file": str(path)}, lambda: print(f"{task(one)}\n\n{one.stub}\n\n{todo}"))


def _judge(one: "Puzzle", file: Path) -> Result:
    """Judge an answer, write its picture, and keep that it is solved."""
    from minidist.course.puzzle import attempt, load, mark

    made = attempt(one, load(one, file))
    # The verdict is said, also where a picture or the progress cannot be written.
    written: list[Path] = []
    try:
        written += made.write(file)
        if made.result.passed:
            mark(one.name)
    except UsageError as error:
        say(f"minidist: {error}")
    for path in written:
        say(f"written: {quoted_path(path, marks=False)}")

    value = {
        "puzzle": one.name,
        "solved": made.result.passed,
        "text": made.text,
        "hint": made.result.hint,
        "target": made.result.par,
        "yours": made.result.yours,
        "written": [str(path) for path in written],
    }
    return Result(value, lambda: print(made.result.printed + made.text), 0 if made.result.passed else 1)
