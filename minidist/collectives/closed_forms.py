"""What a whole call sends, summed over its ranks, and what bandwidths of different collectives are compared by.

Proved by: tests/train/test_reduction.py, tests/bench/test_collectives.py
"""

from collections.abc import Sequence

from minidist.core.base import hooks
from minidist.core.collectives.registry import volume
from minidist.core.comm.point_to_point import PointToPoint


def elements_sent(
    comm: PointToPoint, operation: str, algorithm: str, elements: int | Sequence[int], itemsize: int
) -> int:
    """Return the elements that all ranks of `comm` together send in one call, by the formula of the algorithm.

    algorithm: a name, or "auto", for the one that is chosen. elements: of the whole array, or of each rank's
    chunk.
    """
    if algorithm in hooks.choosers:
        total = elements if isinstance(elements, int) else sum(elements)
        algorithm = hooks.choosers[algorithm](comm, operation, total * itemsize)
    return sum(volume(operation, algorithm, elements, comm.size, rank).elements for rank in range(comm.size))


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: bytes that a link must carry per byte of the array.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    # A pipelined broadcast carries every byte over each link once; an all-reduce is a reduce-scatter and an all-gather.
    if operation in ("broadcast", "reduce"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks
