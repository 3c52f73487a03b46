"""Which algorithms each collective has, and what each of them sends and how long it takes.

An algorithm says all that in its own file, so that the formula stands beside the loop that it describes:

    @algorithm(
        "all_reduce",
        "my_name",
        sends=lambda sizes, rank: ...,  # (messages, elements) that leave `rank`
        seconds=lambda nbytes, ranks, alpha, beta: ...,  # until the last rank is done
    )
    def all_reduce(comm, array, op): ...

`volume` and `seconds` look a formula up. The tests compare every trace with them, and `algorithm="auto"` chooses by
the seconds.

Proved by: tests/collectives/test_closed_form.py, tests/collectives/test_papers.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from minidist.base.layout import chunk_sizes
from minidist.base.registry import Registry

Function = TypeVar("Function", bound=Callable[..., Any])


class Volume(NamedTuple):
    """What one rank sends in one call; the elements times the item size are bytes."""

    messages: int
    elements: int


@dataclass(frozen=True)
class Algorithm:
    """One way to run a collective.

    run: the function, called with the call. sends: (sizes, rank) -> (messages, elements) that leave `rank`, where
    sizes are the elements of each rank's chunk; of an operation with a root both count from the root. seconds:
    (nbytes, ranks, alpha, beta) -> seconds on the alpha-beta clock until the last rank is done, when all ranks begin
    at once and the number of ranks divides the array of `nbytes`. Adding costs nothing there.
    """

    run: Callable[..., Any]
    sends: Callable[..., tuple[int, int]]
    seconds: Callable[[float, int, float, float], float]


ALGORITHMS: dict[str, Registry[Algorithm]] = {
    operation: Registry(f"{operation} algorithm")
    for operation in (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "gather",
        "reduce",
        "reduce_scatter",
        "scatter",
    )
}


def algorithm(
    operation: str,
    name: str,
    *,
    sends: Callable[..., tuple[int, int]],
    seconds: Callable[[float, int, float, float], float],
) -> Callable[[Function], Function]:
    """Register a function as `operation`'s algorithm `name`. See `Algorithm` for the two formulas."""

    def register(function: Function) -> Function:
        ALGORITHMS[operation].add(name, Algorithm(function, sends, seconds))
        return function

    return register


def formulas(operation: str, name: str) -> dict[str, Callable[..., Any]]:
    """Return the two formulas of a registered algorithm, for another one that sends the same."""
    entry = ALGORITHMS[operation][name]
    return {"sends": entry.sends, "seconds": entry.seconds}


def volume(
    operation: str, algorithm: str, elements: int | Sequence[int], ranks: int, rank: int, root: int = 0, **options: Any
) -> Volume:
    """Return (messages, elements) that leave `rank` in one call.

    elements: of the whole array, cut by `chunk_sizes`; or of each rank's chunk. Of all_to_all: what `rank` sends.
    options: what a formula needs beyond that: `itemsize` (segmented_ring), `rows` (bruck).
    """
    sizes = chunk_sizes(elements, ranks) if isinstance(elements, int) else list(elements)
    # The formulas of these count ranks from the root.
    if operation in ("broadcast", "reduce", "gather", "scatter"):
        sizes, rank = sizes[root:] + sizes[:root], (rank - root) % ranks
    return Volume(*ALGORITHMS[operation][algorithm].sends(sizes, rank, **options))


def seconds(operation: str, algorithm: str, nbytes: float, ranks: int, alpha: float, beta: float) -> float:
    """Return the seconds of one call: alpha per message, beta per byte; see `Algorithm.seconds`."""
    return ALGORITHMS[operation][algorithm].seconds(nbytes, ranks, alpha, beta)


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: bytes that a link must carry per byte of the array.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    # A pipelined broadcast carries every byte over each link once; an all-reduce is a reduce-scatter and an all-gather.
    if operation in ("broadcast", "reduce"):
        return 1.0
    return (2 if operation == "all_reduce" else 1) * (ranks - 1) / ranks
