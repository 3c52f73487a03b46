"""Lesson 06c: a parameter server that holds the SSP bound."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.comm.errors import UnmatchedMessageError
from minidist.core.base.errors import DeadlockError
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, drawing, short

SLACK = 0.01  # seconds; a gradient takes whole seconds, a message microseconds


class Compute:
    """`compute(clock, weights)`: the worker's next gradient, a 1 in its own place. It records what it saw, and when."""

    def __init__(self, comm: Comm, seconds: int) -> None:
        self.comm, self.seconds = comm, seconds
        self.seen: list[tuple[int, np.ndarray, float]] = []

    def __call__(self, clock: int, weights: np.ndarray) -> np.ndarray:
        self.seen.append((clock, np.array(weights), self.comm.time()))
        self.comm.compute(seconds=self.seconds, name=f"gradient {clock}")
        return np.eye(self.comm.size - 1)[self.comm.rank - 1]


def pace(case: Case) -> list[int]:
    """Return the seconds of a gradient, for each worker."""
    return [int(n) for n in case.generator(1).integers(1, 5, case.ranks - 1)]


def bound_of(case: Case) -> int:
    return int(case.generator(2).integers(case.size <= 2, 4))


def starts(case: Case) -> np.ndarray:
    """Return when worker w may start clock c if messages take no time: after its last one and the slowest's c-s-1."""
    seconds, bound = pace(case), bound_of(case)
    times = np.zeros((case.ranks - 1, case.size))
    for clock in range(1, case.size):
        for w, own in enumerate(seconds):
            others = [times[v, clock - bound - 1] + seconds[v] for v in range(len(seconds)) if clock - bound > 0]
            times[w, clock] = max([times[w, clock - 1] + own, *others])
    return times


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    bound, workers = bound_of(case), case.ranks - 1

    total, _ = answers[0]
    if total is None or np.shape(total) != (workers,) or not np.array_equal(total, np.full(workers, case.size)):
        got = "None" if total is None else short(np.asarray(total))
        return (
            f"rank 0 returned {got}; {case.size} gradients from each of {workers} workers make"
            f" {short(np.full(workers, case.size))}"
        )

    simulated = answers[0][1]
    for rank, (_, seen) in list(enumerate(answers))[1:]:
        if [clock for clock, *_ in seen] != list(range(case.size)):
            return (
                f"rank {rank} computed the clocks {[clock for clock, *_ in seen]}; it should be 0 to {case.size - 1},"
                " each once"
            )
        # A worker sees all updates that it has sent, and those of the slowest up to the bound ...
        for clock, weights, _ in seen:
            if weights[rank - 1] != clock:
                return (
                    f"rank {rank} at clock {clock} saw {int(weights[rank - 1])} of its updates; it must see all {clock}"
                )
            if weights.min() < clock - bound:
                slowest = int(weights.argmin()) + 1
                return (
                    f"bound {bound}: rank {rank} started clock {clock} with {int(weights.min())} updates of rank"
                    f" {slowest} in its weights; it needs at least {clock - bound}"
                )
        # ... and waits no longer than the bound demands; real clocks are too noisy to check that.
        if simulated:
            for clock, _, time in seen:
                allowed = float(starts(case)[rank - 1, clock])
                if time > allowed + SLACK:
                    return (
                        f"bound {bound}: rank {rank} waited too long: it started clock {clock} at {time:.0f} s, and"
                        f" could have at {allowed:.0f} s"
                    )
    return ""


def too_early(failure: Failure) -> bool:
    return "it needs at least" in failure.message


def no_worker_waits(failure: Failure) -> bool:
    """Return whether every worker starts its next clock as soon as its gradient is done."""
    times = [(rank, clock, time) for rank, (_, seen) in enumerate(failure.answers) if rank for clock, _, time in seen]
    return all(time < clock * pace(failure.case)[rank - 1] + SLACK for rank, clock, time in times)


def one_reply_too_many(failure: Failure) -> bool:
    """Return whether the server alone is left, in a send."""
    waiting: Sequence[Any] = getattr(failure.error, "waiting", ())
    return failure.raised(UnmatchedMessageError) or (
        failure.raised(DeadlockError) and [item.rank for item in waiting] == [0] and waiting[0].what.startswith("send")
    )


EXERCISES = [
    Exercise(
        name="06c.ssp",
        arguments=lambda case, rank: (case.size, bound_of(case), [0, *pace(case)][rank]),
        setup=lambda comm, clocks, bound, seconds: (clocks, bound, Compute(comm, seconds)),
        answer=lambda arguments, returned: (
            (returned, arguments[2].comm.world.kind == "simulated")
            if returned is not None
            else (None, arguments[2].seen)
        ),
        check_answers=check_answers,
        least=lambda case: Least(case.ranks - 1, 0),
        par=Case(4, 6),
        unit="clock",
        draw=drawing((2, 8), (1, 7)),
        cases=lambda: sorted(
            [Case(ranks, size) for ranks in (1, 2, 3, 4, 5, 8) for size in (1, 2, 5)]
            + [
                Case(ranks, size, seed)
                for ranks, size, seed in ((3, 4, 49), (3, 7, 2), (4, 6, 3), (5, 8, 4), (6, 5, 5), (7, 3, 6))
            ]
        ),
        limits=("messages", "bytes"),
        for_hints={
            "too_early_for_all": lambda f: too_early(f) and no_worker_waits(f),
            "bound_is_positive": lambda f: bound_of(f.case) > 0,
        },
    )
]
