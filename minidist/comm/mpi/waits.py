"""What a rank of the MPI world waits in: messages, streams, other ranks; and how its watchdog writes that down.

Proved by: tests/comm/test_conformance.py, tests/comm/mpi/test_failures.py
"""

import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from minidist.base.traces import MessageEvent
from minidist.comm.call_site import CallSite, call_site, call_site_of_thread
from minidist.comm.message_checks import CheckedMessages
from minidist.comm.tags import describe
from minidist.comm.waiting import error_line, without_checksums
from minidist.core.base.fibers import Fiber
from minidist.core.comm.communicator import ANY, PointToPoint, Request, Work

_FIELDS = tuple(one.name for one in fields(MessageEvent))
_values = attrgetter(*_FIELDS)


@dataclass(slots=True, eq=False)
class MPIRequest(Request):
    """A request and what the MPI world must remember, and keep alive, until it has been waited for."""

    comm: CheckedMessages
    site: CallSite
    event: MessageEvent
    buffer: np.ndarray  # the array, or its copy on the host
    checksum: int | None = field(default=None, init=False)  # of what is sent
    header: bytes | bytearray | None = field(default=None, init=False)
    header_request: Any = field(default=None, init=False)
    payload: Any = field(default=None, init=False)  # MPI's request; None until the header has come
    describe = describe


class Stream:
    """The execution context of a communicator's asynchronous work on this rank."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fiber: Fiber | None = None
        self.queue: deque[Work] = deque()
        self.resumed = 0  # how often it has run
        self.waiting: MPIRequest | None = None


class Entering:
    """A rank makes a communicator and waits for the other members. text: what else it does with them, in words."""

    def __init__(self, comm: PointToPoint, origin: str = "", text: str = "") -> None:
        self.origin = origin
        self.peers = [member for member in comm.members if member != comm.members[comm.rank]]
        site = call_site(sys._getframe(1))
        self.text = text or f"making the communicator {comm.name} of ranks {list(comm.members)}, at {site}"

    def describe(self) -> str:
        """Return what the rank waits in."""
        return self.text


class Exchanging(NamedTuple):
    """A rank is in a sendrecv whose requests are not kept."""

    comm: PointToPoint
    dest: int
    source: int
    tag: int
    nbytes: int

    def describe(self) -> str:
        """Return what the rank waits in."""
        dest, source = self.comm.members[self.dest], self.comm.members[self.source]
        return f"{self.comm.operation}: sendrecv to rank {dest} and from rank {source}, tag {self.tag}, {self.nbytes} B"


class Returned:
    """A rank's program is over; it waits for the others to finish, because it may have to report them."""


Wait = Request | Work | Entering | tuple[Any, ...] | Returned | None  # a tuple: the arguments of an Exchanging


def state_of(world: Any, silence: float = 0.0) -> dict[str, object]:
    """Return what a rank does now: rank, state, peers, and what it waits in, with the line. Called in any thread.

    world: the `MPIWorld` of the rank. silence: seconds for which it has computed without a message.
    """
    state: dict[str, object] = {"rank": world.rank, "state": world.state, "peers": []}
    if world.state != "computing":
        return state
    # The rank goes on while it is looked at, and what it waits in may describe itself by a program of the user's.
    try:
        return state | _waiting(world, silence)
    except Exception as error:
        return state | {"what": f"something that cannot be described ({type(error).__name__})"}


def doing(state: Mapping[str, Any]) -> str:
    """Return in words what a rank does; state: see `state_of`."""
    if state["state"] == "waiting":
        return f"waits in {without_checksums(state['what'])}"
    if state["state"] == "returned":
        return "has returned, and waits for the others to finish"
    return str(state["what"]) if "what" in state else "waits for all ranks to start"


def _waiting(world: Any, silence: float) -> dict[str, object]:
    now = world.waiting
    waiting = Exchanging._make(now) if isinstance(now, tuple) else now
    if waiting is None:
        return {"what": f"computing at {_site(world)}", "silence": silence}

    # What it waits in, and which ranks could end the wait.
    assert isinstance(waiting, Request | Work | Entering | Exchanging)
    what = waiting.describe()
    state: dict[str, object] = {}
    if isinstance(waiting, MPIRequest):
        members = waiting.comm.members
        others = [member for member in members if member != world.rank]
        state["peers"] = others if waiting.peer == ANY else [members[waiting.peer]]
        state["message"], state["members"] = as_dict(waiting.event), list(members)
    elif isinstance(waiting, Exchanging):
        state["peers"] = [waiting.comm.members[waiting.source]]
    elif isinstance(waiting, Entering):
        state["peers"] = waiting.peers
        state["origin"] = waiting.origin

    # What the operation itself does not know: the line of the wait, an exception before it, the other streams.
    site = _site(world)
    if str(site) not in what:
        what += f", waited for at {site}"
    if world.handling is not None:
        what += f", while it handles {error_line(world.handling)}"
    pending = [item.describe() for stream in tuple(world.active) if (item := stream.waiting) is not None]
    if pending:
        what += f"; its stream waits in {'; '.join(pending)}"
    return state | {"state": "waiting", "what": what}


def _site(world: Any) -> CallSite:
    """Return where the main program is. While a stream runs, the main program's stack is its greenlet's."""
    return call_site_of_thread(world.thread, world.main.gr_frame)


def as_dict(event: MessageEvent) -> dict[str, Any]:
    """Return the event's fields, in a tenth of the time of `dataclasses.asdict`."""
    return dict(zip(_FIELDS, _values(event), strict=True))
