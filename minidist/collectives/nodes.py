"""Two-level collectives on a communicator whose nodes the program names by color, not the network.

The algorithms are those of `two_level`.

Proved by: tests/collectives/test_two_level.py
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np

from minidist.collectives import rooted, two_level
from minidist.comm.communicator import int64
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose
from minidist.core.collectives import calls, ring
from minidist.core.comm.communicator import Comm


def _on_nodes(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that makes the call on `.comm`, by the two-level algorithm."""

    @wraps(collective)
    def method(self: "TwoLevel", *arguments: Any, **keywords: Any) -> Any:
        return collective(self.comm, *arguments, algorithm="two_level", **keywords)

    return method


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
        self.comm.nodes = self.nodes

    all_reduce = _on_nodes(calls.all_reduce)
    reduce_scatter = _on_nodes(calls.reduce_scatter)
    all_gather = _on_nodes(calls.all_gather)
    broadcast = _on_nodes(calls.broadcast)
    reduce = _on_nodes(rooted.reduce)

    def barrier(self, *, async_op: bool = False) -> Any:
        """Block until every rank has entered."""
        call = self.comm.collective("barrier/two_level")
        run = partial(two_level.barrier, call)
        return call.run_async(run) if async_op else run()
