"""All algorithms of each collective, those of the core and those of this package; and one call as data.

    ALGORITHMS["all_reduce"]     {"ring": ..., "ordered": ..., "recursive_doubling": ..., ...}

The table is that of the core. This module imports every file that adds to the table, so that all names are in it.

From a `Call` follows what every rank passes to the algorithm.

Proved by: tests/collectives/test_collectives.py, tests/base/test_hooks.py, tests/collectives/test_one_event.py,
tests/collectives/test_auto.py
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minidist.core.base import hooks
from minidist.core.base.layout import chunk_sizes
from minidist.core.collectives.calls import ALGORITHMS as ALGORITHMS
from minidist.core.collectives.calls import Algorithm

hooks.load_more(ALGORITHMS["all_reduce"])


def candidates(operation: str) -> dict[str, Algorithm]:
    """Return the algorithms that "auto" chooses among: those with a formula, in the same order on every rank."""
    return {name: entry for name, entry in sorted(ALGORITHMS[operation].items()) if entry.seconds is not None}


# What an algorithm of each operation is called with, after the call.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "all_gather": ("shard", "sizes", "out"),
    "all_reduce": ("array", "op"),
    "all_to_all": ("array", "send_sizes", "receive_sizes"),
    "broadcast": ("array", "root"),
    "gather": ("shard", "sizes", "root"),
    "reduce": ("array", "root", "op"),
    "reduce_scatter": ("array", "sizes", "out", "op"),
    "scatter": ("array", "sizes", "out", "root"),
}


class Call(NamedTuple):
    """What a collective call moves. sizes: elements of each rank's chunk; of an all_to_all, of each one it sends."""

    operation: str
    sizes: tuple[int, ...]
    root: int = 0
    op: str = "sum"

    @classmethod
    def of(cls, operation: str, ranks: int, arguments: Sequence[Any]) -> "Call":
        """Return the call of an algorithm that is given these arguments on one rank of `ranks`."""
        given = dict(zip(PARAMETERS[operation], arguments, strict=True))
        sizes = given.get("sizes") or given.get("send_sizes") or chunk_sizes(given["array"].size, ranks)
        return cls(operation, tuple(sizes), given.get("root", 0), given.get("op", "sum"))

    @classmethod
    def of_size(cls, operation: str, ranks: int, elements: int) -> "Call":
        """Return a call for an array of `elements` in all; the chunks of an all_to_all are equal, and rounded up."""
        even = operation == "all_to_all"
        return cls(operation, (-(-elements // ranks),) * ranks if even else tuple(chunk_sizes(elements, ranks)))

    def arguments(self, rank: int, make: Callable[[int], Any]) -> tuple[Any, ...]:
        """Return what calls.py passes to the algorithm on one rank. make: returns an array of a number of elements."""
        sizes = list(self.sizes)
        whole, chunk = make(sum(sizes)), make(sizes[rank])
        given = {
            "array": None if self.operation == "scatter" and rank != self.root else whole,
            "shard": chunk,
            "sizes": sizes,
            "send_sizes": sizes,  # the very same list: bruck knows by it that all are equal
            "receive_sizes": sizes,
            "out": whole if self.operation == "all_gather" else chunk,
            "root": self.root,
            "op": self.op,
        }
        return tuple(given[name] for name in PARAMETERS[self.operation])
