"""Lesson 29: Muon's step of matrices whose rows lie on several ranks, each computed by one owner.

Proved by: tests/lesson/test_exercises.py
"""

from collections.abc import Callable

import numpy as np

from minidist.base.layout import chunk_sizes, cut
from minidist.collectives import all_to_all
from minidist.comm import Comm
from minidist.lesson.exercise import Case, Exercise, Hint
from minidist.optim.muon import newton_schulz

COLUMNS = 3


def owners_compute(
    comm: Comm, parts: list[np.ndarray], rows: list[list[int]], orthogonalize: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """Matrix k belongs to rank k % n: send it your rows, and get back your rows of the result."""
    n, columns = comm.size, parts[0].shape[1]
    of_rank = [range(rank, len(parts), n) for rank in range(n)]
    there = [sum(parts[k].size for k in owned) for owned in of_rank]
    here = [sum(rows[k][rank] for k in of_rank[comm.rank]) * columns for rank in range(n)]

    # There: from each rank the rows of my matrices, one after the other.
    flat = np.concatenate([parts[k].reshape(-1) for owned in of_rank for k in owned])
    received = cut(all_to_all(comm, flat, send_counts=there, receive_counts=here), here)
    blocks: dict[int, list[np.ndarray]] = {k: [] for k in of_rank[comm.rank]}
    for rank, chunk in enumerate(received):
        for k, block in zip(blocks, cut(chunk, [rows[k][rank] * columns for k in blocks]), strict=True):
            blocks[k].append(block.reshape(-1, columns))
    results = {k: orthogonalize(np.concatenate(block)) for k, block in blocks.items()}

    # Back: to each rank its rows of my matrices.
    split = {k: cut(result, rows[k]) for k, result in results.items()}
    flat = np.concatenate([np.zeros(0), *(split[k][rank].reshape(-1) for rank in range(n) for k in split)])
    returned = all_to_all(comm, flat, send_counts=here, receive_counts=there)
    order = [k for owned in of_rank for k in owned]
    mine = dict(zip(order, cut(returned, [parts[k].size for k in order]), strict=True))
    return [mine[k].reshape(-1, columns) for k in range(len(parts))]


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


def of_own_rows(case: Case) -> list[tuple[np.ndarray, ...]]:
    """Return what comes out when each rank orthogonalises its shards."""
    return [
        tuple(newton_schulz(part) if len(part) else part for part in parts) for parts in shards(case, matrices(case))
    ]


EXERCISES = [
    Exercise(
        name="29.owners_compute",
        solution=owners_compute,
        arguments=lambda case, comm: (list(shards(case, matrices(case))[comm.rank]), rows_of(case), newton_schulz),
        expected=lambda case: shards(case, [newton_schulz(matrix) for matrix in matrices(case)]),
        par=Case(4, 7),
        label=lambda case: (
            f"{case.ranks} rank{'s' * (case.ranks != 1)}, {len(matrices(case))} matri"
            f"{'x' if len(matrices(case)) == 1 else 'ces'}"
        ),
        limits=("bytes",),
        hints=(
            Hint(
                lambda f: f.answers_are(of_own_rows(f.case)),
                "Newton-Schulz of a shard is not the shard of Newton-Schulz: the owner needs all rows first",
            ),
            Hint(
                lambda f: f.answers_are(shards(f.case, matrices(f.case))),
                "these are the rows that came in; return those of the orthogonalised matrices",
            ),
            Hint(
                lambda f: f.kind == "limit",
                "right, but too many bytes: only the owner of a matrix needs its rows, and each rank only its own rows"
                " of the result",
            ),
        ),
    )
]
