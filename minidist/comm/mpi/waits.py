"""What a rank of the MPI world waits in, other than messages and works: what its watchdog writes down.

Proved by: tests/comm/mpi/test_failures.py
"""

import sys
from typing import Any, Protocol

from minidist.base.traces import Trace
from minidist.comm.call_log import CallLog
from minidist.comm.call_site import call_site
from minidist.comm.communicator import Claim
from minidist.comm.mpi.stream import Stream
from minidist.core.base.fibers import Fiber
from minidist.core.comm.point_to_point import PointToPoint, Request, Work


class Entering:
    """A rank makes a communicator and waits for the other members."""

    def __init__(self, comm: PointToPoint, origin: str = "") -> None:
        self.origin = origin
        self.peers = [member for member in comm.members if member != comm.members[comm.rank]]
        site = call_site(sys._getframe(1))
        self.text = f"making the communicator {comm.name} of ranks {list(comm.members)}, at {site}"

    def describe(self) -> str:
        """Return what the rank waits in."""
        return self.text


class Exchanging:
    """A rank is in a sendrecv whose requests are not kept."""

    __slots__ = ("comm", "dest", "nbytes", "source", "tag")

    def __init__(self, comm: PointToPoint, dest: int, source: int, tag: int, nbytes: int) -> None:
        self.comm, self.dest, self.source, self.tag, self.nbytes = comm, dest, source, tag, nbytes

    def describe(self) -> str:
        """Return what the rank waits in."""
        dest, source = self.comm.members[self.dest], self.comm.members[self.source]
        return f"{self.comm.operation}: sendrecv to rank {dest} and from rank {source}, tag {self.tag}, {self.nbytes} B"


class Returned:
    """A rank's program is over; it waits for the others to finish, because it may have to report them."""


Wait = Request | Work | Entering | tuple[Any, ...] | Returned | None  # a tuple: the arguments of an Exchanging


class Watched(Protocol):
    """What the watchdog's thread reads of its rank's world."""

    MPI: Any
    base: Any  # MPI's communicator of the world's own business
    rank: int
    size: int
    state: str  # "computing" | "returned"
    place: str  # where the program says that it is
    waiting: Wait  # of the main program
    handling: BaseException | None  # the exception that led into the wait
    completed: int  # messages
    active: list[Stream]
    trace: Trace
    logs: dict[str, CallLog]  # of the collective calls, by communicator
    made: dict[str, Claim]  # communicators, also the one that is being made
    main: Fiber
