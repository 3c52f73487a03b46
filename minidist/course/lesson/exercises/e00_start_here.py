"""Lesson 00: print in rank order. Each rank speaks once, rank 0 first, and two ranks never speak at the same time."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from minidist.comm import SimWorld
from minidist.comm.errors import UnmatchedMessageError
from minidist.core.base.errors import DeadlockError
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, drawing

SPEAKING = 1e-3  # seconds that a sentence takes; without it a rank that passes the token too early would not be noticed


class Say:
    """`say(text)` for one rank. It records when the rank began and ended to speak."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.spoken: list[tuple[float, float, str]] = []

    def __call__(self, text: str) -> None:
        real = not isinstance(self.comm.world, SimWorld)  # processes have separate clocks; the machine has one
        now: Callable[[], float] = time.perf_counter if real else self.comm.time
        start = now()
        if real:
            time.sleep(SPEAKING)
        self.comm.compute(seconds=SPEAKING, name="say")
        self.spoken.append((start, now(), text))


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    for rank, spoken in enumerate(answers):
        if len(spoken) != 1:
            return f"rank {rank} spoke {len(spoken)} times; each rank speaks once"
    for rank in range(1, case.ranks):
        (before,), (after,) = answers[rank - 1], answers[rank]
        if after[0] < before[1]:
            return f"rank {rank} began to speak before rank {rank - 1} had finished"
    return ""


def overlapped(failure: Failure) -> bool:
    return failure.kind == "wrong" and "before rank" in failure.message


def reversed_order(failure: Failure) -> bool:
    """Return whether each rank speaks before the one that should speak before it."""
    starts = [spoken[0][0] for spoken in failure.answers]
    return overlapped(failure) and starts == sorted(starts, reverse=True) and len(set(starts)) > 1


def told_by_one_rank(failure: Failure) -> bool:
    """Return whether rank 0 sends to several ranks."""
    return overlapped(failure) and len({message.peer for message in failure.traces[0].sent()}) > 1


def no_rank_begins(failure: Failure) -> bool:
    """Return whether every rank waits in a receive."""
    waiting = getattr(failure.error, "waiting", ())
    return failure.raised(DeadlockError) and {item.rank for item in waiting if item.what.startswith("receive")} == set(
        range(failure.case.ranks)
    )


EXERCISES = [
    Exercise(
        name="00.in_rank_order",
        arguments=lambda case, rank: (),
        setup=lambda comm: (Say(comm),),
        answer=lambda arguments, returned: arguments[0].spoken,
        check_answers=check_answers,
        cases=lambda: [Case(ranks, 1) for ranks in (1, 2, 3, 4, 5, 7, 8, 13)],
        draw=drawing((1, 16), (1, 1)),
        least=lambda case: Least(case.ranks - 1, 0),
        par=Case(4, 1),
        unit="sentence",
        limits=("messages",),
        for_hints={
            "no_rank_waited": lambda f: overlapped(f) and f.answers[0][0][0] == f.answers[1][0][0],
            "lost_token": lambda f: f.raised(DeadlockError, UnmatchedMessageError),
        },
    )
]
