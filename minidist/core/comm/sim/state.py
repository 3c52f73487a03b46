"""What the parts of the simulated world share: the streams, the messages in flight, and how the run is set up.

`Matching` pairs sends with receives, and `Sim` schedules the streams. Each is given this one object, so that neither
needs to know the other.

Proved by: tests/comm/sim/test_world.py
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from minidist.core.base.fibers import Fiber
from minidist.core.comm.point_to_point import Request, Work
from minidist.core.comm.sim.clock import LinkModel

Key = tuple[str, int, int, int]  # context, source, destination (world ranks), tag: what a send and a receive must share


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
    """One run of a simulated world."""

    size: int
    links: LinkModel
    traces: list[Any]  # the record of each rank, see `hooks.trace`
    ready: deque[Stream]  # streams that can run
    mains: list[Stream]
    running: Stream  # whose turn it is
    side: dict[tuple[int, str], Stream] = field(default_factory=dict)  # by rank and communicator
    sends: dict[Key, list[SimRequest]] = field(default_factory=dict)
    receives: dict[Key, list[SimRequest]] = field(default_factory=dict)

    def streams(self) -> list[Stream]:
        """Return all streams: the ranks' main programs, then the others."""
        return [*self.mains, *self.side.values()]
