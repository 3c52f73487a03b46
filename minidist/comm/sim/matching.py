"""Posting, meeting and waiting in the simulated world: which send meets which receive, what it costs, and who wakes up.

post     a send and a receive of one (context, source, destination, tag) meet in the order of their posts, at once
         when the other side is there already; a receive from any rank waits until no stream can run any more
deliver  headers are compared, the array is copied once, and a stream that was blocked in a wait can run again
wait     blocks until the two have met, then advances the clock (the formulas are those of `clock`)

Proved by: tests/comm/sim/test_world.py, tests/comm/sim/test_choosers.py
"""

from collections.abc import Callable
from threading import get_ident
from typing import Any

import numpy as np

from minidist.base.errors import BufferReuseError, MismatchError, UsageError
from minidist.base.fibers import current
from minidist.base.trace import MessageEvent, current_purpose
from minidist.comm.buffers import changed, checksum
from minidist.comm.call_site import CallSite
from minidist.comm.header import compare, dtype_name, header_of, is_of_replicas
from minidist.comm.point_to_point import ANY, PointToPoint, Request, Work
from minidist.comm.sim.choosers import Candidate
from minidist.comm.sim.failures import Failures
from minidist.comm.sim.state import Key, SimRequest, SimState, take


def second_thread(comm: PointToPoint, site: CallSite) -> UsageError:
    """Return the error for a communicator that another thread than the ranks' uses."""
    return UsageError(
        f"rank {comm.members[comm.rank]}: {comm.name} is used in a second thread, at {site}; communicate only in the"
        " thread that calls the rank's program, and use async_op=True to overlap"
    )


class Matching:
    """The messages of a run. block: let other streams run until the request can go on.

    ends_of: (comm, rank, peer) -> the world ranks between which a message that `rank` sends to `peer` travels, where
    those are not the two (`FoldedWorld`).
    """

    ends_of: Callable[[PointToPoint, int, int], tuple[int, int]] | None = None

    def __init__(self, state: SimState, failures: Failures, block: Callable[[Request | Work], None]) -> None:
        self.state, self.failures, self.block = state, failures, block
        self.posts = 0

    def post(
        self, comm: PointToPoint, kind: str, array: np.ndarray, peer: int, tag: int, site: CallSite, guarded: bool
    ) -> SimRequest:
        # A rank that is to die dies before it posts.
        state = self.state
        stream = state.running
        rank, nbytes, watches = stream.rank, array.nbytes, state.watches
        if get_ident() != state.thread:
            raise second_thread(comm, site)
        if comm.members[comm.rank] != rank:
            raise UsageError(
                f"rank {rank} uses the communicator of rank {comm.members[comm.rank]}, at {site}; each rank "
                "communicates on the one that it is given"
            )
        if self.failures.active:
            self.failures.before_post(rank)

        # Record it.
        world_peer = comm.members[peer] if peer != ANY else ANY
        event = MessageEvent(
            rank,
            stream.name,
            kind,
            world_peer,
            tag,
            nbytes,
            current_purpose(),
            comm.operation,
            comm.name,
            stream.time,
            -1.0,
            -1.0,
            0,
            dtype_name(array.dtype),
            peer == ANY,
        )
        if state.record:
            state.traces[rank].messages.append(event)
        elif state.totals and kind == "send":
            trace = state.traces[rank]
            trace.add_to_totals(event.purpose, trace.ranks, trace.ranks * nbytes)
        self.posts += 1
        request = SimRequest(comm, kind, array, peer, tag, site, event, stream, self.posts)

        # Watch its buffer, when other code runs before the wait: always beside a stream, the rank's main program.
        if guarded:
            state.unwaited[rank][id(request)] = request
        request.watched = watched = watches and (guarded or not stream.is_main)
        if watches and (guarded or state.open[rank].start_of):
            # A buffered send has left its buffer at once, which may be freed before the wait.
            state.open[rank].add(rank, request, guarded and not (kind == "send" and nbytes <= state.eager_limit))
        if watches and kind == "receive" and stream.is_main and state.works[rank].guards:
            state.works[rank].refuse(request)

        if kind == "send":
            # The out-port sends one message after the other, and is busy with each for its overhead and its bytes.
            links = state.links
            alpha, beta = (links.alpha, links.beta) if links.link is None else links.link(rank, world_peer)
            overhead = links.overhead
            if links.free_startup and event.purpose == "startup":
                alpha = beta = overhead = 0.0
            request.depart = depart = max(stream.time, stream.out_free)
            left = depart + beta * nbytes
            request.sent = stream.out_free = left + overhead
            request.arrival = left + alpha
            request.eager = nbytes <= state.eager_limit
            if watched:
                request.checksum = checksum(array)

            # It meets the oldest receive that names this rank, unless an older one from any rank comes first.
            ends = (rank, world_peer) if self.ends_of is None else self.ends_of(comm, rank, peer)
            key = (comm.context, *ends, tag)
            receives = state.receives.get(key)
            if receives and not (state.wildcards and self._behind_wildcard(receives[0], key)):
                self._deliver(request, receives.popleft())
                if not receives:
                    del state.receives[key]
                return request
            if self.failures.active and world_peer in state.dead:
                request.eager = False
                self.failures.fail(request, world_peer)
                return request
            if request.eager:
                request.array = array.copy()
                request.checksum = None
            state.sends[key].append(request)
            return request

        # A receive from any rank waits until no stream can run: until then more candidates may come.
        if peer == ANY:
            state.wildcards[comm.context, rank, tag].append(request)
        else:
            # A receive by name meets the oldest send, unless an older wildcard may take that one.
            key = (comm.context, world_peer, rank, tag)
            sends = state.sends.get(key)
            if sends and (comm.context, rank, tag) not in state.wildcards:
                self._deliver(sends.popleft(), request)
                if not sends:
                    del state.sends[key]
                return request
            if self.failures.active and not sends and world_peer in state.dead:
                self.failures.fail(request, world_peer)
                return request
            state.receives[key].append(request)
        if watched:
            request.checksum = checksum(array)
        return request

    def _deliver(self, send: SimRequest, receive: SimRequest) -> None:
        """Let a send and its receive meet: compare, copy once, wake the streams that wait."""
        # Both sides must agree, and neither buffer may have changed since its post.
        source, target = send.array, receive.array
        if self.state.checks:
            if (
                send.comm.match_key != receive.comm.match_key
                or source.dtype != target.dtype
                or source.shape != target.shape
            ):
                self._refuse(send, receive)
                return  # while the world looks ahead
            if send.checksum is not None and checksum(source) != send.checksum:
                raise self._changed(send)

        # The message itself: one copy, from the sender's array into the receiver's.
        if not receive.watched:
            target[...] = source
        elif id(receive) in self.state.unwaited[receive.stream.rank]:
            # Its program goes on: what it reads before the wait must not depend on the order of the ranks.
            self.state.arrived[id(receive)] = source.copy()
            if receive.checksum is None:
                receive.checksum = checksum(target)
        else:
            if receive.checksum is not None and checksum(target) != receive.checksum:
                raise self._changed(receive)
            target[...] = source
            receive.checksum = checksum(target)

        # The times of the two are those of the picture in `clock`.
        receive.arrival, receive.matched, send.matched = send.arrival, True, True
        send.arrival = receive.event.posted  # a synchronous send ends no earlier than its receive is posted

        # Whoever waits for one of the two can run again.
        for request in (receive, send):
            if request.waiter is not None:
                self.state.ready.append(request.waiter)
                request.waiter = None

    def _changed(self, request: SimRequest) -> BufferReuseError:
        """Return the error for a message whose buffer is not as it was, with the line that its rank has come to."""
        rank = request.stream.rank
        return changed(rank, request.describe(), self.state.line_of(rank))

    def _refuse(self, send: SimRequest, receive: SimRequest) -> None:
        """Raise MismatchError for two sides of a message that differ; those of two collective calls end the run."""
        lines = f"{send.site}" if send.site == receive.site else f"{send.site} (sender) and {receive.site} (receiver)"
        ours, theirs = header_of(receive.comm.match_key, receive.array), header_of(send.comm.match_key, send.array)
        try:
            compare(theirs, ours, send.stream.rank, receive.stream.rank, lines)
        except MismatchError as error:
            # A receive from any rank gets its message from the scheduler, which cannot pause as a rank can.
            in_calls = None not in (send.comm.opened, receive.comm.opened) and current() is self.state.running.fiber
            if not in_calls or is_of_replicas(ours.operation) or is_of_replicas(theirs.operation):
                raise
            self.state.refuse(error, receive.comm, ours.operation == theirs.operation)
            self.block(send if send.stream is self.state.running else receive)

    # receives from any rank -------------------------------------------------------------------------------------------

    def match_one_wildcard(self) -> bool:
        """No stream can run: give one receive from any rank its message. Returns False when there is none to give."""
        state = self.state
        # The chooser decides among all matches that are possible now.
        found = self._candidates() if state.wildcards else []
        if not found:
            return False
        chosen = state.chooser([candidate for candidate, _ in found])
        # The wildcard now has a source, and meets the oldest message of it.
        context, source, destination, tag = key = found[chosen][1]
        receive = take(state.wildcards, (context, destination, tag))
        send = take(state.sends, key)
        receive.peer, receive.event.peer = receive.comm.members.index(source), source
        self._deliver(send, receive)

        # Receives by name, posted after it, had to let it choose first; they may go on now.
        self.match_waiting(context, destination, tag)
        return True

    def _candidates(self) -> list[tuple[Candidate, Key]]:
        """Return every match of a wildcard that there could be now, sorted: not in the order of the schedule."""
        # A candidate for each sender: its oldest message and the oldest wildcard that it fits.
        found = []
        for key, queue in self.state.sends.items():
            context, source, destination, tag = key
            receives = self.state.wildcards.get((context, destination, tag))
            if receives is not None:
                time = max(queue[0].arrival, receives[0].event.posted)
                found.append((Candidate(time, destination, source, context, tag), key))
        return sorted(found)

    def match_waiting(self, context: str, destination: int, tag: int) -> None:
        """Match the receives that had to wait for an older receive from any rank."""
        sends, receives = self.state.sends, self.state.receives
        for key in [k for k in receives if k[0] == context and k[2:] == (destination, tag)]:
            while key in receives and key in sends and not self._behind_wildcard(receives[key][0], key):
                self._deliver(take(sends, key), take(receives, key))

    def _behind_wildcard(self, receive: SimRequest, key: Key) -> bool:
        """Return whether a receive from any rank for the same messages is older than `receive`: it chooses first."""
        context, _, destination, tag = key
        older = self.state.wildcards.get((context, destination, tag))
        return older is not None and older[0].order < receive.order

    # waiting ----------------------------------------------------------------------------------------------------------

    def wait(self, request: Any) -> None:
        """Return when the request is complete, and advance the stream's clock to that time."""
        state = self.state
        stream = state.running
        receiving = request.kind == "receive"
        if state.unwaited[stream.rank].pop(id(request), None) is not None:
            state.open[stream.rank].close(request)

        # A receive begins when it is waited for, a send when its bytes leave the port.
        event = request.event
        event.start = stream.time if receiving else request.depart

        # Let the others run until it has met its other side.
        links = state.links
        if not request.matched and not request.eager:
            if request.error is None:
                request.waiter = stream
                self.block(request)
            if request.error is not None:  # the news of a death takes one latency
                dead = request.error.rank
                alpha, _ = links.cost(dead, stream.rank)
                stream.time = event.end = max(stream.time, state.dead[dead] + alpha)
                raise request.error
        if request.checksum is not None:
            if checksum(request.array) != request.checksum:
                raise self._changed(request)
            arrived = state.arrived.pop(id(request), None)
            if arrived is not None:
                request.array[...] = arrived

        # When is it complete?
        if receiving:
            # A receive: `landed` of the picture in `clock`. The in-port takes one message after the other.
            source = request.comm.members[request.peer]
            beta = links.beta if links.link is None else links.link(source, stream.rank)[1]
            busy = links.overhead + beta * event.nbytes
            if links.free_startup and event.purpose == "startup":
                busy = 0.0
            stream.in_free = end = max(request.arrival, stream.in_free + busy, event.posted)
        elif request.eager:
            end = request.sent
        else:
            end = max(request.sent, request.arrival)

        # What was complete before the wait began costs nothing.
        if end > stream.time:
            stream.time = end
        event.end = stream.time
