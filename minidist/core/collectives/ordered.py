"""A sum whose bits do not depend on chunks, buckets or messages: contributions are added in rank order.

Floating-point addition is not associative: a ring adds chunk j starting at rank j+1, so moving a chunk boundary changes
bits of the result. Here every rank sends chunk j straight to rank j, which holds all n contributions and adds them
0 + 1 + ... + (n-1). Each element's sum then depends on nothing but its n values.

    rank 0 ──chunk 1──▶ 1        each rank: n-1 messages out, n-1 in, the ring's volume (n-1)/n of the array;
           ──chunk 2──▶ 2        it needs more memory: n-1 received chunks; all_reduce of ring.py needs one
           ──chunk 3──▶ 3

Proved by: tests/collectives/test_ordered.py
"""

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.layout import chunk_sizes, cut
from minidist.core.base.trace import watchers
from minidist.core.collectives import ring
from minidist.core.collectives.calls import ALGORITHMS, accumulate, algorithm, divide
from minidist.core.collectives.naive import fan
from minidist.core.comm.communicator import PointToPoint


@algorithm(
    "reduce_scatter",
    "ordered",
    sends=lambda sizes, rank: (len(sizes) - 1, sum(sizes) - sizes[rank]),
    # n-1 chunks leave one after the other without a wait in between, so there is one latency for all.
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: fan(nbytes / n, n, alpha, beta, overhead),
)
def reduce_scatter(comm: PointToPoint, array: np.ndarray, sizes: list[int], out: np.ndarray, op: str) -> np.ndarray:
    """Send chunk j to rank j (`array.nbytes - chunk r` leave rank r) and add what arrives in rank order."""
    # contributions[r]: rank r's part of this rank's chunk. All n are kept, so that they can be added in order.
    n, rank, chunks = comm.size, comm.rank, cut(array.reshape(-1), sizes)
    contributions = []
    for other in range(n):
        contributions.append(chunks[rank] if other == rank else xp.empty_like(out))
        for watcher in () if other == rank else watchers.get():
            watcher.allocated(contributions[other], "communication")

    # Send to r+1, r+2, ... and receive from r-1, r-2, ...: so messages leave and arrive one after the other, and no
    # two ranks send to the same one at the same moment.
    receives, sends = [], []
    for distance in range(1, n):
        receives.append(comm.irecv(contributions[(rank - distance) % n], (rank - distance) % n))
    for distance in range(1, n):
        sends.append(comm.isend(chunks[(rank + distance) % n], (rank + distance) % n))
    comm.waitall(receives)
    comm.waitall(sends)

    # The declared order: 0 + 1 + ... + (n-1).
    out[...] = contributions[0]
    for contribution in contributions[1:]:
        accumulate(op, out, contribution)
    if op == "avg":
        divide(out, n)
    return out


@algorithm(
    "all_reduce",
    "ordered",
    sends=ALGORITHMS["all_reduce"]["ring"].sends,
    seconds=lambda nbytes, n, alpha, beta, overhead=0.0: (
        fan(nbytes / n, n, alpha, beta, overhead) + (n - 1) * (alpha + beta * nbytes / n)
    ),
)
def all_reduce(comm: PointToPoint, array: np.ndarray, op: str) -> np.ndarray:
    """Ordered reduce-scatter, then the ring's all-gather, which only copies: the ring's volume and messages."""
    # The sum of this rank's chunk goes to its place in `array`, from where the ring passes it on.
    flat, sizes = array.reshape(-1), chunk_sizes(array.size, comm.size)
    chunks = cut(flat, sizes)
    mine = chunks[comm.rank]
    mine[...] = reduce_scatter(comm, flat, sizes, xp.empty_like(mine), op)
    ring.circulate(comm, chunks)
    return array
