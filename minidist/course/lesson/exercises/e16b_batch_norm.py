"""Lesson 16b: batch normalisation by the statistics of the rows of all ranks."""

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, summed

EPS = 1e-5
CHANNELS = 3
FAR = 2.0**27  # whose square has no room for a unit


def rows_of(case: Case) -> list[np.ndarray]:
    """Return the rows of every rank, of unequal number, some of them none; each rank's have another mean.

    Those of a case of an odd seed are far from 0: there E[x^2] - mean^2 has no right digit.
    """
    draw = case.generator()
    counts = [int(draw.integers(0, case.size + 1)) for _ in range(case.ranks)]
    far = FAR * (case.seed % 2)
    return [draw.integers(-4, 5, (count, CHANNELS)) + 10.0 * rank + far for rank, count in enumerate(counts)]


def least(case: Case) -> Least:
    """Return the least of the ranks that have rows: each may have one row, and then no sum of squares is needed."""
    ranks = sum(len(rows) > 0 for rows in rows_of(case))
    return summed(ranks, ranks, CHANNELS)


def normalised(case: Case, how: str = "union") -> list[np.ndarray]:
    """Return what every rank must return, or what a typical mistake returns."""
    parts = rows_of(case)
    used = [part for part in parts if len(part)]
    if not used:
        return parts
    means, variances = np.stack([part.mean(axis=0) for part in used]), np.stack([part.var(axis=0) for part in used])
    counts = np.array([[len(part)] for part in used]) / sum(map(len, used))
    if how == "own":
        return [(part - part.mean(axis=0)) / np.sqrt(part.var(axis=0) + EPS) if len(part) else part for part in parts]
    mean, variance = np.concatenate(used).mean(axis=0), np.concatenate(used).var(axis=0)
    if how == "mean of variances":
        variance = (counts * variances).sum(axis=0)
    elif how == "mean of means":
        mean = means.mean(axis=0)
        variance = (variances + (means - mean) ** 2).mean(axis=0)
    elif how == "unbiased":
        rows = sum(map(len, used))
        variance = variance * rows / max(1, rows - 1)
    if how == "not centred":
        mean = 0 * mean
    deviations = {"no root": variance + EPS, "eps outside": np.sqrt(variance) + EPS}
    deviation = deviations.get(how, np.sqrt(variance + EPS))
    return [(part - mean) / deviation for part in parts]


def not_a_number(failure: Failure) -> bool:
    """Return whether an answer is NaN, as of a mean over no rows."""
    return failure.kind == "wrong" and any(
        answer is not None and not np.isfinite(np.asarray(answer, float)).all() for answer in failure.answers
    )


def far_from_0(failure: Failure) -> bool:
    """Return whether the answer is wrong where all rows are far from 0, and finite."""
    return failure.kind == "wrong" and failure.case.seed % 2 == 1 and not not_a_number(failure)


EXERCISES = [
    Exercise(
        name="16b.sync_batch_norm",
        arguments=lambda case, rank: (rows_of(case)[rank], EPS),
        expected=normalised,
        least=least,
        par=Case(4, 7),
        label=lambda case: (
            f"{case.ranks} rank{'s' * (case.ranks != 1)}, up to {case.size} row{'s' * (case.size != 1)} each"
        ),
        limits=("bytes",),
    )
]
