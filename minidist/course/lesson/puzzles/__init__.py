"""Sixty puzzles in three rows: a few lines to fill in, a target in bytes, messages, time or memory.

    messages    m01 ... m20    one rank sends, another receives, up to a ring and a tree
    memory      b01 ... b20    which arrays are alive when, up to ZeRO and offloading
    schedules   s01 ... s20    the lists of a pipeline's stages, up to zero bubble

A puzzle is an exercise with a text and a stub, in which `____` stands where the reader writes. The last puzzles of a
row are exercises of the lessons. The target is par, which is measured.

Proved by: tests/lesson/test_puzzles.py
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

from minidist.core.base.trace import Trace
from minidist.course.lesson.exercise import Case, Exercise, Hint

BLANK = "____"
MESSAGES = ("bytes", "messages")
Picture = Callable[[Case, Any], Sequence[Trace]]  # from a case and rank 0's answer


@dataclass(frozen=True)
class Puzzle:
    """One puzzle. picture: what is drawn of an answer; None draws the run itself."""

    name: str
    title: str
    text: str
    stub: str
    exercise: Exercise
    picture: Picture | None = None

    @property
    def function(self) -> str:
        """The name of the function that the stub defines."""
        return function_of(self.stub)


def function_of(stub: str) -> str:
    """Return the name of the last function that a stub defines."""
    return re.findall(r"^def (\w+)\(", stub, re.MULTILINE)[-1]


def filled(stub: str, lines: Sequence[str]) -> str:
    """Return the stub with a text in the place of each blank; what has several lines is indented as its blank is."""
    for text in lines:
        before, _, after = stub.partition(BLANK)
        indent = re.search(r"[^\n]*$", before)[0] if text.count("\n") else ""  # type: ignore[index]
        stub = before + text.replace("\n", f"\n{indent}") + after
    return stub


def puzzle(
    text: str, cases: Sequence[Case], *hints: Hint, note: str = "", picture: Picture | None = None, **settings: Any
) -> Puzzle:
    """Return a puzzle of an exercise that has these cases, the last of which has the target.

    text: a line of name and title, the task, an empty line, and the stub. note: the end of the task, which puzzles of a
    kind have in common. settings: of Exercise.
    """
    head, _, stub = dedent(text).strip("\n").partition("\n\n")
    title, *lines = head.split("\n")
    name, _, title = title.partition(" ")
    exercise = Exercise(
        name=f"puzzle.{name}",
        cases=lambda: list(cases),
        draw=None,
        par=cases[-1],
        functions=(function_of(stub),),
        hints=hints,
        **settings,
    )
    return Puzzle(name, title, " ".join([*lines, note]).strip(), stub, exercise, picture)


def of_lesson(text: str, exercise: Exercise, picture: Picture | None = None) -> Puzzle:
    """Return the puzzle of an exercise of a lesson. text: a line of name and title, the signature, the task."""
    title, signature, *lines = dedent(text).strip("\n").split("\n")
    name, _, title = title.partition(" ")
    return Puzzle(name, title, " ".join(lines), f"def {signature}:\n    {BLANK}", exercise, picture)


def says(words: str, text: str) -> Hint:
    """Return a hint for a failure whose message has these words."""
    return Hint(lambda failure: words in failure.message, text)


def raises(kinds: type[BaseException] | tuple[type[BaseException], ...], text: str) -> Hint:
    """Return a hint for an answer that raises one of these."""
    return Hint(lambda failure: failure.raised(*(kinds if isinstance(kinds, tuple) else (kinds,))), text)


def above(metric: str, text: str) -> Hint:
    """Return a hint for a right answer that is above the target in this metric."""
    return Hint(lambda failure: failure.kind == "limit" and failure.metric == metric, text)


def too_few(text: str) -> Hint:
    """Return a hint for right answers that no message has carried."""
    return Hint(lambda failure: failure.kind in ("few", "shared"), text)
