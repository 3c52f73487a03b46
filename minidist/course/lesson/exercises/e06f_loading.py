"""Lesson 06f: loaders make batches for one trainer, in the order in which it trains on them."""

import numpy as np

from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.course.lesson.exercise import Case, Exercise, Failure, Least

SECONDS = 1e-3  # for which a batch is made


class Maker:
    """`make(i)` returns batch i. A loader makes its share of the batches; the trainer makes none unless it is alone."""

    def __init__(self, comm: Comm, batches: list[np.ndarray], share: int) -> None:
        self.comm, self.batches, self.share, self.made = comm, batches, share, 0

    def __call__(self, i: int) -> np.ndarray:
        if self.share == 0:
            raise UsageError("rank 0 is the trainer: it must receive batches from the loaders, and must not make any")
        self.made += 1
        if self.made > self.share:
            raise UsageError(f"loader {self.comm.rank} was asked for {self.made} batches; its share is {self.share}")
        self.comm.compute(seconds=SECONDS, name="make a batch")
        return self.batches[i].copy()


def arguments(case: Case, rank: int) -> tuple[int, list[np.ndarray], int]:
    trains = rank == 0 and case.ranks > 1
    share = 0 if trains else -(-case.size // max(1, case.ranks - 1))
    return case.size, [] if trains else [batch(case, i) for i in range(case.size)], share


def setup(comm: Comm, size: int, batches: list[np.ndarray], share: int) -> tuple[int, Maker]:
    return size, Maker(comm, batches, share)


def batch(case: Case, i: int) -> np.ndarray:
    return case.generator(i, 5).integers(0, 99, 2) + 100.0 * i


def all_batches(case: Case) -> np.ndarray:
    return np.array([batch(case, i) for i in range(case.size)]).reshape(case.size, 2)


def expected(case: Case) -> list[np.ndarray]:
    return [all_batches(case), *[np.zeros((0, 2))] * (case.ranks - 1)]


def in_another_order(failure: Failure) -> bool:
    """Return whether the trainer has the right batches, but not in their order."""
    if failure.kind != "wrong" or np.shape(failure.answers[0]) != (failure.case.size, 2):
        return False
    rows = np.asarray(failure.answers[0])
    return np.array_equal(rows[np.argsort(rows[:, 0], kind="stable")], all_batches(failure.case))


EXERCISES = [
    Exercise(
        name="06f.in_order",
        arguments=arguments,
        setup=setup,
        expected=expected,
        least=lambda case: Least(min(case.size, 1), 8 * 2 * case.size),
        par=Case(4, 9),
        limits=("bytes", "messages", "time"),
        label=lambda case: f"{case.ranks} rank{'s' * (case.ranks != 1)}, {case.size} batch{'es' * (case.size != 1)}",
        for_hints={"others_answer": lambda f: any(np.shape(answer) != (0, 2) for answer in f.answers[1:])},
    )
]
