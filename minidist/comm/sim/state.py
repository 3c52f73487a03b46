"""What the parts of the simulated world share: the streams, the messages in flight, and how the run is set up.

`Matching` pairs sends with receives, `Failures` kills ranks, `HangWatchdog` and `deadlock_report` look on, and
`SimWorld` schedules the streams. Each is given this one object, so that none needs to know another.

Proved by: tests/comm/sim/test_world.py
"""

import sys
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import numpy as np

from minidist.base.errors import MismatchError, RankDeadError
from minidist.base.fibers import Fiber
from minidist.base.trace import Trace
from minidist.comm.buffers import OpenMessages, WorkArrays
from minidist.comm.call_log import Call, CallLog
from minidist.comm.call_site import NOWHERE, CallSite, call_site
from minidist.comm.claims import Claim
from minidist.comm.point_to_point import MAX_TAG, OWN_TAG, PointToPoint, Request, Work
from minidist.comm.sim.choosers import Chooser
from minidist.comm.sim.clock import LinkModel

Key = tuple[str, int, int, int]  # context, source, destination (world ranks), tag: what a send and a receive must share
AnyKey = tuple[str, int, int]  # context, destination, tag: of a receive from any rank


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


@dataclass(slots=True, eq=False)
class SimRequest(Request):
    """A request and what the simulated world must remember of it until it has been waited for."""

    stream: Stream
    order: int  # of all posts of the run
    eager: bool = field(default=False, init=False)  # a buffered send, which is complete at once
    matched: bool = field(default=False, init=False)
    watched: bool = field(default=False, init=False)  # other code runs between the post and the wait
    checksum: int | None = field(default=None, init=False)  # of the bytes that must be unchanged when the wait ends
    waiter: Stream | None = field(default=None, init=False)
    error: RankDeadError | None = field(default=None, init=False)  # it cannot complete any more
    depart: float = field(default=0.0, init=False)
    sent: float = field(default=0.0, init=False)
    arrival: float = field(default=0.0, init=False)


class UnlikeCalls(NamedTuple):
    """Two ranks have made unlike calls. sizes: the arrays have not fitted. ready: the streams that could go on."""

    error: MismatchError
    name: str  # of the communicator
    number: int  # of the call
    sizes: bool
    ready: list[Stream]


@dataclass(eq=False)
class SimState:
    """One run of a simulated world."""

    size: int
    links: LinkModel
    chooser: Chooser
    checks: bool
    record: bool
    eager_limit: int  # sends of at most so many bytes are buffered; -1: none, not even an empty one
    isolate: bool  # a killed rank does not end the run
    watches: bool  # buffers in flight
    ready: deque[Stream]  # streams that can run
    mains: list[Stream]
    running: Stream  # whose turn it is
    side: dict[tuple[int, str], Stream] = field(default_factory=dict)  # by rank and communicator
    sends: dict[Key, deque[SimRequest]] = field(default_factory=lambda: defaultdict(deque))
    receives: dict[Key, deque[SimRequest]] = field(default_factory=lambda: defaultdict(deque))
    wildcards: dict[AnyKey, deque[SimRequest]] = field(default_factory=lambda: defaultdict(deque))
    returned: set[int] = field(default_factory=set)
    dead: dict[int, float] = field(default_factory=dict)  # when each killed rank died
    call_values: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # see `SimWorld.compare_calls`
    logs: dict[str, dict[int, CallLog]] = field(default_factory=lambda: defaultdict(dict))  # by communicator and rank
    claims: dict[tuple[str, int], Claim] = field(default_factory=dict)  # by origin and world rank: see `register`
    totals: bool = False  # keep the bytes by purpose, where no record is kept
    weights: dict[int, int] = field(default_factory=dict)  # the ranks that each running one stands for (`FoldedWorld`)
    thread: int = field(default_factory=get_ident)  # that runs the ranks
    comms: list[PointToPoint] = field(default_factory=list)  # that this run has made
    programs: dict[int, int] = field(default_factory=dict)  # ranks whose program runs in another thread: its identifier
    switches: int = 0  # of streams; stands still while a rank computes
    unlike: "UnlikeCalls | None" = None  # two ranks' calls differ, which ends the run

    def __post_init__(self) -> None:
        ranks = range(self.size)
        self.traces = [
            Trace(rank, self.size, keeps_events=self.record, ranks=self.weights.get(rank, 1)) for rank in ranks
        ]
        self.open = [OpenMessages() for _ in ranks]
        self.arrived: dict[int, np.ndarray] = {}  # by the id of a receive, what its wait is to write into its array
        self.unwaited: list[dict[int, Request | Work]] = [{} for _ in ranks]
        self.works = [WorkArrays(rank) for rank in ranks]

    def calls(self, name: str) -> dict[int, Iterable[Call]]:
        """Return the last collective calls on the communicator `name`, by world rank."""
        return {rank: log.recent for rank, log in self.logs[name].items()}

    def line_of(self, rank: int) -> CallSite:
        """Return the line at which the main program of a rank is; NOWHERE when it has ended or cannot be seen."""
        main = self.mains[rank]
        frame = sys._getframe(1) if main is self.running else getattr(main.fiber, "gr_frame", None)
        return call_site(frame, NOWHERE)

    def refuse(self, error: MismatchError, call: PointToPoint, sizes: bool) -> None:
        """End the run with an error about two ranks' calls, as soon as the stream that runs has paused."""
        # The stack of the rank that has noticed it, as an exception raised there would have it.
        frame: FrameType | None = sys._getframe(1)
        steps: TracebackType | None = None
        while frame is not None:
            steps = TracebackType(steps, frame, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        numbers = [number for number, *_ in self.logs[call.name][self.running.rank].recent]
        number = next((number for number in reversed(numbers) if number % (MAX_TAG + 1) == call.tag % OWN_TAG), 0)
        self.unlike = UnlikeCalls(error.with_traceback(steps), call.name, number, sizes, list(self.ready))
        self.ready.clear()

    def streams(self) -> list[Stream]:
        """Return all streams: the ranks' main programs, then the others."""
        return [*self.mains, *self.side.values()]


def take(queues: dict[Any, deque[SimRequest]], key: Any) -> SimRequest:
    """Remove and return the oldest request of a queue; an empty queue is deleted."""
    queue = queues[key]
    request = queue.popleft()
    if not queue:
        del queues[key]
    return request


def remove(queues: dict[Any, deque[SimRequest]], key: Any, request: SimRequest) -> None:
    """Remove a request from its queue; an empty queue is deleted."""
    queue = queues[key]
    queue.remove(request)
    if not queue:
        del queues[key]
