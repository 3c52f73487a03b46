"""What a call sends and how long it takes, by the formulas in the file of its algorithm, and bandwidths to compare by.

Proved by: tests/collectives/test_closed_form.py, tests/collectives/test_papers.py, tests/train/test_reduction.py,
tests/bench/test_collectives.py
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minidist.core.base import hooks
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import chunk_sizes
from minidist.core.collectives.calls import ALGORITHMS
from minidist.core.comm.communicator import PointToPoint


class Volume(NamedTuple):
    """What one rank sends in one call; the elements times the item size are bytes."""

    messages: int
    elements: int


def formulas(operation: str, name: str) -> dict[str, Callable[..., Any]]:
    """Return the two formulas of a registered algorithm, for another one that sends the same."""
    return {kind: formula(operation, name, kind) for kind in ("sends", "seconds")}


def formula(operation: str, name: str, kind: str) -> Callable[..., Any]:
    """Return one formula of a registered algorithm, "sends" or "seconds"; UsageError when it has none."""
    found: Callable[..., Any] | None = getattr(ALGORITHMS[operation][name], kind)
    if found is None:
        raise UsageError(f"{operation}/{name} was registered without `{kind}`; pass it to @algorithm")
    return found


def volume(
    operation: str, algorithm: str, elements: int | Sequence[int], ranks: int, rank: int, root: int = 0, **options: Any
) -> Volume:
    """Return (messages, elements) that leave `rank` in one call.

    elements: of the whole array, cut by `chunk_sizes`; or of each rank's chunk. Of all_to_all: what `rank` sends.
    options: what a formula needs beyond that: `itemsize` (segmented_ring, ring_in_blocks), `rows` (bruck).
    """
    sizes = chunk_sizes(elements, ranks) if isinstance(elements, int) else list(elements)
    # The formulas of these count ranks from the root.
    if operation in ("broadcast", "reduce", "gather", "scatter"):
        sizes, rank = sizes[root:] + sizes[:root], (rank - root) % ranks
    return Volume(*formula(operation, algorithm, "sends")(sizes, rank, **options))


def seconds(
    operation: str, algorithm: str, nbytes: float, ranks: int, alpha: float, beta: float, overhead: float = 0.0
) -> float:
    """Return the seconds of one call: alpha per message, beta per byte, of alpha the overhead keeps a port busy.

    See `Algorithm.seconds`; UsageError when the algorithm has no formula.
    """
    of_call = formula(operation, algorithm, "seconds")
    if overhead and "overhead" in inspect.signature(of_call).parameters:
        return float(of_call(nbytes, ranks, alpha, beta, overhead=overhead))
    return float(of_call(nbytes, ranks, alpha, beta))


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
