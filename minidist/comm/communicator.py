"""The one interface that every strategy is written against, whatever a rank really is.

A `Comm` is a rank's handle on a group of ranks. It offers point-to-point messages only; `minidist.collectives` builds
the rest from them. All messages of one collective call share a *channel*: a `Comm` whose tag is the number of the call,
so that two different collectives that meet by mistake are recognised and named instead of exchanging each other's
bytes.

A *lane* is how an operation becomes nonblocking: the blocking function runs in a greenlet of its own beside the rank's
main program, first posted, first run. There is no second, asynchronous version of any algorithm.
"""

import math
import operator
import pickle
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.base.errors import BufferReuseError, RankDeadError, UsageError
from minidist.base.trace import MessageEvent, Trace, purpose
from minidist.comm.buffers import may_overlap
from minidist.comm.call_site import NOWHERE, Site, user_site

if TYPE_CHECKING:
    from minidist.comm.world import World

ANY = -1  # "from whoever sends": a wildcard source
CALLS = 2**14  # collective calls on one communicator are numbered modulo this
MAX_TAG = CALLS - 1  # MPI guarantees tags up to 2**15 - 1; the upper half is for headers


class Request:
    """A nonblocking send or receive. `peer` is a rank of the communicator; a wildcard's peer is known after the wait.

    Each world has a subclass with what it must remember until the wait.
    """

    __slots__ = ("array", "comm", "event", "finished", "kind", "operation", "peer", "site", "tag")

    def __init__(
        self, comm: "Comm", kind: str, array: np.ndarray, peer: int, tag: int, site: Site, event: MessageEvent
    ) -> None:
        self.comm, self.kind, self.array, self.peer, self.tag = comm, kind, array, peer, tag
        self.operation, self.site, self.event = comm.signature, site, event
        self.finished = False  # has it been waited for?

    def wait(self) -> np.ndarray:
        return self.comm.wait(self)

    def describe(self) -> str:
        way = "to" if self.kind == "send" else "from"
        other = "any rank" if self.peer == ANY else f"rank {self.comm.members[self.peer]}"
        what = self.kind if self.operation == "message" else f"{self.operation}: {self.kind}"
        return f"{what} {way} {other}, tag {self.tag}, {self.array.nbytes} B, at {self.site}"


class Work:
    """A posted collective: `wait()` returns what the blocking call would have returned."""

    __slots__ = (
        "arrays",
        "checksums",
        "comm",
        "context",
        "end",
        "error",
        "finished",
        "function",
        "operation",
        "posted",
        "result",
        "site",
        "waiter",
    )

    def __init__(
        self,
        comm: "Comm",
        function: Callable[[], Any],
        operation: str,
        site: Site,
        posted: float,
        arrays: Sequence[np.ndarray] = (),
    ) -> None:
        self.arrays = arrays  # the program must leave them alone until the wait
        self.checksums: list[int] = []
        self.comm, self.function, self.operation, self.site, self.posted = comm, function, operation, site, posted
        self.context = copy_context()  # the work runs as if it had run here: same purpose, same everything
        self.finished = False
        self.result: Any = None
        self.error: RankDeadError | None = None  # what wait() raises instead
        self.end = posted
        self.waiter: Any = None  # who is blocked in wait()

    def wait(self) -> Any:
        return self.comm.world.wait_work(self)

    def describe(self) -> str:
        return f"{self.operation}, posted at {self.site}"


class Comm:
    """A rank's handle on a group of ranks.

    rank, size: this rank's number in the group, and the group's size. members: world rank of each member. name: the
    context; equal on all members, and unlike any other communicator's. Arrays must be C-contiguous; nothing is copied.
    """

    def __init__(self, world: "World", name: str, members: Sequence[int], rank: int) -> None:
        self.world, self.name, self.members, self.rank = world, name, members, rank
        self.size = len(members)
        self.operation = self.signature = "message"  # signature: what both sides of a message must have alike
        self.context = name
        self.nodes: list[list[int]] | None = None  # its ranks node by node, when somebody has said so; see TwoLevel
        self.call: int | None = None  # a channel's tag
        self.site: Site | None = None  # where a channel's collective was called; nobody looks in a lean world
        self._calls = 0
        self._children = 0
        world.register(self)

    def __repr__(self) -> str:
        return f"Comm({self.name!r}, rank {self.rank} of {self.size})"

    # point to point ---------------------------------------------------------------------------------------------------

    def isend(self, array: np.ndarray, dest: int, tag: int = 0) -> Request:
        """Start sending `array` (its bytes, to rank `dest`); do not touch it before `wait`."""
        return self._post("send", array, dest, tag, True)

    def irecv(self, array: np.ndarray, source: int, tag: int = 0) -> Request:
        """Start receiving into `array` from rank `source` (or ANY); do not touch it before `wait`."""
        return self._post("receive", array, source, tag, True)

    def wait(self, request: Request) -> np.ndarray:
        """Block until the request is complete; returns its array."""
        if not request.finished:
            self.world.wait(request)
            request.finished = True
        return request.array

    def waitall(self, requests: Sequence[Request]) -> None:
        """Wait for each request, in the order given."""
        for request in requests:
            self.wait(request)

    def send(self, array: np.ndarray, dest: int, tag: int = 0) -> None:
        """Send; block until the buffer may be used again: at once, or when the receiver arrives. Rely on neither."""
        self.wait(self._post("send", array, dest, tag, False))

    def recv(self, array: np.ndarray, source: int, tag: int = 0) -> int:
        """Receive into `array`; returns the source's rank (of interest with ANY)."""
        request = self._post("receive", array, source, tag, False)
        self.wait(request)
        return request.peer

    def sendrecv(self, outgoing: np.ndarray, dest: int, incoming: np.ndarray, source: int, tag: int = 0) -> None:
        """Send and receive at once: the step of every ring. Cannot deadlock on buffering."""
        if self.world.lean and self.world.exchange(self, outgoing, dest, incoming, source, tag):
            return
        if self.world.checks and may_overlap(outgoing, incoming):
            raise BufferReuseError(
                f"rank {self.rank}: sendrecv receives into the memory that it sends from, at"
                f" {self.site or user_site(2)}; give each message a buffer of its own"
            )
        receive = self._post("receive", incoming, source, tag, False)
        send = self._post("send", outgoing, dest, tag, False)
        self.wait(receive)
        self.wait(send)

    def send_object(self, value: Any, dest: int, tag: int = 0) -> None:
        """Send any picklable object: two messages, its length (8 B) and its bytes."""
        data = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        self.send(np.array([data.size], dtype=np.int64), dest, tag)
        self.send(data, dest, tag)

    def recv_object(self, source: int, tag: int = 0) -> Any:
        """Receive what `send_object` sent."""
        length = np.empty(1, dtype=np.int64)
        source = self.recv(length, source, tag)
        data = np.empty(int(length[0]), dtype=np.uint8)
        self.recv(data, source, tag)
        return pickle.loads(data.tobytes())

    def barrier(self) -> None:
        """Nobody leaves before all have entered: ceil(log2 n) rounds of empty messages (Hensgen et al. 1988)."""
        channel = self.collective("barrier")
        nothing = np.empty(0, dtype=np.uint8)
        distance = 1
        while distance < channel.size:
            to, source = (channel.rank + distance) % channel.size, (channel.rank - distance) % channel.size
            channel.sendrecv(nothing, to, nothing, source)
            distance *= 2

    # time -------------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        """Seconds since the run began, on this lane's clock (virtual or real)."""
        return self.world.time()

    def compute(
        self, operations: Sequence[tuple[float, float]] = (), seconds: float = 0.0, name: str = "compute"
    ) -> None:
        """Say what was computed: (FLOPs, bytes) of each operation, or seconds. Advances a virtual clock only."""
        if not 0.0 <= seconds < math.inf:
            raise UsageError(
                f"rank {self.rank}: compute of {seconds:g} s; time does not run backwards, nor for ever: pass seconds"
                " of at least 0"
            )
        self.world.compute(operations, seconds, name)

    def progress(self) -> None:
        """Let lanes advance. Answers nothing, so nothing becomes nondeterministic."""
        self.world.progress()

    @property
    def trace(self) -> Trace:
        """This rank's record."""
        return self.world.trace_of(self)

    # groups -----------------------------------------------------------------------------------------------------------

    def dup(self) -> "Comm":
        """The same ranks, another context: its messages never meet this one's. A call of all members."""
        self._children += 1
        return Comm(self.world, f"{self.name}.{self._children}dup", self.members, self.rank)

    def group(self, ranks: Sequence[int], label: str) -> "Comm":
        """A communicator of `ranks` (of this one, in that order), this rank among them. Sends nothing.

        Every member must call it with the same ranks, as its same-numbered call of `group`, `dup` or `split` here.
        """
        self._children += 1
        ranks = [int(r) for r in ranks]
        if self.rank not in ranks or len(set(ranks)) != len(ranks) or not 0 <= min(ranks) <= max(ranks) < self.size:
            raise UsageError(
                f"rank {self.rank}: a group needs distinct ranks of 0..{self.size - 1} with its caller, got {ranks}"
            )
        name = f"{self.name}.{self._children}{label}"
        return Comm(self.world, name, [self.members[r] for r in ranks], ranks.index(self.rank))

    def split(self, color: int, key: int = 0) -> "Comm":
        """One communicator for each color, ordered by (key, rank).

        Everybody learns everybody's (color, key), 16 B each, in ceil(log2 n) messages a rank (Bruck et al. 1997): row i
        of a rank's table is that of rank + i; who has the next rows of the table sends them.
        """
        if color < 0:
            raise UsageError(f"rank {self.rank}: split needs a color of at least 0, got {color}")
        channel = self.collective("split")
        table = np.zeros((self.size, 2), dtype=np.int64)
        table[0] = (color, key)
        known = 1
        with purpose("startup"):
            while known < self.size:
                more = min(known, self.size - known)
                to, source = (self.rank - known) % self.size, (self.rank + known) % self.size
                channel.sendrecv(table[:more], to, table[known : known + more], source)
                known += more
        table = np.roll(table, self.rank, axis=0)
        same = np.flatnonzero(table[:, 0] == color).tolist()
        return self.group(sorted(same, key=lambda r: (table[r, 1], r)), f"color{color}")

    # collectives ------------------------------------------------------------------------------------------------------

    def collective(self, operation: str, alike: str = "") -> "Comm":
        """A channel for the next collective call; a channel answers itself, so that collectives may be composed.

        alike: what every member must pass the same, beside the operation: compared with each message.
        """
        if self.call is not None:
            return self
        channel = Comm.__new__(Comm)
        channel.__dict__.update(self.__dict__)
        channel.operation, channel.context = operation, self.name + "/collectives"
        channel.signature = f"{operation} {alike}" if alike else operation
        channel.call, channel.site = self._calls % CALLS, None if self.world.lean else user_site(2)
        self._calls += 1
        return channel

    def post(self, function: Callable[[], Any], arrays: Sequence[np.ndarray] = ()) -> Work:
        """Run `function` in this communicator's lane; called on the channel that the function uses.

        arrays: what it reads and writes, and nobody else until its wait.
        """
        site = self.site or user_site(2)
        return self.world.post_work(Work(self, function, self.operation, site, self.world.time(), arrays))

    # ------------------------------------------------------------------------------------------------------------------

    def _post(self, kind: str, array: np.ndarray, peer: int, tag: int, guarded: bool) -> Request:
        if self.call is not None:
            tag, site = self.call, self.site or NOWHERE
        else:
            site = user_site(3)
            if tag.__class__ is not int:
                tag = operator.index(tag)
            if not 0 <= tag <= MAX_TAG:
                raise UsageError(f"rank {self.rank}: tag {tag} is outside 0..{MAX_TAG}, at {site}")
        if not 0 <= peer < self.size and not (peer == ANY and kind == "receive"):
            raise UsageError(
                f"rank {self.rank}: {kind} names rank {peer}, but {self.name} has ranks 0..{self.size - 1}, at {site}"
            )
        flags = getattr(array, "flags", None)
        if flags is None or not flags.c_contiguous or (kind == "receive" and not getattr(flags, "writeable", True)):
            raise UsageError(f"rank {self.rank}: {kind} of {_why_not(array)}, at {site}")
        if array.dtype.hasobject:
            raise UsageError(
                f"rank {self.rank}: {kind} of an array of Python objects, which are addresses in this process; "
                f"convert it to numbers, or use send_object, at {site}"
            )
        return self.world.post(self, kind, array, peer, tag, site, guarded)


def _why_not(array: Any) -> str:
    """Why this cannot be a message, and what to pass instead."""
    if not hasattr(array, "flags"):
        return f"a {type(array).__name__}; messages are arrays: pass numpy.array(...), or use send_object"
    if not array.flags.c_contiguous:
        return (
            f"an array with strides {array.strides}; messages need C-contiguous arrays: "
            "pass numpy.ascontiguousarray(array) or receive into a fresh one"
        )
    return "an array that is read-only; receive into one that may be written"
