"""Lesson 03: every rank sends to the right and receives from the left, three ways, none of which relies on buffering.

Proved by: tests/lesson/test_exercises.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.core.base.errors import BufferReuseError, DeadlockError, UnwaitedRequestError, UsageError
from minidist.course.lesson.exercise import Case, Exercise, Failure, Hint, Least


def data(case: Case, rank: int) -> np.ndarray:
    """Return 100 r, 100 r + 1, ...: the numbers show from which rank they came."""
    return 100.0 * rank + np.arange(case.size)


def from_distance(case: Case, distance: int) -> list[np.ndarray]:
    return [data(case, (rank + distance) % case.ranks) for rank in range(case.ranks)]


def all_wait_in(what: str) -> Any:
    """Return a predicate: does every waiting rank wait in a send (receive)?"""

    def holds(failure: Failure) -> bool:
        waiting: Sequence[Any] = getattr(failure.error, "waiting", ())
        return failure.raised(DeadlockError) and all(item.what.startswith(what) for item in waiting)

    return holds


HINTS = (
    Hint(
        lambda f: f.raised(DeadlockError) and f.case.ranks == 1,
        "with one rank the right neighbour is the rank itself, and it can neither send nor receive while it waits in"
        " the other",
    ),
    Hint(
        all_wait_in("send"),
        "every rank waits in its send: a send may block until its receive has started; let some receive first",
    ),
    Hint(all_wait_in("receive"), "every rank waits in its receive, and no rank has sent: this hangs on every machine"),
    Hint(
        lambda f: f.case.ranks > 2 and f.answers_are(from_distance(f.case, 1)),
        "the numbers come from the right neighbour; the left one is (rank - 1) % size",
    ),
    Hint(lambda f: f.answers_are(from_distance(f.case, 0)), "the numbers are the rank's own: return what was received"),
    Hint(
        lambda f: f.raised(UnwaitedRequestError),
        "isend and irecv only start: wait for both requests, or the buffer may be read while it is being written",
    ),
    Hint(
        lambda f: f.raised(BufferReuseError),
        "what comes in needs an array of its own, np.empty_like(outgoing); outgoing may still be on its way",
    ),
    Hint(
        lambda f: f.raised(UsageError) and "names rank" in f.message,
        "the ring closes with % size: the last rank's right neighbour is rank 0",
    ),
    Hint(
        lambda f: f.kind == "limit",
        "correct, but slower than two rounds: some messages travel one after the other that could travel at the same"
        " time; let neighbours work in pairs, of which one sends first and the other receives first",
    ),
    Hint(
        lambda f: f.raised(UsageError) and "without comm." in f.message, "this one of the three ways uses other calls"
    ),
)


WAITS_TOO_EARLY = Hint(
    lambda f: f.raised(DeadlockError),
    "a wait comes before both requests have been started, which is a blocking send or receive: start the receive and"
    " the send, then wait for both",
)


def exercise(name: str, forbidden: tuple[str, ...], hints: tuple[Hint, ...] = HINTS) -> Exercise:
    return Exercise(
        name=name,
        arguments=lambda case, rank: (data(case, rank),),
        expected=lambda case: from_distance(case, -1),
        least=lambda case: Least(case.ranks * (case.size > 0), 8 * case.ranks * case.size),
        par=Case(4, 16),
        limits=("time",),
        forbidden=forbidden,
        hints=hints,
    )


EXERCISES = [
    exercise("03.by_order", ("sendrecv", "isend", "irecv")),
    exercise("03.by_sendrecv", ("send", "recv", "isend", "irecv")),
    exercise("03.by_requests", ("send", "recv", "sendrecv"), (WAITS_TOO_EARLY, *HINTS)),
]
