"""What the parts of the simulated world share: the streams, the messages in flight, and how the run is set up.

`Matching` pairs sends with receives, and `Sim` schedules the streams. Each is given this one object, so that neither
needs to know the other.

Proved by: tests/comm/sim/test_world.py
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from minidist.core.base.errors import RankDeadError
from minidist.core.base.fibers import Fiber
from minidist.core.base.trace import MessageEvent, Trace
from minidist.core.comm.point_to_point import Request, Work
from minidist.core.comm.sim.clock import LinkModel

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
    """A request and what the simulated world must remember of it until it has been waited for.

    other: the world rank of its peer, or ANY. order: among all posts of the run. posted: the time of its post.
    nonblocking: the user's program runs before the wait. event: its record, where one is kept.
    """

    stream: Stream
    other: int
    nbytes: int
    order: int
    posted: float
    nonblocking: bool
    eager: bool = field(default=False, init=False)  # a buffered send, which is complete at once
    matched: bool = field(default=False, init=False)
    is_free: bool = field(default=False, init=False)  # it takes no time: see `LinkModel.free_startup`
    waiter: Stream | None = field(default=None, init=False)
    error: RankDeadError | None = field(default=None, init=False)  # it cannot complete any more
    depart: float = field(default=0.0, init=False)
    sent: float = field(default=0.0, init=False)
    arrival: float = field(default=0.0, init=False)
    event: MessageEvent | None = field(default=None, init=False)


@dataclass(eq=False)
class SimState:
    """One run of a simulated world."""

    size: int
    links: LinkModel
    requests: type[SimRequest]  # what a message in flight is
    chooser: Any  # see comm/sim/any_source.py
    eager_limit: int  # sends of at most so many bytes are buffered; -1: none, not even an empty one
    traces: list[Trace]
    ready: deque[Stream]  # streams that can run
    mains: list[Stream]
    running: Stream  # whose turn it is
    side: dict[tuple[int, str], Stream] = field(default_factory=dict)  # by rank and communicator
    sends: dict[Key, list[SimRequest]] = field(default_factory=dict)
    receives: dict[Key, list[SimRequest]] = field(default_factory=dict)
    wildcards: dict[AnyKey, list[SimRequest]] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)
    dead: dict[int, float] = field(default_factory=dict)  # when each killed rank died

    def __post_init__(self) -> None:
        # By rank and id: the requests and works that no wait has been called for.
        self.unwaited: list[dict[int, Request | Work]] = [{} for _ in range(self.size)]

    def streams(self) -> list[Stream]:
        """Return all streams: the ranks' main programs, then the others."""
        return [*self.mains, *self.side.values()]
