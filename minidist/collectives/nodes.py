"""Two-level collectives on a communicator whose nodes the program names by color, not the network.

The algorithms are those of `two_level`.

Proved by: tests/collectives/test_two_level.py
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.trace import purpose
from minidist.collectives import calls, ring, two_level
from minidist.comm.communicator import Comm, int64


class TwoLevel:
    """The ranks of `comm` in nodes: those with the same `color` (a node's coordinate in a mesh, for instance) are one.

    A call of all ranks; at the start every rank learns all colors (8 B each, purpose `startup`). Any number of
    ranks, nodes of any size, ragged counts. `.comm` is a duplicate that knows its nodes: any collective on it takes
    `algorithm="two_level"`, and "auto" has it among its choices; the methods here are those calls.
    """

    def __init__(self, comm: Comm, color: int) -> None:
        color = int64(color, comm.rank, "a node's color")
        if color < 0:
            raise UsageError(f"rank {comm.rank}: a node needs a color of at least 0, got {color}")
        # A duplicate, so that `comm` itself keeps the network's nodes.
        self.comm, self.color = comm.dup(), color

        # What travels: each rank's color, 8 B, around the ring.
        colors = np.empty(comm.size, dtype=np.int64)
        with purpose("startup"):
            call = self.comm.collective("two_level")
            ring.all_gather(call, np.array([color], dtype=np.int64), [1] * comm.size, colors)

        # in the order of their first ranks
        self.nodes = [np.flatnonzero(colors == c).tolist() for c in dict.fromkeys(colors.tolist())]
        self.comm.set_nodes(self.nodes)

    def all_reduce(self, array: np.ndarray, op: str = "sum", *, async_op: bool = False) -> Any:
        """Replace every rank's `array` by the sum (`op`) of all ranks' arrays, in place; returns it."""
        return calls.all_reduce(self.comm, array, op, algorithm="two_level", async_op=async_op)

    def reduce_scatter(
        self,
        array: np.ndarray,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: np.ndarray | None = None,
        async_op: bool = False,
    ) -> Any:
        """Give rank r chunk r of the sum (`op`) of all ranks' arrays (flattened)."""
        return calls.reduce_scatter(
            self.comm, array, op, counts=counts, out=out, algorithm="two_level", async_op=async_op
        )

    def all_gather(
        self,
        shard: np.ndarray,
        *,
        counts: Sequence[int] | None = None,
        out: np.ndarray | None = None,
        async_op: bool = False,
    ) -> Any:
        """Give every rank all ranks' shards (flattened), one after the other in rank order."""
        return calls.all_gather(self.comm, shard, counts=counts, out=out, algorithm="two_level", async_op=async_op)

    def broadcast(self, array: np.ndarray, root: int = 0, *, async_op: bool = False) -> Any:
        """Replace every rank's `array` by the root's, in place; returns it."""
        return calls.broadcast(self.comm, array, root, algorithm="two_level", async_op=async_op)

    def reduce(self, array: np.ndarray, root: int = 0, op: str = "sum", *, async_op: bool = False) -> Any:
        """Give the root the sum (`op`) of all ranks' arrays, as a new array; the others get None."""
        return calls.reduce(self.comm, array, root, op, algorithm="two_level", async_op=async_op)

    def barrier(self, *, async_op: bool = False) -> Any:
        """Block until every rank has entered."""
        call = self.comm.collective("barrier/two_level")
        run = partial(two_level.barrier, call)
        return call.run_async(run) if async_op else run()
