"""Two levels: first inside each node, then across nodes, so that the slow links carry as little as they can.

Two nodes of three ranks; links inside a node are fast, those between nodes slow:

    1 reduce-scatter inside    0 ─ 1 ─ 2        3 ─ 4 ─ 5       rank l of a node has chunk l of its node's sum
    2 all-reduce across        0 ═ 3    1 ═ 4    2 ═ 5          ranks of equal number: chunk l of the sum over all
    3 all-gather inside        0 ─ 1 ─ 2        3 ─ 4 ─ 5       every rank has the whole sum

Across nodes a rank sends 2 (M-1)/M of N/L bytes (M nodes of L ranks), L times less than a ring over all whose links all
carry 2 (n-1)/n of N. Reduce-scatter is the first two steps with one less across, all-gather the last two. Nodes of
unequal size have no partner for every chunk: there rank 0 of each node, its leader, works for all (reduce inside,
across among leaders, broadcast inside), as it does in broadcast, reduce and barrier, where a slow link carries the
array once.

Which ranks form a node? `TwoLevel(comm, color)` gives its communicator the nodes. Any other one asks the world: ranks
joined by the fastest links form a node in the simulated world, processes of one host under MPI.

Source: Jia et al., Highly scalable deep learning training system with mixed-precision, 2018, section 3.4 (hierarchical
all-reduce).
Proved by: tests/collectives/test_two_level.py
"""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import numpy as np

from minidist.collectives import binomial_tree, rooted
from minidist.collectives.closed_forms import Volume, formulas, seconds, volume
from minidist.comm.communicator import int64, part
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import chunk_sizes, offsets
from minidist.core.base.trace import purpose
from minidist.core.collectives import calls, ring
from minidist.core.collectives.calls import algorithm, divide
from minidist.core.comm.communicator import CollectiveCall, Comm


def sub(call: CollectiveCall, ranks: Sequence[int]) -> CollectiveCall:
    """Return the part of a call among `ranks` (in that order, this rank among them), numbered from 0.

    An algorithm for n ranks so runs on the ranks of one node, or on one rank of each node. Sends nothing; the messages
    travel with the tag of the whole call. Two ranks' messages keep their order, so parts of one call that follow one
    another cannot meet.
    """
    return part(
        call,
        type(call),
        members=[call.members[rank] for rank in ranks],
        rank=list(ranks).index(call.rank),
        size=len(ranks),
        ranks=[call.ranks[rank] for rank in ranks],
        nodes=None,
    )


class Levels:
    """The ranks of a call, sorted into nodes and seen from one of them.

    inside: the ranks of its node. across: the ranks of its place in every node. With nodes of unequal size only the
    leaders have one; for any other rank it is the rank alone.
    """

    def __init__(self, comm: CollectiveCall) -> None:
        # The same list of nodes on every rank, from what `TwoLevel` was told or from the world's links or hosts.
        self.comm = comm
        self.nodes = nodes = comm.nodes or comm.world.nodes(comm.members)
        self.node = next(i for i, node in enumerate(nodes) if comm.rank in node)
        place = nodes[self.node].index(comm.rank)

        # With equal nodes every place has a partner in each node; else only place 0, the leaders, has.
        self.equal = len({len(node) for node in nodes}) == 1
        self.inside = sub(comm, nodes[self.node])
        together = self.equal or place == 0
        self.across = sub(comm, [node[place] for node in nodes if len(node) > place] if together else [comm.rank])

    @property
    def order(self) -> list[int]:
        """Ranks sorted by (place, node): what belongs to one place of all nodes then lies side by side."""
        return [node[place] for place in range(self.inside.size) for node in self.nodes]

    def totals(self, sizes: Sequence[int]) -> list[int]:
        """Return the elements of each place, over all nodes."""
        return [sum(sizes[node[place]] for node in self.nodes) for place in range(self.inside.size)]

    def leaders(self) -> CollectiveCall:
        """Return the part of the call among the first ranks of the nodes; the caller must be one of them."""
        return sub(self.comm, [node[0] for node in self.nodes])

    def node_of(self, rank: int) -> int:
        """Return the number of a rank's node."""
        return next(i for i, node in enumerate(self.nodes) if rank in node)


def reordered(flat: np.ndarray, sizes: Sequence[int], order: Sequence[int], back: bool = False) -> np.ndarray:
    """Copy the chunks of `flat` from rank order into `order`, or back. No copy when the two are the same."""
    if list(order) == list(range(len(sizes))):
        return flat
    # start: of each rank's chunk in rank order. moved: of the chunks in `order`.
    result, start, moved = xp.empty_like(flat), offsets(list(sizes)), offsets([sizes[rank] for rank in order])
    for i, rank in enumerate(order):
        here, there = (moved[i], moved[i + 1]), (start[rank], start[rank + 1])
        (a, b), (c, d) = (there, here) if back else (here, there)
        result[a:b] = flat[c:d]
    return result


def sends_inside_and_across(
    operation: str, sizes: Sequence[Sequence[int]], node: int, rank: int
) -> tuple[Volume, Volume]:
    """Return what rank `rank` of node `node` sends inside its node and to other nodes, with M equal nodes of L ranks.

    operation: all_reduce, reduce_scatter or all_gather. sizes[m][l]: elements of the chunk of rank l of node m; an
    all-reduce cuts the array first into L parts, then each part into M.
    """
    # Inside the ring runs over the L places, each with the chunks of all nodes; across over the M chunks of one place.
    places = [sum(place) for place in zip(*sizes, strict=True)]
    inside = volume(operation, "ring", places, len(places), rank)
    return inside, volume(operation, "ring", [row[rank] for row in sizes], len(sizes), node)


def two_level_seconds(
    nbytes: float, nodes: int, ranks: int, fast: tuple[float, float], slow: tuple[float, float]
) -> float:
    """Return the seconds of an all-reduce of equal nodes; fast, slow: (alpha, beta) inside a node and across.

    A reduce-scatter or an all-gather takes half of it.
    """
    # Steps 1 and 3 on the whole array, step 2 on a place's share of it.
    inside = seconds("all_reduce", "ring", nbytes, ranks, *fast)
    return inside + seconds("all_reduce", "ring", nbytes / ranks, nodes, *slow)


# The registered formulas are those of ranks that are all in one node.
@algorithm("all_reduce", "two_level", **formulas("all_reduce", "ring"))
def all_reduce(comm: CollectiveCall, array: np.ndarray, op: str) -> np.ndarray:
    """Sum inside, across and inside again; of equal nodes a rank sends 2 (M-1)/M of 1/L of the array across."""

    levels = Levels(comm)
    inner, inside, across = "sum" if op == "avg" else op, levels.inside, levels.across  # divided once, at the end

    # Steps 1, 2 and 3 of the picture.
    if levels.equal:
        flat, sizes = array.reshape(-1), chunk_sizes(array.size, inside.size)
        start = offsets(sizes)
        mine = xp.empty_like(flat, shape=(sizes[inside.rank],))

        # [1] to [3]: place l gets chunk l of its node's sum, then of the sum over all, then every chunk.
        ring.reduce_scatter(inside, flat, sizes, mine, inner)
        ring.all_reduce(across, mine, inner)
        if op == "avg":
            divide(mine, comm.size)
        flat[start[inside.rank] : start[inside.rank + 1]] = mine
        ring.all_gather(inside, flat[start[inside.rank] : start[inside.rank + 1]], sizes, flat)
        return array

    # Unequal nodes: the leaders work for all.
    total = binomial_tree.reduce(inside, array, 0, inner)
    if total is not None:
        ring.all_reduce(across, total, inner)
        if op == "avg":
            divide(total, comm.size)
        array[...] = total
    return binomial_tree.broadcast(inside, array, 0)


@algorithm("reduce_scatter", "two_level", **formulas("reduce_scatter", "ring"))
def reduce_scatter(comm: CollectiveCall, array: np.ndarray, sizes: list[int], out: np.ndarray, op: str) -> np.ndarray:
    """Reduce-scatter inside each node, then across; a leader works for its node where nodes are unequal."""
    levels = Levels(comm)
    inner, inside, across, nodes = "sum" if op == "avg" else op, levels.inside, levels.across, levels.nodes
    flat = array.reshape(-1)

    # Steps 1 and 2: each place gets the chunks of that place in all nodes, then each rank its own.
    if levels.equal:
        # totals[l]: elements of place l, over all nodes. held: this place's chunks, node by node.
        totals = levels.totals(sizes)
        held = xp.empty_like(flat, shape=(totals[inside.rank],))
        ring.reduce_scatter(inside, reordered(flat, sizes, levels.order), totals, held, inner)
        ring.reduce_scatter(across, held, [sizes[rank] for rank in across.ranks], out, inner)
        if op == "avg":
            divide(out, comm.size)
        return out

    # Unequal nodes: the leaders reduce, exchange whole nodes' chunks, and scatter them inside.
    total = binomial_tree.reduce(inside, flat, 0, inner)
    mine, node_sizes = nodes[levels.node], [sum(sizes[rank] for rank in node) for node in nodes]
    if total is not None:
        ours = xp.empty_like(flat, shape=(node_sizes[levels.node],))
        by_node = reordered(total, sizes, [rank for node in nodes for rank in node])
        ring.reduce_scatter(across, by_node, node_sizes, ours, inner)
        if op == "avg":
            divide(ours, comm.size)
        total = ours
    return binomial_tree.scatter(inside, total, [sizes[rank] for rank in mine], out, 0)


@algorithm("all_gather", "two_level", **formulas("all_gather", "ring"))
def all_gather(comm: CollectiveCall, shard: np.ndarray, sizes: list[int], out: np.ndarray) -> np.ndarray:
    """Gather across the nodes, then inside; a leader works for its node where nodes are unequal."""
    levels = Levels(comm)
    inside, across, nodes = levels.inside, levels.across, levels.nodes
    flat = shard.reshape(-1)

    # Step 2 without sums, then step 3. The chunks lie by (place, node) on the way.
    if levels.equal:
        totals, order = levels.totals(sizes), levels.order
        straight = order == list(range(len(sizes)))
        held = out if straight else xp.empty_like(out)  # by (place, node)
        start = offsets(totals)
        ours = held[start[inside.rank] : start[inside.rank + 1]]
        ring.all_gather(across, flat, [sizes[rank] for rank in across.ranks], ours)
        ring.all_gather(inside, ours, totals, held)
        if not straight:
            out[...] = reordered(held, sizes, order, back=True)
        return out

    # Unequal nodes: the leaders gather, exchange whole nodes' shards, and broadcast them inside.
    together = binomial_tree.gather(inside, flat, [sizes[rank] for rank in nodes[levels.node]], 0)
    order = [rank for node in nodes for rank in node]
    held = xp.empty_like(out)
    if together is not None:
        ring.all_gather(across, together, [sum(sizes[rank] for rank in node) for node in nodes], held)
    binomial_tree.broadcast(inside, held, 0)
    out[...] = reordered(held, sizes, order, back=True)
    return out


@algorithm("broadcast", "two_level", **formulas("broadcast", "binomial"))
def broadcast(comm: CollectiveCall, array: np.ndarray, root: int) -> np.ndarray:
    """Broadcast inside the root's node, among the leaders, inside the other nodes: M-1 slow messages in all."""
    levels = Levels(comm)

    at_root = levels.node_of(root)
    # The root's node first, then one slow message to each other leader, then the other nodes.
    if levels.node == at_root:
        binomial_tree.broadcast(levels.inside, array, levels.nodes[at_root].index(root))
    if levels.inside.rank == 0:
        binomial_tree.broadcast(levels.leaders(), array, at_root)
    return array if levels.node == at_root else binomial_tree.broadcast(levels.inside, array, 0)


@algorithm("reduce", "two_level", **formulas("reduce", "binomial"))
def reduce(comm: CollectiveCall, array: np.ndarray, root: int, op: str) -> np.ndarray | None:
    """Reduce inside the other nodes, among the leaders, inside the root's node: M-1 slow messages in all."""
    levels = Levels(comm)
    inner, at_root = "sum" if op == "avg" else op, levels.node_of(root)
    # The broadcast turned round: inside the other nodes, then one slow message from each of their leaders.
    part: np.ndarray | None = array

    # Now the leader of the root's node holds the sum of the other nodes and its array.
    if levels.node != at_root:
        part = binomial_tree.reduce(levels.inside, array, 0, inner)
    if levels.inside.rank == 0 and len(levels.nodes) > 1:
        assert part is not None
        part = binomial_tree.reduce(levels.leaders(), part, at_root, inner)
    if levels.node != at_root:
        return None
    assert part is not None
    total = binomial_tree.reduce(levels.inside, part, levels.nodes[at_root].index(root), inner)
    if total is not None and op == "avg":
        divide(total, comm.size)
    return total


def barrier(comm: CollectiveCall) -> None:
    """Synchronize inside each node, among the leaders, and inside again."""
    levels = Levels(comm)
    # No leader enters before its whole node has; no rank leaves before all leaders have met.
    levels.inside.barrier()
    if levels.inside.rank == 0:
        levels.leaders().barrier()
    levels.inside.barrier()


# --- a communicator whose nodes the program names by color, not the network ---


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
        run = partial(barrier, call)
        return call.run_async(run) if async_op else run()
