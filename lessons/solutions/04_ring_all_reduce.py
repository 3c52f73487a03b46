"""Our solutions of lesson 04; they are not a part of the package."""

import numpy as np

from minidist.base.layout import chunk_sizes, offsets
from minidist.comm import Comm


def ring_all_reduce(comm: Comm, array: np.ndarray) -> None:
    """Run a reduce-scatter, then an all-gather; a rank sends 2 (n-1)/n of the array to its right neighbour."""
    n, rank = comm.size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    start = offsets(chunk_sizes(array.size, n))
    chunks = [array[start[j] : start[j + 1]] for j in range(n)]
    for step in range(n - 1):
        leaving, arriving = chunks[(rank - 1 - step) % n], chunks[(rank - 2 - step) % n]
        incoming = np.empty_like(arriving)
        comm.sendrecv(leaving, right, incoming, left)
        arriving += incoming
    for step in range(n - 1):  # now chunk r is complete on rank r
        leaving, arriving = chunks[(rank - step) % n], chunks[(rank - 1 - step) % n]
        comm.sendrecv(leaving, right, arriving, left)


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


SOLUTIONS = {
    "04.ring_all_reduce": ring_all_reduce,
    "04.ordered_reduce_scatter": ordered_reduce_scatter,
}
