"""What the simulated world remembers of a flow of control, and of a message between its post and its wait."""

from collections import deque

import numpy as np
from greenlet import greenlet

from minidist.base.errors import RankDeadError
from minidist.base.trace import MessageEvent
from minidist.comm.call_site import Site
from minidist.comm.communicator import Comm, Request, Work


class Lane:
    """One flow of control of a rank, with a clock and two ports: the main program, or a communicator's lane."""

    __slots__ = ("greenlet", "handling", "in_free", "is_main", "name", "out_free", "queue", "rank", "time", "waiting")

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name, self.is_main = rank, name, name == "main"
        self.greenlet: greenlet | None = None
        self.time = self.out_free = self.in_free = 0.0
        self.waiting: Request | Work | None = None
        self.handling: BaseException | None = None  # blocked inside an `except` or `finally`: what brought it there
        self.queue: deque[Work] = deque()


class SimRequest(Request):
    """A request and what the simulated world must remember of it until it has been waited for."""

    __slots__ = (
        "arrival",
        "checksum",
        "depart",
        "eager",
        "error",
        "lane",
        "matched",
        "order",
        "posted",
        "sent",
        "waiter",
        "watched",
    )

    def __init__(
        self,
        comm: Comm,
        kind: str,
        array: np.ndarray,
        peer: int,
        tag: int,
        site: Site,
        event: MessageEvent,
        lane: Lane,
        order: int,
    ) -> None:
        # Not super().__init__: it would be a tenth of the time of a message.
        self.comm, self.kind, self.array, self.peer, self.tag = comm, kind, array, peer, tag
        self.operation, self.site, self.event = comm.signature, site, event
        self.lane, self.posted, self.order = lane, lane.time, order
        self.finished = self.matched = self.eager = self.watched = False
        self.checksum: int | None = None  # of the bytes that must be there still when the wait ends
        self.waiter: Lane | None = None
        self.error: RankDeadError | None = None  # it cannot complete any more
        self.depart = self.arrival = self.sent = 0.0
