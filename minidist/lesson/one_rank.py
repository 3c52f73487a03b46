"""Runs one rank of an exercise, in the simulated world and under mpiexec alike.

Proved by: tests/lesson/test_checker.py
"""

from collections.abc import Callable
from typing import Any

from minidist.base.errors import UsageError
from minidist.comm import Comm
from minidist.lesson.exercise import Case, Exercise


def one_rank(exercise: Exercise, function: Callable[..., Any], case: Case, comm: Comm) -> Any:
    """Call the function with this rank's arguments of a case and return its answer."""
    arguments = exercise.arguments(case, comm)
    if not exercise.communicates:
        return exercise.answer(arguments, function(*arguments))
    return exercise.answer(arguments, function(restricted(comm, exercise.forbidden), *arguments))


def restricted(comm: Comm, forbidden: tuple[str, ...]) -> Any:
    """Return the communicator without some of its methods."""
    return _Restricted(comm, forbidden) if forbidden else comm


class _Restricted:
    def __init__(self, comm: Comm, forbidden: tuple[str, ...]) -> None:
        self._comm, self._forbidden = comm, forbidden

    def __getattr__(self, name: str) -> Any:
        if name in self._forbidden:
            raise UsageError(f"this exercise does without comm.{name}; forbidden here: {', '.join(self._forbidden)}")
        return getattr(self._comm, name)
