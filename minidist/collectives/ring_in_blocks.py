"""The ring on blocks of a long array, one after the other, so that a block stays in the caches of the processors.

The ring passes over an array three times: it sends a chunk, adds to a chunk, and sends the sum. An array that is longer
than the caches is read from memory each time; a block is read from memory once:

    ring              | send .......... | add .......... | send .......... |        three passes over the array
    ring_in_blocks    | send | add | send |  | send | add | send |  ...             three passes over each block

It takes 2 (n-1) messages for each block, so it is only for ranks that share a machine and for long arrays. The bytes
are those of the ring, and so are the sums where the array is one block.

Source: Lam, Rothberg and Wolf, The cache performance and optimizations of blocked algorithms, ASPLOS 1991.
Proved by: tests/collectives/test_papers.py, tests/collectives/test_closed_form.py
"""

from collections.abc import Sequence
from math import ceil

import numpy as np

from minidist.core.base.layout import chunk_sizes, cut
from minidist.core.collectives import ring
from minidist.core.collectives.calls import algorithm
from minidist.core.comm.communicator import PointToPoint

BLOCK_BYTES = 4 << 20


def blocks(elements: int, itemsize: int) -> list[int]:
    """Return the elements of each block, nearly equal: as few blocks as are needed of at most BLOCK_BYTES."""
    return chunk_sizes(elements, max(1, ceil(elements * itemsize / BLOCK_BYTES)))


def sends(sizes: Sequence[int], rank: int, itemsize: int = 8) -> tuple[int, int]:
    """Return what is sent: the ring's messages and elements, for each block."""
    n, of_blocks = len(sizes), blocks(sum(sizes), itemsize)
    chunks = [chunk_sizes(elements, n) for elements in of_blocks]
    return 2 * (n - 1) * len(of_blocks), sum(2 * sum(c) - c[rank] - c[(rank + 1) % n] for c in chunks)


@algorithm(
    "all_reduce",
    "ring_in_blocks",
    sends=sends,
    seconds=lambda nbytes, n, alpha, beta: (
        2 * (n - 1) * (max(1, ceil(nbytes / BLOCK_BYTES)) * alpha + beta * nbytes / n)
    ),
)
def all_reduce(comm: PointToPoint, array: np.ndarray, op: str) -> np.ndarray:
    """Run the ring on each block: 2 (n-1) messages per block and rank."""
    for block in cut(array.reshape(-1), blocks(array.size, array.itemsize)):
        ring.all_reduce(comm, block, op)
    return array
