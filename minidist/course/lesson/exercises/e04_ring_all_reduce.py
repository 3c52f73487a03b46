"""Lesson 04: the ring all-reduce for any number of ranks and any size, in place.

Proved by: tests/lesson/test_exercises.py
"""

import numpy as np

from minidist.core.base.errors import MismatchError, UsageError
from minidist.course.lesson.exercise import Case, Exercise, Failure, Hint, is_wrong, reduced_to_all


def data(case: Case, rank: int) -> np.ndarray:
    """Return whole numbers, so that the order of the additions does not matter."""
    return case.generator(rank).integers(1, 1000, case.size).astype(np.float64)


def total(case: Case) -> list[np.ndarray]:
    return [np.sum([data(case, rank) for rank in range(case.ranks)], axis=0)] * case.ranks


def unchanged(failure: Failure) -> bool:
    return failure.answers_are([data(failure.case, rank) for rank in range(failure.case.ranks)])


def sums_of_own_chunk(failure: Failure) -> bool:
    """Return whether chunk r is complete on rank r, for every rank."""
    n = failure.case.ranks
    chunks = [np.array_split(answer, n)[rank] for rank, answer in enumerate(failure.answers)]
    return failure.kind == "wrong" and all(
        np.array_equal(chunk, wanted)
        for chunk, wanted in zip(chunks, np.array_split(failure.expected[0], n), strict=True)
    )


def nothing_is_added(failure: Failure) -> bool:
    """Return whether every number is that of some rank."""
    parts = [data(failure.case, rank) for rank in range(failure.case.ranks)]
    return failure.kind == "wrong" and all(
        np.any([np.equal(answer, part) for part in parts], axis=0).all() for answer in failure.answers
    )


EXERCISES = [
    Exercise(
        name="04.ring_all_reduce",
        arguments=lambda case, rank: (data(case, rank),),
        expected=total,
        answer=lambda arguments, returned: arguments[0],
        least=reduced_to_all(lambda case: case.size),
        par=Case(4, 16),
        limits=("bytes",),
        written_by_hand=("minidist.core.collectives", "minidist.collectives"),
        hints=(
            Hint(
                unchanged,
                "the array is as it was. The sum must be written into it, and also when there are fewer elements than"
                " ranks: size // n is 0 then; np.array_split gives the first chunks one element more",
            ),
            Hint(
                lambda f: f.raised(UsageError) and "names rank" in f.message,
                "a neighbour's number lies outside 0..n-1: the ring closes with % n",
            ),
            Hint(
                lambda f: f.raised(MismatchError),
                "what a rank sends is not the chunk that its neighbour expects: in step s of the first half rank r"
                " sends chunk r-1-s and receives r-2-s",
            ),
            Hint(
                lambda f: f.kind == "limit",
                "the sums are right, but some rank carries more than 2 (n-1)/n of the array: there is a boss, or whole "
                "arrays travel; send one chunk at a time, and keep the chunks as equal as possible",
            ),
            Hint(
                lambda f: f.answers_are([whole / f.case.ranks for whole in total(f.case)]),
                "this is the mean of the ranks' arrays; the sum is asked for",
            ),
            Hint(
                lambda f: (
                    sums_of_own_chunk(f) and any(np.any(a > e) for a, e in zip(f.answers, f.expected, strict=True))
                ),
                "the second half adds: a complete chunk replaces what its receiver has",
            ),
            Hint(
                sums_of_own_chunk,
                "every rank has the sum of its own chunk, and not of all others: the second half, in which complete"
                " chunks travel round without being added, is missing or too short",
            ),
            Hint(
                nothing_is_added,
                "the numbers are those of single ranks: in the first half what comes in is added to the rank's own"
                " chunk",
            ),
            Hint(
                lambda f: f.kind == "wrong" and f.case.ranks > 2,
                "right for 2 ranks and wrong for 3: does a rank pass on the sum that it has just made, or only its own "
                "part?",
            ),
            Hint(
                is_wrong,
                "in the first half what comes in is added to the rank's own chunk, once; in the second half a complete"
                " chunk replaces it",
            ),
        ),
    )
]
