"""Lesson 06: the mean over all rows, from means over shards of different sizes, some of them empty."""

from collections.abc import Sequence

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, summed


def counts(case: Case) -> list[int]:
    """Return the rows (or tokens that are not masked) of each rank: ragged, some 0, never all."""
    result = case.generator().integers(0, 6, case.ranks)
    result[case.seed % case.ranks] += 1
    return [int(count) for count in result]


def rows(case: Case) -> list[np.ndarray]:
    """Return (count, size) for each rank: the gradient of each row."""
    return [case.generator(rank, 1).integers(-50, 50, (n, case.size)) * 1.0 for rank, n in enumerate(counts(case))]


def means(case: Case) -> list[np.ndarray]:
    return [shard.mean(axis=0) if len(shard) else np.full(case.size, np.nan) for shard in rows(case)]


def least(case: Case) -> Least:
    return summed(sum(count > 0 for count in counts(case)), case.ranks, case.size)


def truth(case: Case) -> list[np.ndarray]:
    return [np.concatenate(rows(case)).mean(axis=0)] * case.ranks


def divided_by_ranks(failure: Failure) -> bool:
    total = np.concatenate(rows(failure.case)).sum(axis=0)
    return failure.answers_are([total / failure.case.ranks] * failure.case.ranks)


def differs(answers: Sequence[np.ndarray]) -> bool:
    return any(not np.array_equal(answer, answers[0]) for answer in answers)


EXERCISES = [
    Exercise(
        name="06.weighted_average",
        arguments=lambda case, rank: (means(case)[rank], counts(case)[rank]),
        expected=truth,
        least=least,
        par=Case(4, 16),
        unit="parameter",
        for_hints={
            "not_a_number": lambda f: f.kind == "wrong" and 0 in counts(f.case) and bool(np.isnan(f.answers[0]).any()),
            "plain_average": lambda f: f.answers_are([np.mean(means(f.case), axis=0)] * f.case.ranks),
            "not_divided": lambda f: f.answers_are([np.concatenate(rows(f.case)).sum(axis=0)] * f.case.ranks),
            "sum_of_means": lambda f: f.answers_are([np.sum(means(f.case), axis=0)] * f.case.ranks),
            "zero_for_nothing": lambda case: [np.nansum(means(case), axis=0) / sum(counts(case))] * case.ranks,
            "has_the_count": lambda f: np.shape(f.answers[0]) == (f.case.size + 1,),
            "some_have_nothing": lambda f: 0 in counts(f.case),
            "ranks_differ": lambda f: f.answers[0] is not None and differs(f.answers),
        },
    )
]
