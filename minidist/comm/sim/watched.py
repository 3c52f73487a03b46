"""The messages of a run with watchers.

An object that checks or records messages, or ends ranks, is a *watcher* of the run (core/base/watchers.py has those of
operations): it has some of these methods, which are called here. A run without watchers has another class, so that they
cost nothing there.

    posting(stream, comm)      before a message is posted         queued(request)   its other side is not there yet:
    posted(request)            it has been posted                                   request.error keeps it out
    meet(send, receive)        before the array is copied;        waiting(request)  its wait begins
                               True: a watcher has copied it   ended(request)    its wait ends

Proved by: tests/comm/sim/test_world.py, tests/comm/sim/test_failures.py
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from minidist.comm.sim.any_source import AnySource
from minidist.comm.sim.state import RunState
from minidist.core.base.errors import RankDeadError
from minidist.core.base.trace import current_purpose
from minidist.core.comm.point_to_point import ANY, PointToPoint, Request, Work
from minidist.core.comm.sim.matching import Matching
from minidist.core.comm.sim.state import Key, SimRequest


class Watched(AnySource):
    """The messages of a run with watchers, buffered sends, or messages that take no time."""

    def __init__(self, state: RunState, block: Callable[[Request | Work], None], watchers: Sequence[Any] = ()) -> None:
        super().__init__(state, block)
        self.on_posting, self.on_posted, self.on_queued, self.on_meet, self.on_waiting, self.on_ended = (
            [getattr(watcher, name) for watcher in watchers if hasattr(watcher, name)]
            for name in ("posting", "posted", "queued", "meet", "waiting", "ended")
        )
        # The messages that take no time: see `LinkModel.free_startup`.
        self.free: set[SimRequest] = set()
        self.free_startup = state.links.free_startup
        if self.free_startup:
            usual = self.cost_of or (lambda request: (self.alpha, self.beta, self.overhead))
            self.cost_of = lambda request: (0.0, 0.0, 0.0) if request in self.free else usual(request)

    def post(
        self, comm: PointToPoint, kind: str, array: np.ndarray, peer: int, tag: int, nonblocking: bool
    ) -> SimRequest:
        for posting in self.on_posting:
            posting(self.state.running, comm)
        return Matching.post(self, comm, kind, array, peer, tag, nonblocking)

    def send(self, request: SimRequest) -> None:
        self._posted(request)
        request.complete = request.nbytes <= self.state.eager_limit
        Matching.send(self, request)

    def receive(self, request: SimRequest) -> None:
        if request.peer == ANY:
            request.other = ANY
        self._posted(request)
        AnySource.receive(self, request)

    def _posted(self, request: SimRequest) -> None:
        if self.free_startup and current_purpose() == "startup":
            self.free.add(request)
        for posted in self.on_posted:
            posted(request)

    def queue(self, queues: dict[Key, list[SimRequest]], key: Key, request: Any) -> None:
        for queued in self.on_queued:
            queued(request)
        if request.error is None:
            if request.complete:
                # It is complete before it is received, so its line is found now and its buffer may be written again.
                request.array = request.array.copy()
                request.posted_at = request.site
            Matching.queue(self, queues, key, request)

    def _behind(self, request: Any, older: list[SimRequest]) -> None:
        if (request.comm.context, request.other, request.stream.rank, request.tag) not in self.sends:
            for queued in self.on_queued:
                queued(request)
        if request.error is None:
            super()._behind(request, older)

    def copy(self, send: SimRequest, receive: SimRequest) -> None:
        for meet in self.on_meet:
            if meet(send, receive):
                return
        receive.array[...] = send.array

    def wait(self, request: Any) -> None:
        for waiting in self.on_waiting:
            waiting(request)
        try:
            if request.error is not None:
                raise request.error
            Matching.wait(self, request)
        except RankDeadError:
            # The rank that it waits for has died; the waiting rank is told at `arrival`.
            stream = request.stream
            stream.time = max(stream.time, request.arrival)
            for ended in self.on_ended:
                ended(request)
            raise
        for ended in self.on_ended:
            ended(request)
        if self.free:
            self.free.discard(request)
