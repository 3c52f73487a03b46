"""The simulated world: ranks are fibers in this process, time is virtual, and a deadlock is a certainty.

This module runs the ranks; how their messages meet is in `matching`. Fibers switch only where a rank blocks, so a run
is deterministic; when no fiber can run, none ever will, and the report can say exactly which rank waits for
which. Sends are synchronous by default (they complete when the receive is posted): a program that relies on buffering
deadlocks here, always, instead of on the day when its messages grow.

    hub (the scheduler) ──▶ a stream runs until it blocks ──▶ hub ──▶ the next stream that is ready
    none is ready:  [1] match one receive from any rank, else  [2] notify of a death, else  [3] all have returned, or
    it is a deadlock

Proved by: tests/comm/sim/test_world.py, tests/comm/test_conformance.py
"""

import contextvars
import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any

from minidist.base.errors import (
    CommunicationError,
    MismatchError,
    RankDeadError,
    RankTimeoutError,
    UnmatchedMessageError,
    UnwaitedRequestError,
    UsageError,
    quoted,
)
from minidist.base.fibers import FiberExit, current, spawn, throw
from minidist.base.interrupts import interruptible
from minidist.base.trace import SpanEvent, Trace, check_checks, check_record
from minidist.comm.call_log import CallLog
from minidist.comm.call_site import NOWHERE, call_site
from minidist.comm.claims import Claim, unlike_claims
from minidist.comm.communicator import Comm
from minidist.comm.has_run import LAZY, has_run
from minidist.comm.point_to_point import PointToPoint, Request, Work
from minidist.comm.sim.choosers import Chooser, earliest
from minidist.comm.sim.clock import LinkModel
from minidist.comm.sim.ended import EndedWorld, used_after_run
from minidist.comm.sim.failures import Failures
from minidist.comm.sim.hang_watchdog import HangWatchdog, Stopped
from minidist.comm.sim.matching import Matching, second_thread
from minidist.comm.sim.process_state import ProcessState
from minidist.comm.sim.state import SimState, Stream


class SimWorld:
    """`ranks` virtual ranks that run one function.

    eager_bytes: sends of at most so many bytes are buffered and complete at once; 0 (default): every send is
    synchronous. links: the alpha-beta cost model. chooser: which message a wildcard receive gets. checks: compare
    headers and watch buffers in flight; "headers" leaves out the watch on buffers, which costs checksums of each
    nonblocking message. timeout: seconds of real time that one rank may compute without communicating.
    record: keep traces; "totals" keeps the bytes by purpose alone, so that a long run's memory does not grow.
    on_failure: what `kill` does: "end" (default) the run, as MPI would; "isolate" the rank alone.

    `run(main, *arguments)` calls `main(comm, *arguments)` on every rank and returns the list of results. An exception
    on any rank ends the run and is raised here, with a note naming the rank. A killed rank's result is None.
    """

    kind = "simulated"
    unchecked = False
    folds = False
    uneven: Collection[str]  # see `FoldedWorld`
    kept_calls = 8  # sends are synchronous, so no rank is far ahead; and there may be 10,000 ranks
    state: SimState  # of the run, or of the last one
    failures: Failures
    post: Callable[..., Request]  # the messages of a run go straight to its `Matching`
    wait: Callable[[Any], None]

    def __init__(
        self,
        ranks: int,
        *,
        eager_bytes: int = 0,
        links: LinkModel | None = None,
        chooser: Chooser = earliest,
        checks: bool | str = True,
        timeout: float = 60.0,
        record: bool | str = True,
        on_failure: str = "end",
    ) -> None:
        check_record(record)
        check_checks(checks)
        if ranks < 1:
            raise UsageError(f"a world needs at least 1 rank, got {ranks}")
        if on_failure not in ("end", "isolate"):
            raise UsageError(f'on_failure={quoted(on_failure)}; it must be "end" or "isolate"')
        self.size, self.eager_bytes, self.links = ranks, eager_bytes, links or LinkModel()
        self.chooser, self.checks, self.timeout, self.record = chooser, bool(checks), timeout, record
        self.on_failure, self.check_buffers = on_failure, checks is True
        self.in_run = self.looking_ahead = False
        self.uneven = ()
        self.place = ""
        self.pending_kills: dict[int, int] = {}  # rank -> messages that it posts before, in each run

    # running ----------------------------------------------------------------------------------------------------------

    def run(self, main: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `main(comm, *arguments)` on every rank; return the list of results."""
        if self.in_run:
            raise UsageError(
                f"SimWorld.run inside its own run, at {call_site(sys._getframe(1))}; make another SimWorld for a run "
                "inside a run"
            )

        # Everything that belongs to this run is new: streams, queues, clocks, records.
        mains = [Stream(rank, "main", is_main=True) for rank in range(self.size)]
        state = self.state = SimState(
            self.size,
            self.links,
            self.chooser,
            self.checks,
            self.record is True,
            self.eager_bytes or -1,
            self.on_failure == "isolate",
            self.check_buffers,
            ready=self._ready_queue([mains[rank] for rank in self.running_ranks()]),
            mains=mains,
            running=mains[0],
            totals=self.record == "totals",
            weights=self._weights(),
        )
        self.place, self.looking_ahead = "", False
        self.failures = Failures(state, self.pending_kills)
        self.matching = self._new_matching()
        self.post, self.wait = self.matching.post, self.matching.wait

        # What every rank does: a fiber each.
        results: list[Any] = [None] * self.size
        members = range(self.size)

        def program(stream: Stream) -> None:
            try:
                result = main(Comm(self, "world", members, stream.rank), *arguments, **keywords)
                results[stream.rank] = has_run(result, main, stream.rank)
            except SystemExit as end:  # `sys.exit()` is one way to return
                if end.code:
                    raise
            self.process.returned(stream.rank, self.size)
            if stream.rank not in state.dead:
                state.returned.add(stream.rank)

        self.hub, self.in_run = current(), True
        self.process = ProcessState()
        # Each with a context of its own, because ranks set context variables (purpose, autocast) of their own.
        for rank in self.running_ranks():
            mains[rank].fiber = spawn(program, mains[rank], contextvars.copy_context(), self.hub)

        # Run them. Whatever ends the run, no fiber and no thread stays behind. A browser has no threads.
        watchdog = HangWatchdog(state, self.timeout) if self.timeout and sys.platform != "emscripten" else None
        try:
            with interruptible():
                self._schedule()
                self._finish()
            if watchdog and watchdog.error:  # raised in a rank that caught it
                raise watchdog.error
        except BaseException as error:
            # What an interrupted rank raises on its way out (a lock that is not held any more) has the same cause.
            if watchdog and watchdog.error and (watchdog.interrupts or isinstance(error, Stopped | RankTimeoutError)):
                raise watchdog.error.with_traceback(error.__traceback__) from None
            raise
        finally:
            if watchdog:
                watchdog.stop()
            self._end_streams()
            self.process.end()
            self.in_run = False

            # What a program has kept of the run can be read, and nothing can be sent with it.
            ended = EndedWorld(state.traces, self.end_time)
            for comm in state.comms:
                comm.world = ended
            state.comms.clear()
            self.post = self.wait = ended.post_or_wait
        return [None if rank in state.dead else result for rank, result in enumerate(results)]

    def kill(self, rank: int, *, after_messages: int | None = None) -> None:
        """Let rank `rank` (a world rank) die.

        Without `after_messages` it dies now: call it on a rank of a run. With it, in a run or before one, it dies when
        it is about to post one message more than `after_messages` from here on (0: instead of its next message).

        In a world with on_failure="isolate" the others go on: see `failures`. Otherwise RankDeadError ends the run.
        """
        if not 0 <= rank < self.size:
            raise UsageError(f"kill names rank {rank}, but the world has ranks 0..{self.size - 1}")
        if after_messages is None:
            if not self.in_run:
                raise UsageError(
                    f"kill of rank {rank} outside a run: pass after_messages, or call it on a rank of the run"
                )
            self.failures.kill(rank)
        elif after_messages < 0:
            raise UsageError(f"kill of rank {rank} after {after_messages} messages; it must be at least 0")
        elif self.in_run:
            self.failures.kill_after(rank, after_messages)
        else:
            self.pending_kills[rank] = after_messages

    def running_ranks(self) -> Sequence[int]:
        """Return the ranks that run: all of them. A subclass may let some stand for others."""
        return range(self.size)

    def _weights(self) -> dict[int, int]:
        """Return how many ranks each running one stands for, where that is not one."""
        return {}

    def _ready_queue(self, streams: Sequence[Stream]) -> deque[Stream]:
        """Return the queue of streams that can run. A test takes another order: times and results must not change."""
        return deque(streams)

    def _new_matching(self) -> Matching:
        """Return what pairs the messages of a run. A subclass may limit them."""
        return Matching(self.state, self.failures, self._block)

    def _schedule(self) -> None:
        # Round after round: every stream that is ready runs until it blocks.
        state, ready, process = self.state, self.state.ready, self.process
        drawn, seed, numpy = process.drawn, process.seed, process.numpy
        words, loop = process.words, process.running_loop
        while True:
            while ready:
                state.running = stream = ready.popleft()
                if stream.rank != process.owner:
                    # The usual case, in which no rank has drawn a random number or waits inside an event loop.
                    now = drawn.value, seed.value, numpy.value
                    if process.touched or process.loops or words != now or loop() is not None:
                        process.give_to(stream.rank)
                    else:
                        process.owner = stream.rank
                stream.waiting = None
                state.switches += 1
                assert stream.fiber is not None
                try:
                    stream.fiber.switch()
                except (Exception, SystemExit) as error:
                    self._annotate(error, stream)
                    raise

            # No stream is ready: [1] and [2] of the picture. Two calls that differ let no other stream run.
            if state.unlike is not None:
                from minidist.comm.sim.look_ahead import look_ahead

                raise look_ahead(self, state.unlike)
            if self.matching.match_one_wildcard():
                continue
            if not state.dead or not self.failures.notify(self.matching.match_waiting):
                break

        # [3] A rank that has not returned, or a stream that it left behind, waits for ever.
        if len(state.returned) + len(state.dead) < len(self.running_ranks()) or any(
            stream.waiting is not None and stream.rank not in state.dead for stream in state.side.values()
        ):
            from minidist.comm.sim.deadlock_report import deadlock

            raise deadlock(state)

    def _annotate(self, error: BaseException, stream: Stream) -> None:
        if isinstance(error, CommunicationError):
            return  # its text names the ranks, and which one was running means nothing
        where = "" if stream.is_main else f" ({stream.name})"
        error.add_note(f"raised on rank {stream.rank} of {self.size}{where}, virtual time {stream.time:.6g} s")

    def _finish(self) -> None:
        """Raise when a message was never received, or a request never waited for."""
        # A sent message that no rank received.
        state = self.state
        for (context, source, *_), queue in state.sends.items():
            for request in queue:
                rank = request.stream.rank
                if state.dead and (source in state.dead or context.endswith("/collectives")):
                    continue  # on the wire when its sender died, or of a collective that was given up
                name = request.comm.name
                if context.endswith("/collectives") and (found := self._unlike_calls(name, range(self.size))):
                    raise MismatchError(found)
                raise UnmatchedMessageError(
                    f"rank {rank}: its {request.describe()} was never received; every send needs a receive"
                )

        # A request or a work of which no wait has been called.
        for rank, unwaited in enumerate(state.unwaited):
            for item in unwaited.values():
                raise UnwaitedRequestError(
                    f"rank {rank}: its {item.describe()} was never waited for; call wait() on every request"
                )

    def _end_streams(self) -> None:
        # Blocked fibers would stay in memory with all their arrays; ending them runs their `finally` blocks.
        for stream in self.state.streams():
            if stream.fiber is not None and not stream.fiber.dead:
                self.state.running = stream
                with suppress(Exception):  # of the rank's own `finally`; the error that ended the run is what counts
                    throw(stream.fiber, FiberExit)

    def _block(self, on: Request | Work) -> None:
        """Let the other streams run until `on` wakes this one."""
        # A killed rank never communicates again: see `failures`.
        stream = self.state.running
        if stream.rank in self.state.dead:
            raise FiberExit
        if get_ident() != self.state.thread:
            raise second_thread(on.comm, on.site)
        stream.waiting = on
        stream.handling = sys.exc_info()[1]

        # The main program ran until here: did it write into the arrays of its works in other streams?
        works = self.state.works[stream.rank]
        if stream.is_main and works.running:
            works.check(self.state.line_of)
        self.hub.switch()
        if stream.is_main and works.running:
            works.refresh()

    # streams ----------------------------------------------------------------------------------------------------------

    def run_async(self, work: Work) -> Work:
        # One stream per communicator and rank: works run one after the other, in the order of their starts.
        state = self.state
        if not self.in_run:
            raise used_after_run(work.site)
        if get_ident() != state.thread:
            raise second_thread(work.comm, work.site)
        rank, name = state.running.rank, work.comm.name
        stream = state.side.get((rank, name))
        if stream is None:
            stream = state.side[rank, name] = Stream(rank, f"lane:{name}", is_main=False)
        stream.queue.append(work)
        state.unwaited[rank][id(work)] = work

        # From here to the wait the program must not write into the arrays.
        if self.check_buffers and work.arrays:
            work.guards = state.works[rank].add(work, work.arrays)

        # A stream whose queue was empty has ended; it starts again.
        if stream.fiber is None or stream.fiber.dead:
            stream.fiber = spawn(self._run_stream, stream, contextvars.copy_context(), self.hub)
            state.ready.append(stream)
        return work

    def _run_stream(self, stream: Stream) -> None:
        while stream.queue:
            # A work starts when the stream is free, but not before it was asked for.
            work = stream.queue.popleft()
            stream.time = max(stream.time, work.started)
            works = self.state.works[stream.rank]
            if work.guards:
                works.begin(work, work.guards, self.state.line_of)
            try:
                result = work.context.run(work.function)
                work.result = has_run(result, work.function, work.comm.rank) if isinstance(result, LAZY) else result
            except RankDeadError as error:
                if self.on_failure == "end":
                    raise
                work.error = error  # raised by its wait

            # Done: its arrays are free again, and the rank that waits for it can run.
            work.end, work.finished = stream.time, True
            if work.guards:
                works.finish(work.guards)
                work.guards = []  # a guard knows its work: a circle would keep the arrays alive
            if work.waiter is not None:
                self.state.ready.append(work.waiter)
                work.waiter = None

    def wait_work(self, work: Work) -> Any:
        # The waiting stream's clock moves on to the end of the work; what ended earlier costs nothing.
        stream = self.state.running
        self.state.unwaited[stream.rank].pop(id(work), None)
        if not work.finished:
            if not self.in_run:
                raise used_after_run(work.site)
            work.waiter = stream
            self._block(work)
        stream.time = max(stream.time, work.end)
        if work.error is not None:
            raise work.error
        return work.result

    def progress(self) -> None:
        """Nothing to do: the scheduler runs streams whenever this rank blocks, and virtual time does not pass here."""

    # clock and record -------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.state.running.time

    def compute(self, operations: Sequence[tuple[float, float]], seconds: float, name: str) -> None:
        # The roofline of each operation, or the seconds given; nothing runs meanwhile on this stream.
        stream = self.state.running
        start = stream.time
        spent = seconds + (self.links.seconds(list(operations)) if operations else 0.0)
        if self.links.slowdown is not None:
            spent *= self.links.slowdown(stream.rank)
        end = start + spent
        if not start <= end < math.inf:
            raise UsageError(
                f"rank {stream.rank}: compute of {end - start:g} s; it must be a finite number of at least 0"
            )
        stream.time = end
        trace = self.state.traces[stream.rank]
        trace.computed += spent
        trace.busy += spent if stream.is_main else 0.0
        if self.state.record and end > start:
            trace.spans.append(SpanEvent(stream.rank, stream.name, name, start, end))

    def trace_of(self, comm: PointToPoint) -> Trace:
        return self.state.traces[comm.members[comm.rank]]

    @property
    def traces(self) -> list[Trace]:
        """The record of every rank."""
        return self.state.traces

    @property
    def dead(self) -> dict[int, float]:
        """The ranks that were killed in this run (the last one), and the virtual time of each death."""
        return self.state.dead

    @property
    def end_time(self) -> float:
        """Virtual seconds until the last rank's main program returned."""
        return max(stream.time for stream in self.state.mains)

    # what a world offers beside ---------------------------------------------------------------------------------------

    def register(self, comm: PointToPoint, log: CallLog, origin: str, label: str) -> None:
        """Raise MismatchError when another member made this communicator of other ranks, or with another label."""
        state, claims = self.state, self.state.claims
        rank, members = comm.members[comm.rank], comm.members
        state.comms.append(comm)
        state.logs[comm.name][rank] = log
        mine = Claim(origin, rank, members, label, NOWHERE)
        first = claims.get((origin, rank))

        # The first member that comes claims the communicator for all members; what a dead rank claimed counts no more.
        if first is None or first.rank in state.dead:
            first = mine = mine._replace(site=call_site(sys._getframe(1)))
            for member in members:
                other = claims.setdefault((origin, member), mine)
                if other is not mine and other.rank not in state.dead:
                    raise unlike_claims(mine, other)
                claims[origin, member] = mine
        elif not first.agrees(mine):
            raise unlike_claims(mine._replace(site=call_site(sys._getframe(1))), first)

    def _unlike_calls(self, name: str, ended: Collection[int] = ()) -> str:
        """Return the sentence about the calls of a communicator in which ranks differ, "" if none is known."""
        from minidist.comm.unlike_calls import unlike_calls

        return unlike_calls(name, self.state.calls(name), ended)

    def compare_calls(self, call: PointToPoint, value: int) -> None:
        """Raise MismatchError when another rank has begun this call with another value."""
        # The first rank's value, and how many ranks have come.
        key = call.name, call.tag
        first, count = self.state.call_values.get(key, (value, 0))
        if value != first and self.state.unlike is None:
            self.state.refuse(MismatchError(self._unlike_calls(call.name)), call, False)
            self.hub.switch()
        self.state.call_values[key] = first, count + 1
        if count + 1 == call.size:
            del self.state.call_values[key]

    def nodes(self, members: Sequence[int]) -> list[list[int]]:
        """Return the places in `members` of the ranks that the fastest links join, node by node."""
        return self.links.nodes(members)

    def exchange(self, *_: Any) -> bool:
        """Return False: a sendrecv has no shorter way here."""
        return False
