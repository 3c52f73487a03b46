"""Posting, meeting and waiting in the simulated world: which send meets which receive, what it costs, and who wakes up.

post     a send and a receive of one (context, source, destination, tag) meet in the order of their posts, at once
         when the other side is there already; a receive from any rank waits until nobody can run any more
deliver  headers are compared, the array is copied once, and whoever was blocked in a wait can run again
wait     blocks until the two have met, then charges the clock (see `clock`)
"""

from collections import deque
from typing import Any, NoReturn

import numpy as np

from minidist.base.errors import RankDeadError
from minidist.base.trace import MessageEvent, Trace, current_purpose
from minidist.comm.buffers import OpenReceives, changed, checksum
from minidist.comm.call_site import Site
from minidist.comm.communicator import ANY, Comm, Request, Work
from minidist.comm.header import compare, dtype_name, header_of
from minidist.comm.sim import queues
from minidist.comm.sim.choosers import Chooser
from minidist.comm.sim.clock import LinkModel
from minidist.comm.sim.failures import Deaths
from minidist.comm.sim.queues import Key, Wild, behind_wildcard
from minidist.comm.sim.request import Lane, SimRequest


class Matching:
    """The half of `SimWorld` that knows messages; the other half runs the ranks."""

    checks: bool
    record: bool
    chooser: Chooser
    links: LinkModel
    eager_limit: int
    mortal: bool
    deaths: Deaths
    traces: list[Trace]
    posts: int
    running: Lane  # whose turn it is
    ready: deque[Lane]
    sends: dict[Key, deque[SimRequest]]
    receives: dict[Key, deque[SimRequest]]
    wildcards: dict[Wild, deque[SimRequest]]
    open: list[OpenReceives]
    unwaited: list[dict[int, Request | Work]]

    @property
    def dead(self) -> dict[int, float]:
        """The ranks that have been killed in this run (the last one), with the virtual time of each death."""
        return self.deaths.times

    def _block(self, on: Request | Work) -> None:
        raise NotImplementedError

    def post(
        self, comm: Comm, kind: str, array: np.ndarray, peer: int, tag: int, site: Site, guarded: bool
    ) -> SimRequest:
        lane = self.running
        rank, nbytes = lane.rank, array.nbytes
        if self.mortal:
            self.deaths.before_post(rank)
        world_peer = comm.members[peer] if peer != ANY else ANY
        event = MessageEvent(
            rank,
            lane.name,
            kind,
            world_peer,
            tag,
            nbytes,
            current_purpose(),
            comm.operation,
            comm.name,
            lane.time,
            -1.0,
            -1.0,
            0,
            dtype_name(array.dtype),
            peer == ANY,
        )
        if self.record:
            self.traces[rank].messages.append(event)
        self.posts += 1
        request = SimRequest(comm, kind, array, peer, tag, site, event, lane, self.posts)
        if guarded:
            self.unwaited[rank][id(request)] = request
        # Does somebody else run between here and the wait? In a lane always: the rank's main program.
        request.watched = self.checks and (guarded or not lane.is_main)
        if kind == "receive" and self.checks and (guarded or self.open[rank].starts):
            self.open[rank].check(rank, request, guarded)
        if kind == "send":
            alpha, beta = self.links.cost(rank, world_peer)
            request.depart = depart = max(lane.time, lane.out_free)
            request.sent = lane.out_free = sent = depart + beta * nbytes
            request.arrival = sent + alpha
            request.eager = nbytes <= self.eager_limit
            if request.watched:
                request.checksum = checksum(array)
            key = (comm.context, rank, world_peer, tag)
            receives = self.receives.get(key)
            if receives and not behind_wildcard(self.wildcards, receives[0], key):
                self._deliver(request, receives.popleft())
                if not receives:
                    del self.receives[key]
                return request
            if self.mortal and world_peer in self.dead:
                request.eager = False
                self.deaths.fail(request, world_peer)
                return request
            if request.eager:
                request.array = array.copy()
                request.checksum = None
            queues.append(self.sends, key, request)
        elif peer == ANY:
            queues.append(self.wildcards, (comm.context, rank, tag), request)
            if request.watched:
                request.checksum = checksum(array)
        else:
            key = (comm.context, world_peer, rank, tag)
            sends = self.sends.get(key)
            if sends and (comm.context, rank, tag) not in self.wildcards:
                self._deliver(sends.popleft(), request)
                if not sends:
                    del self.sends[key]
            elif self.mortal and not sends and world_peer in self.dead:
                self.deaths.fail(request, world_peer)
            else:
                queues.append(self.receives, key, request)
                if request.watched:
                    request.checksum = checksum(array)
        return request

    def _deliver(self, send: SimRequest, receive: SimRequest) -> None:
        """A send and its receive have met: compare, copy once, wake whoever waits."""
        ours, theirs = send.array, receive.array
        if self.checks:
            if send.operation != receive.operation or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
                compare(
                    header_of(send.operation, ours),
                    header_of(receive.operation, theirs),
                    send.lane.rank,
                    receive.lane.rank,
                    f"{send.site} (sender) and {receive.site} (receiver)",
                )
            if send.checksum is not None:
                self._check_untouched(send)
            if receive.checksum is not None:
                self._check_untouched(receive)
        theirs[...] = ours
        if receive.watched:
            receive.checksum = checksum(theirs)
        receive.arrival, receive.matched, send.matched = send.arrival, True, True
        send.arrival = receive.posted  # a synchronous send ends no earlier than its receive is posted
        if receive.waiter is not None:
            self.ready.append(receive.waiter)
            receive.waiter = None
        if send.waiter is not None:
            self.ready.append(send.waiter)
            send.waiter = None

    def _check_untouched(self, request: SimRequest) -> None:
        if checksum(request.array) != request.checksum:
            raise changed(request.lane.rank, request.describe())

    def _match_one_wildcard(self) -> bool:
        """Nobody can run: let exactly one wildcard receive have its message, then everybody runs on."""
        if not self.wildcards:
            return False
        found = queues.candidates(self.sends, self.wildcards)
        if not found:
            return False
        chosen = self.chooser([candidate for candidate, _ in found])
        context, source, destination, tag = key = found[chosen][1]
        receive = queues.take(self.wildcards, (context, destination, tag))
        send = queues.take(self.sends, key)
        receive.peer, receive.event.peer = receive.comm.members.index(source), source
        self._deliver(send, receive)
        self.match_waiting(context, destination, tag)
        return True

    def match_waiting(self, context: str, destination: int, tag: int) -> None:
        """Receives that stood behind a wildcard may match now."""
        for key in [k for k in self.receives if k[0] == context and k[2:] == (destination, tag)]:
            while (
                key in self.receives
                and key in self.sends
                and not behind_wildcard(self.wildcards, self.receives[key][0], key)
            ):
                self._deliver(queues.take(self.sends, key), queues.take(self.receives, key))

    # waiting ----------------------------------------------------------------------------------------------------------

    def wait(self, request: Any) -> None:
        lane = self.running
        receiving = request.kind == "receive"
        if self.unwaited[lane.rank].pop(id(request), None) is not None and receiving:
            self.open[lane.rank].close(request)
        event = request.event
        event.start = lane.time if receiving else request.depart
        if not request.matched and not request.eager:
            if request.error is None:
                request.waiter = lane
                self._block(request)
            if request.error is not None:
                self._raise(request.error, event)
        if request.checksum is not None:
            self._check_untouched(request)
        if receiving:
            _, beta = self.links.cost(request.comm.members[request.peer], lane.rank)
            lane.in_free = end = max(request.arrival, lane.in_free + beta * event.nbytes, request.posted)
        elif request.eager:
            end = request.sent
        else:
            end = max(request.sent, request.arrival)
        if end > lane.time:
            lane.time = end
        event.end = lane.time

    def _raise(self, error: RankDeadError, event: MessageEvent) -> NoReturn:
        """The news of a death takes one latency from there to here, and ends the wait."""
        lane = self.running
        latency, _ = self.links.cost(error.rank, lane.rank)
        lane.time = event.end = max(lane.time, self.dead[error.rank] + latency)
        raise error
