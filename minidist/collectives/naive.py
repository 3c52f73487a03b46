"""The simplest algorithms: everything goes through, or comes from, rank 0 or the root. Correct, readable and slow.

The root's port carries (n-1) messages while the others wait, so time grows with n where a tree's grows with log n. Sums
are added in rank order. The broadcast is in minidist/core/collectives/naive.py, because the core begins with one.

Proved by: tests/collectives/test_collectives.py, tests/collectives/test_closed_form.py
"""

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.layout import offsets
from minidist.core.collectives.calls import accumulate, algorithm, divide
from minidist.core.collectives.naive import broadcast, fan
from minidist.core.comm.communicator import PointToPoint


@algorithm("reduce", "naive", sends=lambda sizes, rank: (1, sum(sizes)) if rank else (0, 0), seconds=fan)
def reduce(comm: PointToPoint, array: np.ndarray, root: int, op: str) -> np.ndarray | None:
    """Send every rank's array to the root, which adds them in rank order."""
    # Every message goes straight to the root.
    if comm.rank != root:
        comm.send(array, root)
        return None

    # The root has memory for all n contributions, because it adds in rank order, not in the order of arrival.
    parts = [array if other == root else xp.empty_like(array) for other in range(comm.size)]
    comm.waitall([comm.irecv(parts[other], other) for other in range(comm.size) if other != root])

    # 0 + 1 + ... + (n-1); the root's own array is not overwritten.
    total = parts[0].copy() if root == 0 else parts[0]
    for part in parts[1:]:
        accumulate(op, total, part)
    if op == "avg":
        divide(total, comm.size)
    return total


@algorithm(
    "gather",
    "naive",
    sends=lambda sizes, rank: (1, sizes[rank]) if rank else (0, 0),
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: fan(nbytes / n, n, alpha, beta, overhead),
)
def gather(comm: PointToPoint, shard: np.ndarray, sizes: list[int], root: int) -> np.ndarray | None:
    """Send every rank's shard to the root."""
    if comm.rank != root:
        comm.send(shard.reshape(-1), root)
        return None
    # The root: each shard arrives at its place in the whole, and nothing is copied afterwards.
    start = offsets(sizes)
    whole = xp.empty_like(shard, shape=(start[-1],))
    whole[start[root] : start[root + 1]] = shard.reshape(-1)
    comm.waitall([comm.irecv(whole[start[r] : start[r + 1]], r) for r in range(comm.size) if r != root])
    return whole


@algorithm(
    "scatter",
    "naive",
    sends=lambda sizes, rank: (0, 0) if rank else (len(sizes) - 1, sum(sizes) - sizes[0]),
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: fan(nbytes / n, n, alpha, beta, overhead),
)
def scatter(comm: PointToPoint, array: np.ndarray | None, sizes: list[int], out: np.ndarray, root: int) -> np.ndarray:
    """Send each rank its chunk from the root."""
    if comm.rank != root:
        comm.recv(out.reshape(-1), root)
        return out
    # The root sends views of its array: a chunk is contiguous.
    assert array is not None
    flat, start = array.reshape(-1), offsets(sizes)
    sends = [comm.isend(flat[start[r] : start[r + 1]], r) for r in range(comm.size) if r != root]
    out.reshape(-1)[...] = flat[start[root] : start[root + 1]]
    comm.waitall(sends)
    return out


@algorithm(
    "all_gather",
    "naive",
    sends=lambda sizes, rank: (1, sizes[rank]) if rank else (len(sizes) - 1, (len(sizes) - 1) * sum(sizes)),
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: (
        fan(nbytes / n, n, alpha, beta, overhead) + fan(nbytes, n, alpha, beta, overhead)
    ),
)
def all_gather(comm: PointToPoint, shard: np.ndarray, sizes: list[int], out: np.ndarray) -> np.ndarray:
    """Gather to rank 0, then broadcast the whole."""
    whole = gather(comm, shard, sizes, 0)
    if whole is not None:
        out[...] = whole
    return broadcast(comm, out, 0)


@algorithm(
    "reduce_scatter",
    "naive",
    sends=lambda sizes, rank: (1, sum(sizes)) if rank else (len(sizes) - 1, sum(sizes) - sizes[0]),
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: (
        fan(nbytes, n, alpha, beta, overhead) + fan(nbytes / n, n, alpha, beta, overhead)
    ),
)
def reduce_scatter(comm: PointToPoint, array: np.ndarray, sizes: list[int], out: np.ndarray, op: str) -> np.ndarray:
    """Reduce to rank 0, then scatter the chunks."""
    return scatter(comm, reduce(comm, array, 0, op), sizes, out, 0)


@algorithm(
    "all_reduce",
    "naive",
    sends=lambda sizes, rank: (1, sum(sizes)) if rank else (len(sizes) - 1, (len(sizes) - 1) * sum(sizes)),
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: 2 * fan(nbytes, n, alpha, beta, overhead),
)
def all_reduce(comm: PointToPoint, array: np.ndarray, op: str) -> np.ndarray:
    """Reduce to rank 0, then broadcast."""
    total = reduce(comm, array, 0, op)
    if total is not None:
        array[...] = total
    return broadcast(comm, array, 0)
