"""Lesson 03: every rank sends to the right and receives from the left, in three ways that do not rely on buffering."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.core.base.errors import DeadlockError
from minidist.course.lesson.exercise import Case, Exercise, Failure, Least
from minidist.course.lesson.hint_file import hints_of


def data(case: Case, rank: int) -> np.ndarray:
    """Return 100 r, 100 r + 1, ...: the numbers show from which rank they came."""
    return 100.0 * rank + np.arange(case.size)


def from_distance(case: Case, distance: int) -> list[np.ndarray]:
    return [data(case, (rank + distance) % case.ranks) for rank in range(case.ranks)]


def all_wait_in(failure: Failure, what: str) -> bool:
    """Return whether every waiting rank waits in a send, or in a receive."""
    waiting: Sequence[Any] = getattr(failure.error, "waiting", ())
    return failure.raised(DeadlockError) and all(item.what.startswith(what) for item in waiting)


def exercise(name: str, forbidden: tuple[str, ...]) -> Exercise:
    return Exercise(
        name=name,
        arguments=lambda case, rank: (data(case, rank),),
        expected=lambda case: from_distance(case, -1),
        least=lambda case: Least(case.ranks * (case.size > 0), 8 * case.ranks * case.size),
        par=Case(4, 16),
        limits=("time",),
        forbidden=forbidden,
        hints=hints_of(globals(), name, "03"),
    )


EXERCISES = [
    exercise("03.by_order", ("sendrecv", "isend", "irecv")),
    exercise("03.by_sendrecv", ("send", "recv", "isend", "irecv")),
    exercise("03.by_requests", ("send", "recv", "sendrecv")),
]
