"""Messages and communicators: the interface of all algorithms, for simulated ranks and for processes.

`PointToPoint` sends and receives among a group of ranks. `Comm` is a rank's handle on a group, and `CollectiveCall` is
one operation of all its ranks together, so an algorithm runs on either. Both hand their messages to a world, `Sim` or
`MPIWorld`, which have the same methods.

    comm.send(array, dest) ──▶ PointToPoint._post ──▶ Sim.post ──▶ Request
                               PointToPoint.wait  ──▶ Sim.wait

Every collective is built from these messages (`minidist/core/collectives`), and all messages of one call carry the
number of the call as their tag. In a world that checks (not `Sim`), two collectives that meet by mistake are an error
that names both, and no rank continues with the other one's bytes:

    rank 0   all_reduce #3 ──── tag 3, match key "all_reduce/ring" ────▶ rank 1   broadcast #3: MismatchError

There is no second, asynchronous version of any collective. A `Work` is a blocking function that runs in a *stream*: a
greenlet next to the rank's main program, one for each communicator. A stream runs works in the order of their start.

Proved by: tests/comm/test_conformance.py, tests/comm/sim/test_world.py
"""

from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from minidist.core.base import hooks
from minidist.core.base.arrays import Array
from minidist.core.base.errors import RankDeadError
from minidist.core.base.trace import watchers

Operations = Sequence[tuple[float, float]]  # (FLOPs, bytes) of each
ANY = -1  # "from any rank": a wildcard source
# Messages inside a layer belong to the pass that they are sent in; their purpose says which.
PASS_OF = {"tensor_forward": "forward", "tensor_backward": "backward", "regather": "backward"}
MAX_TAG = 2**14 - 1  # MPI guarantees tags up to 2**15 - 1; the upper half is for headers


@dataclass(eq=False, init=False)  # two are made for each message, and setting attributes takes half of an `__init__`
class Request:
    """A nonblocking send or receive; each world has a subclass with what it must remember until the wait.

    kind: "send" or "receive". peer: a rank of `comm`. nonblocking: the program goes on before the wait.
    """

    comm: "PointToPoint"
    kind: str
    array: Array
    peer: int
    tag: int
    nonblocking: bool
    finished: bool = field(default=False, init=False)  # has it been waited for?

    def wait(self) -> Array:
        """Block until the message is complete; return its array."""
        return self.comm.wait(self)

    def describe(self) -> str:
        """Return the operation, the other rank and the bytes, for reports."""
        return f"{self.comm.operation}: {self.kind} with rank {self.comm.members[self.peer]}, {self.array.nbytes} B"


@dataclass(slots=True, eq=False)
class Work:
    """A function that runs in a communicator's stream; `wait()` returns what the blocking call would have returned.

    arrays: those that the function reads and writes, which the program leaves alone until the wait, and perhaps other
    values. site: the line that started it, where the world looks for it.
    """

    comm: "PointToPoint"
    function: Callable[[], Any]
    arrays: Sequence[Any] = ()
    context: Context = field(default_factory=copy_context)  # it runs as if called here: with the same purpose
    watched: list[Any] = field(default_factory=list)  # what the world notes of the arrays, where it checks them
    finished: bool = False
    started: float = 0.0
    result: Any = None
    error: RankDeadError | None = None  # what wait() raises instead
    end: float = 0.0
    waiter: Any = None  # the stream that is blocked in wait()
    site: Any = None

    def wait(self) -> Any:
        """Block until the function is done; return its result."""
        return self.comm.world.wait_work(self)

    def describe(self) -> str:
        """Return the operation and the line, for reports."""
        return f"{self.comm.operation}, started at {self.site}" if self.site else self.comm.operation


class PointToPoint:
    """Messages among a group of ranks, seen from one of them.

    rank, size: this rank's number in the group, and the group's size. members: the world rank of each member. ranks:
    the number of each member in the communicator, which differs from its own only in a part of a collective call.
    name: of the communicator. context: messages of different contexts never meet. operation: for traces and reports.
    match_key: what both sides of a message must have equal. tag: that of messages that name none; in a collective call
    its number, which all its messages carry. nodes: the ranks node by node, where the links (`TwoLevel`) say them.
    numbers: of a `Comm`, those of its calls. last, again: its last all-reduce, and what makes it again (`DirectComm`).

    Arrays must be C-contiguous; nothing is copied.
    """

    numbers: Any = None
    last: Any = None
    again: Any = None

    def __init__(self, world: Any, name: str, members: Sequence[int], rank: int) -> None:
        self.world, self.name, self.context, self.members, self.rank = world, name, name, members, rank
        self.size = len(members)
        self.ranks: Sequence[int] = range(self.size)
        self.operation = self.match_key = "message"
        self.tag = 0
        self.nodes: list[list[int]] | None = None

    def isend(self, array: Array, dest: int, tag: int | None = None) -> Request:
        """Start sending `array` (its bytes, to rank `dest`); do not touch it before `wait`."""
        return self._post("send", array, dest, tag, True)

    def irecv(self, array: Array, source: int, tag: int | None = None) -> Request:
        """Start receiving into `array` from rank `source` (ANY: not in a `Sim`); do not touch it before `wait`."""
        return self._post("receive", array, source, tag, True)

    def wait(self, request: Request) -> Array:
        """Block until the request is complete; return its array."""
        if not request.finished:
            self.world.wait(request)
            request.finished = True
        return request.array

    def waitall(self, requests: Sequence[Request]) -> None:
        """Wait for each request, in the order given."""
        for request in requests:
            if not request.finished:
                self.world.wait(request)
                request.finished = True

    def send(self, array: Array, dest: int, tag: int | None = None) -> None:
        """Send; block until the buffer may be used again: at once, or when the receiver arrives. Rely on neither."""
        self.world.wait(self._post("send", array, dest, tag, False))

    def recv(self, array: Array, source: int, tag: int | None = None) -> int:
        """Receive into `array`; return the source's rank (of interest with ANY)."""
        request, wait = self._post("receive", array, source, tag, False), self.world.wait
        wait(request)
        return request.peer

    def sendrecv(self, outgoing: Array, dest: int, incoming: Array, source: int, tag: int | None = None) -> None:
        """Send and receive at once: the step of every ring. Cannot deadlock on buffering."""
        # The receive first: when the partner's message comes, its buffer is known.
        receive = self._post("receive", incoming, source, tag, False)
        send = self._post("send", outgoing, dest, tag, False)
        self.world.wait(receive)  # a world that looks ahead has another `wait` then
        self.world.wait(send)

    def _post(self, kind: str, array: Array, peer: int, tag: int | None, nonblocking: bool) -> Request:
        request: Request = self.world.post(self, kind, array, peer, self.tag if tag is None else tag, nonblocking)
        return request

    def collective(self, *_: Any, **__: Any) -> "PointToPoint":
        """Return the call whose messages an algorithm is to send: this one, or of a `Comm` a new one."""
        return self

    def barrier(self) -> None:
        """Return when every rank has entered: ceil(log2 n) rounds of empty messages (Hensgen et al. 1988)."""
        # Round k: tell rank + 2^k, hear from rank - 2^k. Afterwards this rank knows of 2^(k+1) ranks that they have
        # entered.
        call = self.collective("barrier")
        nothing = np.empty(0, dtype=np.uint8)
        distance = 1
        while distance < self.size:
            dest, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            call.sendrecv(nothing, dest, nothing, source)
            distance *= 2

    def run_async(self, function: Callable[[], Any], arrays: Sequence[Array] = ()) -> Work:
        """Run `function` in the communicator's stream. arrays: see `Work`."""
        if not callable(function):
            hooks.wrong_arguments().refuse_function(self, function)
        work = Work(self, function, arrays)
        self.world.run_async(work)
        return work

    def progress(self) -> None:
        """Advance nonblocking operations. Returns nothing, so results cannot depend on timing."""
        self.world.progress()

    def time(self) -> float:
        """Return the seconds since the run began, on this stream's clock (virtual or real)."""
        return float(self.world.time())

    def compute(self, operations: Operations = (), seconds: float = 0.0, name: str = "compute") -> None:
        """Record what was computed: (FLOPs, bytes) of each operation, or seconds. Advances a virtual clock only."""
        checked = hooks.wrong_arguments().check_operations(self, operations, seconds) or operations
        self.world.compute(checked, seconds, name)

    def advance_clock(self, name: str) -> None:
        """Advance a virtual clock by the time of the operations that a `FlopCounter` counted since the last call.

        Called before messages are sent, so that they depart when the computation before them is done. Without a counter
        nothing happens. name: of the span in the trace, such as "forward", or the purpose of the messages that follow.
        """
        for watcher in watchers.get():
            if watcher.operations is not None:
                operations, watcher.operations = watcher.operations, []
                self.world.compute(operations, 0.0, PASS_OF.get(name, name))

    @property
    def trace(self) -> Any:
        """This rank's record, a `Trace` of minidist/base/traces.py."""
        return self.world.trace_of(self)


class CollectiveCall(PointToPoint):
    """One collective call of a rank: point-to-point messages whose tag is the number of the call."""

    def __init__(self, comm: "Comm", operation: str, match_key: str) -> None:
        self.world, self.name, self.members, self.rank = comm.world, comm.name, comm.members, comm.rank
        self.size, self.ranks, self.nodes, self.context = comm.size, comm.ranks, comm.nodes, comm.of_calls
        self.operation, self.match_key = operation, match_key
        # The tag of all its messages wraps around after 16,384 calls, when the messages of the call that had it before
        # have long arrived.
        self.tag = next(comm.numbers) & MAX_TAG


class Comm(PointToPoint):
    """A rank's handle on a group of ranks.

    origin: the call that makes it, "world.2": the second one of `group` or `dup` on the world. label: what
    tells it from others of that origin. Both together are its name, equal on all members.
    """

    call_class = CollectiveCall

    def __init__(self, world: Any, origin: str, members: Sequence[int], rank: int, label: str = "") -> None:
        # A label that begins with a digit would be read as a part of the number before it.
        name = f"{origin}_{label}" if label[:1].isdigit() else f"{origin}{label}"
        super().__init__(world, name, members, rank)
        # Every rank makes the same calls in the same order, so equal numbers mean the same call, with no message sent.
        self.numbers, self._children, self.of_calls = count(), 0, name + "/collectives"

    def __repr__(self) -> str:
        return f"Comm({self.name!r}, rank {self.rank} of {self.size})"

    def collective(self, operation: str, equal: str = "", root: int | None = None, *_: Any) -> CollectiveCall:
        """Return this rank's next collective call. A world that reports messages takes further arguments.

        equal, root: what must be equal on every member, in addition to the operation, in a world that checks.
        """
        match_key = operation if root is None else f"{operation} root {root}"
        return self.call_class(self, operation, f"{match_key} {equal}" if equal else match_key)

    def dup(self) -> "Comm":
        """Return a communicator of the same ranks whose messages never meet this one's. All members must call it."""
        # Part of the name, so that two duplicates of one communicator are two contexts.
        self._children += 1
        return type(self)(self.world, f"{self.name}.{self._children}", self.members, self.rank, "dup")

    def group(self, ranks: Sequence[int], label: str) -> "Comm":
        """Return a communicator of `ranks` (of this one, in that order), this rank among them. Sends nothing.

        Every member must call it with the same ranks and label, as its same-numbered call of `group` or `dup`.
        """
        self._children += 1
        # A member is its world rank; its place in `ranks` is its number in the new communicator.
        members = [self.members[r] for r in ranks]
        place = list(ranks).index(self.rank)
        return type(self)(self.world, f"{self.name}.{self._children}", members, place, str(label))
