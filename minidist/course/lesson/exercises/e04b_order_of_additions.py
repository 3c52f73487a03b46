"""Lesson 04b: a reduce-scatter that adds in the order of the ranks, to the bit."""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, Least


def fractions(case: Case, rank: int) -> np.ndarray:
    """Return numbers of very different size, so that the order of the additions shows."""
    return case.generator(rank).normal(size=case.size) * 10.0 ** case.generator(rank, 1).integers(-8, 8, case.size)


def in_rank_order(case: Case) -> list[np.ndarray]:
    whole = fractions(case, 0).copy()
    for rank in range(1, case.ranks):
        whole += fractions(case, rank)
    return np.array_split(whole, case.ranks)


def nearly(failure: Failure) -> bool:
    """Return whether the answers are right up to rounding."""
    if failure.kind != "wrong" or any(answer is None for answer in failure.answers):
        return False
    both = zip(failure.answers, failure.expected, strict=True)
    return all(np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-6) for a, b in both)


EXERCISES = [
    Exercise(
        name="04b.ordered_reduce_scatter",
        arguments=lambda case, rank: (fractions(case, rank),),
        expected=in_rank_order,
        least=lambda case: Least((case.ranks - 1) * (case.size > 0), 8 * case.size * (case.ranks - 1)),
        par=Case(4, 16),
        limits=("bytes",),
        written_by_hand=("minidist.core.collectives", "minidist.collectives"),
        tolerance=0.0,
    )
]
