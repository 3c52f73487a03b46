"""The same bits whatever the ring, the buckets or the number of messages: contributions are added in rank order.

Floating-point addition is not associative: a ring adds chunk j starting at rank j+1, so moving a chunk boundary changes
bits of the result. Here every rank sends chunk j straight to rank j, which holds all n contributions and adds them
0 + 1 + ... + (n-1). Each element's sum then depends on nothing but its n values.

    rank 0 ──chunk 1──▶ 1        each rank: n-1 messages out, n-1 in, the ring's volume (n-1)/n of the array;
           ──chunk 2──▶ 2        the price is memory: n-1 chunks wait side by side, where a ring needs two
           ──chunk 3──▶ 3
"""

import numpy as np

from minidist.base.layout import chunk_sizes, offsets
from minidist.base.memory import track
from minidist.collectives import ring
from minidist.collectives.operations import accumulate, divide
from minidist.collectives.registry import algorithm, formulas
from minidist.comm.point_to_point import PointToPoint


def reduce_scatter_seconds(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """All n-1 chunks leave one after the other and no rank waits in between: one latency for all of them."""
    return alpha + (ranks - 1) * beta * nbytes / ranks if ranks > 1 else 0.0


@algorithm(
    "reduce_scatter",
    "ordered",
    sends=lambda sizes, rank: (len(sizes) - 1, sum(sizes) - sizes[rank]),
    seconds=reduce_scatter_seconds,
)
def reduce_scatter(comm: PointToPoint, array: np.ndarray, sizes: list[int], out: np.ndarray, op: str) -> np.ndarray:
    """Rank r sends chunk j to rank j (`array.nbytes - chunk r` in all) and adds what it gets in rank order.

    Rank r sends to r+1, r+2, ... and waits for r-1, r-2, ...: so messages leave and arrive one after the other, and the
    whole takes alpha + beta (n-1) chunk on the alpha-beta clock.
    """
    n, rank = comm.size, comm.rank
    flat, start = array.reshape(-1), offsets(sizes)
    contributions = [
        track(np.empty_like(out), "communication") if other != rank else flat[start[rank] : start[rank + 1]]
        for other in range(n)
    ]
    sources = [(rank - distance) % n for distance in range(1, n)]
    receives = [comm.irecv(contributions[source], source) for source in sources]
    targets = [(rank + distance) % n for distance in range(1, n)]
    sends = [comm.isend(flat[start[target] : start[target + 1]], target) for target in targets]
    comm.waitall(receives)
    comm.waitall(sends)
    out[...] = contributions[0]
    for contribution in contributions[1:]:
        accumulate(op, out, contribution)
    if op == "avg":
        divide(out, n)
    return out


@algorithm(
    "all_reduce",
    "ordered",
    sends=formulas("all_reduce", "ring")["sends"],
    seconds=lambda nbytes, n, alpha, beta: (
        reduce_scatter_seconds(nbytes, n, alpha, beta) + (n - 1) * (alpha + beta * nbytes / n)
    ),
)
def all_reduce(comm: PointToPoint, array: np.ndarray, op: str) -> np.ndarray:
    """Ordered reduce-scatter, then the ring's all-gather, which only copies: the ring's volume and messages."""
    flat, sizes = array.reshape(-1), chunk_sizes(array.size, comm.size)
    start = offsets(sizes)
    mine = flat[start[comm.rank] : start[comm.rank + 1]]
    mine[...] = reduce_scatter(comm, flat, sizes, np.empty_like(mine), op)
    ring.all_gather(comm, mine, sizes, flat)
    return array
