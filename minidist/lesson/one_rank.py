"""Runs one rank of an exercise, in the simulated world and under mpiexec alike.

Proved by: tests/lesson/test_checker.py
"""

from collections.abc import Callable
from typing import Any

from minidist.base.errors import MinidistError, UsageError
from minidist.comm import Comm
from minidist.lesson.exercise import Case, Exercise


class ForbiddenCallError(UsageError):
    """The answer used a method of comm that the exercise does without."""


class ProgramExitError(MinidistError):
    """The answer ended the program."""


def one_rank(exercise: Exercise, function: Callable[..., Any], case: Case, comm: Comm) -> Any:
    """Call the function with this rank's arguments of a case and return its answer."""
    arguments = exercise.arguments(case, comm)
    given = (restricted(comm, exercise.forbidden), *arguments) if exercise.communicates else arguments
    try:
        returned = function(*given)
    except SystemExit as end:
        raise ProgramExitError(f"the function ended the program: SystemExit({end.code!r})") from None
    return exercise.answer(arguments, returned)


def restricted(comm: Comm, forbidden: tuple[str, ...]) -> Any:
    """Return the communicator without some of its methods."""
    return _Restricted(comm, forbidden) if forbidden else comm


class _Restricted:
    def __init__(self, comm: Comm, forbidden: tuple[str, ...]) -> None:
        self._comm, self._forbidden = comm, forbidden

    def __getattr__(self, name: str) -> Any:
        if name in self._forbidden:
            raise ForbiddenCallError(
                f"this exercise does without comm.{name}; forbidden here: {', '.join(self._forbidden)}"
            )
        return getattr(self._comm, name)
