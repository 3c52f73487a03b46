"""The simulated world: ranks are greenlets in this process, time is virtual, and a deadlock is a certainty, not a timeout.

Greenlets switch only where a rank blocks, so a run is deterministic; when no greenlet can run, nobody ever will, and the
report can say exactly who waits for whom. Sends are synchronous by default (they complete when the receive is posted):
a program that relies on buffering deadlocks here, always, instead of on the day when its messages grow.

    hub (this scheduler) ──▶ a lane runs until it blocks ──▶ hub ──▶ the next ready lane
    nobody ready: 1 match one wildcard receive, else 2 everybody has finished, else 3 deadlock
"""

import contextvars
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from minidist.base.errors import (
    BufferReuseError,
    RankTimeoutError,
    UnmatchedMessageError,
    UnwaitedRequestError,
    UsageError,
)
from minidist.base.trace import MessageEvent, SpanEvent, Trace, current_purpose
from minidist.comm.choosers import Candidate, Chooser, earliest
from minidist.comm.clock import LinkModel
from minidist.comm.communicator import ANY, Comm, Request, Work
from minidist.comm.header import compare, header_of
from minidist.comm.reports import deadlock
from minidist.comm.site import Site

Key = tuple[str, int, int, int]  # context, source, destination (world ranks), tag


class Lane:
    """One flow of control of a rank, with a clock and two ports of its own: the main program, or a communicator's lane."""

    __slots__ = ("greenlet", "in_free", "name", "out_free", "queue", "rank", "time", "waiting")

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.greenlet: greenlet | None = None
        self.time = self.out_free = self.in_free = 0.0
        self.waiting: Request | Work | None = None
        self.queue: deque[Work] = deque()


class Pending:
    """What the simulated world remembers of a request until it has been waited for."""

    __slots__ = ("arrival", "checksum", "depart", "eager", "lane", "matched", "order", "posted", "sent", "waiter")

    def __init__(self, lane: Lane, order: int) -> None:
        self.lane, self.posted, self.order = lane, lane.time, order
        self.matched = self.eager = False
        self.depart = self.arrival = self.sent = 0.0
        self.checksum: int | None = None
        self.waiter: Lane | None = None


def checksum(array: np.ndarray) -> int:
    """A sum of the array's bytes, eight at a time: enough to notice that somebody wrote into it."""
    raw = array.reshape(-1).view(np.uint8)
    whole = raw.size // 8 * 8
    return int(np.add.reduce(raw[:whole].view(np.uint64))) ^ int(np.add.reduce(raw[whole:], dtype=np.uint64))


class SimWorld:
    """`ranks` virtual ranks that run one function.

    eager_bytes: sends of at most so many bytes are buffered and complete at once; 0 (default): every send is synchronous.
    links: the alpha-beta cost model. chooser: which message a wildcard receive gets. checks: compare headers and watch
    buffers in flight. timeout: seconds of real time that one rank may compute without communicating. record: keep traces.

    `run(main, *arguments)` calls `main(comm, *arguments)` on every rank and returns the list of results. An exception on
    any rank ends the run and is raised here, with a note naming the rank.
    """

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
    ) -> None:
        if ranks < 1:
            raise UsageError(f"a world needs at least 1 rank, got {ranks}")
        self.size, self.eager_bytes, self.links = ranks, eager_bytes, links or LinkModel()
        self.chooser, self.checks, self.timeout, self.record = chooser, checks, timeout, record
        self.kind = "simulated"

    # running -----------------------------------------------------------------------------------------------------------

    def run(self, main: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        self.traces = [Trace(rank, self.size) for rank in range(self.size)]
        self.mains = [Lane(rank, "main") for rank in range(self.size)]
        self.lanes: dict[tuple[int, str], Lane] = {}
        self.sends: dict[Key, deque[Request]] = {}
        self.receives: dict[Key, deque[Request]] = {}
        self.wildcards: dict[tuple[str, int, int], deque[Request]] = {}  # context, destination, tag
        self.unwaited: list[dict[int, Request | Work]] = [{} for _ in range(self.size)]
        self.ready: deque[Lane] = deque(self.mains)
        self.returned: set[int] = set()
        self.switches = self.posts = 0
        results: list[Any] = [None] * self.size
        members = range(self.size)

        def program(lane: Lane) -> None:
            results[lane.rank] = main(Comm(self, "world", members, lane.rank), *arguments, **keywords)
            self.returned.add(lane.rank)

        self.hub = getcurrent()
        for lane in self.mains:
            self._spawn(lane, program)
        watch = _Watch(self) if self.timeout else None
        try:
            self._schedule()
            self._finish()
        finally:
            if watch:
                watch.stop()
            self._kill_all()
        return results

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
                except Exception as error:
                    self._annotate(error, lane)
                    raise
            if not self._match_one_wildcard():
                break
        if len(self.returned) < self.size or any(lane.waiting is not None for lane in self.lanes.values()):
            raise deadlock(self)

    def _annotate(self, error: Exception, lane: Lane) -> None:
        where = "" if lane.name == "main" else f" (lane {lane.name})"
        error.add_note(f"raised on rank {lane.rank} of {self.size}{where}, virtual time {lane.time:.6g} s")

    def _finish(self) -> None:
        for queue in self.sends.values():
            for request in queue:
                rank = request.state.lane.rank
                raise UnmatchedMessageError(f"rank {rank}: nobody received its {request.describe()}; every send needs a receive")
        for rank, open_requests in enumerate(self.unwaited):
            for item in open_requests.values():
                raise UnwaitedRequestError(f"rank {rank}: nobody waited for its {item.describe()}; call wait() on every request")

    def _kill_all(self) -> None:
        for lane in (*self.mains, *self.lanes.values()):
            if lane.greenlet is not None and not lane.greenlet.dead:
                lane.greenlet.throw(GreenletExit)

    def _block(self, on: Request | Work) -> None:
        lane = self.running
        lane.waiting = on
        self.hub.switch()

    # posting and matching ------------------------------------------------------------------------------------------------

    def register(self, comm: Comm) -> None:
        pass

    def post(self, comm: Comm, kind: str, array: np.ndarray, peer: int, tag: int, site: Site, guarded: bool) -> Request:
        lane = self.running
        world_peer = comm.members[peer] if peer != ANY else ANY
        event = MessageEvent(
            lane.rank, lane.name, kind, world_peer, tag, array.nbytes, current_purpose(), comm.operation, comm.name, lane.time,
            dtype=array.dtype.str,
        )  # fmt: skip
        if self.record:
            self.traces[lane.rank].messages.append(event)
        request = Request(comm, kind, array, peer, tag, comm.operation, site, event)
        self.posts += 1
        pending = request.state = Pending(lane, self.posts)
        if guarded:
            self.unwaited[lane.rank][id(request)] = request
        if kind == "send":
            alpha, beta = self.links.cost(lane.rank, world_peer)
            cost = beta * array.nbytes
            pending.depart = max(lane.time, lane.out_free)
            pending.sent = lane.out_free = pending.depart + cost
            pending.arrival = pending.depart + alpha + cost
            # Decided before matching: whether the receive happens to be posted already depends on the schedule.
            pending.eager = 0 < self.eager_bytes >= array.nbytes  # by default an empty message is synchronous too
            key = (comm.context, lane.rank, world_peer, tag)
            waiting = self.receives.get(key)
            if waiting and not self._behind_wildcard(waiting[0], key):
                self._deliver(request, waiting.popleft())
                if not waiting:
                    del self.receives[key]
                return request
            if pending.eager:
                request.array = array.copy()
            elif guarded and self.checks:
                pending.checksum = checksum(array)
            self.sends.setdefault(key, deque()).append(request)
        elif peer == ANY:
            event.wildcard = True
            self.wildcards.setdefault((comm.context, lane.rank, tag), deque()).append(request)
        else:
            key = (comm.context, world_peer, lane.rank, tag)
            waiting = self.sends.get(key)
            if waiting and not self.wildcards.get((comm.context, lane.rank, tag)):
                send = waiting.popleft()
                if not waiting:
                    del self.sends[key]
                self._deliver(send, request)
            else:
                self.receives.setdefault(key, deque()).append(request)
                if guarded and self.checks:
                    pending.checksum = checksum(array)
        return request

    def _behind_wildcard(self, receive: Request, key: Key) -> bool:
        """Was a wildcard receive for the same messages posted before `receive`? Then it chooses first."""
        context, _, destination, tag = key
        wildcards = self.wildcards.get((context, destination, tag))
        return bool(wildcards) and wildcards[0].state.order < receive.state.order

    def _deliver(self, send: Request, receive: Request) -> None:
        """A send and its receive have met: compare, copy once, wake whoever waits."""
        outgoing, incoming = send.state, receive.state
        ours, theirs = send.array, receive.array
        if self.checks:
            if send.operation != receive.operation or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
                compare(
                    header_of(send.operation, ours), header_of(receive.operation, theirs), outgoing.lane.rank,
                    incoming.lane.rank, f"{send.site} (sender) and {receive.site} (receiver)",
                )  # fmt: skip
            self._check_untouched(send)
            self._check_untouched(receive)
        theirs[...] = ours
        if incoming.checksum is not None:
            incoming.checksum = checksum(theirs)
        incoming.arrival, incoming.matched, outgoing.matched = outgoing.arrival, True, True
        outgoing.arrival = incoming.posted  # a synchronous send ends no earlier than its receive is posted
        for pending in (incoming, outgoing):
            if pending.waiter is not None:
                self.ready.append(pending.waiter)
                pending.waiter = None

    def _check_untouched(self, request: Request) -> None:
        pending = request.state
        if pending.checksum is not None and checksum(request.array) != pending.checksum:
            raise BufferReuseError(
                f"rank {pending.lane.rank}: the buffer of its {request.describe()} was changed while the operation was in "
                "flight; wait() first, or give each message a buffer of its own"
            )

    def _match_one_wildcard(self) -> bool:
        """Nobody can run: let exactly one wildcard receive have its message, then everybody runs on."""
        candidates: list[Candidate] = []
        pairs: list[tuple[Request, Key]] = []
        for (context, destination, tag), queue in self.wildcards.items():
            receive = queue[0]
            for source in sorted(receive.comm.members):
                key = (context, source, destination, tag)
                waiting = self.sends.get(key)
                if waiting:
                    time = max(waiting[0].state.arrival, receive.state.posted)
                    candidates.append(Candidate(time, destination, source))
                    pairs.append((receive, key))
        if not pairs:
            return False
        receive, key = pairs[self.chooser(candidates) if len(pairs) > 1 or self.chooser is not earliest else 0]
        context, source, destination, tag = key
        queue = self.wildcards[(context, destination, tag)]
        queue.popleft()
        if not queue:
            del self.wildcards[(context, destination, tag)]
        sends = self.sends[key]
        send = sends.popleft()
        if not sends:
            del self.sends[key]
        receive.peer, receive.event.peer = receive.comm.members.index(source), source
        self._deliver(send, receive)
        self._match_waiting(context, destination, tag)
        return True

    def _match_waiting(self, context: str, destination: int, tag: int) -> None:
        """Receives that stood behind a wildcard may match now."""
        for key in [k for k in self.receives if k[0] == context and k[2:] == (destination, tag)]:
            receives, sends = self.receives[key], self.sends.get(key, deque())
            while receives and sends and not self._behind_wildcard(receives[0], key):
                self._deliver(sends.popleft(), receives.popleft())
            if not receives:
                del self.receives[key]
            if not sends:
                self.sends.pop(key, None)

    # waiting -------------------------------------------------------------------------------------------------------------

    def wait(self, request: Request) -> None:
        pending, lane = request.state, self.running
        self.unwaited[lane.rank].pop(id(request), None)
        event = request.event
        event.start = lane.time if request.kind == "receive" else pending.depart
        if not pending.matched and not pending.eager:
            pending.waiter = lane
            self._block(request)
        if pending.checksum is not None and self.checks:
            self._check_untouched(request)
        if request.kind == "receive":
            source = request.comm.members[request.peer]
            _, beta = self.links.cost(source, lane.rank)
            end = max(lane.time, pending.arrival, lane.in_free + beta * request.array.nbytes, pending.posted)
            lane.in_free = end
        else:
            end = max(lane.time, pending.sent, 0.0 if pending.eager else pending.arrival)
        lane.time = event.end = end

    # lanes -----------------------------------------------------------------------------------------------------------------

    def post_work(self, work: Work) -> Work:
        rank, name = self.running.rank, work.comm.name
        lane = self.lanes.get((rank, name))
        if lane is None:
            lane = self.lanes[(rank, name)] = Lane(rank, f"lane:{name}")
        lane.queue.append(work)
        self.unwaited[rank][id(work)] = work
        if lane.greenlet is None or lane.greenlet.dead:
            self._spawn(lane, self._run_lane)
            self.ready.append(lane)
        return work

    def _run_lane(self, lane: Lane) -> None:
        while lane.queue:
            work = lane.queue.popleft()
            lane.time = max(lane.time, work.posted)
            work.result = work.function()
            work.end, work.finished = lane.time, True
            waiter = self.mains[lane.rank]
            if waiter.waiting is work:
                self.ready.append(waiter)

    def wait_work(self, work: Work) -> Any:
        lane = self.running
        self.unwaited[lane.rank].pop(id(work), None)
        if not work.finished:
            self._block(work)
        lane.time = max(lane.time, work.end)
        return work.result

    # clock -----------------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return self.running.time

    def compute(self, operations: Sequence[tuple[float, float]], seconds: float, name: str) -> None:
        lane = self.running
        start = lane.time
        lane.time += seconds + (self.links.seconds(list(operations)) if operations else 0.0)
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


class _Watch:
    """Stops a rank that computes without end: raises RankTimeoutError inside it after `timeout` seconds without a switch."""

    def __init__(self, world: SimWorld) -> None:
        self.world, self.thread_id = world, threading.get_ident()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="minidist-watch")
        self.thread.start()

    def _watch(self) -> None:
        seen, since = -1, 0
        while not self.stopped.wait(self.world.timeout / 4):
            since = since + 1 if self.world.switches == seen else 0
            seen = self.world.switches
            if since >= 4:
                rank = self.world.running.rank
                timeout = self.world.timeout

                class Stopped(RankTimeoutError):
                    def __init__(self) -> None:
                        super().__init__(
                            f"rank {rank} computed for more than {timeout:g} s without communicating; "
                            "it may compute without end: look at the line below, or raise --timeout"
                        )

                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread_id), ctypes.py_object(Stopped))
                return

    def stop(self) -> None:
        self.stopped.set()
