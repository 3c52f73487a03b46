"""The simplest algorithms: a broadcast directly from the root, and an all-to-all with one partner after the other.

    broadcast      0 ──▶ 1, then 0 ──▶ 2, then 0 ──▶ 3: (n-1) messages through one port, where a tree has log2 n steps
    all-to-all     in step s = 1, 2, 3 rank r sends to r+s and receives from r-s: the pairwise exchange has no root

Proved by: tests/collectives/test_collectives.py, tests/collectives/test_closed_form.py
"""

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.layout import offsets
from minidist.core.collectives.calls import algorithm
from minidist.core.comm.communicator import PointToPoint


def fan(nbytes: float, ranks: int, alpha: float, beta: float, overhead: float = 0.0) -> float:
    """Return the seconds of n-1 messages of `nbytes` each that leave, or reach, one rank one after the other.

    The overhead of the first message is a part of its alpha; each of the others keeps the port busy for its own.
    """
    return alpha + (ranks - 1) * beta * nbytes + (ranks - 2) * overhead if ranks > 1 else 0.0


@algorithm(
    "broadcast",
    "naive",
    sends=lambda sizes, rank: (0, 0) if rank else (len(sizes) - 1, (len(sizes) - 1) * sum(sizes)),
    seconds=fan,
)
def broadcast(comm: PointToPoint, array: np.ndarray, root: int) -> np.ndarray:
    """Send the array from the root to each of the others: (n-1) nbytes leave the root."""
    if comm.rank == root:
        comm.waitall([comm.isend(array, other) for other in range(comm.size) if other != root])
    else:
        comm.recv(array, root)
    return array


@algorithm(
    "all_to_all",
    "pairwise",
    sends=lambda sizes, rank: (len(sizes) - 1, sum(sizes) - sizes[rank]),
    seconds=lambda nbytes, n, alpha, beta: (n - 1) * (alpha + beta * nbytes / n),
)
def all_to_all(comm: PointToPoint, array: np.ndarray, send_sizes: list[int], receive_sizes: list[int]) -> np.ndarray:
    """Exchange chunks with one partner after the other; a rank sends everything but the chunk that it keeps."""
    # The own chunk is copied, not sent.
    n, rank = comm.size, comm.rank
    flat, start, place = array.reshape(-1), offsets(send_sizes), offsets(receive_sizes)
    out = xp.empty_like(flat, shape=(place[-1],))
    out[place[rank] : place[rank + 1]] = flat[start[rank] : start[rank + 1]]

    # In each step the ranks' partners are a permutation: no two ranks send to the same one.
    for step in range(1, n):
        to, source = (rank + step) % n, (rank - step) % n
        comm.sendrecv(flat[start[to] : start[to + 1]], to, out[place[source] : place[source + 1]], source)
    return out
