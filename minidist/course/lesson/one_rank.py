"""Runs one rank of an exercise, both in the simulated world and under mpiexec.

Proved by: tests/lesson/test_checker.py
"""

import inspect
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minidist.comm.has_run import has_run
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import MinidistError, UsageError
from minidist.core.comm import Comm
from minidist.course.lesson.plain import form, plain


@dataclass(frozen=True)
class Task:
    """What of an exercise the process of an answer gets. The fields are those of `Exercise`."""

    setup: Callable[..., tuple[Any, ...]] | None
    answer: Callable[[tuple[Any, ...], Any], Any]
    communicates: bool
    forbidden: tuple[str, ...]
    written_by_hand: tuple[str, ...]
    generator: bool = False
    links: LinkModel | None = None


class ForbiddenCallError(UsageError):
    """The answer used a method of comm that the exercise does without."""


class ParametersError(UsageError):
    """The answer has other parameters than the exercise has arguments."""


class ProgramExitError(MinidistError):
    """The answer ended the program."""


def one_rank(task: Task, function: Callable[..., Any], data: bytes, comm: Comm) -> Any:
    """Call the function with what this rank's pickled data makes its arguments, and return its answer."""
    arguments = pickle.loads(data)
    if task.setup is not None:
        arguments = task.setup(comm, *arguments)
    restricted = _Restricted(comm, task.forbidden) if task.forbidden else comm
    given = (restricted, *arguments) if task.communicates else arguments
    check_arguments(function, given, task.communicates)
    try:
        returned = function(*given)
    except SystemExit as end:
        raise ProgramExitError(f"the function ended the program: SystemExit({end.code!r})") from None
    # A `yield` or an `async` that nobody asked for is said; as an answer it would be wrong for another reason.
    if not (task.generator and inspect.isgenerator(returned)):
        has_run(returned, function, comm.rank if task.communicates else None)
    return task.answer(arguments, returned)


def check_arguments(function: Callable[..., Any], given: Sequence[Any], communicates: bool) -> None:
    """Raise ParametersError where the function has other parameters than the exercise has arguments."""
    try:
        signature = inspect.signature(function)
    except Exception:  # of a function of C, or of an object that hides its parameters
        return
    try:
        signature.bind(*given)
    except TypeError:
        kinds = ["comm"] * communicates
        kinds += ["a function" if callable(value) else form(plain(value)) for value in given[len(kinds) :]]
        raise ParametersError(
            f"the function has the parameters {signature}, and the exercise passes {len(kinds)}: {', '.join(kinds)}"
        ) from None


class _Restricted:
    """A communicator without some of its methods."""

    def __init__(self, comm: Comm, forbidden: tuple[str, ...]) -> None:
        self._comm, self._forbidden = comm, forbidden

    def __getattr__(self, name: str) -> Any:
        if name in self._forbidden:
            raise ForbiddenCallError(
                f"this exercise does without comm.{name}; forbidden here: {', '.join(self._forbidden)}"
            )
        return getattr(self._comm, name)
