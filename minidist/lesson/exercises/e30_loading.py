"""Lesson 30: loaders make batches for one trainer, in the order in which it trains on them.

Proved by: tests/lesson/test_exercises.py
"""

from collections.abc import Callable

import numpy as np

from minidist.base.errors import DeadlockError, UsageError
from minidist.comm import Comm
from minidist.lesson.exercise import Case, Exercise, Failure, Hint


def in_order(comm: Comm, batches: int, make: Callable[[int], np.ndarray]) -> np.ndarray:
    """Batch i is made by loader i mod N, and the trainer takes the batches in their order from whoever makes them."""
    loaders, result = comm.size - 1, np.zeros((batches, 2))
    if comm.rank > 0:
        for i in range(comm.rank - 1, batches, loaders):
            comm.send(make(i), 0)
        return result[:0]
    for i in range(batches):
        if loaders:
            comm.recv(result[i], 1 + i % loaders)
        else:
            result[i] = make(i)
    return result


class Maker:
    """`make(i)` returns batch i. A loader makes its share, and the trainer none, unless it is alone."""

    def __init__(self, case: Case, comm: Comm) -> None:
        self.case, self.rank, self.made = case, comm.rank, 0

    def __call__(self, i: int) -> np.ndarray:
        share = -(-self.case.size // max(1, self.case.ranks - 1))
        if self.rank == 0 and self.case.ranks > 1:
            raise UsageError("rank 0 trains while the others load: it receives batches, and makes none")
        self.made += 1
        if self.made > share:
            raise UsageError(f"loader {self.rank} was asked for {self.made} batches; its share is {share}")
        return batch(self.case, i)


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
        name="30.in_order",
        solution=in_order,
        arguments=lambda case, comm: (case.size, Maker(case, comm)),
        expected=expected,
        par=Case(4, 9),
        limits=("bytes", "messages"),
        label=lambda case: f"{case.ranks} rank{'s' * (case.ranks != 1)}, {case.size} batch{'es' * (case.size != 1)}",
        hints=(
            Hint(
                in_another_order,
                "these are the right batches in the order in which they came: then who is fast decides what is trained"
                " on; say beforehand who makes batch i, and take it from there",
            ),
            Hint(
                lambda f: f.raised(UsageError) and "share" in f.message,
                "one loader makes more than its share: batch i belongs to loader i % loaders, which is rank 1 +"
                " i % loaders",
            ),
            Hint(
                lambda f: f.raised(UsageError, ZeroDivisionError),
                "the trainer makes a batch only where it is alone: then there is no loader among whom to divide",
            ),
            Hint(
                lambda f: f.raised(DeadlockError),
                "a loader sends what the trainer does not take, or the other way round: both go through the same"
                " batches i = 0, 1, 2, ... of this loader",
            ),
            Hint(lambda f: f.kind == "limit", "right, but a batch travels more than once"),
        ),
    )
]
