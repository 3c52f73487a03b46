"""Counts what the judge says to wrong answers and to right ones that are written in an unusual way.

    python -m tests.lesson.bank                # all of them, half a minute
    python -m tests.lesson.bank 04. puzzle     # of exercises whose names begin so

A wrong answer that is accepted, a right one that is refused, and a wrong one with another hint than it should get are
named, and the exit code is 1.

Proved by: tests/lesson/test_bank.py
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from minidist.course.lesson import solution
from minidist.course.lesson.catalogue import find
from minidist.course.lesson.puzzles import filled
from minidist.course.lesson.solutions import defined
from minidist.course.puzzle import rows
from tests.lesson.judged_here import judged
from tests.lesson.mutations import MUTATIONS
from tests.lesson.puzzle_attempts import WRONG as PUZZLES
from tests.lesson.unusual_answers import RIGHT
from tests.lesson.wrong_answers import WRONG


class Entry(NamedTuple):
    """An answer to an exercise. hint: words of the hint that a wrong one must get, "" when none fits; None: right.

    made: returns the function; most of them are compiled, which takes longer than to list all.
    """

    exercise: str
    title: str
    made: Callable[[], Any]
    hint: str | None

    def problem(self):
        """Return a sentence when the judge treats it otherwise than it should, else ""."""
        verdict = judged(self.exercise, self.made())
        if verdict.passed != (self.hint is None):
            return (
                f"accepted, and it is wrong: {self.title}"
                if verdict.passed
                else f"refused, and it is right:\n{verdict.text}"
            )
        if self.hint and self.hint not in verdict.hint:
            return f"{self.title}: the hint is {verdict.hint!r}, and should have {self.hint!r}"
        return ""


def mutated(name, old, new):
    """Return our solution of an exercise with one text of it, or of its file, replaced by another."""
    function = solution(name)
    text, own = Path(inspect.getsourcefile(function)).read_text(encoding="utf-8"), inspect.getsource(function)
    changed = text.replace(own, own.replace(old, new)) if old in own else text.replace(old, new)
    assert own.count(old) <= 1 or text.count(old) == 1, f"{name}: {old!r} is there several times"
    assert changed != text, f"{name}: {old!r} is not there"
    module = ModuleType("mutated")
    exec(compile(changed, f"<{name}>", "exec"), module.__dict__)
    return defined(module, find(name))


def of_puzzle(puzzle, lines):
    """Return the function of a puzzle's stub whose blanks are filled."""
    namespace = {"np": np}
    exec(filled(puzzle.stub, lines), namespace)
    return namespace[puzzle.function]


def bank():
    """Return all entries."""
    puzzles = {puzzle.name: puzzle for row in rows().values() for puzzle in row}
    return [
        *(
            Entry(name, f"{old.strip()!r} -> {new.strip()!r}", partial(mutated, name, old, new), hint)
            for name, changes in MUTATIONS.items()
            for old, new, hint in changes
        ),
        *(Entry(name, function.__name__, lambda f=function: f, hint) for name, function, hint in WRONG),
        *(
            Entry(puzzles[name].exercise.name, str(lines), partial(of_puzzle, puzzles[name], lines), hint)
            for name, lines, hint in PUZZLES
        ),
        *(Entry(name, function.__name__, lambda f=function: f, None) for name, function in RIGHT),
    ]


def main(beginnings):
    """Judge all entries, or those of some exercises; print what is wrong and the counts; return the exit code."""
    entries = [entry for entry in bank() if entry.exercise.startswith(tuple(beginnings) or "")]
    problems = [f"{entry.exercise}: {problem}" for entry in entries if (problem := entry.problem())]
    wrong = [entry for entry in entries if entry.hint is not None]
    hinted = sum(bool(entry.hint) for entry in wrong)
    print(*problems, sep="\n", end="\n" * bool(problems))
    print(f"{len({entry.exercise for entry in entries})} exercises and puzzles, {len(problems)} problems")
    print(f"{len(wrong)} wrong answers, {hinted} of them ({hinted / max(1, len(wrong)):.0%}) with a hint that fits")
    print(f"{len(entries) - len(wrong)} right answers that are written in an unusual way")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
