"""Puzzles: what a reader sees of them, the verdict on an answer, its picture, and which are solved.

    from minidist.course.puzzle import puzzle

    puzzle("m03")                prints the task and its stub
    puzzle("m03", swap)          judges the function, and shows its run step by step

The judge is that of the lessons (lesson/checker.py). The picture is of a second run, in this process, on the case that
the verdict names: the smallest one that fails, or that of the target. `minidist puzzle` does the same with files.

Proved by: tests/lesson/test_puzzles.py
"""

import contextlib
import io
import os
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.base.errors import UsageError, nearest, quoted, quoted_path, reason
from minidist.base.traces import Trace
from minidist.comm.errors import RankTimeoutError
from minidist.core.comm import Comm
from minidist.course import progress
from minidist.course.lesson.answer_process import BUFFERED, EndlessError
from minidist.course.lesson.checker import Result, examine
from minidist.course.lesson.exercise import Case
from minidist.course.lesson.judge import target
from minidist.course.lesson.one_rank import one_rank
from minidist.course.lesson.par import par_of
from minidist.course.lesson.puzzles import BLANK, Puzzle
from minidist.course.lesson.runner import Limits, ProcessEndedError
from minidist.course.lesson.submission import read
from minidist.course.lesson.transport import dumps_of_exercise
from minidist.report.stepper_world import StepWorld

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from minidist.report.stepper import Stepper

ROWS = ("messages", "memory", "schedules")


@cache
def rows() -> dict[str, list[Puzzle]]:
    """Return row -> its puzzles, the easiest first."""
    return {row: import_module(f"minidist.course.lesson.puzzles.{row}").PUZZLES for row in ROWS}


def find(name: str) -> Puzzle:
    """Return a puzzle. Raises UsageError when there is none of this name."""
    table = {puzzle.name: puzzle for row in rows().values() for puzzle in row}
    if name not in table:
        raise UsageError(f"there is no puzzle {quoted(name)}{nearest(name, table)}; `minidist puzzle` lists them")
    return table[name]


# The task -------------------------------------------------------------------------------------------------------------


def target_of(puzzle: Puzzle) -> str:
    """Return the target in words, as our solution was measured."""
    exercise = puzzle.exercise
    return target(par_of(exercise.name, exercise.par).metrics, exercise.limits) or "the right answer"


def target_line(puzzle: Puzzle) -> str:
    """Return the target and the case on which it was measured."""
    return f"target (par) on {puzzle.exercise.describe(puzzle.exercise.par)}: {target_of(puzzle)}"


def task(puzzle: Puzzle) -> str:
    """Return the text of a puzzle with its target."""
    blanks = puzzle.stub.count(BLANK)
    fill = f"Fill {blanks} blank{'s' * (blanks != 1)}; {target_line(puzzle)}."
    lines = [textwrap.fill(text, 100, break_on_hyphens=False) for text in (puzzle.text, fill)]
    return "\n".join([f"{puzzle.name} {puzzle.title}", "", *lines])


def sheet(puzzle: Puzzle) -> str:
    """Return the file that the reader fills in."""
    name = puzzle.name
    return (
        f'"""{task(puzzle)}\n\nWrite in the place of each ____, then: minidist puzzle {name} {name}.py\n"""\n\n'
        f"import numpy as np\n\n\n{puzzle.stub}\n"
    )


def load(puzzle: Puzzle, path: Path) -> Callable[..., Any]:
    """Run a file and return the function of the puzzle. Raises UsageError when it has none, or cannot be run."""
    if path.suffix != ".py" or not os.path.isfile(path):
        what = "is no file whose name ends in .py" if path.exists() else "does not exist"
        raise UsageError(f"{quoted_path(path)} {what}; `minidist puzzle {puzzle.name}` writes one to fill in")
    namespace: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(read(path), path.name, "exec"), namespace)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise UsageError(f"{quoted_path(path)} cannot be run: {reason(error, named=True)}") from None
    if not callable(namespace.get(puzzle.function)):
        names = [name for name, value in namespace.items() if callable(value)]
        raise UsageError(
            f"{quoted_path(path)} defines no {puzzle.function}(){nearest(puzzle.function, names)}; the stub of"
            f" {puzzle.name} has its name"
        )
    function: Callable[..., Any] = namespace[puzzle.function]
    return function


# The verdict and the picture ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attempt:
    """An answer that was judged. run: what is drawn of it, a world or traces; none where nothing can be drawn."""

    puzzle: Puzzle
    result: Result
    run: StepWorld | Sequence[Trace]

    @property
    def text(self) -> str:
        """The verdict, with the target."""
        return self.result.text + ("" if self.result.passed else f"\n  {target_line(self.puzzle)}")

    @property
    def title(self) -> str:
        """What the picture shows."""
        name, case = self.puzzle.name, case_of(self.puzzle, self.result)
        return f"{name} {self.puzzle.title}: your answer, {self.puzzle.exercise.describe(case)}."

    def steps(self) -> "Stepper | None":
        """Return the page to step through the run; None where it has no message and no computation."""
        from minidist.report.stepper import show

        with contextlib.suppress(UsageError):
            return show(self.run, self.title)
        return None

    def figure(self) -> "Figure | None":
        """Return what the steps do not show: the memory, or, where no message has arrived, which rank waits for which.

        None where the steps are all.
        """
        from minidist.report import draw

        traces = self.run.traces if isinstance(self.run, StepWorld) else self.run
        if any(trace.memory for trace in traces):
            return draw("memory", traces, {"command": f"minidist puzzle {self.puzzle.name}"})
        return self.result.figure if self.steps() is None else None

    def write(self, path: Path) -> list[Path]:
        """Write what there is to see next to the answer's file; returns the files."""
        from minidist.report import save

        steps, figure = self.steps(), self.figure()
        written = [] if steps is None else [steps.write(path.with_suffix(".html"))]
        return written if figure is None else [*written, save(figure, path.with_suffix(".svg"))]


def attempt(puzzle: Puzzle, function: Callable[..., Any]) -> Attempt:
    """Judge an answer, and run it once more for its picture."""
    result = examine(puzzle.exercise.name, function, mpi=False)
    # What has to be ended from outside is not run here.
    endless = result.failure is not None and result.failure.raised(RankTimeoutError, EndlessError, ProcessEndedError)
    return Attempt(puzzle, result, () if endless else run(puzzle, function, result))


def case_of(puzzle: Puzzle, result: Result) -> Case:
    """Return the case that is drawn."""
    return puzzle.exercise.par if result.failure is None else result.failure.case


def run(puzzle: Puzzle, function: Callable[..., Any], result: Result) -> StepWorld | Sequence[Trace]:
    """Return the run of an answer, as far as it went, or what the puzzle draws of its answer."""
    exercise, case = puzzle.exercise, case_of(puzzle, result)
    inputs = [dumps_of_exercise(exercise.arguments(case, rank)) for rank in range(case.ranks)]

    def main(comm: Comm) -> Any:
        return one_rank(exercise.task, function, inputs[comm.rank], comm)

    is_buffered = result.failure is not None and result.failure.buffered
    world = StepWorld(case.ranks, eager_bytes=BUFFERED if is_buffered else 0, timeout=Limits().compute_s)
    answers = None
    # The verdict says what was raised, and what was printed.
    with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
        answers = world.run(main)
    if puzzle.picture is None:
        return world
    with contextlib.suppress(Exception):  # whatever an answer raises that has another form than the puzzle's
        return puzzle.picture(case, answers[0] if answers else None)
    return ()


def puzzle(name: str, function: Callable[..., Any] | None = None) -> None:
    """Print the task of a puzzle, or judge the function, print the verdict and, in a notebook, show its run.

    Raises UsageError when there is no such puzzle.
    """
    from minidist.report import show

    one = find(name)
    if function is None:
        print(f"{task(one)}\n\n{one.stub}")
        return
    made = attempt(one, function)
    print(made.text)
    if made.steps() is not None:
        show(made.run, made.title)
    figure = made.figure()
    if figure is not None:
        show(figure)
    if made.result.passed:
        try:
            mark(name)
        except UsageError as error:
            print(error)


# Progress -------------------------------------------------------------------------------------------------------------


def solved() -> list[str]:
    """Return the names of the puzzles that are solved. Raises UsageError when the file cannot be read."""
    return progress.names_of("puzzles")


def mark(name: str) -> None:
    """Keep that a puzzle is solved. Raises UsageError when this cannot be written."""
    progress.add("puzzles", name)
