"""Lesson 04: the ring all-reduce for any number of ranks and any size, in place."""

import numpy as np

from minidist.base.errors import MismatchError, UsageError
from minidist.base.layout import chunk_sizes, offsets
from minidist.comm import Comm
from minidist.lesson.exercise import Case, Exercise, Failure, Hint


def ring_all_reduce(comm: Comm, array: np.ndarray) -> None:
    """Reduce-scatter, then all-gather; a rank sends 2 (n-1)/n of the array to its right neighbour."""
    n, rank = comm.size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    start = offsets(chunk_sizes(array.size, n))
    chunks = [array[start[j] : start[j + 1]] for j in range(n)]
    for step in range(n - 1):
        leaving, arriving = chunks[(rank - 1 - step) % n], chunks[(rank - 2 - step) % n]
        incoming = np.empty_like(arriving)
        comm.sendrecv(leaving, right, incoming, left)
        arriving += incoming
    for step in range(n - 1):  # now chunk r is complete on rank r
        leaving, arriving = chunks[(rank - step) % n], chunks[(rank - 1 - step) % n]
        comm.sendrecv(leaving, right, arriving, left)


def data(case: Case, rank: int) -> np.ndarray:
    """Whole numbers, so that the order of the additions does not matter."""
    return case.generator(rank).integers(1, 1000, case.size).astype(np.float64)


def total(case: Case) -> list[np.ndarray]:
    return [np.sum([data(case, rank) for rank in range(case.ranks)], axis=0)] * case.ranks


def unchanged(failure: Failure) -> bool:
    return failure.answers_are([data(failure.case, rank) for rank in range(failure.case.ranks)])


EXERCISES = [
    Exercise(
        name="04.ring_all_reduce",
        solution=ring_all_reduce,
        arguments=lambda case, comm: (data(case, comm.rank),),
        expected=total,
        answer=lambda arguments, returned: arguments[0],
        par=Case(4, 16),
        limits=("bytes",),
        hints=(
            Hint(
                unchanged,
                "the array is as it was. The sum must be written into it, and also when there are fewer elements than ranks: "
                "size // n is 0 then; np.array_split gives the first chunks one element more",
            ),
            Hint(
                lambda f: f.raised(UsageError) and "names rank" in f.message,
                "a neighbour's number lies outside 0..n-1: the ring closes with % n",
            ),
            Hint(
                lambda f: f.raised(MismatchError),
                "what a rank sends is not the chunk that its neighbour expects: in step s of the first half rank r sends "
                "chunk r-1-s and receives r-2-s",
            ),
            Hint(
                lambda f: f.kind == "limit",
                "the sums are right, but some rank carries more than 2 (n-1)/n of the array: there is a boss, or whole "
                "arrays travel; send one chunk at a time, and keep the chunks as equal as possible",
            ),
            Hint(
                lambda f: f.kind == "wrong" and f.case.ranks > 2,
                "right for 2 ranks and wrong for 3: does a rank pass on the sum that it has just made, or only its own "
                "part?",
            ),
        ),
    )
]
