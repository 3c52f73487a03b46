"""Lesson 11c: Muon's step of matrices whose rows lie on several ranks, each computed by one owner."""

import numpy as np

from minidist.core.base.layout import chunk_sizes, cut
from minidist.course.lesson.exercise import Case, Exercise, Least
from minidist.optim.muon import newton_schulz

COLUMNS = 3


def matrices(case: Case) -> list[np.ndarray]:
    """Return the whole matrices: some with fewer rows than there are ranks."""
    draw = case.generator()
    return [draw.normal(size=(1 + int(draw.integers(0, case.size + 3)), COLUMNS)) for _ in range(1 + case.size % 5)]


def rows_of(case: Case) -> list[list[int]]:
    return [chunk_sizes(len(matrix), case.ranks) for matrix in matrices(case)]


def shards(case: Case, whole: list[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
    """Return each rank's rows of every matrix."""
    split = [cut(matrix, rows) for matrix, rows in zip(whole, rows_of(case), strict=True)]
    return [tuple(np.array(of_matrix[rank]) for of_matrix in split) for rank in range(case.ranks)]


def least(case: Case) -> Least:
    """Return what it takes to bring each matrix, or the products of its columns, to one rank, and the result back."""
    messages, numbers = 0, 0
    for rows in rows_of(case):
        others = sum(n > 0 for n in rows) - 1
        messages = max(messages, 2 * others)
        numbers += 2 * min(COLUMNS * (sum(rows) - max(rows)), others * COLUMNS * (COLUMNS + 1) // 2)
    return Least(messages, 8 * numbers)


def of_own_rows(case: Case) -> list[tuple[np.ndarray, ...]]:
    """Return what comes out when each rank orthogonalises its shards."""
    return [
        tuple(newton_schulz(part) if len(part) else part for part in parts) for parts in shards(case, matrices(case))
    ]


EXERCISES = [
    Exercise(
        name="11c.owners_compute",
        arguments=lambda case, rank: (list(shards(case, matrices(case))[rank]), rows_of(case), newton_schulz),
        expected=lambda case: shards(case, [newton_schulz(matrix) for matrix in matrices(case)]),
        least=least,
        par=Case(4, 7),
        label=lambda case: (
            f"{case.ranks} rank{'s' * (case.ranks != 1)}, {len(matrices(case))} matri"
            f"{'x' if len(matrices(case)) == 1 else 'ces'}"
        ),
        limits=("bytes",),
        for_hints={"shards_of_the_whole": lambda f: f.answers_are(shards(f.case, matrices(f.case)))},
    )
]
