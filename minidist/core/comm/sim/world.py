"""The simulated world: ranks are fibers in this process, time is virtual, and every deadlock is found.

This module runs the ranks; how their messages meet is in `matching`. Fibers switch only where a rank blocks, so a run
is deterministic; when no fiber can run, none ever will, and the report can say exactly which rank waits for
which. Sends are synchronous by default (they complete when the receive is posted): a program that relies on buffering
always deadlocks here, and not only when its messages are larger than the buffers of an MPI library.

    hub (the scheduler) ──▶ a stream runs until it blocks ──▶ the next stream that is ready ──▶ ... ──▶ hub
    none is ready:  [1] match one receive from any rank, where the world has such receives, else
                    [2] all have returned, or it is a deadlock

Proved by: tests/comm/sim/test_world.py, tests/comm/test_conformance.py
"""

import contextvars
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from minidist.core.base import hooks
from minidist.core.base.errors import CommunicationError, DeadlockError
from minidist.core.base.fibers import DIRECT, FiberExit, current, spawn, throw
from minidist.core.comm.communicator import Comm, PointToPoint, Request, Work
from minidist.core.comm.sim.matching import AlphaBeta, Matching, SimState, Stream


class Sim:
    """`ranks` virtual ranks that run one function. links: the costs; those of a `LinkModel` need `SimWorld`."""

    comm_class: type[Comm] = Comm  # what a rank gets
    state_class: type[SimState] = SimState
    many = 256  # ranks whose data do not fit into the caches together
    slowdown: Callable[[int], float] | None = None  # rank -> the factor by which its computing takes longer
    checks_links = False  # whether a subclass refuses other ranks and links than this class
    folds = False  # whether one rank stands for many: see `FoldedWorld`
    state: SimState  # of the run, or of the last one
    matching: Matching
    post: Callable[..., Request]  # the messages of a run go straight to its `Matching`
    wait: Callable[[Any], None]

    def __init__(self, ranks: int, *, links: AlphaBeta | None = None) -> None:
        if not self.checks_links:
            hooks.comm_checks().check_core_world(ranks, links)
        self.size, self.links = ranks, links or AlphaBeta()
        self.running_ranks: Sequence[int] = range(ranks)  # all of them; a subclass may let some stand for others

    def run(self, main: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `main(comm, *arguments)` on every rank; return the list of results.

        An exception on any rank ends the run and is raised here, with a note naming the rank.
        """
        # Everything that belongs to this run is new: streams, queues, clocks, records.
        mains = [Stream(rank, "main", is_main=True) for rank in range(self.size)]
        ready = self._ready_queue([mains[rank] for rank in self.running_ranks])
        traces = [hooks.trace(rank, self.size, keeps_events=False) for rank in range(self.size)]
        self.state = self.state_class(self.size, self.links, traces, ready, mains, mains[0])
        self.matching = self._new_matching()
        self.post, self.wait = self.matching.post, self.matching.wait

        # What every rank does: a fiber each.
        results: list[Any] = [None] * self.size

        def program(stream: Stream) -> None:
            comm = self.comm_class(self, "world", range(self.size), stream.rank)
            results[stream.rank] = main(comm, *arguments, **keywords)

        # Each with a separate context, because ranks set context variables (purpose, autocast).
        self.hub = current()
        for rank in self.running_ranks:
            mains[rank].fiber = spawn(program, mains[rank], contextvars.copy_context(), self.hub)

        # Run them. Whatever ends the run, no fiber stays behind.
        try:
            self._schedule()
            self._finish()
        finally:
            self._end_streams()
        return results

    def _ready_queue(self, streams: Sequence[Stream]) -> deque[Stream]:
        """Return the queue of streams that can run. In another order times and results must be the same."""
        return deque(streams)

    def _new_matching(self) -> Matching:
        """Return what pairs the messages of a run. A subclass may limit or watch them."""
        return Matching(self.state, self._block)

    def _finish(self) -> None:
        """Do what is to be done when all programs have returned."""

    def _schedule(self) -> None:
        # Round after round: every stream that is ready runs until it blocks.
        state, ready = self.state, self.state.ready
        self.direct = DIRECT and type(ready) is deque  # another queue has another order
        # Which ready stream is next: of many ranks the newest, whose data are still in the caches; else the oldest.
        self.next = -1 if self.size > self.many else 0
        while True:
            while ready:
                state.running = stream = ready.popleft()
                stream.waiting = None
                assert stream.fiber is not None
                try:
                    stream.fiber.switch()
                except (Exception, SystemExit) as error:
                    # An error about communication names its ranks; which rank was running does not matter.
                    stream = state.running
                    if not isinstance(error, CommunicationError):
                        where = f"rank {stream.rank} of {self.size}" + ("" if stream.is_main else f" ({stream.name})")
                        error.add_note(f"raised on {where}, virtual time {stream.time:.6g} s")
                    raise
            if not self._idle():  # [1] of the picture
                break

        # [2] A rank that has not returned, or a stream that it left behind, waits for ever.
        if any(stream.fiber is not None and not stream.fiber.dead for stream in state.streams()):
            raise self._deadlock([stream for stream in state.streams() if stream.waiting is not None])

    def _idle(self) -> bool:
        """No stream can run: let one go on. Returns False when there is none: only a subclass knows some."""
        return False

    def _deadlock(self, blocked: list[Stream]) -> DeadlockError:
        """Return the error for a run whose streams are blocked: what each of them waits in."""
        names = [f"rank {stream.rank}" + ("" if stream.is_main else f" ({stream.name})") for stream in blocked]
        lines = [f"  {who} waits in {s.waiting.describe()}" for who, s in zip(names, blocked, strict=True) if s.waiting]
        lines += [f"  rank {s.rank} has returned" for s in self.state.mains if s.fiber is not None and s.fiber.dead]
        ranks = len({stream.rank for stream in blocked})
        first = f"deadlock: {ranks} of {self.size} ranks are blocked and none can make progress"
        return DeadlockError("\n".join([first, *lines]))

    def _end_streams(self) -> None:
        self.direct = False
        # Blocked fibers would stay in memory with all their arrays; ending them runs their `finally` blocks.
        for stream in self.state.streams():
            if stream.fiber is not None and not stream.fiber.dead:
                self.state.running = stream
                with suppress(Exception):  # of the rank's own `finally`; the error that ended the run is what counts
                    throw(stream.fiber, FiberExit)

    def _block(self, on: Request | Work) -> None:
        """Let the other streams run until `on` wakes this one."""
        state = self.state
        state.running.waiting = on
        # The next stream that is ready runs at once, if it has begun. The hub begins all others, because the stack of a
        # fiber that this one began would lie on top of this one's.
        ready = state.ready
        if ready and self.direct and (stream := ready[self.next]).waiting is not None:
            del ready[self.next]
            state.running, stream.waiting = stream, None
            stream.fiber.switch()  # type: ignore[union-attr]
        else:
            self.hub.switch()

    def run_async(self, work: Work) -> Work:
        # One stream per communicator and rank: works run one after the other, in the order of their starts.
        state = self.state
        rank, name = state.running.rank, work.comm.name
        stream = state.side.get((rank, name))
        if stream is None:
            stream = state.side[rank, name] = Stream(rank, f"lane:{name}", is_main=False)
        stream.queue.append(work)
        work.started = state.running.time

        # A stream whose queue was empty has ended; it starts again.
        if stream.fiber is None or stream.fiber.dead:
            stream.fiber = spawn(self._run_stream, stream, contextvars.copy_context(), self.hub)
            state.ready.append(stream)
        return work

    def _run_stream(self, stream: Stream) -> None:
        while stream.queue:
            # A work starts when the stream is free, but not before it was asked for, and in the context of that time.
            work = stream.queue.popleft()
            stream.time = max(stream.time, work.started)
            work.result = work.context.run(work.function)

            # Done: the rank that waits for it can run.
            work.end, work.finished = stream.time, True
            if work.waiter is not None:
                self.state.ready.append(work.waiter)
                work.waiter = None

    def wait_work(self, work: Work) -> Any:
        # The waiting stream's clock moves on to the end of the work; what ended earlier costs nothing.
        stream = self.state.running
        if not work.finished:
            work.waiter = stream
            self._block(work)
        stream.time = max(stream.time, work.end)
        if work.error is not None:
            raise work.error
        return work.result

    def progress(self) -> None:
        """Nothing to do: the scheduler runs streams whenever this rank blocks, and virtual time does not pass here."""

    def time(self) -> float:
        return self.state.running.time

    def compute(self, operations: Sequence[tuple[float, float]], seconds: float, name: str) -> None:
        # The roofline of each operation, or the seconds given; nothing runs meanwhile on this stream.
        stream = self.state.running
        start = stream.time
        spent = seconds + (self.links.seconds(list(operations)) if operations else 0.0)
        if self.slowdown is not None:
            spent *= self.slowdown(stream.rank)
        end = start + spent
        if not start <= end < math.inf:
            hooks.comm_checks().refuse_time(stream.rank, end - start)
        stream.time = end
        self.state.traces[stream.rank].add_computed(stream, name, start, spent)

    def trace_of(self, comm: PointToPoint) -> Any:
        return self.state.traces[comm.members[comm.rank]]

    @property
    def traces(self) -> list[Any]:
        """The record of every rank."""
        return self.state.traces

    @property
    def end_time(self) -> float:
        """Virtual seconds until the last rank's main program returned."""
        return max(stream.time for stream in self.state.mains)
