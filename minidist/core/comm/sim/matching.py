"""Posting, matching and waiting in the simulated world: which send matches which receive, and what the message costs.

post     a send and a receive of one (context, source, destination, tag) meet in the order of their posts, at once
         when the other side is there already
deliver  the array is copied once, and a stream that was blocked in a wait can run again
wait     blocks until the two have met, then advances the clock (the formulas are those of `clock`)

A world that checks or records messages, or gives receives from any rank a message, has a subclass (minidist/comm/sim).

Proved by: tests/comm/sim/test_world.py, tests/comm/sim/test_choosers.py
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.core.comm.point_to_point import PointToPoint, Request, Work
from minidist.core.comm.sim.state import Key, SimRequest, SimState


class Matching:
    """The messages of a run. block: let other streams run until the request can go on.

    cost_of: a message -> its (alpha, beta, overhead); None: the same for every message. key_of: a send -> what its
    receive must have equal, where that is not its context, ranks and tag (`FoldedWorld`).
    """

    requests: type[SimRequest] = SimRequest  # what a message in flight is
    cost_of: Callable[[SimRequest], tuple[float, float, float]] | None = None
    key_of: Callable[[SimRequest], Key] | None = None

    def __init__(self, state: SimState, block: Callable[[Request | Work], None]) -> None:
        self.state, self.block = state, block
        self.sends, self.receives = state.sends, state.receives
        links = state.links
        self.alpha, self.beta, self.overhead = links.alpha, links.beta, links.overhead
        if links.link is not None:
            self.cost_of = self._cost_of_link

    def _cost_of_link(self, request: SimRequest) -> tuple[float, float, float]:
        """Return the costs of a message whose link differs from others."""
        pair = request.stream.rank, request.other
        alpha, beta = self.state.links.cost(*(pair if request.kind == "send" else pair[::-1]))
        return alpha, beta, self.overhead

    def post(
        self, comm: PointToPoint, kind: str, array: np.ndarray, peer: int, tag: int, nonblocking: bool
    ) -> SimRequest:
        """Start a send or a receive."""
        stream = self.state.running
        other, nbytes, now = comm.members[peer], array.nbytes, stream.time
        request = self.requests(comm, kind, array, peer, tag, nonblocking, stream, other, nbytes, now)
        if kind == "send":
            self.send(request)
        else:
            self.receive(request)
        return request

    def send(self, request: SimRequest) -> None:
        """Let a send leave, and meet the oldest receive that waits for it."""
        # The out-port sends one message after the other, and is busy with each for its overhead and its bytes.
        stream, alpha, beta, overhead = request.stream, self.alpha, self.beta, self.overhead
        if self.cost_of is not None:
            alpha, beta, overhead = self.cost_of(request)
        request.depart = depart = stream.time if stream.time > stream.out_free else stream.out_free
        left = depart + beta * request.nbytes
        request.end = stream.out_free = left + overhead
        request.arrival = left + alpha

        key = (request.comm.context, stream.rank, request.other, request.tag)
        if self.key_of is not None:
            key = self.key_of(request)
        receives = self.receives.get(key)
        if receives is None:
            self.queue(self.sends, key, request)
        else:
            if len(receives) == 1:
                del self.receives[key]
            self.deliver(request, receives.pop(0))

    def receive(self, request: SimRequest) -> None:
        """Let a receive meet the oldest send that waits for it."""
        key = (request.comm.context, request.other, request.stream.rank, request.tag)
        sends = self.sends.get(key)
        if sends is None:
            self.queue(self.receives, key, request)
        else:
            if len(sends) == 1:
                del self.sends[key]
            self.deliver(sends.pop(0), request)

    def queue(self, queues: dict[Key, list[SimRequest]], key: Key, request: SimRequest) -> None:
        """Keep a message whose other side is not there yet."""
        if key in queues:
            queues[key].append(request)
        else:
            queues[key] = [request]

    def deliver(self, send: SimRequest, receive: SimRequest) -> None:
        """Let a send and its receive meet: copy once, wake the streams that wait."""
        # The message itself: one copy, from the sender's array into the receiver's.
        self.copy(send, receive)

        # The times of the two are those of the picture in `clock`. A synchronous send ends no earlier than its receive
        # is posted; one that is complete already was buffered.
        posted = receive.arrival
        if posted > send.end and not send.complete:
            send.end = posted
        if send.arrival > posted:
            receive.arrival = send.arrival
        receive.complete = send.complete = True

        # Whoever waits for one of the two can run again.
        if receive.waiter is not None:
            self.state.ready.append(receive.waiter)
            receive.waiter = None
        if send.waiter is not None:
            self.state.ready.append(send.waiter)
            send.waiter = None

    def copy(self, send: SimRequest, receive: SimRequest) -> None:
        """Copy what is sent to where it is received."""
        receive.array[...] = send.array

    # waiting ----------------------------------------------------------------------------------------------------------

    def wait(self, request: Any) -> None:
        """Return when the request is complete, and advance the stream's clock to that time."""
        # Let the others run until it has met its other side.
        stream = self.state.running
        if not request.complete:
            request.waiter = stream
            self.block(request)

        # A receive: `landed` of the picture in `clock`. The in-port takes one message after the other.
        end = request.end
        if request.kind == "receive":
            beta, overhead = self.beta, self.overhead
            if self.cost_of is not None:
                _, beta, overhead = self.cost_of(request)
            end = stream.in_free + (overhead + beta * request.nbytes)
            if request.arrival > end:
                end = request.arrival
            stream.in_free = end

        # What was complete before the wait began costs nothing.
        if end > stream.time:
            stream.time = end
