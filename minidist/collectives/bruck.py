"""Bruck's all-to-all: a chunk travels in hops of 1, 2, 4, ... ranks, many chunks in one message. For short chunks.

Pairwise exchange needs n-1 messages per rank. Here a chunk that must go i ranks far goes in the hops of i's binary
digits, together with all others that make the same hop:

    distance   1   2   3   4   5   6   7              5 ranks far = hop 1, then hop 4
    hop 1      x       x       x       x              every rank sends these chunks to rank + 1, in one message
    hop 2          x   x           x   x              ... to rank + 2
    hop 4                  x   x   x   x              ... to rank + 4

So ceil(log2 n) messages; the price is that a chunk is sent as often as its distance has ones: about n/2 chunks per
message, (n/2) log2 n in all instead of n-1. With chunks of unequal size no rank knows what passes through it; then the
sizes (8 B each) go ahead of every message.

Source: Bruck, Ho, Kipnis, Upfal, Weathersby, Efficient algorithms for all-to-all communications in multiport
message-passing systems, IEEE TPDS 8 (1997).
Proved by: tests/collectives/test_collectives.py, tests/collectives/test_papers.py
"""

from collections.abc import Sequence
from math import ceil, log2

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.layout import offsets
from minidist.core.collectives.calls import algorithm
from minidist.core.comm.communicator import PointToPoint


def sends(sizes: Sequence[int], rank: int, rows: Sequence[Sequence[int]] | None = None) -> tuple[int, int]:
    """Return what is sent: the chunk that must go i ranks far once for each one among the binary digits of i.

    rows[r][j]: elements from rank r to rank j, where they differ; then their sizes (8 B each) go ahead of the chunks.
    """
    n, messages, elements, distance = len(sizes), 0, 0, 1
    table, counted = rows or [sizes] * n, rows is not None

    # Hop by hop, the chunks that leave this rank: its own, and those of the ranks behind it that pass through.
    while distance < n:
        moving = [i for i in range(n) if i & distance]
        for i in moving:
            origin = (rank - i % distance) % n  # it has made its smaller hops
            elements += table[origin][(origin + i) % n]
        messages, elements, distance = messages + 1 + counted, elements + counted * len(moving), 2 * distance
    return messages, elements


def seconds(nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """Return the seconds for equal chunks: ceil(log2 n) alpha, and each chunk's bytes once per one in its distance."""
    ones = sum(i.bit_count() for i in range(ranks))
    return ceil(log2(ranks)) * alpha + beta * ones * nbytes / ranks


@algorithm("all_to_all", "bruck", sends=sends, seconds=seconds)
def all_to_all(comm: PointToPoint, array: np.ndarray, send_sizes: list[int], receive_sizes: list[int]) -> np.ndarray:
    """Send ceil(log2 n) messages per rank. When both size lists are the very same list, all chunks are equal."""
    n, rank = comm.size, comm.rank
    equal = send_sizes is receive_sizes
    flat, start = array.reshape(-1), offsets(send_sizes)
    # chunks[i]: the one that started at distance i from its destination
    chunks = [flat[start[(rank + i) % n] : start[(rank + i) % n + 1]] for i in range(n)]

    # One hop for each binary digit of the distances.
    distance = 1
    while distance < n:
        to, source = (rank + distance) % n, (rank - distance) % n
        moving = [i for i in range(n) if i & distance]

        # Pack what makes this hop into one message.
        counts = np.array([chunks[i].size for i in moving], dtype=np.int64)
        outgoing, place = xp.empty_like(flat, shape=(int(counts.sum()),)), offsets(counts.tolist())
        for k, i in enumerate(moving):
            outgoing[place[k] : place[k + 1]] = chunks[i]

        # Learn how much arrives: the sizes travel ahead, unless all chunks are equal.
        arriving, sends = counts, []
        if not equal:
            arriving = xp.empty_like(counts)
            receive = comm.irecv(arriving, source)
            sends = [comm.isend(counts, to), comm.isend(outgoing, to)]
            comm.wait(receive)

        # Exchange the message and unpack it.
        incoming, place = xp.empty_like(flat, shape=(int(arriving.sum()),)), offsets(arriving.tolist())
        if equal:
            comm.sendrecv(outgoing, to, incoming, source)
        else:
            comm.recv(incoming, source)
            comm.waitall(sends)
        for k, i in enumerate(moving):
            chunks[i] = incoming[place[k] : place[k + 1]]
        distance *= 2

    # chunks[i] came from rank - i.
    goal = offsets(receive_sizes)
    out = xp.empty_like(flat, shape=(goal[-1],))
    for i in range(n):
        source = (rank - i) % n
        out[goal[source] : goal[source + 1]] = chunks[i]
    return out
