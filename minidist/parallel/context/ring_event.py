"""Ring attention of folded ranks as one event: what a pass sends, computes and allocates is recorded once per shape.

    recorded once      post 4,096 B | count 2 products | advance the clock | wait | post ...     and the peak of memory
    every other call   out_free = max(t, out_free) + beta n ...     the same formulas, no requests and no arrays

In a dry run one rank stands for all ranks of the ring (`comm/sim/folded.py`): what it sends to the next rank, it
receives from the rank before. The first call with a shape runs `RingAttention` with a communicator that records the
calls it gets. Every later one repeats the record on the rank's clock, by the formulas of `core/comm/sim/matching.py`
and in the order of the record, so times, bytes and peaks are those of the messages. Rings whose ranks hold unequal
parts are not recorded.

Proved by: tests/parallel/test_ring_event.py, tests/train/test_folded_dry_run.py
"""

from copy import copy
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from minidist.base.flop_counter import FlopCounter, current_flop_counter
from minidist.base.memory import account_memory
from minidist.base.meta import MetaArray
from minidist.comm.sim.folded import FoldedWorld
from minidist.core.autograd.ops.attention import Drop
from minidist.core.base import arrays as xp
from minidist.core.base.trace import current_purpose, purpose, track, watchers
from minidist.core.comm import Comm
from minidist.core.parallel.context_parallel import RingAttention


@dataclass
class Record:
    """What a pass round the ring does: its calls in order, and the most bytes by purpose.

    calls: ("post", bytes), ("count", (kind, flops, bytes)), ("advance", None) and ("wait", None). at_peak: the live
    bytes at the peak of all; peaks: of each purpose by itself. equal: whether every message that arrives has the shape
    of the one that leaves.
    """

    calls: list[tuple[str, Any]] = field(default_factory=list)
    at_peak: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    equal: bool = True


class RingAttentionEvent(RingAttention):
    """`RingAttention` that is one event where arrays have no values and one rank stands for the whole ring."""

    def __init__(self, comm: Comm, length: int) -> None:
        super().__init__(comm, length)
        self._records: dict[Any, Record] = {}

    def _ring_forward(self, q: xp.Array, k: xp.Array, v: xp.Array, drop: Drop) -> tuple[xp.Array, xp.Array]:
        record = self._record("_ring_forward", q, k, v, drop=drop)
        if record is None:
            return super()._ring_forward(q, k, v, drop)
        o = track(xp.empty(q.shape, q.dtype, q), "activation")
        self._repeat(record, "tensor_forward", {"activation": o.nbytes})
        return o, xp.empty(q.shape[:-1], q.dtype, q)

    def _ring_backward(
        self, q: xp.Array, k: xp.Array, v: xp.Array, g: xp.Array, o: xp.Array, log_sum: xp.Array, drop: Drop
    ) -> tuple[xp.Array, xp.Array, xp.Array]:
        record = self._record("_ring_backward", q, k, v, g, o, log_sum, drop=drop)
        if record is None:
            return super()._ring_backward(q, k, v, g, o, log_sum, drop)
        dq = track(xp.empty(q.shape, q.dtype, q), "activation_gradient")
        self._repeat(record, "tensor_backward", {"activation_gradient": dq.nbytes})
        dk, dv = track(xp.empty((2, *k.shape), k.dtype, k), "communication")
        return dq, dk, dv

    def _record(self, name: str, *arrays: xp.Array, drop: Drop) -> Record | None:
        """Return the record of a pass; None where it has to run: with values, in parts, or where a rank may fail."""
        world = cast(Any, self.comm.world)
        if not xp.is_meta(arrays[0]) or not world.folds or world.failures.watches:
            return None
        if not world.is_folded(self.comm) or len(world.places_of(self.comm)) > 1:
            return None
        key = name, drop is None, *((array.shape, array.dtype) for array in arrays)
        record = self._records.get(key)
        if record is None:
            record = self._records[key] = self._run_once(name, arrays, drop)
        return record if record.equal else None

    def _run_once(self, name: str, arrays: tuple[xp.Array, ...], drop: Drop) -> Record:
        """Run a pass with a communicator that sends nothing."""
        record, twin = Record(), copy(self)
        twin.comm = cast(Comm, _RecordingComm(self.comm, record))
        # The caller's watchers are told of what `_repeat` does, not of this.
        token = watchers.set(())
        try:
            with account_memory() as account, FlopCounter() as counter:
                counter.add = counter.counted = (  # type: ignore[method-assign]
                    lambda *operation: record.calls.append(("count", operation))
                )
                getattr(RingAttention, name)(twin, *arrays, drop)
        finally:
            watchers.reset(token)
        record.at_peak, record.peaks = account.at_peak, account.peak_by_purpose
        return record

    def _repeat(self, record: Record, why: str, own: dict[str, int]) -> None:
        """Do what a record says, on this rank's clock; own: bytes that the caller has allocated already."""
        comm, world = self.comm, cast(FoldedWorld, self.comm.world)
        with purpose(why):
            why = current_purpose()
        ring = _Ring(world, comm, why)
        counter, posted = current_flop_counter(), []
        for name, value in record.calls:
            if name == "post":
                posted.append(ring.post(value))
            elif name == "wait":
                ring.wait(posted.pop())
            elif counter is not None and name == "count":
                counter.add(*value)
            elif name == "advance":
                comm.advance_clock(why)

        # The peak of all, and what is left of the peaks of single purposes, which may be at other times.
        _hold({kind: nbytes - own.get(kind, 0) for kind, nbytes in record.at_peak.items()})
        for kind, nbytes in record.peaks.items():
            if nbytes > record.at_peak.get(kind, 0):
                _hold({kind: nbytes - own.get(kind, 0)})


class _Ring:
    """The clock and the counts of a rank that sends to the next rank of a ring what it receives from the one before."""

    def __init__(self, world: FoldedWorld, comm: Comm, why: str) -> None:
        world.log = None  # what this ring does is not in it
        self.state, self.records, links = world.state, world.record, world.links
        self.stream, self.why = self.state.running, why
        here, n = comm.members[comm.rank], comm.size
        after, before = comm.members[(comm.rank + 1) % n], comm.members[(comm.rank - 1) % n]
        self.alpha, self.beta = links.cost(here, after)
        self.beta_in, self.overhead = links.cost(before, here)[1], links.overhead
        if links.free_startup and why == "startup":
            self.alpha = self.beta = self.beta_in = self.overhead = 0.0

    def post(self, nbytes: int) -> tuple[float, float, float, int]:
        """Post a receive and a send of `nbytes`; return when that was, when it has left and arrives, and the bytes."""
        trace = self.state.traces[self.stream.rank]
        if self.records:
            trace.add_to_totals(self.why, trace.ranks, trace.ranks * nbytes)
        left = max(self.stream.time, self.stream.out_free) + self.beta * nbytes
        self.stream.out_free = left + self.overhead
        return self.stream.time, left + self.overhead, left + self.alpha, nbytes

    def wait(self, message: tuple[float, float, float, int]) -> None:
        """Wait for the receive, then for the send, which ends no earlier than its receive is posted."""
        stream, (posted, sent, arrival, nbytes) = self.stream, message
        stream.in_free = max(arrival, stream.in_free + (self.overhead + self.beta_in * nbytes), posted)
        stream.time = max(stream.time, stream.in_free)
        stream.time = max(stream.time, sent if nbytes <= self.state.eager_limit else max(sent, posted))


class _RecordingComm:
    """The communicator of a ring, which notes what it is to do. A request is its array, which it keeps alive."""

    def __init__(self, comm: Comm, record: Record) -> None:
        self.rank, self.size, self.calls, self.record = comm.rank, comm.size, record.calls, record
        self.receiving: tuple[int, ...] = ()

    def irecv(self, array: xp.Array, source: int) -> xp.Array:
        self.receiving = array.shape
        return array

    def isend(self, array: xp.Array, dest: int) -> xp.Array:
        self.record.equal &= array.shape == self.receiving
        self.calls.append(("post", array.nbytes))
        return array

    def advance_clock(self, name: str) -> None:
        self.calls.append(("advance", None))

    def waitall(self, requests: list[Any]) -> None:
        self.calls.append(("wait", None))


def _hold(nbytes: dict[str, int]) -> None:
    """Allocate and free that many bytes of each purpose, all at one time."""
    held = [track(cast(Any, MetaArray(count, np.uint8)), kind) for kind, count in nbytes.items() if count > 0]
    del held
