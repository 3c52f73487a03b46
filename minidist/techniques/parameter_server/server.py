"""The server: receives pushes in any order, applies them, and sends weights to the workers that may go on.

    [1] receive a push of worker w ──▶ [2] apply it (or, in bsp, wait for the others of its clock)
                                   ──▶ [3] send weights to every worker that may go on now
    [4] worker w has died          ──▶ a push received in part is dropped, whole ones stay; no worker waits for w; [2]

[4] is the rule for a worker that dies: a push that was received whole is applied, once, and any other never.

The consistency says how far a worker may run ahead. Waiting less gives more steps per second, and gradients computed
with older weights.

    a worker that has pushed c times may start clock c when  c - reached <= bound
    reached     bsp, delay    the updates that the server has made (one per clock)
                ssp, asp      the pushes of the slowest worker

Proved by: tests/parallel/test_parameter_server.py, tests/parallel/test_killed_workers.py
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any, NamedTuple

from minidist.base.errors import RankDeadError, UsageError, quoted
from minidist.base.traces import SpanEvent
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.base.layout import offsets
from minidist.core.base.trace import new_purpose, purpose, track
from minidist.core.comm import ANY, Comm
from minidist.core.optim import Optimizer
from minidist.optim import ParameterSlice, block_square_sums, clip_coefficient, norm_from_blocks
from minidist.techniques.parameter_server.server_shards import Rows, ServerShard

new_purpose("parameter_push")
new_purpose("parameter_pull")


class Consistency(NamedTuple):
    """How far a worker may run ahead (`bound` clocks), and whether a clock's gradients are one update (`aggregate`)."""

    bound: float
    aggregate: bool


def parse_consistency(text: str) -> Consistency:
    """Return the consistency that a text such as "bsp", "asp", "ssp:2" or "delay:3" names."""
    name, _, number = text.partition(":")
    # bsp is delay:0, asp is ssp without a bound.
    if text in ("bsp", "asp"):
        return Consistency(0, True) if text == "bsp" else Consistency(inf, False)
    if name not in ("ssp", "delay") or not re.fullmatch("-?[0-9]{1,18}", number):
        raise UsageError(
            f"consistency {quoted(text)}; it must be bsp, asp, ssp:S or delay:T, with a number of clocks S, T"
        )
    if int(number) < 0:
        raise UsageError(
            f"consistency {quoted(text)} has the bound {number}; it must be at least 0 clocks (0: wait for all)"
        )
    return Consistency(int(number), name == "delay")


@dataclass(frozen=True)
class ServerConfig:
    """The settings of one run with servers.

    servers: how many of the ranks, the first ones, are servers. consistency: see `parse_consistency`. optimizer: makes
    each server's optimizer from its slices. sparse: keys of matrices whose touched rows alone are pushed.
    staleness_aware: the learning rate of an update is divided by the number of updates that its worker had not seen
    (asp and ssp). rate(clock): factor of the learning rate of an update of that clock. clip: the largest norm of an
    update's gradient; one server has the whole gradient, and of several each knows a part. push: what compresses
    gradients on a rank, a `PushCompression`; None: they are pushed as they are.
    """

    servers: int
    consistency: str
    optimizer: Callable[[Sequence[ParameterSlice]], Optimizer]
    sparse: frozenset[str] = field(default_factory=frozenset)
    staleness_aware: bool = False
    rate: Callable[[int], float] = lambda clock: 1.0
    clip: float | None = None
    push: Any = None


class Updates:
    """The state of one shard: applies gradients and counts versions. Server and replay share this arithmetic."""

    def __init__(
        self, config: ServerConfig, shard: ServerShard, observe: Callable[["Updates"], None] | None = None
    ) -> None:
        self.shard, self.config, self.observe, self.version = shard, config, observe, 0
        self.slices = [
            ParameterSlice(shard.weights[key].reshape(-1), None, key, shard.shapes[key]) for key in shard.keys
        ]
        self.optimizer = config.optimizer(self.slices) if shard.keys else None

    def apply(self, gradients: Sequence[Array], clock: int, staleness: int) -> None:
        """Make one update with the sum of the flat gradients (of one clock), added in the order given."""
        # Added in the order given, so that the replay gets the same bits.
        total, *rest = gradients
        for gradient in rest:
            total = total + gradient

        # As one device clips: the norm of the whole gradient, in the order of the parameters.
        if self.config.clip is not None:
            norm = norm_from_blocks(block_square_sums(total))
            total *= clip_coefficient(norm, self.config.clip)

        # The slices' gradients are views of the sum; the optimizer steps all keys at once.
        for piece, view in zip(self.slices, self.shard.views(total).values(), strict=True):
            piece.grad = view.reshape(-1)
        if self.optimizer is not None:
            # Staleness-aware: a gradient that is n updates old counts 1/n.
            factor = 1 / max(1, staleness) if self.config.staleness_aware else 1.0
            self.optimizer.lr_factor = self.config.rate(clock) * factor
            self.optimizer.step()
        self.version += 1
        if self.observe is not None:
            self.observe(self)


class Server:
    """One server and what it knows of every worker."""

    def __init__(
        self,
        comm: Comm,
        config: ServerConfig,
        shard: ServerShard,
        observe: Callable[[Updates], None] | None = None,
        between: Callable[[int], None] | None = None,
    ) -> None:
        self.comm, self.config, self.shard, self.between = comm, config, shard, between
        self.bound, self.aggregate = parse_consistency(config.consistency)
        self.updates = Updates(config, shard, observe)

        # What the server knows of each worker. Workers are numbered from 0, behind the servers' ranks.
        workers = range(comm.size - config.servers)
        self.done: dict[int, float] = dict.fromkeys(workers, 0)  # pushes of each worker; infinite after its last
        self.clock = dict.fromkeys(workers, 0)  # of the last push
        self.read = dict.fromkeys(workers, 0)  # the version that each worker computes with
        self.pending: dict[int, deque[Array]] = {w: deque() for w in workers}  # received, not yet applied
        self.waiting: dict[int, int] = {}  # worker -> the clock that it wants to start
        self.receiving = -1  # the worker whose push has begun to come
        self.staleness: list[int] = []

    def serve(self) -> None:
        """Serve until every worker has pushed for the last time, or is dead."""
        seen = 0  # the version of the last call of `between`
        while min(self.done.values()) < inf:
            try:
                # [1] One push, or the news of a death.
                worker, clock, last = self._receive()
                self.done[worker] = inf if last else clock + 1
                if not last:
                    self.waiting[worker] = clock + 1
            except RankDeadError as error:
                self.remove_worker(error)
            # [2], [3]: a worker found dead while weights are sent may let more be applied.
            self._apply()
            while self._send_weights():
                self._apply()
            # In bsp every worker has the weights of this version now, and pushes nothing before it has joined in.
            if self.between is not None and self.updates.version > seen:
                seen = self.updates.version
                self.between(seen)

    def remove_worker(self, error: RankDeadError) -> None:
        """[4] Go on without a dead worker; the trace records after how many messages that was, for the replay."""
        worker = self.comm.members.index(error.rank) - self.config.servers

        # Servers are the first ranks. What a dead server held is lost.
        if worker < 0:
            raise error  # a server, and with it its weights
        if self.done[worker] < inf:
            now, known = self.comm.time(), len(self.comm.trace.messages)
            half = ", half a push thrown away" if self.receiving == worker else ""
            name = f"worker {worker} is dead, known after {known} messages{half}"
            self.comm.trace.spans.append(SpanEvent(self.comm.rank, "main", name, now, now, "death"))

        # An infinite count of pushes: neither a clock nor a bound waits for this worker again.
        self.receiving = -1
        self.done[worker] = inf
        self.waiting.pop(worker, None)

    def _receive(self) -> tuple[int, int, bool]:
        """[1] Receive the head of a push from any worker and the rest from the same one: (worker, clock, last).

        Raises RankDeadError when that worker dies meanwhile; nothing is kept of a push received in part.
        """
        shard = self.shard
        with purpose("parameter_push"):
            # The head comes from any worker: clock, is it the last push, and how many rows of each sparse key follow.
            head = xp.empty(2 + len(shard.sparse), xp.int64)
            rank = self.comm.recv(head, ANY)
            worker = self.receiving = rank - self.config.servers
            clock, last, *touched = head.tolist()

            # The messages for all dense keys, then ids and values of each sparse key that has rows.
            contributions: dict[str, Any] = {}
            if shard.dense:
                parts = [track(xp.empty(n, dtype, shard.flat), "communication") for n, dtype in shard.wire]
                for part in parts:
                    self.comm.recv(part, rank)
                dense = parts[0] if shard.push is None else shard.push.decode(parts)
                at = offsets([prod(shard.shapes[key]) for key in shard.dense])
                for i, key in enumerate(shard.dense):
                    contributions[key] = dense[at[i] : at[i + 1]].reshape(shard.shapes[key])
            for key, count in zip(shard.sparse, touched, strict=True):
                ids = xp.empty(count, xp.int64)
                rows = xp.empty((count, shard.shapes[key][1]), shard.rows, shard.flat)
                values = track(rows, "communication")
                if count:
                    self.comm.recv(ids, rank)
                    self.comm.recv(values, rank)
                contributions[key] = Rows(ids, xp.as_array(xp.upcast(values), shard.flat.dtype))

        # Only now is the push whole. It waits here until it may be applied.
        self.receiving = -1
        self.pending[worker].append(shard.gradient(contributions))
        self.clock[worker] = clock
        return worker, clock, bool(last)

    def _apply(self) -> None:
        """[2] Apply what can be applied: in bsp, a clock that all active workers have pushed, in worker order."""
        if self.aggregate:
            # An update takes at most one gradient of each worker; a worker that is done contributes what is left of its
            # own.
            while any(self.pending.values()) and all(self.pending[w] or self.done[w] == inf for w in self.pending):
                gradients = [queue.popleft() for queue in self.pending.values() if queue]
                self.updates.apply(gradients, self.updates.version, staleness=0)
            return

        # asp, ssp: every push is an update, in the order of arrival.
        for worker, queue in self.pending.items():
            while queue:
                self.staleness.append(self.updates.version - self.read[worker])
                self.updates.apply([queue.popleft()], self.clock[worker], self.staleness[-1])

    def _send_weights(self) -> bool:
        """[3] Send the weights to each waiting worker that is at most `bound` clocks ahead.

        Returns True when one of them turned out to be dead: then more may be applied, and others may go on.
        """
        # The clock that everyone else has reached: see the head of this file.
        reached = self.updates.version if self.aggregate else min(self.done.values())
        for worker, clock in sorted(self.waiting.items()):
            if clock - reached <= self.bound:
                del self.waiting[worker]
                # The version that the worker's next gradient is computed with, for its staleness.
                self.read[worker] = self.updates.version
                try:
                    with purpose("parameter_pull"):
                        self.comm.send(self.shard.flat, self.config.servers + worker)
                except RankDeadError as error:
                    self.remove_worker(error)
                    return True
        return False
