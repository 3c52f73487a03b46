"""Our solutions of lesson 04b; they are not a part of the package."""

import numpy as np

from minidist.core.comm import Comm


def ordered_reduce_scatter(comm: Comm, array: np.ndarray) -> np.ndarray:
    """Send chunk j directly to rank j, which keeps all parts apart until it can add them in rank order."""
    n, rank = comm.size, comm.rank
    chunks = np.array_split(array, n)
    parts = [np.empty_like(chunks[rank]) for _ in range(n)]
    parts[rank] = chunks[rank]
    for distance in range(1, n):
        to, source = (rank + distance) % n, (rank - distance) % n
        comm.sendrecv(chunks[to], to, parts[source], source)
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


SOLUTIONS = {"04b.ordered_reduce_scatter": ordered_reduce_scatter}
