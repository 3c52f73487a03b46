"""Finds exercises by their names: those of the lessons, of assignments, and the puzzles.

Proved by: tests/lesson/test_exercises.py
"""

import importlib
import pkgutil
from dataclasses import replace
from functools import cache

from minidist.base.errors import UsageError, nearest
from minidist.course.lesson.exercise import Exercise
from minidist.course.lesson.hint_file import hints_of
from minidist.course.lesson.numbers import current


@cache
def exercises(folder: str = "exercises") -> dict[str, Exercise]:
    """Return name -> exercise, from all files of exercises/, of assignments/ (what courses ask for) or of puzzles/."""
    package = importlib.import_module(f"minidist.course.lesson.{folder}")
    files = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    return {exercise.name: exercise for file in files for exercise in exercises_of(f"{package.__name__}.{file}")}


@cache
def exercises_of(module: str) -> list[Exercise]:
    """Return the exercises of a module, with their hints."""
    functions = vars(importlib.import_module(module))
    return [
        replace(exercise, hints=exercise.hints or hints_of(functions, exercise.name, **exercise.for_hints))
        for exercise in functions["EXERCISES"]
    ]


def names() -> list[str]:
    """Return the names of all exercises."""
    return list(exercises())


def find(name: str) -> Exercise:
    """Return the exercise, also by a name that it had before.

    Raises UsageError, with the names that exist, when there is none.
    """
    name = current(name)
    # The puzzles have a list that people look at: `minidist puzzle`.
    table = exercises("puzzles") if name.startswith("puzzle.") else {**exercises(), **exercises("assignments")}
    if name not in table:
        near = nearest(name, table) or f"; there are {', '.join(table)}"
        raise UsageError(f"there is no exercise {name!r}{near}")
    return table[name]
