"""Failure injection: killing a rank on purpose, what becomes of its messages, and how the others learn of it.

A killed rank stops where it is, in all its streams, and never communicates again (its `finally` blocks run, as always
in Python, but a message there ends them). What it had sent *buffered* is on the wire and still arrives; a synchronous
send that was not received yet is gone, like its receives.

    rank 1 waits for rank 2   ──┐
    rank 0 waits for any rank ──┤      rank 2 is killed
                                ├─▶ rank 1: RankDeadError at once, in its wait; it may catch it and go on
                                └─▶ rank 0: goes on with the others; RankDeadError, once, when no other rank can send

So a rank that waits for a dead rank by name is notified every time. A rank that waits for any rank is notified of each
death at most once, and only when it would otherwise wait forever: the detector is never wrong, because in this world it
is known when no stream can run. On the clock the news takes one latency. MPI's own rule is harsher: a process that dies
ends the job.

Source: the rules for named and for wildcard receives are those of ULFM (Bland et al., Post-failure recovery of MPI
communication capability, IJHPCA 27, 2013).

Proved by: tests/comm/sim/test_failures.py
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from minidist.comm.sim.watched import RunState, take
from minidist.comm.tags import LocatedRequest
from minidist.core.base.errors import RankDeadError
from minidist.core.base.fibers import FiberExit, throw
from minidist.core.comm.communicator import ANY


class Failures:
    """The killed ranks of a run.

    isolate: a killed rank does not end the run. pending: ranks that are going to die, and how many messages each posts
    before. forget: called with a rank that has been killed.
    """

    def __init__(self, state: RunState, isolate: bool, pending: dict[int, int], forget: Callable[[int], None]) -> None:
        self.state, self.isolate, self.pending, self.forget = state, isolate, dict(pending), forget
        self.watches = isolate or bool(pending)  # what ranks post
        self.notified: set[tuple[int, int]] = set()  # (which rank, of whose death)

    def queued(self, request: LocatedRequest) -> None:
        """Fail a message whose other side is dead, and has left none."""
        if request.other in self.state.dead:
            request.complete = False
            self.fail(request, request.other)

    def posted(self, request: LocatedRequest) -> None:
        """Stop a rank that is dead, or that dies now, before its message meets another one."""
        self.posting(request.stream.rank)

    def posting(self, rank: int) -> None:
        """Stop a rank that is dead, or that dies now, instead of its next message."""
        # A dead rank's `finally` blocks may still try to send: that ends them.
        if rank in self.state.dead:
            raise FiberExit
        if rank in self.pending:
            if self.pending[rank] == 0:
                del self.pending[rank]
                self.kill(rank)
            else:
                self.pending[rank] -= 1

    def kill(self, rank: int) -> None:
        """Stop a rank now. Does not return when it is the caller's own."""
        state = self.state
        caller = state.running
        if rank in state.dead:
            return
        # The time of the death: no earlier than what the rank has done, or than the event that killed it.
        state.dead[rank] = max(state.mains[rank].time, caller.time)
        if not self.isolate:
            raise RankDeadError(
                f"rank {rank} was killed at virtual time {state.dead[rank]:.6g} s and the run ends, as a job under MPI "
                'would; SimWorld(on_failure="isolate") lets the others go on',
                rank,
            )
        self._purge(rank)

        # End its streams, the caller's own last.
        for stream in state.streams():
            if stream.rank == rank and stream is not caller and stream.fiber and not stream.fiber.dead:
                state.running = stream
                with suppress(Exception):  # raised by the function's `finally`
                    throw(stream.fiber, FiberExit)
        state.running = caller
        if caller.rank == rank:
            raise FiberExit

    def _purge(self, rank: int) -> None:
        """Remove a dead rank's requests, and fail those of the ranks that wait for it by name."""
        state = self.state
        # In its own record every interval gets an end, and no request is left to wait for.
        for event in state.traces[rank].messages:
            if event.end < 0:  # a dead rank has nothing pending
                event.start = max(event.start, event.posted)
                event.end = max(event.start, state.dead[rank])
        state.unwaited = {id(item): item for of, item in state.items_unwaited() if of != rank}
        self.forget(rank)

        self._remove_own(rank)
        self._fail_others(rank)

    def _remove_own(self, rank: int) -> None:
        """Remove the messages of a dead rank, but for those on the wire."""
        state = self.state
        for key in [key for key in state.sends if key[1] == rank]:
            for request in [request for request in state.sends[key] if not request.complete]:
                take(state.sends, key, request)
        for key in [key for key in state.receives if key[2] == rank]:
            del state.receives[key]

    def _fail_others(self, rank: int) -> None:
        """Fail the messages of other ranks that wait for a dead one."""
        state = self.state
        for queues, other in ((state.sends, 2), (state.receives, 1)):
            for key in [key for key in queues if key[other] == rank]:
                for request in queues.pop(key):
                    if not request.complete:
                        self.fail(request, rank)
        for (context, source, *place), receives in state.receives.items():
            if source == ANY and (context, rank, *place) not in state.sends:
                for request in [request for request in receives if request.other == rank]:
                    receives.remove(request)
                    self.fail(request, rank)

    def fail(self, request: Any, dead: int) -> None:
        """Let the request's wait raise: it cannot complete any more."""
        # The error says which request, and why; its wait raises it, which may be much later. The news of a death takes
        # one latency.
        rank = request.stream.rank
        request.arrival = self.state.dead[dead] + self.state.links.cost(dead, rank)[0]
        self.notified.add((rank, dead))
        others = "; no other rank sends to it" if request.peer == ANY else ""
        request.error = RankDeadError(
            f"rank {rank}: its {request.describe()} cannot complete: rank {dead} died at virtual time "
            f"{self.state.dead[dead]:.6g} s{others}; catch RankDeadError and go on without it, or let it end the run",
            dead,
        )

        # Already in the wait: let it run, so that it raises.
        if request.waiter is not None:
            self.state.ready.append(request.waiter)
            request.waiter = None

    def notify(self, withdraw: Callable[[LocatedRequest], None]) -> bool:
        """No stream can run: notify those that wait for a dead rank, or for any rank, of a death that is news to them.

        Returns whether there was any. withdraw: takes a receive out of its queue.
        """
        # Every stream is blocked now: look at what each waits for.
        state, any_news = self.state, False
        for stream in state.streams():
            request = stream.waiting
            if stream.rank in state.dead or not isinstance(request, LocatedRequest) or request.error is not None:
                continue

            # Which death is reported? A wait by name is notified every time, a wait for any rank once.
            members = request.comm.members
            if request.peer == ANY:
                news = [r for r in sorted(state.dead) if r in members and (stream.rank, r) not in self.notified]
            else:
                news = [members[request.peer]] if members[request.peer] in state.dead else []
            if not news:
                continue

            # Withdraw the request, then let its wait raise.
            if request.kind == "send":
                take(state.sends, (request.comm.context, stream.rank, news[0], request.tag), request)
            else:
                withdraw(request)
            self.fail(request, news[0])
            any_news = True
        return any_news
