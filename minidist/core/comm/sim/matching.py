"""Posting, matching and waiting in the simulated world: which send matches which receive, and what the message costs.

post     a send and a receive of one (context, source, destination, tag) meet in the order of their posts, at once
         when the other side is there already
deliver  the array is copied once, and a stream that was blocked in a wait can run again
wait     blocks until the two have met, then advances the clock

The costs are those of the alpha-beta model, with one port in and one port out for each stream of a rank:

    sender    post ──▶ depart = max(post, out_free)          out_free = depart + beta n
    wire      arrival = depart + alpha + beta n
    receiver  landed = max(arrival, in_free + beta n, receive posted)   in_free = landed
              its wait ends at max(landed, now): a message that has landed costs nothing

Every term depends only on the order in which a stream's program posts and waits, never on the order in which a
scheduler happens to run the ranks. So a program without wildcards has exactly one virtual time. In return, contention
inside the network is not modelled, because it would depend on the schedule.

A world that checks or records messages, or that matches receives from any rank, has a subclass (minidist/comm/sim). A
subclass of the costs has links that differ, and an overhead of each message (minidist/comm/sim/links.py).

Source: Hockney, The communication challenge for MPP, Parallel Computing 20 (1994).

Proved by: tests/comm/sim/test_world.py, tests/comm/sim/test_clock.py, tests/comm/sim/test_choosers.py
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minidist.core.base import hooks
from minidist.core.base.arrays import Array
from minidist.core.base.errors import UsageError
from minidist.core.base.fibers import Fiber
from minidist.core.comm.communicator import ANY, PointToPoint, Request, Work

Key = tuple[str, int, int, int]  # context, source, destination (world ranks), tag: what a send and a receive must share


@dataclass(frozen=True)
class AlphaBeta:
    """Costs of links and of computing. Defaults: 1 µs latency, 10 GB/s links, 100 GFLOP/s and 50 GB/s per rank.

    alpha: seconds of latency per message. beta: seconds per byte. flops: floating-point operations per second of a
    rank. memory_bandwidth: bytes per second of a rank.
    """

    alpha: float = 1e-6
    beta: float = 1e-10
    flops: float = 1e11
    memory_bandwidth: float = 5e10

    def __post_init__(self) -> None:
        hooks.comm_checks().check_links(self)

    def seconds(self, operations: list[tuple[float, float]]) -> float:
        """Return the time of a list of operations, each (FLOPs, bytes moved): the roofline, summed."""
        return sum(max(flops / self.flops, moved / self.memory_bandwidth) for flops, moved in operations)


@dataclass(slots=True, eq=False)
class Stream:
    """An execution context of a rank, with a clock and two ports: its main program, or one for each communicator."""

    rank: int
    name: str
    is_main: bool
    fiber: Fiber | None = None
    time: float = 0.0
    out_free: float = 0.0  # the ports are free from then on
    in_free: float = 0.0
    waiting: Request | Work | None = None
    handling: BaseException | None = None  # the exception that led into a wait inside `except` or `finally`
    queue: deque[Work] = field(default_factory=deque)


@dataclass(eq=False, init=False)
class SimRequest(Request):
    """A request and what the simulated world must remember of it until it has been waited for.

    other: the world rank of its peer. arrival: when the message arrives; of a receive that has not met its send, when
    it was posted. complete: its wait does not block. waiter: what waits for it. depart, end: of a send, when its bytes
    leave the port, and when its buffer is free.
    """

    stream: Stream
    other: int
    nbytes: int
    arrival: float
    complete: bool
    waiter: Stream | None
    depart: float = 0.0
    end: float = 0.0


@dataclass(eq=False)
class SimState:
    """One run of a simulated world: what `Matching`, which pairs messages, and `Sim`, which runs streams, share.

    costs: the `LinkModel` that computes the times of messages; None where alpha and beta suffice.
    """

    size: int
    links: AlphaBeta
    traces: list[Any]  # the record of each rank, see `hooks.trace`
    ready: deque[Stream]  # streams that can run
    mains: list[Stream]
    running: Stream  # whose turn it is
    side: dict[tuple[int, str], Stream] = field(default_factory=dict)  # by rank and communicator
    sends: dict[Key, list[SimRequest]] = field(default_factory=dict)
    receives: dict[Key, list[SimRequest]] = field(default_factory=dict)
    costs: Any = None

    def streams(self) -> list[Stream]:
        """Return all streams: the ranks' main programs, then the others."""
        return [*self.mains, *self.side.values()]


class Matching:
    """The messages of a run. block: a function that lets other streams run until the request can go on.

    key_of: (message, key) -> what its other side must have equal: `FoldedWorld`, receives from any rank. None: key.
    keeps: (message, key) -> whether a message whose other side is not there yet waits for it. None: always.
    on_posted: functions that look at a message before it meets another one, where the run is watched.
    on_meet: functions of a send and its receive, called before the array is copied; True: it has copied the array.
    """

    request_class: type[SimRequest] = SimRequest

    def __init__(self, state: SimState, block: Callable[[Request | Work], None]) -> None:
        self.state, self.block, self.requests = state, block, self.request_class
        self.on_posted: list[Callable[[SimRequest], None]] = []
        self.on_meet: list[Callable[[SimRequest, SimRequest], bool]] = []
        self.sends, self.receives = state.sends, state.receives
        self.alpha, self.beta, self.costs = state.links.alpha, state.links.beta, state.costs
        self.key_of: Callable[[SimRequest, Key], Key] | None = None
        self.keeps: Callable[[SimRequest, Key], bool] | None = None

    def any_source(self) -> int:
        """Return the other rank of a receive from any rank. Only a subclass has such receives."""
        raise UsageError(f"rank {self.state.running.rank}: a Sim has no receives from any rank; use a SimWorld")

    def post(self, comm: PointToPoint, kind: str, array: Array, peer: int, tag: int, nonblocking: bool) -> SimRequest:
        """Start a send or a receive. It meets the oldest message of the other kind that fits it, or waits for one."""
        stream, requests = self.state.running, self.requests
        rank, other = stream.rank, self.any_source() if peer == ANY else comm.members[peer]
        request = requests()
        request.comm, request.kind, request.array = comm, kind, array
        request.peer, request.tag, request.nonblocking = peer, tag, nonblocking
        request.stream, request.other, request.nbytes = stream, other, array.nbytes
        request.arrival, request.complete, request.waiter = stream.time, False, None
        for posted in self.on_posted:
            posted(request)

        # What a send and its receive have equal: the context, the sender, the receiver, the tag.
        if kind == "send":
            # The out-port sends one message after the other, and is busy with each for beta times its bytes.
            request.depart = stream.time if stream.time > stream.out_free else stream.out_free
            request.end = stream.out_free = request.depart + self.beta * request.nbytes
            request.arrival = request.end + self.alpha
            if self.costs is not None:
                self.costs.leave(request)
            key, mine, others = (comm.context, rank, other, tag), self.sends, self.receives
        else:
            key, mine, others = (comm.context, other, rank, tag), self.receives, self.sends
        if self.key_of is not None:
            key = self.key_of(request, key)

        # Its other side is not there yet: it stays in a queue.
        queue = others.get(key)
        if queue is None:
            if self.keeps is None or self.keeps(request, key):
                mine.setdefault(key, []).append(request)
            return request
        if len(queue) == 1:
            del others[key]
        if kind == "send":
            self.deliver(request, queue.pop(0))
        else:
            self.deliver(queue.pop(0), request)
        return request

    def deliver(self, send: SimRequest, receive: SimRequest) -> None:
        """Let a send and its receive meet: copy once, wake the streams that wait."""
        # The message itself: one copy, from the sender's array into the receiver's.
        for meet in self.on_meet:
            if meet(send, receive):
                break
        else:
            receive.array[...] = send.array

        # The times of the two are those of the picture. A synchronous send ends when its receive is posted, or later. A
        # send that is complete already was buffered, and its end stays.
        posted = receive.arrival
        if posted > send.end and not send.complete:
            send.end = posted
        if send.arrival > posted:
            receive.arrival = send.arrival
        receive.complete = send.complete = True

        # Whoever waits for one of the two can run again.
        if receive.waiter is not None:
            self.state.ready.append(receive.waiter)
            receive.waiter = None
        if send.waiter is not None:
            self.state.ready.append(send.waiter)
            send.waiter = None

    def wait(self, request: Any) -> None:
        """Return when the request is complete, and advance the stream's clock to that time."""
        # Let the others run until it has met its other side.
        stream = self.state.running
        if not request.complete:
            request.waiter = stream
            self.block(request)

        # A receive: `landed` of the picture. The in-port takes one message after the other.
        if request.kind == "send":
            end = request.end
        else:
            busy = self.beta * request.nbytes if self.costs is None else self.costs.busy(request)
            end = stream.in_free + busy
            if request.arrival > end:
                end = request.arrival
            stream.in_free = end

        # What was complete before the wait began costs nothing.
        if end > stream.time:
            stream.time = end
