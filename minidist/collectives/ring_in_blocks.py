"""The ring whose sums are computed block by block, so that what arrives is added while it is in the cache.

The ring receives a whole chunk before it adds it. A chunk that is longer than the cache is written to memory first and
read again for the sum; a block of it is not:

    ring              | receive ............................ | add ............................. |   a step
    ring_in_blocks    | receive | add | receive | add | receive | add | receive | add |

A step of the reduce-scatter takes k messages, one for each block, and n-1 steps of the all-gather, which only copies,
take one message each. So it is for long arrays on ranks that share a machine. Bytes and bits are those of the ring, and
it needs one block of memory in addition to the array, where the ring needs a chunk.

Source: Lam, Rothberg and Wolf, The cache performance and optimizations of blocked algorithms, ASPLOS 1991.
Proved by: tests/collectives/test_papers.py, tests/collectives/test_closed_form.py
"""

from collections.abc import Sequence
from math import ceil

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.layout import chunk_sizes, cut
from minidist.core.base.trace import track
from minidist.core.collectives.calls import accumulate, algorithm, divide
from minidist.core.collectives.ring import circulate
from minidist.core.comm.communicator import PointToPoint

BLOCK_BYTES = 2 << 20


def blocks(nbytes: float) -> int:
    """Return into how many blocks, nearly equal, a chunk of this many bytes is cut."""
    return max(1, ceil(nbytes / BLOCK_BYTES))


def sends(sizes: Sequence[int], rank: int, itemsize: int = 8) -> tuple[int, int]:
    """Return what is sent: the ring's elements; every chunk in as many blocks as the largest one, chunk 0, needs."""
    n = len(sizes)
    return (n - 1) * (blocks(sizes[0] * itemsize) + 1), 2 * sum(sizes) - sizes[rank] - sizes[(rank + 1) % n]


@algorithm(
    "all_reduce",
    "ring_in_blocks",
    sends=sends,
    seconds=lambda nbytes, n, alpha, beta: (n - 1) * ((blocks(nbytes / n) + 1) * alpha + 2 * (beta * nbytes / n)),
)
def all_reduce(comm: PointToPoint, array: np.ndarray, op: str) -> np.ndarray:
    """Take the ring's steps, each step of the reduce-scatter in k blocks: (n-1) (k+1) messages per rank."""
    n, rank, flat = comm.size, comm.rank, array.reshape(-1)
    sizes = chunk_sizes(array.size, n)
    chunks = cut(flat, sizes)
    # All chunks have the same number of blocks, so that both sides of a step agree on the messages.
    k = blocks(sizes[0] * array.itemsize)
    parts = [cut(chunk, chunk_sizes(chunk.size, k)) for chunk in chunks]
    arrived = track(xp.empty_like(flat, shape=(parts[0][0].size,)), "communication")

    # Reduce-scatter: in each step a chunk leaves and another one grows, block by block.
    for step in range(1, n):
        leaving, growing = parts[(rank - step) % n], parts[(rank - step - 1) % n]
        for block, total in zip(leaving, growing, strict=True):
            incoming = arrived[: total.size]
            comm.sendrecv(block, (rank + 1) % n, incoming, (rank - 1) % n)
            accumulate(op, total, incoming)
    if op == "avg":
        divide(chunks[rank], n)

    # All-gather: the complete chunks travel once around, each in one message.
    circulate(comm, chunks)
    return array
