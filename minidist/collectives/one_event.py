"""A collective call of folded ranks as one event, whose messages, bytes and times come from running it once elsewhere.

Where one rank stands for others (`comm/sim/folded.py`) the members of a call do not run, so it cannot be made of
messages. It is run once on meta arrays, in another, small world that has the ranks of the call alone, beginning at
the times at which they come. What happens there happens here: the clocks advance, the messages and bytes are counted,
and the memory that the algorithm works in is allocated and freed. Equal calls are looked up.

    rank 0 of 8 ── all_reduce ──▶ a world of 8 ranks runs the ring, once per size ──▶ 14 messages, their bytes, seconds

Proved by: tests/collectives/test_one_event.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from minidist.base.memory import account_memory
from minidist.base.meta import MetaArray
from minidist.collectives.algorithms import ALGORITHMS, Call
from minidist.collectives.ring_event import FIRST_CHUNKS, links_of, ring_memory, ring_outcome
from minidist.comm.sim.folded import FoldedWorld, Outcome, Ports
from minidist.comm.sim.links import LinkModel
from minidist.comm.sim.sim_world import SimWorld
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import current_purpose, track, watchers
from minidist.core.base.trace import purpose as sending
from minidist.core.collectives.calls import Algorithm
from minidist.core.comm.communicator import CollectiveCall, Comm, PointToPoint

Arguments = tuple[Any, ...]


class Described(NamedTuple):
    """What happens, as far as it matters. call: None for a barrier. dtype: of the array."""

    call: Call | None
    name: str
    run: Callable[..., Any]
    dtype: Any = None


Workspace = tuple[dict[str, int], ...]  # of each rank by purpose: the most bytes that the algorithm allocates


def run_as_one_event(operation: str, entry: Algorithm, call: CollectiveCall, *arguments: Any) -> Any:
    """Run a collective algorithm on a call whose ranks may be folded. arguments: as of the algorithm."""
    world = cast(FoldedWorld, call.world)
    if call.size == 1 or not world.is_folded(call):
        return entry.run(call, *arguments)

    array = arguments[0] if arguments[0] is not None else arguments[2]
    if operation == "scatter" or (operation == "all_to_all" and len({*arguments[1], *arguments[2]}) > 1):
        raise UsageError(
            f"{operation}/{entry.name} of {array.size} elements cannot be folded: one rank does not know what the"
            " others pass; run every rank"
        )
    _happen(Described(Call.of(operation, call.size, arguments), entry.name, entry.run, array.dtype), call)
    return _result(operation, call, arguments)


def barrier_as_one_event(comm: PointToPoint) -> None:
    """Wait until every rank has entered, where ranks may be folded."""
    if cast(FoldedWorld, comm.world).is_folded(comm):
        _happen(Described(None, "dissemination", PointToPoint.barrier), comm.collective("barrier"))
    else:
        PointToPoint.barrier(comm)


def _happen(described: Described, call: PointToPoint) -> None:
    """Let the ranks of a call do what `described` says: count the messages, advance the clocks, hold the memory."""
    world = cast(FoldedWorld, call.world)
    purpose, links, members = current_purpose(), world.links, tuple(call.members)
    nodes = tuple(map(tuple, call.nodes)) if call.nodes else None
    if links.link is None:
        members = tuple(range(call.size))  # all groups of this size are equal

    # The memory that the algorithm works in is taken while the call is under way.
    at_once = (Ports(0.0, 0.0, 0.0),) * call.size
    outcome, workspaces = _trial(described, purpose, links, members, nodes, at_once)

    def outcome_of(begins: tuple[Ports, ...]) -> Outcome:
        return outcome if begins == at_once else _trial(described, purpose, links, members, nodes, begins)[0]

    held = [track(cast(Any, MetaArray(nbytes, np.uint8)), kind) for kind, nbytes in workspaces[call.rank].items()]
    world.call(call, outcome_of)
    del held


@lru_cache(4096)
def _trial(
    described: Described,
    purpose: str,
    links: LinkModel,
    members: tuple[int, ...],
    nodes: tuple[tuple[int, ...], ...] | None,
    begins: tuple[Ports, ...],
) -> tuple[Outcome, Workspace]:
    """Run one call on meta arrays in another world; return what happens to each rank, by place.

    A ring is not run: `ring_event.py` computes the same for all of its ranks at once.
    """
    link = links.link
    if _is_ring(described):
        assert described.call is not None
        operation, sizes = described.call.operation, described.call.sizes
        itemsize, is_free = described.dtype.itemsize, links.free_startup and purpose == "startup"
        costs = links_of(links, members, is_free)
        outcome = ring_outcome(operation, sizes, itemsize, costs, begins)
        return outcome, tuple(
            {"communication": most} if most else {} for most in ring_memory(operation, sizes, itemsize)
        )
    if link is not None:
        links = replace(links, link=lambda a, b: link(members[a], members[b]))
    world = SimWorld(len(members), checks=False, record="totals", timeout=0, links=links)

    def main(comm: Comm) -> tuple[Ports, dict[str, int]]:
        stream = world.state.running
        stream.time, stream.out_free, stream.in_free = begins[comm.rank]
        if nodes:
            comm.nodes = [list(node) for node in nodes]
        name, arguments = "barrier", ()
        if described.call is not None:
            name = described.call.operation
            arguments = described.call.arguments(comm.rank, lambda size: MetaArray(size, described.dtype))
        with account_memory() as account, sending(purpose):
            described.run(comm.collective(f"{name}/{described.name}"), *arguments)
        return Ports(stream.time, stream.out_free, stream.in_free), account.at_peak

    # The caller's watchers are told of what the caller allocates, not of this.
    token = watchers.set(())
    try:
        results = world.run(main)
    finally:
        watchers.reset(token)
    ends, workspaces = zip(*results, strict=True)
    messages = [sum(trace.messages_by_purpose().values()) for trace in world.traces]
    nbytes = [sum(trace.bytes_by_purpose().values()) for trace in world.traces]
    return Outcome(ends, messages, nbytes), workspaces


def _is_ring(described: Described) -> bool:
    """Return whether a call's algorithm is our ring."""
    if described.call is None or described.name != "ring" or described.call.operation not in FIRST_CHUNKS:
        return False
    return ALGORITHMS[described.call.operation]["ring"].run is described.run


def _result(operation: str, call: CollectiveCall, arguments: Arguments) -> Any:
    """Return what the algorithm returns, with the values that follow from all ranks having this one's."""
    array = arguments[0]
    if operation == "all_gather":
        sizes, out = arguments[1], arguments[2]
        if isinstance(out, np.ndarray) and len(set(sizes)) == 1:
            out.reshape(call.size, -1)[...] = array.reshape(-1)
        return out
    if operation == "reduce_scatter":
        return arguments[2]
    if operation == "all_reduce":
        if isinstance(array, np.ndarray) and arguments[1] == "sum":
            array *= array.dtype.type(call.size)
        return array
    if operation == "broadcast":
        return array
    if operation == "all_to_all":
        return xp.empty_like(array, shape=(sum(arguments[2]),))
    # The root alone has a result.
    size, root = (sum(arguments[1]), arguments[2]) if operation == "gather" else (array.size, arguments[1])
    return xp.empty_like(array, shape=(size,)) if call.rank == root else None
