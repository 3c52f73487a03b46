"""Lesson 04: the ring all-reduce for any number of ranks and any size, in place."""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, reduced_to_all


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
        for_hints={
            "divided_by_the_ranks": lambda f: f.answers_are([whole / f.case.ranks for whole in total(f.case)]),
            "another_sum_has_it": lambda f: (
                sums_of_own_chunk(f) and any((np.any(a > e) for a, e in zip(f.answers, f.expected, strict=True)))
            ),
        },
    )
]
