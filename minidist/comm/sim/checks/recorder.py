"""The record of a simulated run's messages: an event for each side of each message, or the bytes by purpose alone.

    posted   an event, with the time of the post          waiting, ended   its start and its end

Proved by: tests/comm/test_conformance.py, tests/comm/sim/test_world.py
"""

from minidist.base.traces import MessageEvent
from minidist.comm.header import dtype_name
from minidist.comm.tags import LocatedRequest
from minidist.core.base.trace import current_purpose
from minidist.core.comm.communicator import ANY
from minidist.core.comm.sim.matching import SimState


class Recorder:
    """Keeps an event of every message; that of a request is `LocatedRequest.event`."""

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
