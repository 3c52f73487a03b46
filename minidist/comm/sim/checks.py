"""What watches the messages of a simulated run (see `watched.py`): the calls, the memory in flight, the record.

The calls of all ranks must agree: the headers of matched messages, the roots, the members of communicators.

    rank 0   broadcast root 0 ──┐   the second one differs: no stream runs on, and `look_ahead` asks what the
    rank 1   broadcast root 1 ──┘   ranks would have called next, so that the error can name the cause

A program must not write into the memory of a message or work in flight, or use it twice. So what it reads from an array
before its wait does not depend on the order in which the ranks run:

    irecv ── the program goes on ──▶ the message comes: it is put aside ──▶ wait: the array is as it was? then write it
    isend ── the program goes on ──▶ wait: the array is as it was?

The record has an event for each side of each message, or the bytes by purpose alone.

Proved by: tests/comm/sim/test_world.py, tests/comm/sim/test_misuse.py, tests/comm/sim/test_look_ahead.py,
tests/comm/test_conformance.py
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import NamedTuple

import numpy as np

from minidist.base.arrays import dtype_name
from minidist.base.traces import MessageEvent
from minidist.comm.buffers import OpenMessages, WorkArrays, changed, contents
from minidist.comm.call_log import Call, CallLog
from minidist.comm.call_site import NOWHERE, CallSite, call_site
from minidist.comm.communicator import Claim, unlike_claims
from minidist.comm.message_checks import OWN_TAG
from minidist.comm.sim.watched import RunState
from minidist.comm.tags import LocatedRequest
from minidist.core.base.errors import MismatchError
from minidist.core.base.fibers import current
from minidist.core.base.trace import current_purpose
from minidist.core.comm.communicator import ANY, MAX_TAG, PointToPoint, Request, Work
from minidist.core.comm.sim.matching import SimState, Stream

KEPT_CALLS = 8  # of a rank: sends are synchronous, so no rank is far ahead; and there may be 10,000 ranks


class UnlikeCalls(NamedTuple):
    """Two ranks have made different calls. sizes: those of the arrays differ. ready: the streams that could go on."""

    error: MismatchError
    name: str  # of the communicator
    number: int  # of the call
    sizes: bool
    ready: list[Stream]


class CallWatch:
    """What the ranks of a run have called. block: let other streams run.

    unlike: two ranks' calls differ, which ends the run.
    """

    def __init__(self, state: RunState, block: Callable[[Request | Work], None]) -> None:
        self.state, self.block = state, block
        self.logs: dict[str, dict[int, CallLog]] = defaultdict(dict)  # by communicator and world rank
        self.claims: dict[tuple[str, int], Claim] = {}  # by origin and world rank
        self.values: dict[tuple[str, int], tuple[int, int]] = {}  # of a call: the first rank's, and who has come
        self.unlike: UnlikeCalls | None = None

    def calls(self, name: str) -> dict[int, Iterable[Call]]:
        """Return the last collective calls on the communicator `name`, by world rank."""
        return {rank: log.recent for rank, log in self.logs[name].items()}

    def explain(self, name: str, ended: Collection[int] = ()) -> str:
        """Return the sentence about the calls of a communicator in which ranks differ, "" if none is known."""
        from minidist.comm.unlike_calls import unlike_calls

        return unlike_calls(name, self.calls(name), ended)

    def register(self, comm: PointToPoint, origin: str, label: str) -> None:
        """Raise MismatchError when another member made this communicator of other ranks, or with another label."""
        claims, dead = self.claims, self.state.dead
        rank, members = comm.members[comm.rank], comm.members
        self.logs[comm.name][rank] = CallLog(KEPT_CALLS)
        mine = Claim(origin, rank, members, label, NOWHERE)
        first = claims.get((origin, rank))

        # The first member that comes claims the communicator for all members; what a dead rank claimed counts no more.
        if first is None or first.rank in dead:
            mine = mine._replace(site=call_site(sys._getframe(1)))
            for member in members:
                other = claims.setdefault((origin, member), mine)
                if other is not mine and other.rank not in dead:
                    raise unlike_claims(mine, other)
                claims[origin, member] = mine
        elif not first.agrees(mine):
            raise unlike_claims(mine._replace(site=call_site(sys._getframe(1))), first)

    def differs(self, call: PointToPoint, value: int) -> bool:
        """Return whether another rank has begun this call with another value."""
        # The first rank's value, and how many ranks have come.
        key = call.name, call.tag
        first, count = self.values.get(key, (value, 0))
        self.values[key] = first, count + 1
        if count + 1 == call.size:
            del self.values[key]
        return value != first

    def meet(self, send: LocatedRequest, receive: LocatedRequest) -> bool:
        """Raise when the two sides of a message differ."""
        source, target = send.array, receive.array
        if (
            send.comm.match_key == receive.comm.match_key
            and source.dtype == target.dtype
            and source.shape == target.shape
        ):
            return False

        # What explains a difference is imported only when there is one.
        from minidist.comm.header import compare, header_of, is_of_replicas

        lines = f"{send.site}" if send.site == receive.site else f"{send.site} (sender) and {receive.site} (receiver)"
        ours, theirs = header_of(receive.comm.match_key, target), header_of(send.comm.match_key, source)
        try:
            compare(theirs, ours, send.stream.rank, receive.stream.rank, lines)
        except MismatchError as error:
            # A receive from any rank gets its message from the scheduler, which cannot pause as a rank can.
            in_calls = None not in (send.comm.opened, receive.comm.opened) and current() is self.state.running.fiber
            if not in_calls or is_of_replicas(ours.operation) or is_of_replicas(theirs.operation):
                raise
            self.refuse(error, receive.comm, ours.operation == theirs.operation)
            self.block(send if send.stream is self.state.running else receive)
        return True  # while the world looks ahead

    def refuse(self, error: MismatchError, call: PointToPoint, sizes: bool) -> None:
        """End the run with an error about two ranks' calls, as soon as the stream that runs has paused."""
        # The stack of the rank that has noticed it, as an exception raised there would have it.
        frame: FrameType | None = sys._getframe(1)
        steps: TracebackType | None = None
        while frame is not None:
            steps = TracebackType(steps, frame, frame.f_lasti, frame.f_lineno)
            frame = frame.f_back
        state = self.state
        numbers = [number for number, *_ in self.logs[call.name][state.running.rank].recent]
        number = next((number for number in reversed(numbers) if number % (MAX_TAG + 1) == call.tag % OWN_TAG), 0)
        self.unlike = UnlikeCalls(error.with_traceback(steps), call.name, number, sizes, list(state.ready))
        state.ready.clear()


@dataclass(slots=True, eq=False)
class Watched:
    """A message whose rank runs other code between its post and its wait.

    array: as it was posted. contents: what must be unchanged when the wait ends, or its checksum. open: it is not
    waited for yet. arrived: what its wait is to write.
    """

    array: np.ndarray
    contents: int | bytes
    open: bool
    arrived: np.ndarray | None = None


class BufferWatch:
    """The memory in flight of a run. ranks: those that are watched."""

    def __init__(self, state: RunState, ranks: Sequence[int]) -> None:
        self.state = state
        self.watched: dict[LocatedRequest, Watched] = {}
        self.open = {rank: OpenMessages() for rank in ranks}
        self.works = {rank: WorkArrays(rank) for rank in ranks}

    # messages ---------------------------------------------------------------------------------------------------------

    def posted(self, request: LocatedRequest) -> None:
        """Raise when the memory is that of another message or work; watch it while other code runs."""
        stream, rank, nonblocking = request.stream, request.stream.rank, request.nonblocking
        if nonblocking or self.open[rank].use_of:
            # A buffered send has left its buffer at once, which may be freed before the wait.
            leaves = request.kind == "send" and request.nbytes <= self.state.eager_limit
            self.open[rank].add(rank, request, nonblocking and not leaves)
        if request.kind == "receive" and stream.is_main and self.works[rank].guards:
            self.works[rank].refuse(request)
        # Other code always runs in addition to a stream: the rank's main program.
        if nonblocking or not stream.is_main:
            self.watched[request] = Watched(request.array, contents(request.array), nonblocking)

    def meet(self, send: LocatedRequest, receive: LocatedRequest) -> bool:
        """Raise when a buffer has changed since its post; put aside what a program must not see before its wait."""
        if not self.watched:
            return False
        self.verify(send)
        watched = self.watched.get(receive)
        if watched is None:
            return False
        if watched.open:
            watched.arrived = send.array.copy()
        else:
            self.verify(receive)
            receive.array[...] = send.array
            watched.contents = contents(receive.array)
        return True

    def verify(self, request: LocatedRequest) -> None:
        """Raise BufferReuseError, with the line that its rank has come to, when a message's buffer is not as it was."""
        watched = self.watched.get(request)
        # A buffered send holds a copy: its array may be written.
        if watched is not None and watched.array is request.array and contents(request.array) != watched.contents:
            rank = request.stream.rank
            raise changed(rank, request.describe(), self.line_of(rank))

    def waiting(self, request: LocatedRequest) -> None:
        """Note that the program waits for a message, and runs no other code."""
        watched = self.watched.get(request) if self.watched else None
        if watched is not None and watched.open:
            watched.open = False
            self.open[request.stream.rank].close(request)

    def ended(self, request: LocatedRequest) -> None:
        """Raise when the buffer of a message has changed; give the program what has arrived."""
        if not self.watched:
            return
        if request.error is None:
            self.verify(request)
        watched = self.watched.pop(request, None)
        if watched is not None and watched.arrived is not None and request.error is None:
            request.array[...] = watched.arrived

    def line_of(self, rank: int) -> CallSite:
        """Return the line at which the main program of a rank is; NOWHERE when it has ended or cannot be seen."""
        main = self.state.mains[rank]
        frame = sys._getframe(1) if main is self.state.running else getattr(main.fiber, "gr_frame", None)
        return call_site(frame, NOWHERE)

    def forget(self, rank: int) -> None:
        """Forget the works of a rank that has been killed."""
        self.works[rank] = WorkArrays(rank)


class Recorder:
    """Keeps an event of every message; the event of a request is `LocatedRequest.event`."""

    def __init__(self, state: SimState) -> None:
        self.traces = state.traces

    def posted(self, request: LocatedRequest) -> None:
        """Record that a message is posted."""
        comm, stream = request.comm, request.stream
        request.event = event = MessageEvent(
            stream.rank,
            stream.name,
            request.kind,
            request.other,
            request.tag,
            request.nbytes,
            current_purpose(),
            comm.operation,
            comm.name,
            request.arrival,
            -1.0,
            -1.0,
            0,
            dtype_name(request.array.dtype),
            request.peer == ANY,
        )
        self.traces[stream.rank].messages.append(event)

    def waiting(self, request: LocatedRequest) -> None:
        """Record when it starts: a receive when it is waited for, a send when its bytes leave the port."""
        event = request.event
        assert event is not None
        event.start = request.stream.time if request.kind == "receive" else request.depart

    def ended(self, request: LocatedRequest) -> None:
        """Record when it ends."""
        event = request.event
        assert event is not None
        event.end = request.stream.time


class Totals:
    """Counts the messages and bytes sent by purpose, so that a long run's memory does not grow."""

    def __init__(self, state: SimState) -> None:
        self.traces = state.traces

    def posted(self, request: LocatedRequest) -> None:
        """Count a send, for each rank that the one which runs stands for."""
        if request.kind == "send":
            trace = self.traces[request.stream.rank]
            trace.add_to_totals(current_purpose(), trace.ranks, trace.ranks * request.nbytes)


class Lines:
    """Finds the line of every message when it is posted, where the stack of a rank that waits cannot be looked at."""

    def posted(self, request: LocatedRequest) -> None:
        """Note the line."""
        request.posted_at = request.site
