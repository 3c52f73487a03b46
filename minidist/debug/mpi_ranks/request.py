"""Requests of nonblocking operations, and what a message's status says.

Proved by: tests/mpi_ranks/test_messages.py
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from minidist.comm.call_site import call_site
from minidist.comm.tags import LocatedRequest
from minidist.core.comm.communicator import Work
from minidist.debug.mpi_ranks.buffers import one
from minidist.debug.mpi_ranks.constants import ANY_SOURCE, ANY_TAG, PROC_NULL, UNDEFINED, Exception, failed, refusing
from minidist.debug.mpi_ranks.datatype import BYTE, Datatype
from minidist.debug.mpi_ranks.handle import Handle, Named
from minidist.debug.mpi_ranks.matching import done
from minidist.debug.mpi_ranks.world import MPIWorld

_COUNT = 3  # the place of the bytes in a status
Part = LocatedRequest | Work


def _field(place: int, kind: type = int) -> tuple[Any, Any]:
    """Return the methods of a status that read a field and write it."""

    def write(self: "Status", value: int) -> None:
        self._fields[place] = value

    return lambda self: kind(self._fields[place]), write


class Status:
    """What is known of a message: its source, tag and bytes."""

    def __init__(self, status: "Status | None" = None) -> None:
        if status is not None and not isinstance(status, Status):
            raise TypeError(f"Status() takes a Status, not a {type(status).__name__}")
        # The source, the tag, the error, the bytes, and whether it was cancelled.
        self._fields: Any = array("q", [ANY_SOURCE, ANY_TAG, 0, 0, 0] if status is None else status._fields)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Status) and self._fields == other._fields

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return _status_of, (list(self._fields),)

    Get_source, Set_source = _field(0)
    Get_tag, Set_tag = _field(1)
    Get_error, Set_error = _field(2)
    Is_cancelled, Set_cancelled = _field(4, bool)
    source, tag, error = property(Get_source, Set_source), property(Get_tag, Set_tag), property(Get_error, Set_error)
    count, cancelled = property(*_field(_COUNT)), property(Is_cancelled, Set_cancelled)

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """Return the number of elements that were received; UNDEFINED when the bytes are no whole number of them."""
        size = datatype.Get_size()
        if size == 0:
            return 0
        count, rest = divmod(self._fields[_COUNT], size)
        return UNDEFINED if rest else count

    def Get_elements(self, datatype: Datatype) -> int:
        """Return the number of basic elements that were received."""
        per = max(1, len(datatype.layout.offsets))
        elements: int = self._fields[_COUNT] * per // max(1, datatype.Get_size())
        return elements

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        self._fields[_COUNT] = count * datatype.Get_size()

    def tomemory(self) -> memoryview:
        """Return the fields as memory that may be changed."""
        return memoryview(self._fields)

    def become(self, fields: Sequence[int]) -> None:
        """Take other values."""
        self._fields[:] = array("q", fields)


def _status_of(fields: list[int]) -> Status:
    status = Status()
    status.become(fields)
    return status


EMPTY = (ANY_SOURCE, ANY_TAG, 0, 0, 0)
_CANCEL = (ANY_SOURCE, ANY_TAG, 0, 0, 1)
NO_PROC = (PROC_NULL, ANY_TAG, 0, 0, 0)


@dataclass(eq=False)
class Pending:
    """An operation that has been started.

    parts: its messages or works. finish: returns the operation's result once they are complete. fields: of the status,
    of an operation that has no receive. start: begins a persistent operation, and returns what is pending then.
    """

    world: MPIWorld | None
    parts: Sequence[Part] = ()
    finish: Callable[[], Any] = lambda: None
    fields: Sequence[int] = EMPTY
    start: "Callable[[], Pending] | None" = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.active = self.start is None

    def ready(self) -> bool:
        """Return whether the operation can end without waiting."""
        return all(map(done, self.parts))

    def waits_in(self) -> Part:
        """Return the part that keeps it, for reports."""
        return next((part for part in self.parts if not done(part)), self.parts[0])

    def end(self) -> tuple[Any, Sequence[int]]:
        """Wait for all parts; return the result and the fields of the status. MPI.Exception for a message too long."""
        for part in () if self.cancelled else self.parts:
            part.wait()
            if isinstance(part, LocatedRequest) and part.kind == "receive" and part.nbytes > part.array.nbytes:
                raise failed(
                    "ERR_TRUNCATE",
                    f"rank {part.stream.rank} receives at most {part.array.nbytes} B at {part.site}, but rank"
                    f" {part.other} sent {part.nbytes} B; pass a larger buffer",
                )
        return None if self.cancelled else self.finish(), self.said()

    def said(self) -> Sequence[int]:
        """Return what the status of a complete operation says."""
        if self.cancelled:
            return _CANCEL
        receives = [p for p in self.parts if isinstance(p, LocatedRequest) and p.kind == "receive"]
        return (receives[-1].peer, receives[-1].tag, 0, receives[-1].nbytes, 0) if receives else self.fields


class Request(Handle):
    """The handle of a nonblocking operation."""

    held: Pending | None
    named = Named[Pending]("ERR_REQUEST", "the request is REQUEST_NULL: its operation has ended")

    def _end(self, status: Status | None) -> Any:
        """Let the operation end, and return its result; nothing for a request without one."""
        pending, value = self.held, None
        fields: Sequence[int] = EMPTY
        if pending is not None and pending.active:
            pending.active = False
            if pending.start is None:
                self.held = None
            try:
                value, fields = pending.end()
            except Exception as error:
                fields = ANY_SOURCE, ANY_TAG, error.error_code, 0, 0
                raise
            finally:
                if status is not None:
                    status.become(fields)
        elif status is not None:
            status.become(EMPTY)
        return value

    @property
    def open(self) -> bool:
        """Whether an operation is under way."""
        return self.held is not None and self.held.active

    @property
    def _ready(self) -> bool:
        """Whether an operation is under way that can end without waiting."""
        return self.open and self.named.ready()

    def _poll(self) -> bool:
        """Return whether the operation can end now; when it cannot, other ranks run first."""
        return _wait_for([self], all, polls=True)

    def wait(self, status: Status | None = None) -> Any:
        """Wait for the operation and return its result: the object of a receive."""
        return self._end(status)

    def Wait(self, status: Status | None = None) -> bool:
        self._end(status)
        return True

    def test(self, status: Status | None = None) -> tuple[bool, Any]:
        """Return whether the operation is complete, and its result."""
        return (True, self._end(status)) if self._poll() else (False, None)

    def Test(self, status: Status | None = None) -> bool:
        """Return whether the operation is complete; it has ended then."""
        return self.test(status)[0]

    def Get_status(self, status: Status | None = None) -> bool:
        """Return whether the operation is complete; it has not ended then."""
        flag = self._poll()
        if flag and status is not None:
            status.become(self.held.said() if self.held is not None and self.held.active else EMPTY)
        return flag

    get_status = Get_status

    # several ----------------------------------------------------------------------------------------------------------

    @classmethod
    def waitall(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> list[Any]:
        """Wait for all operations and return their results."""
        ends, values, failures = [Status() for _ in requests], [], list[Exception]()
        for request, status in zip(requests, ends, strict=True):
            try:
                values.append(request._end(status))
            except Exception as error:
                failures.append(error)
        _fill(statuses, ends)
        if failures:
            raise failures[0] if len(requests) == 1 else failed("ERR_IN_STATUS", failures[0].error_string)
        return values

    @classmethod
    def testall(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> tuple[bool, Any]:
        """Return whether all operations are complete, and their results."""
        return (True, cls.waitall(requests, statuses)) if _wait_for(requests, all, polls=True) else (False, None)

    @classmethod
    def waitany(cls, requests: Sequence["Request"], status: Status | None = None) -> tuple[int, Any]:
        """Wait for one operation; return its number and its result."""
        _wait_for(requests, any)
        index = _first(requests)
        return index, (Request() if index == UNDEFINED else requests[index])._end(status)

    @classmethod
    def testany(cls, requests: Sequence["Request"], status: Status | None = None) -> tuple[int, bool, Any]:
        """Return the number of an operation that is complete, whether there is one, and its result."""
        if not _wait_for(requests, any, polls=True):
            return UNDEFINED, False, None
        index, value = cls.waitany(requests, status)
        return index, True, value

    @classmethod
    def waitsome(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> tuple[Any, Any]:
        """Wait for at least one operation; return the numbers and results of all that are complete."""
        if not any(request.open for request in requests):
            return None, None
        _wait_for(requests, any)
        indices = [k for k, request in enumerate(requests) if request._ready]
        return indices, cls.waitall([requests[k] for k in indices], statuses)

    @classmethod
    def testsome(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> tuple[Any, Any]:
        """Return the numbers and results of the operations that are complete."""
        if not any(request.open for request in requests):
            return None, None
        return cls.waitsome(requests, statuses) if _wait_for(requests, any, polls=True) else ([], [])

    @classmethod
    def Get_status_all(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> bool:
        """Return whether all operations are complete; none has ended then."""
        flag = _wait_for(requests, all, polls=True)
        if flag:
            ends = [Status() for _ in requests]
            for request, status in zip(requests, ends, strict=True):
                request.Get_status(status)
            _fill(statuses, ends)
        return flag

    @classmethod
    def Get_status_any(cls, requests: Sequence["Request"], status: Status | None = None) -> tuple[int, bool]:
        """Return the number of an operation that is complete, and whether there is one; it has not ended then."""
        if not _wait_for(requests, any, polls=True):
            return UNDEFINED, False
        index = _first(requests)
        (Request() if index == UNDEFINED else requests[index]).Get_status(status)
        return index, True

    @classmethod
    def Get_status_some(cls, requests: Sequence["Request"], statuses: list[Status] | None = None) -> list[int] | None:
        """Return the numbers of the operations that are complete; none has ended then."""
        if not any(request.open for request in requests):
            return None
        _wait_for(requests, any, polls=True)
        return [k for k, request in enumerate(requests) if request._ready]

    get_status_all, get_status_any, get_status_some = Get_status_all, Get_status_any, Get_status_some

    # ending without waiting -------------------------------------------------------------------------------------------

    def Cancel(self) -> None:
        """Take the operation back, if its message has not been matched."""
        pending = self.named
        messages = [part for part in pending.parts if isinstance(part, LocatedRequest)]
        if pending.world is not None and messages and pending.active:
            pending.cancelled = min([pending.world.matching.cancel(part) for part in messages])
            for part in messages:
                part.wait()

    def Free(self) -> None:
        """Give the handle back; an operation under way goes on."""
        pending = self.named
        if pending.world is not None:
            for part in pending.parts:
                pending.world.state.unwaited.pop(id(part), None)
        self.held = None

    def cancel(self) -> None:
        self.Cancel()

    def free(self) -> None:
        """Give the handle back, if there is one."""
        if self.held is not None:
            self.Free()


def _without_results() -> None:
    """Give Request the operations on several requests that return no objects: Waitall for waitall, and so on."""

    def install(name: str, shorten: Callable[[Any], Any]) -> None:
        def operation(cls: type[Request], requests: Sequence[Request], statuses: Any = None) -> Any:
            return shorten(getattr(cls, name)(requests, statuses))

        operation.__name__ = operation.__qualname__ = name.capitalize()
        operation.__doc__ = getattr(Request, name).__doc__
        setattr(Request, name.capitalize(), classmethod(operation))

    install("waitall", lambda _: True)
    for name in ("testall", "waitany", "waitsome", "testsome"):
        install(name, lambda found: found[0])
    install("testany", lambda found: found[:2])


_without_results()


def _fill(statuses: Any, ends: list[Status]) -> None:
    """Give a program's list the statuses, in the objects that it has; a list that is too short grows."""
    for status, end in zip(statuses or (), ends, strict=False):
        status.become(end._fields)
    if isinstance(statuses, list):
        statuses += ends[len(statuses) :]


def _first(requests: Sequence[Request]) -> int:
    """Return the number of the operation that was complete first; UNDEFINED when none is under way."""

    def end(k: int) -> float:
        ends = [part.arrival if isinstance(part, LocatedRequest) else part.end for part in requests[k].named.parts]
        return max(ends, default=0.0)

    return min((k for k, request in enumerate(requests) if request._ready), key=end, default=UNDEFINED)


def _wait_for(requests: Sequence[Request], how_many: Callable[[Any], bool], polls: bool = False) -> bool:
    """Let other ranks run until any or all operations under way are complete; return whether they are."""
    open_ones = [request.held for request in requests if request.open and request.held is not None]
    if not open_ones:
        return True

    def ready() -> bool:
        return how_many(pending.ready() for pending in open_ones)

    waiting = [pending for pending in open_ones if not pending.ready()]
    if waiting and not ready() and waiting[0].world is not None:
        waiting[0].world.matching.sleep(ready, waiting[0].waits_in(), polls)
    return ready()


class Prequest(Request):
    """The handle of a persistent operation, which may be started again and again."""

    def __new__(cls, request: Request | None = None) -> Self:
        if request and request.held is not None and request.held.start is None:
            raise TypeError("Prequest() takes a persistent request, such as Send_init returns")
        return super().__new__(cls, request)

    def Start(self) -> None:
        """Begin the operation."""
        pending = self.named
        if pending.start is None or pending.active:
            raise failed("ERR_REQUEST", "Start of an operation that is under way; wait for it first")
        now = pending.start()
        pending.world, pending.parts, pending.finish, pending.fields = now.world, now.parts, now.finish, now.fields
        pending.active, pending.cancelled = True, False

    @classmethod
    def Startall(cls, requests: Sequence["Prequest"]) -> None:
        for request in requests:
            request.Start()


class Grequest(Request):
    """The handle of an operation that the program itself completes, which is refused."""

    def __new__(cls, request: Request | None = None) -> Self:
        if request:
            raise TypeError("Grequest() takes a request that Grequest.Start returned")
        return super().__new__(cls, request)

    Start = staticmethod(refusing("MPI.Grequest.Start", "let the program keep what it waits for"))


class Held(NamedTuple):
    """A message that a matched probe has taken. comm: its communicator. send: None for one from PROC_NULL."""

    comm: Any
    send: LocatedRequest | None


NO_MESSAGE = Held(None, None)  # what a matched probe of PROC_NULL finds


class Message(Handle):
    """The handle of a message that a matched probe has found."""

    held: Held | None
    named = Named[Held]("ERR_REQUEST", "the message is MESSAGE_NULL: it has been received")

    @classmethod
    def Probe(cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> "Message":
        """Wait for a message and take it out of its queue."""
        found: Message = comm.Mprobe(source, tag, status)
        return found

    @classmethod
    def Iprobe(cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Any:
        """Return a message that is there; None when there is none."""
        return comm.Improbe(source, tag, status)

    probe, iprobe = Probe, Iprobe

    def _receive(self, message: Any, is_object: bool) -> Request:
        held = self.named
        if getattr(sys.modules["mpi4py.MPI"], self.predefined or "none", None) is not self:  # a constant stays
            self.held = None
        if held.send is None:
            return Request.of(Pending(None, fields=NO_PROC))
        buffer = None if is_object else one(message, True)
        request: Request = held.comm.receive(buffer, held.send, call_site(sys._getframe(2)))
        return request

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        self._receive(buf, False)._end(status)

    def Irecv(self, buf: Any) -> Request:
        return self._receive(buf, False)

    def recv(self, status: Status | None = None) -> Any:
        return self._receive(None, True)._end(status)

    def irecv(self) -> Request:
        return self._receive(None, True)
