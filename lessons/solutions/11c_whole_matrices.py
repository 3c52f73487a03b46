"""Our solutions of lesson 11c; they are not a part of the package."""

from collections.abc import Callable

import numpy as np

from minidist.core.base.layout import cut
from minidist.core.collectives import all_to_all
from minidist.core.comm import Comm


def owners_compute(
    comm: Comm,
    parts: list[np.ndarray],
    rows: list[list[int]],
    orthogonalize: Callable[[np.ndarray], np.ndarray],
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
        for k, block in zip(
            blocks, cut(chunk, [rows[k][rank] * columns for k in blocks]), strict=True
        ):
            blocks[k].append(block.reshape(-1, columns))
    results = {k: orthogonalize(np.concatenate(block)) for k, block in blocks.items()}

    # Back: to each rank its rows of my matrices.
    split = {k: cut(result, rows[k]) for k, result in results.items()}
    flat = np.concatenate(
        [np.zeros(0), *(split[k][rank].reshape(-1) for rank in range(n) for k in split)]
    )
    returned = all_to_all(comm, flat, send_counts=here, receive_counts=there)
    order = [k for owned in of_rank for k in owned]
    mine = dict(zip(order, cut(returned, [parts[k].size for k in order]), strict=True))
    return [mine[k].reshape(-1, columns) for k in range(len(parts))]


SOLUTIONS = {"11c.owners_compute": owners_compute}
