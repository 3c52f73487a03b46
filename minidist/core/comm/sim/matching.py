"""Posting, matching and waiting in the simulated world: which send matches which receive, and what the message costs.

post     a send and a receive of one (context, source, destination, tag) meet in the order of their posts, at once
         when the other side is there already; a receive from any rank waits until no stream can run any more
deliver  the array is copied once, and a stream that was blocked in a wait can run again
wait     blocks until the two have met, then advances the clock (the formulas are those of `clock`)

An object that checks or records messages, or ends ranks, is a *watcher*: it has some of these methods, which are called
here. A method that no watcher has costs nothing.

    posting(stream, comm)      before a message is posted         queued(request)   its other side is not there yet:
    posted(request)            it has been posted                                   request.error keeps it out
    meet(send, receive)        before the array is copied;        waiting(request)  its wait begins
                               True: a watcher has seen to that   ended(request)    its wait ends

Proved by: tests/comm/sim/test_world.py, tests/comm/sim/test_choosers.py
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.core.base import hooks
from minidist.core.base.trace import current_purpose
from minidist.core.comm.point_to_point import ANY, PointToPoint, Request, Work
from minidist.core.comm.sim.state import Key, SimRequest, SimState, Stream


def methods(watchers: Sequence[Any], name: str) -> list[Callable[..., Any]]:
    """Return the methods of this name of the watchers that have one."""
    return [getattr(watcher, name) for watcher in watchers if hasattr(watcher, name)]


class Matching:
    """The messages of a run. block: let other streams run until the request can go on.

    key_of: returns what a receive must share with a send, where that is not what the two say (`FoldedWorld`).
    """

    def __init__(self, state: SimState, block: Callable[[Request | Work], None], watchers: Sequence[Any] = ()) -> None:
        self.state, self.block = state, block
        links = state.links
        self.link, self.alpha, self.beta, self.overhead = links.link, links.alpha, links.beta, links.overhead
        self.free_startup = links.free_startup
        self.posts = 0
        self.key_of: Callable[[SimRequest], Key] | None = None
        self.on_posting, self.on_posted = methods(watchers, "posting"), methods(watchers, "posted")
        self.on_queued, self.on_meet = methods(watchers, "queued"), methods(watchers, "meet")
        self.on_waiting, self.on_ended = methods(watchers, "waiting"), methods(watchers, "ended")

    def post(
        self, comm: PointToPoint, kind: str, array: np.ndarray, peer: int, tag: int, site: Any, nonblocking: bool
    ) -> SimRequest:
        state = self.state
        stream = state.running
        for posting in self.on_posting:
            posting(stream, comm)
        self.posts = order = self.posts + 1
        other = comm.members[peer] if peer >= 0 else ANY
        nbytes, now = array.nbytes, stream.time
        request = state.requests(comm, kind, array, peer, tag, site, stream, other, nbytes, order, now, nonblocking)
        if nonblocking:
            state.unwaited[stream.rank][id(request)] = request
        if self.free_startup:
            request.is_free = current_purpose() == "startup"
        for posted in self.on_posted:
            posted(request)
        if kind == "send":
            self._send(request, stream)
        else:
            self._receive(request, stream)
        return request

    def _send(self, request: SimRequest, stream: Stream) -> None:
        # The out-port sends one message after the other, and is busy with each for its overhead and its bytes.
        state, nbytes, alpha, beta, overhead = self.state, request.nbytes, self.alpha, self.beta, self.overhead
        if self.link is not None:
            alpha, beta = self.link(stream.rank, request.other)
        if request.is_free:
            alpha = beta = overhead = 0.0
        request.depart = depart = stream.time if stream.time > stream.out_free else stream.out_free
        left = depart + beta * nbytes
        request.sent = stream.out_free = left + overhead
        request.arrival = left + alpha
        request.eager = nbytes <= state.eager_limit

        # It meets the oldest receive that names this rank, unless an older one from any rank comes first.
        key = (request.comm.context, stream.rank, request.other, request.tag)
        if self.key_of is not None:
            key = self.key_of(request)
        receives = state.receives.get(key)
        if receives and not (state.wildcards and hooks.any_source().is_behind(state, receives[0], key)):
            if len(receives) == 1:
                del state.receives[key]
            self.deliver(request, receives.pop(0))
            return
        for queued in self.on_queued:
            queued(request)
        if request.error is None:
            if request.eager:
                # It is complete before it is received, so its line is found now and its buffer may be written again.
                request.array = request.array.copy()
                request.posted_at = request.site
            state.sends.setdefault(key, []).append(request)

    def _receive(self, request: SimRequest, stream: Stream) -> None:
        # A receive from any rank waits until no stream can run: until then more candidates may come.
        state, rank, context, tag = self.state, stream.rank, request.comm.context, request.tag
        if request.peer == ANY:
            state.wildcards.setdefault((context, rank, tag), []).append(request)
            return
        # A receive by name meets the oldest send, unless an older wildcard may take that one.
        key = (context, request.other, rank, tag)
        queue = state.sends.get(key)
        if queue and not (state.wildcards and (context, rank, tag) in state.wildcards):
            if len(queue) == 1:
                del state.sends[key]
            self.deliver(queue.pop(0), request)
            return
        if not queue:
            for queued in self.on_queued:
                queued(request)
        if request.error is None:
            state.receives.setdefault(key, []).append(request)

    def deliver(self, send: SimRequest, receive: SimRequest) -> None:
        """Let a send and its receive meet: copy once, wake the streams that wait."""
        # The message itself: one copy, from the sender's array into the receiver's.
        for meet in self.on_meet:
            if meet(send, receive):
                break
        else:
            receive.array[...] = send.array

        # The times of the two are those of the picture in `clock`.
        receive.matched = send.matched = True
        receive.arrival = send.arrival
        send.arrival = receive.posted  # a synchronous send ends no earlier than its receive is posted

        # Whoever waits for one of the two can run again.
        if receive.waiter is not None:
            self.state.ready.append(receive.waiter)
            receive.waiter = None
        if send.waiter is not None:
            self.state.ready.append(send.waiter)
            send.waiter = None

    def match_one_wildcard(self) -> bool:
        """No stream can run: give one receive from any rank its message. Returns False when there is none to give."""
        return bool(self.state.wildcards) and hooks.any_source().match_one(self)

    # waiting ----------------------------------------------------------------------------------------------------------

    def wait(self, request: Any) -> None:
        """Return when the request is complete, and advance the stream's clock to that time."""
        stream = self.state.running
        if request.nonblocking:
            self.state.unwaited[stream.rank].pop(id(request), None)
        for waiting in self.on_waiting:
            waiting(request)

        # Let the others run until it has met its other side.
        if not request.matched and not request.eager:
            if request.error is None:
                request.waiter = stream
                self.block(request)
            if request.error is not None:
                stream.time = max(stream.time, request.arrival)
                for ended in self.on_ended:
                    ended(request)
                raise request.error

        # When is it complete? A receive: `landed` of the picture in `clock`.
        if request.kind == "receive":
            end = self._landed(request, stream)
        else:
            end = request.sent
            if request.arrival > end and not request.eager:
                end = request.arrival

        # What was complete before the wait began costs nothing.
        if end > stream.time:
            stream.time = end
        for ended in self.on_ended:
            ended(request)

    def _landed(self, request: SimRequest, stream: Stream) -> float:
        """Return when a receive is complete. The in-port takes one message after the other."""
        end = stream.in_free
        if not request.is_free:
            beta = self.beta if self.link is None else self.link(request.other, stream.rank)[1]
            end += self.overhead + beta * request.nbytes
        if request.arrival > end:
            end = request.arrival
        if request.posted > end:
            end = request.posted
        stream.in_free = end
        return end
