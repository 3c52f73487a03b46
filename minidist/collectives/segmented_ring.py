"""The ring in segments: a message is cut, and the first piece travels on while the next one still arrives.

A chain of n ranks that each receive the whole array before they pass it on takes (n-1) (alpha + beta N). In k segments
all links are busy at once, and only the time of the first segment grows with the length of the chain:

    rank 0 ▶ 1    |a|b|c|d|                     time:  (n-1) (alpha + beta N/k)  until the first one is there
    rank 1 ▶ 2      |a|b|c|d|                          + (k-1) beta N/k          for the others, one behind the other
    rank 2 ▶ 3        |a|b|c|d|

All-reduce is the ring's with every chunk in segments: the latency of a step overlaps with the segments that follow.

Source: van de Geijn and Watts, SUMMA, 1997 (the pipelined ring broadcast); Open MPI's `ring_segmented` all-reduce.
Proved by: tests/collectives/test_papers.py
"""

from collections.abc import Sequence
from math import ceil

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.layout import chunk_sizes, cut
from minidist.core.collectives.calls import accumulate, algorithm, divide
from minidist.core.comm.communicator import PointToPoint, Request

SEGMENT_BYTES = 64 * 1024


def segments(nbytes: int) -> int:
    """Return into how many pieces, nearly equal, an array of this many bytes is cut."""
    return max(1, -(-nbytes // SEGMENT_BYTES))


def in_segments(array: np.ndarray, count: int) -> list[np.ndarray]:
    """Return views of `count` segments of a 1-D array, nearly equal."""
    return cut(array, chunk_sizes(array.size, count))


def chain_seconds(nbytes: float, ranks: int, alpha: float, beta: float, overhead: float = 0.0) -> float:
    """Return the seconds of broadcast and reduce: the first of k segments makes n-1 hops, the others follow at once."""
    if ranks == 1:
        return 0.0
    k = segments(ceil(nbytes))
    first = nbytes / k
    return (ranks - 1) * (alpha + beta * first) + beta * (nbytes - first) + (k - 1) * overhead


@algorithm(
    "broadcast",
    "segmented_ring",
    sends=lambda sizes, rank, itemsize=8: (
        (segments(sum(sizes) * itemsize), sum(sizes)) if rank < len(sizes) - 1 else (0, 0)
    ),
    seconds=chain_seconds,
)
def broadcast(comm: PointToPoint, array: np.ndarray, root: int) -> np.ndarray:
    """Pass the segments from the root around the ring: each rank but the last sends the array once."""
    # All receives are posted at once, so that the sender never waits for one.
    n, distance = comm.size, (comm.rank - root) % comm.size
    pieces = in_segments(array.reshape(-1), segments(array.nbytes))
    receives = [comm.irecv(piece, (comm.rank - 1) % n) for piece in pieces] if distance else []

    # A segment leaves as soon as it is here, while the next one arrives. The root's are here from the start.
    sends = []
    for i, piece in enumerate(pieces):
        if distance:
            comm.wait(receives[i])
        if distance < n - 1:
            sends.append(comm.isend(piece, (comm.rank + 1) % n))
    comm.waitall(sends)
    return array


@algorithm(
    "reduce",
    "segmented_ring",
    sends=lambda sizes, rank, itemsize=8: (segments(sum(sizes) * itemsize), sum(sizes)) if rank else (0, 0),
    seconds=chain_seconds,
)
def reduce(comm: PointToPoint, array: np.ndarray, root: int, op: str) -> np.ndarray | None:
    """Add along the chain that ends at the root: each rank adds its part to every segment and passes it on."""
    n = comm.size
    distance = (comm.rank - root - 1) % n  # 0 is the rank after the root, n-1 the root
    total = xp.empty_like(array) if distance else array

    # growing[i]: segment i of the sum so far; it arrives from the rank before and leaves to the rank after.
    k = segments(array.nbytes)
    mine, growing = in_segments(array.reshape(-1), k), in_segments(total.reshape(-1), k)
    receives = [comm.irecv(piece, (comm.rank - 1) % n) for piece in growing] if distance else []

    # As in the broadcast, with one addition between a segment's arrival and its departure.
    sends = []
    for i, piece in enumerate(growing):
        if distance:
            comm.wait(receives[i])
            accumulate(op, piece, mine[i])

        if distance < n - 1:
            sends.append(comm.isend(piece, (comm.rank + 1) % n))
    comm.waitall(sends)
    if distance < n - 1:
        return None

    total = total.copy() if total is array else total
    if op == "avg":
        divide(total, n)
    return total


def all_reduce_sends(sizes: Sequence[int], rank: int, itemsize: int = 8) -> tuple[int, int]:
    """Return what is sent: the ring's elements; every chunk in as many segments as the largest one, chunk 0, needs."""
    n = len(sizes)
    return 2 * (n - 1) * segments(sizes[0] * itemsize), 2 * sum(sizes) - sizes[rank] - sizes[(rank + 1) % n]


def all_reduce_seconds(nbytes: float, ranks: int, alpha: float, beta: float, overhead: float = 0.0) -> float:
    """Return the seconds of 2 (n-1) steps of one chunk.

    A step takes the chunk's time on the port or, if that is longer, a segment's way.
    """
    if ranks == 1:
        return 0.0
    chunk = nbytes / ranks
    k = segments(ceil(chunk))
    step = max(k * overhead + beta * chunk, alpha + beta * chunk / k)
    return (2 * ranks - 3) * step + alpha + beta * chunk + (k - 1) * overhead


@algorithm("all_reduce", "segmented_ring", sends=all_reduce_sends, seconds=all_reduce_seconds)
def all_reduce(comm: PointToPoint, array: np.ndarray, op: str) -> np.ndarray:
    """Take the ring's steps, with its sums (the same bits), each chunk in k segments: 2 (n-1) k messages per rank.

    What arrives in one step is what leaves in the next, segment by segment: steps 1 to n-1 add, the others copy.
    """
    n, rank = comm.size, comm.rank
    # No steps, and no segments.
    if n == 1:
        if op == "avg":
            divide(array, n)
        return array

    # chunks[j][i]: segment i of chunk j. All chunks have the same number of segments, so that both sides agree on the
    # messages.
    sizes = chunk_sizes(array.size, n)
    k = segments(sizes[0] * array.itemsize)
    chunks = [in_segments(chunk, k) for chunk in cut(array.reshape(-1), sizes)]
    slots = in_segments(xp.empty_like(array, shape=(sizes[0],)), k)  # where segments arrive that are to be added

    def receive(step: int, i: int) -> Request:
        target = chunks[(rank - step - 1) % n][i]
        return comm.irecv(slots[i][: target.size] if step < n else target, (rank - 1) % n)

    def send(step: int, i: int) -> Request:
        return comm.isend(chunks[(rank - step) % n][i], (rank + 1) % n)

    # Each segment has one receive and one send under way; when both are done it starts those of its next step.
    receives, sends = [receive(1, i) for i in range(k)], [send(1, i) for i in range(k)]
    for step in range(1, 2 * n - 1):
        for i in range(k):
            arrived = comm.wait(receives[i])
            if step < n:
                target = chunks[(rank - step - 1) % n][i]
                accumulate(op, target, arrived)
                if op == "avg" and step == n - 1:
                    divide(target, n)
            comm.wait(sends[i])
            if step < 2 * n - 2:
                receives[i], sends[i] = receive(step + 1, i), send(step + 1, i)
    return array
