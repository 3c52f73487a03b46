"""Lesson 09: a training loop with a loss scale, whose overflow flag all ranks agree on."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.comm.errors import UnmatchedMessageError
from minidist.core.base.errors import DeadlockError, MismatchError
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Exercise, Failure, Least

FIRST, GROWTH = 2.0**16, 3  # the first scale, and how many good steps in a row double it
RATE = 2.0**-10


class Shard:
    """One rank's elements: `backward(scale)` returns their gradient, `step(gradient)` updates them and gathers all new
    values.
    """

    def __init__(self, comm: Comm, gradients: np.ndarray) -> None:
        self.comm, self.gradients, self.now = comm, gradients, 0
        self.values = np.ones(gradients.shape[1], np.float32)
        self.whole = np.tile(self.values, comm.size)
        self.scales: list[float] = []

    def backward(self, scale: float) -> np.ndarray:
        self.scales.append(float(scale))
        gradient = self.gradients[self.now] * scale
        self.now += 1
        with np.errstate(over="ignore"):
            return gradient.astype(np.float16)

    def step(self, gradient: np.ndarray) -> None:
        self.values -= np.float32(RATE) * np.asarray(gradient)
        whole: Any = all_gather(self.comm, self.values)
        self.whole = whole


def steps_of(case: Case) -> int:
    return 4 + case.size % 5


def gradients(case: Case, rank: int) -> np.ndarray:
    """Return (step, element): small gradients, and sometimes, on one rank, one that a large scale makes infinite."""
    draw = case.generator(rank, 5)
    values = draw.uniform(1, 2, (steps_of(case), case.size + 1)) * 2.0 ** draw.integers(
        -27, -20, (steps_of(case), case.size + 1)
    )
    guilty = case.generator(6)
    for step in range(steps_of(case)):
        if guilty.random() < 0.5 and guilty.integers(case.ranks) == rank:
            values[step, 0] = 1.7 * 2.0 ** guilty.integers(-1, 1)
    return values


def play(
    case: Case, agree: bool = True, unscale_in_float32: bool = True, grow: bool = True, reset: bool = True
) -> list[Any]:
    """Return (values of all ranks, scales) as the rules make them, or as a typical mistake does."""
    scale, good, scales = FIRST, 0, []
    values = np.ones((case.ranks, case.size + 1), np.float32)
    for step in range(steps_of(case)):
        scales.append(scale)
        with np.errstate(over="ignore"):
            scaled = np.array([gradients(case, rank)[step] * scale for rank in range(case.ranks)]).astype(np.float16)

        # An overflow on any rank skips the step on every rank.
        if not np.isfinite(scaled).all():
            scale, good = scale / 2, 0 if reset else good
            continue

        unscaled = (
            scaled.astype(np.float32) / np.float32(scale)
            if unscale_in_float32
            else scaled / np.float16(min(scale, 65504))
        )
        values -= np.float32(RATE) * unscaled
        good += 1
        if grow and good == GROWTH:
            scale, good = scale * 2, 0
    return [(values.reshape(-1), np.array([*scales, scale]))] * case.ranks


def least(case: Case) -> Least:
    """Return what it takes to agree on an overflow in each step, and to gather the values after each good one."""
    gathers = (1 + int(np.sum(np.diff(play(case)[0][1]) >= 0))) * case.ranks
    flags = 2 * (case.ranks - 1) * steps_of(case)
    return Least(
        flags + gathers * int(np.ceil(np.log2(case.ranks))), flags + 4 * gathers * (case.ranks - 1) * (case.size + 1)
    )


def setup(comm: Comm, gradients: np.ndarray) -> tuple[Any, ...]:
    shard = Shard(comm, gradients)
    return len(gradients), shard.backward, shard.step


def answer(arguments: tuple[Any, ...], returned: Any) -> Any:
    """Return the values, and every scale that was used; the last one is what the function returned."""
    shard: Shard = arguments[1].__self__
    if returned is None:
        return None
    whole: Any = all_gather(shard.comm, shard.values)
    return whole, np.array([*shard.scales, float(returned)])


def check_answers(case: Case, answers: Sequence[Any]) -> str:
    for rank, (got, (values, scales)) in enumerate(zip(answers, play(case), strict=True)):
        if got is None:
            return f"rank {rank}: the function returned None; it returns the scale after the last step"
        if not np.array_equal(got[1], scales):
            return f"rank {rank}: scales {listed(got[1])}, expected {listed(scales)}"
        if not np.array_equal(got[0], values):
            wrong = int(np.sum(got[0] != values))
            return f"rank {rank}: the scales are right, and {wrong} of {values.size} values are not"
    return ""


def listed(scales: Any) -> str:
    return ", ".join(f"{scale:g}" for scale in np.asarray(scales).tolist())


def same(failure: Failure, **mistake: bool) -> bool:
    """Return whether the answers are those of a typical mistake."""
    if failure.kind != "wrong" or any(got is None for got in failure.answers):
        return False
    wanted = play(failure.case, **mistake)
    return all(
        np.array_equal(g[0], w[0]) and np.array_equal(g[1], w[1]) for g, w in zip(failure.answers, wanted, strict=True)
    )


def disagree(failure: Failure) -> bool:
    """Return whether ranks used different scales."""
    known = [got[1] for got in failure.answers if got is not None]
    return failure.kind == "wrong" and any(not np.array_equal(scales, known[0]) for scales in known)


EXERCISES = [
    Exercise(
        name="09.scaled_training",
        arguments=lambda case, rank: (gradients(case, rank),),
        setup=setup,
        answer=answer,
        check_answers=check_answers,
        least=least,
        par=Case(4, 6),
        label=lambda case: f"{case.ranks} rank{'s' * (case.ranks != 1)}, {steps_of(case)} steps",
        limits=("bytes",),
        for_hints={
            "raised_or_disagree": lambda f: (
                f.raised(DeadlockError, MismatchError, UnmatchedMessageError) or disagree(f)
            ),
            "not_finite": lambda f: any(got is not None and (not np.isfinite(got[0]).all()) for got in f.answers),
        },
    )
]
