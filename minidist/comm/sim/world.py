"""The simulated world: ranks are greenlets in this process, time is virtual, a deadlock is a certainty.

Here the ranks are run; how their messages meet is in `matching`. Greenlets switch only where a rank blocks, so a run
is deterministic; when no greenlet can run, nobody ever will, and the report can say exactly who waits for whom. Sends
are synchronous by default (they complete when the receive is posted): a program that relies on buffering deadlocks
here, always, instead of on the day when its messages grow.

    hub (this scheduler) ──▶ a lane runs until it blocks ──▶ hub ──▶ the next ready lane
    nobody ready: 1 match one wildcard receive, else 2 everybody has finished, else 3 deadlock
"""

import contextvars
import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from minidist.base.errors import (
    CommunicationError,
    RankDeadError,
    UnmatchedMessageError,
    UnwaitedRequestError,
    UsageError,
)
from minidist.base.trace import SpanEvent, Trace
from minidist.comm.buffers import OpenReceives, check_unchanged, remember
from minidist.comm.communicator import Comm, Request, Work
from minidist.comm.sim.choosers import Chooser, earliest
from minidist.comm.sim.clock import LinkModel
from minidist.comm.sim.deadlock_report import deadlock
from minidist.comm.sim.failures import Deaths, check_rank
from minidist.comm.sim.hang_watchdog import EndlessWatch, Stopped
from minidist.comm.sim.matching import Matching
from minidist.comm.sim.queues import Key, Wild
from minidist.comm.sim.request import Lane, SimRequest


class SimWorld(Matching):
    """`ranks` virtual ranks that run one function.

    eager_bytes: sends of at most so many bytes are buffered and complete at once; 0 (default): every send is
    synchronous. links: the alpha-beta cost model. chooser: which message a wildcard receive gets. checks: compare
    headers and watch buffers in flight. timeout: seconds of real time that one rank may compute without communicating.
    record: keep traces. on_failure: what `kill` does: "end" (default) the run, as MPI would; "isolate" the rank alone.

    `run(main, *arguments)` calls `main(comm, *arguments)` on every rank and returns the list of results. An exception
    on any rank ends the run and is raised here, with a note naming the rank. A killed rank's result is None.
    """

    lean = False

    def __init__(
        self,
        ranks: int,
        *,
        eager_bytes: int = 0,
        links: LinkModel | None = None,
        chooser: Chooser = earliest,
        checks: bool = True,
        timeout: float = 60.0,
        record: bool = True,
        on_failure: str = "end",
    ) -> None:
        if ranks < 1:
            raise UsageError(f"a world needs at least 1 rank, got {ranks}")
        if on_failure not in ("end", "isolate"):
            raise UsageError(f'on_failure={on_failure!r}; it must be "end" or "isolate"')
        self.size, self.eager_bytes, self.links = ranks, eager_bytes, links or LinkModel()
        self.chooser, self.checks, self.timeout, self.record = chooser, checks, timeout, record
        self.eager_limit = eager_bytes or -1  # an empty message is synchronous too
        self.kind, self.on_failure = "simulated", on_failure
        self.running: Lane  # whose turn it is
        self.busy = False  # in a run
        self.doomed: dict[int, int] = {}

    # running ----------------------------------------------------------------------------------------------------------

    def run(self, main: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        self.traces = [Trace(rank, self.size) for rank in range(self.size)]
        self.mains = [Lane(rank, "main") for rank in range(self.size)]
        self.lanes: dict[tuple[int, str], Lane] = {}
        self.sends: dict[Key, deque[SimRequest]] = {}
        self.receives: dict[Key, deque[SimRequest]] = {}
        self.wildcards: dict[Wild, deque[SimRequest]] = {}
        self.posted: list[list[Work]] = [[] for _ in range(self.size)]  # works in lanes whose arrays are watched
        self.open = [OpenReceives() for _ in range(self.size)]
        self.unwaited: list[dict[int, Request | Work]] = [{} for _ in range(self.size)]
        self.ready = self._queue(self.mains)
        self.returned: set[int] = set()
        self.deaths = Deaths(self, self.doomed)
        self.mortal = self.on_failure == "isolate" or bool(self.doomed)  # look for deaths at each post
        self.switches = self.posts = 0
        results: list[Any] = [None] * self.size
        members = range(self.size)

        def program(lane: Lane) -> None:
            try:
                results[lane.rank] = main(Comm(self, "world", members, lane.rank), *arguments, **keywords)
            except SystemExit as end:  # `sys.exit()` is one way to return
                if end.code:
                    raise
            if lane.rank not in self.deaths.times:
                self.returned.add(lane.rank)

        self.hub, self.busy = getcurrent(), True
        for lane in self.mains:
            self._spawn(lane, program)
        watch = EndlessWatch(self) if self.timeout else None
        try:
            self._schedule()
            self._finish()
            if watch and watch.error:  # raised in a rank that caught it
                raise watch.error
        except BaseException as error:
            if watch and watch.error and (error is watch.error or isinstance(error, Stopped)):
                raise watch.error.with_traceback(error.__traceback__) from None
            raise
        finally:
            if watch:
                watch.stop()
            self._kill_all()
            self.busy = False
        return [None if rank in self.dead else result for rank, result in enumerate(results)]

    def kill(self, rank: int, *, after_messages: int | None = None) -> None:
        """Rank `rank` (a world rank) dies: now, when called by a rank of a run, or, before a run or in it, when it is
        about to post one message more than `after_messages` from here on (0: instead of its next message).

        In a world with on_failure="isolate" the others go on: see `comm/sim/failures.py`. Otherwise RankDeadError ends the
        run.
        """
        check_rank(self, rank)
        if after_messages is not None:
            if after_messages < 0:
                raise UsageError(f"kill of rank {rank} after {after_messages} messages; it must be at least 0")
            (self.doomed if not self.busy else self.deaths.doomed)[rank] = after_messages
            self.mortal = True
        elif not self.busy:
            raise UsageError(f"kill of rank {rank} outside a run: pass after_messages, or call it on a rank of the run")
        else:
            self.deaths.kill(rank)

    def _queue(self, lanes: Sequence[Lane]) -> deque[Lane]:
        """The lanes that can run. A test makes it a queue of another order: neither times nor results may change."""
        return deque(lanes)

    def _spawn(self, lane: Lane, program: Callable[[Lane], None]) -> None:
        lane.greenlet = greenlet(program, parent=self.hub)  # where control goes when it ends
        lane.greenlet.gr_context = contextvars.copy_context()  # else a rank starts from an empty context

    def _schedule(self) -> None:
        ready = self.ready
        while True:
            while ready:
                self.running = lane = ready.popleft()
                lane.waiting = None
                self.switches += 1
                assert lane.greenlet is not None
                try:
                    lane.greenlet.switch(lane)
                except (Exception, SystemExit) as error:
                    self._annotate(error, lane)
                    raise
            if not self._match_one_wildcard() and not (self.dead and self.deaths.tell()):
                break
        if len(self.returned) + len(self.dead) < self.size or any(
            lane.waiting is not None and lane.rank not in self.dead for lane in self.lanes.values()
        ):
            raise deadlock(self)

    def _annotate(self, error: BaseException, lane: Lane) -> None:
        if isinstance(error, CommunicationError):
            return  # its text names the ranks, and whose turn it was means nothing
        where = "" if lane.is_main else f" ({lane.name})"
        error.add_note(f"raised on rank {lane.rank} of {self.size}{where}, virtual time {lane.time:.6g} s")

    def _finish(self) -> None:
        for (context, source, *_), queue in self.sends.items():
            for request in queue:
                rank = request.lane.rank
                if self.dead and (source in self.dead or context.endswith("/collectives")):
                    continue  # on the wire when its sender died, or of a collective that was given up
                raise UnmatchedMessageError(
                    f"rank {rank}: nobody received its {request.describe()}; every send needs a receive"
                )
        for rank, open_requests in enumerate(self.unwaited):
            for item in open_requests.values():
                raise UnwaitedRequestError(
                    f"rank {rank}: nobody waited for its {item.describe()}; call wait() on every request"
                )

    def _kill_all(self) -> None:
        for lane in (*self.mains, *self.lanes.values()):
            if lane.greenlet is not None and not lane.greenlet.dead:
                self.running = lane
                with suppress(Exception):  # of the rank's own `finally`; the error that ended the run is what counts
                    lane.greenlet.throw(GreenletExit)

    def _block(self, on: Request | Work) -> None:
        lane = self.running
        if lane.rank in self.dead:
            raise GreenletExit
        lane.waiting = on
        lane.handling = sys.exc_info()[1]
        works = self.posted[lane.rank] if lane.is_main else None
        if works:
            check_unchanged(lane.rank, works)
        self.hub.switch()
        if works:
            remember(works)

    # what a world is asked --------------------------------------------------------------------------------------------

    def register(self, comm: Comm) -> None:
        pass

    def nodes(self, members: Sequence[int]) -> list[list[int]]:
        return self.links.nodes(members)

    def exchange(self, *_: Any) -> bool:
        return False

    # lanes ------------------------------------------------------------------------------------------------------------

    def post_work(self, work: Work) -> Work:
        rank, name = self.running.rank, work.comm.name
        lane = self.lanes.get((rank, name))
        if lane is None:
            lane = self.lanes[(rank, name)] = Lane(rank, f"lane:{name}")
        lane.queue.append(work)
        self.unwaited[rank][id(work)] = work
        if self.checks and work.arrays:
            self.posted[rank].append(work)
            remember((work,))
        if lane.greenlet is None or lane.greenlet.dead:
            self._spawn(lane, self._run_lane)
            self.ready.append(lane)
        return work

    def _run_lane(self, lane: Lane) -> None:
        while lane.queue:
            work = lane.queue.popleft()
            getcurrent().gr_context = work.context
            lane.time = max(lane.time, work.posted)
            try:
                work.result = work.function()
            except RankDeadError as error:
                if self.on_failure == "end":
                    raise
                work.error = error  # raised by its wait
            work.end, work.finished = lane.time, True
            if work.checksums:
                self.posted[lane.rank].remove(work)
            if work.waiter is not None:
                self.ready.append(work.waiter)
                work.waiter = None

    def wait_work(self, work: Work) -> Any:
        lane = self.running
        self.unwaited[lane.rank].pop(id(work), None)
        if not work.finished:
            work.waiter = lane
            self._block(work)
        lane.time = max(lane.time, work.end)
        if work.error is not None:
            raise work.error
        return work.result

    # clock ------------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.running.time

    def compute(self, operations: Sequence[tuple[float, float]], seconds: float, name: str) -> None:
        lane = self.running
        start = lane.time
        end = start + seconds + (self.links.seconds(list(operations)) if operations else 0.0)
        if not start <= end < math.inf:
            raise UsageError(
                f"rank {lane.rank}: compute of {end - start:g} s; time does not run backwards, nor for ever: pass"
                " seconds of at least 0"
            )
        lane.time = end
        if self.record and lane.time > start:
            self.traces[lane.rank].spans.append(SpanEvent(lane.rank, lane.name, name, start, lane.time))

    def progress(self) -> None:
        pass  # lanes are scheduled by the hub whenever this rank blocks, and virtual time needs no pokes

    def trace_of(self, comm: Comm) -> Trace:
        return self.traces[comm.members[comm.rank]]

    @property
    def end_time(self) -> float:
        """Virtual seconds until the last rank's main program was done."""
        return max(lane.time for lane in self.mains)
