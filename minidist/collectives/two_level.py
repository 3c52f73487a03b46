"""Two levels: first inside each node, then across nodes, so that the slow links carry as little as they can.

Two nodes of three ranks; links inside a node are fast, those between nodes slow:

    1 reduce-scatter inside    0 ─ 1 ─ 2        3 ─ 4 ─ 5       rank l of a node has chunk l of its node's sum
    2 all-reduce across        0 ═ 3    1 ═ 4    2 ═ 5          ranks of equal number: chunk l of the sum over all
    3 all-gather inside        0 ─ 1 ─ 2        3 ─ 4 ─ 5       everybody has everything

Across nodes a rank sends 2 (M-1)/M of N/L bytes (M nodes of L ranks), L times less than a ring over all whose links all
carry 2 (n-1)/n of N. Nodes of unequal size have no partner for every chunk: there rank 0 of each node, its leader, works
for all (reduce inside, all-reduce among leaders, broadcast inside).

Source: Jia et al., Highly scalable deep learning training system with mixed-precision, 2018, section 3.4 (hierarchical
all-reduce).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.layout import chunk_sizes, offsets
from minidist.base.trace import purpose
from minidist.collectives import binomial_tree, ring
from minidist.collectives.operations import check_op, divide_if_average
from minidist.comm.communicator import Comm


class TwoLevel:
    """The ranks of `comm` in nodes: those with the same `color` (a node's coordinate in a mesh, for instance) are one.

    A call of all ranks; at the start everybody learns everybody's color (8 B each, purpose `startup`). Calls run in the
    communicator's lane, one after the other, blocking or not.
    """

    def __init__(self, comm: Comm, color: int) -> None:
        self.comm, self.color = comm.dup(), int(color)
        if color < 0:
            raise UsageError(f"rank {comm.rank}: a node needs a color of at least 0, got {color}")
        colors = np.empty(comm.size, dtype=np.int64)
        with purpose("startup"):
            channel = self.comm.collective("two_level")
            ring.all_gather(channel, np.array([color], dtype=np.int64), [1] * comm.size, colors)
        nodes = [np.flatnonzero(colors == c).tolist() for c in dict.fromkeys(colors.tolist())]
        self.nodes: list[list[int]] = nodes  # in the order of their first ranks
        mine = next(node for node in nodes if comm.rank in node)
        self.equal = len({len(node) for node in nodes}) == 1
        self.inside = self.comm.group(mine, f"node{color}")
        place = mine.index(comm.rank)
        across = [node[place] for node in nodes if len(node) > place] if self.equal or place == 0 else [comm.rank]
        self.across = self.comm.group(across, f"across{place}")

    def all_reduce(self, array: np.ndarray, op: str = "sum", *, async_op: bool = False) -> Any:
        """Every rank's `array` becomes the sum (`op`) of all ranks' arrays, in place; returns it (or a Work)."""
        check_op(op, array)
        self._check(array, "all_reduce")
        return self._run(
            "all_reduce/two_level" + ("" if op == "sum" else f" {op}"), lambda: self._all_reduce(array, op), async_op
        )

    def broadcast(self, array: np.ndarray, root: int = 0, *, async_op: bool = False) -> Any:
        """Every rank's `array` becomes the root's: inside its node, among the leaders, inside the other nodes."""
        if not 0 <= root < self.comm.size:
            raise UsageError(f"rank {self.comm.rank}: broadcast with root {root}; ranks are 0..{self.comm.size - 1}")
        self._check(array, "broadcast")
        return self._run("broadcast/two_level", lambda: self._broadcast(array, root), async_op)

    def _check(self, array: np.ndarray, operation: str) -> None:
        if not array.flags.c_contiguous:
            raise UsageError(
                f"rank {self.comm.rank}: {operation} of an array with strides {array.strides}; pass a C-contiguous array"
            )

    def _run(self, name: str, function: Callable[[], np.ndarray], async_op: bool) -> Any:
        work = self.comm.collective(name).post(function)
        return work if async_op else work.wait()

    def _all_reduce(self, array: np.ndarray, op: str) -> np.ndarray:
        inner = "sum" if op == "avg" else op  # divided once, at the end
        inside, across = (comm.collective(f"two_level {op}") for comm in (self.inside, self.across))
        if self.equal:
            flat, sizes = array.reshape(-1), chunk_sizes(array.size, inside.size)
            start = offsets(sizes)
            mine = np.empty_like(flat, shape=(sizes[inside.rank],))
            ring.reduce_scatter(inside, flat, sizes, mine, inner)
            ring.all_reduce(across, mine, inner)
            divide_if_average(op, mine, self.comm.size)
            flat[start[inside.rank] : start[inside.rank + 1]] = mine
            ring.all_gather(inside, flat[start[inside.rank] : start[inside.rank + 1]], sizes, flat)
            return array
        total = binomial_tree.reduce(inside, array, 0, inner)
        if total is not None:
            ring.all_reduce(across, total, inner)
            divide_if_average(op, total, self.comm.size)
            array[...] = total
        return binomial_tree.broadcast(inside, array, 0)

    def _broadcast(self, array: np.ndarray, root: int) -> np.ndarray:
        home = next(i for i, node in enumerate(self.nodes) if root in node)
        inside, across = (comm.collective("two_level broadcast") for comm in (self.inside, self.across))
        at_home = self.comm.rank in self.nodes[home]
        if at_home:
            binomial_tree.broadcast(inside, array, self.nodes[home].index(root))
        if inside.rank == 0:
            binomial_tree.broadcast(across, array, home)
        return array if at_home else binomial_tree.broadcast(inside, array, 0)
