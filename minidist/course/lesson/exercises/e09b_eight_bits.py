"""Lesson 09b: one grid for all ranks."""

from collections.abc import Callable

import numpy as np

from minidist.course.lesson.exercise import Case, Exercise, Failure, Least, is_wrong


def shards(case: Case) -> list[np.ndarray]:
    """Return the values of each rank: later ranks have fewer, some none, and each has a different range."""
    sizes = [max(0, case.size - rank) for rank in range(case.ranks)]
    some = float(case.seed % 4 != 1)  # else all of them are zero
    return [some * (case.generator(rank).standard_normal(n) * 2.0**-rank - rank) for rank, n in enumerate(sizes)]


def rounded(x: np.ndarray, largest: float, to_whole: Callable[[np.ndarray], np.ndarray] = np.round) -> np.ndarray:
    scale = largest / 127 or 1.0
    return np.clip(to_whole(x / scale), -127, 127) * scale


def not_to_nearest(failure: Failure) -> bool:
    mine = shards(failure.case)
    largest = max(map(magnitude, mine))
    ways = (np.floor, np.trunc, np.ceil)
    return any(failure.answers_are([rounded(x, largest, way) for x in mine]) for way in ways)


def with_largest(failure: Failure, largest: Callable[[list[np.ndarray], int], float]) -> bool:
    """Return whether each rank rounded to a grid that ends at largest(all shards, its number)."""
    mine = shards(failure.case)
    return failure.answers_are([rounded(x, largest(mine, rank)) for rank, x in enumerate(mine)])


def magnitude(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))


ONE_GRID = Exercise(
    name="09b.one_grid",
    arguments=lambda case, rank: (shards(case)[rank],),
    expected=lambda case: [rounded(x, max(map(magnitude, shards(case)))) for x in shards(case)],
    least=lambda case: Least(2 * (min(case.ranks, case.size) - 1), 8 * 2 * (min(case.ranks, case.size) - 1)),
    par=Case(4, 16),
    limits=("bytes",),
    unit="value",
    for_hints={
        "largest_of_its_own": lambda f: with_largest(f, lambda mine, rank: magnitude(mine[rank])),
        "sum_of_the_largest": lambda f: with_largest(f, lambda mine, rank: sum(map(magnitude, mine))),
        "largest_with_its_sign": lambda f: with_largest(
            f, lambda mine, rank: max(float(x.max(initial=-np.inf)) for x in mine)
        ),
        "mean_of_the_largest": lambda f: with_largest(f, lambda mine, rank: sum(map(magnitude, mine)) / len(mine)),
        "divided_by_127_twice": lambda case: [
            rounded(x, max(map(magnitude, shards(case)))) * 127 / (max(map(magnitude, shards(case))) or 127.0)
            for x in shards(case)
        ],
        "raised_or_not_finite": lambda f: (
            f.raised(ValueError, ZeroDivisionError, FloatingPointError)
            or (is_wrong(f) and any(not np.isfinite(a).all() for a in f.answers))
        ),
    },
)

EXERCISES = [ONE_GRID]
