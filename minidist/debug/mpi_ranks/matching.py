"""Which send is matched with which receive by MPI's rules, where a receive may leave its source and its tag open.

All messages of two ranks on a communicator wait in one queue, in the order of their posts:

    sends     queue of (context, source, destination)     [tag 3] [tag 7] [tag 3]
    receives  list of (context, destination)              [from 1, tag 7] [from any rank, any tag]

A send and a receive are matched when the send is the oldest of its queue that fits the receive, and the receive is the
oldest of its list that the send fits: MPI's rule that messages do not overtake each other. A receive that names its
source is matched at once. One from any rank waits until no rank can run, when all candidates are known.

A rank that polls (Test, Iprobe) goes on, too, only when no other rank can run; otherwise it would poll for ever.

Source: MPI: A Message-Passing Interface Standard, version 4.1, section 3.5, "Semantics of Point-to-Point
Communication".
Proved by: tests/mpi_ranks/test_messages.py
"""

import sys
from collections import defaultdict
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Any, NamedTuple

import numpy as np

from minidist.base.arrays import dtype_name
from minidist.comm.buffers import contents
from minidist.comm.call_site import CallSite, call_site
from minidist.comm.sim.checks import Watched
from minidist.comm.sim.choosers import Candidate
from minidist.comm.sim.sim_world import SimWorld
from minidist.comm.sim.watched import Watched as WatchedMessages
from minidist.comm.sim.watched import take
from minidist.comm.tags import LocatedRequest
from minidist.core.base.errors import MismatchError, UsageError
from minidist.core.comm.communicator import ANY, Comm, Work
from minidist.core.comm.sim.matching import SimRequest, Stream
from minidist.debug.mpi_ranks.constants import ANY_TAG
from minidist.debug.mpi_ranks.objects import OBJECT

IDLE_ROUNDS, IDLE_S = 1_000, 5.0  # polls without any message, after which they are a deadlock
EVERY_TAG = -2  # in place of a tag, in the key of a queue
_NOTHING = np.empty(0, np.uint8)


class Sleeper(NamedTuple):
    """A stream that waits until `ready()`; one that polls goes on when no other can."""

    stream: Stream
    ready: Callable[[], bool]
    polls: bool


def _unlike(send: Any, receive: Any, wanted: np.dtype[Any]) -> MismatchError:
    """Return the error of a message whose type is not the one that its receive wants."""
    sent, received = (
        "an object" if dtype == OBJECT else f"{dtype_name(dtype)}[{request.array.size}]"
        for request, dtype in ((send, send.array.dtype), (receive, wanted))
    )
    remedy = "MPI itself would copy the bytes without a word: give both buffers the same dtype"
    if OBJECT in (send.array.dtype, wanted):
        remedy = "send goes with recv, and Send with Recv"
    return MismatchError(
        f"dtype mismatch: rank {send.stream.rank} sent {sent}, rank {receive.stream.rank} receives {received} at"
        f" {send.site} (sender) and {receive.site} (receiver); {remedy}"
    )


def done(part: SimRequest | Work) -> bool:
    """Return whether a message or a nonblocking collective is complete, so that its wait does not block."""
    return part.finished or (isinstance(part, SimRequest) and part.complete)


class MPIMatching(WatchedMessages):
    """The messages of a run. Those of collectives meet as always; those of programs by MPI's rules."""

    def __init__(self, world: SimWorld) -> None:
        super().__init__(world.state, world._block, world._watchers())
        self.buffers, self.thread = world.buffers, world.thread
        self.posted: dict[tuple[str, int], list[SimRequest]] = defaultdict(list)  # receives
        self.any_size: set[SimRequest] = set()  # receives of objects, whose array is that of the message
        self.sleepers: list[Sleeper] = []
        self.probing: list[SimRequest] = []  # probes of any rank that wait
        self.probed: dict[SimRequest, SimRequest] = {}  # the message that each of them has found
        self.refused: UsageError | None = None  # an error in a thread, which nobody would see there
        self.posts = self.met = 0
        self.idle, self.idle_since, self.progress = 0, 0.0, (0, 0)

    def post(self, comm: Any, kind: str, array: np.ndarray, peer: int, tag: int, nonblocking: bool) -> SimRequest:
        """Start a send or a receive, of a collective, too; threads that the program has started may not."""
        if get_ident() != self.thread:
            site = comm.site or call_site(sys._getframe(1), comm.opened)
            self.refused = UsageError(
                f"rank {comm.members[comm.rank]}: MPI is called in a thread that the program has started, at {site};"
                " call it in the main thread only, and use nonblocking operations (Isend, Irecv) to overlap"
            )
            raise SystemExit  # ends that thread without a word; the run says it
        self.posts += 1
        return super().post(comm, kind, array, peer, tag, nonblocking)

    def post_user(
        self, comm: Comm, kind: str, array: np.ndarray | None, peer: int, tag: int, site: CallSite, mode: str = ""
    ) -> Any:
        """Start a send or a receive of the program's.

        array: None for a receive of an object of any size. tag: ANY_TAG of a receive, too. mode: of a send, "buffered"
        or "synchronous" where it is not MPI's standard mode.
        """
        request = self._queued(comm, kind, _NOTHING if array is None else array, peer, tag, site)
        if kind == "send":
            request.complete = mode == "buffered" or (request.complete and mode != "synchronous")
            if mode == "buffered":
                request.array = request.array.copy()
            key = comm.context, request.stream.rank, comm.members[peer], EVERY_TAG
            self.state.sends.setdefault(key, []).append(request)
            self._meet_receive(request)
        else:
            if array is None:
                self.any_size.add(request)
            self.posted[comm.context, request.stream.rank].append(request)
            self._meet_send(request)
        return request

    def _queued(self, comm: Comm, kind: str, array: np.ndarray, peer: int, tag: int, site: CallSite) -> Any:
        """Post a message, and take it out of the queue of its tag: here a queue holds the messages of every tag."""
        request: Any = self.post(comm, kind, array, peer, tag, True)
        self.state.unwaited[id(request)] = request
        request.posted_at = site
        rank, other = request.stream.rank, request.other
        if kind == "send":
            take(self.state.sends, (comm.context, rank, other, tag), request)
        else:
            take(self.state.receives, (comm.context, other, rank, tag), request)
        return request

    def receive_taken(self, comm: Comm, array: np.ndarray | None, send: SimRequest, site: CallSite) -> Any:
        """Receive a message that a matched probe has taken out of its queue. array: None for an object."""
        array_or_none = _NOTHING if array is None else array
        request = self._queued(comm, "receive", array_or_none, send.comm.rank, send.tag, site)
        if array is None:
            self.any_size.add(request)
        self.deliver(send, request)
        return request

    # who meets whom ---------------------------------------------------------------------------------------------------

    def oldest_send(self, receive: SimRequest, source: int) -> SimRequest | None:
        """Return the send of a world rank that a receive would get, None when there is none yet."""
        queue = self.state.sends.get((receive.comm.context, source, receive.stream.rank, EVERY_TAG), ())
        send = next((send for send in queue if receive.tag in (ANY_TAG, send.tag)), None)
        if send is None or self._oldest_receive(send, receive) is not receive:
            return None
        return send

    def _oldest_receive(self, send: SimRequest, last: SimRequest | None = None) -> SimRequest | None:
        """Return the first receive of the list that a send fits; `last` stands behind those of the list."""
        source = send.stream.rank
        for receive in self.posted.get((send.comm.context, send.comm.members[send.peer]), ()):
            if receive.tag in (ANY_TAG, send.tag) and receive.other in (ANY, source):
                return receive
        return last

    def _meet_receive(self, send: SimRequest) -> None:
        receive = self._oldest_receive(send)
        if receive is not None and receive.peer != ANY and self.oldest_send(receive, send.stream.rank) is send:
            self.join(send, receive)

    def _meet_send(self, receive: SimRequest) -> None:
        if receive.peer != ANY:
            send = self.oldest_send(receive, receive.other)
            if send is not None:
                self.join(send, receive)

    def join(self, send: SimRequest, receive: SimRequest) -> None:
        """Let the two meet, and then those that had to wait for one of them."""
        key = receive.comm.context, receive.stream.rank
        self.take_send(send)
        if receive in self.posted[key]:
            self.posted[key].remove(receive)
        self.deliver(send, receive)
        self._go_on(key)

    def _go_on(self, key: tuple[str, int]) -> None:
        """Match the receives of a list that an older one has kept from their messages."""
        for receive in list(self.posted[key]):
            if not receive.complete:
                self._meet_send(receive)

    def take_send(self, send: SimRequest) -> None:
        """Take a message out of its queue."""
        context, source, peer = send.comm.context, send.stream.rank, send.comm.members[send.peer]
        take(self.state.sends, (context, source, peer, EVERY_TAG), send)

    def deliver(self, send: SimRequest, receive: SimRequest) -> None:
        self.met += 1
        posted = receive.arrival
        self._deliver(send, receive)
        send.arrival = posted

    def _deliver(self, send: Any, receive: Any) -> None:
        if send.comm.match_key != "message":
            super().deliver(send, receive)
            return

        # Bytes may meet anything, as memory without a type; everything else must be what was sent.
        source, target = send.array, receive.array
        wanted = OBJECT if receive in self.any_size else target.dtype
        if source.dtype != wanted and np.uint8 not in (source.dtype, wanted):
            raise _unlike(send, receive, wanted)
        if receive in self.any_size:
            self.any_size.remove(receive)
            receive.array = target = np.empty_like(source)
        for request in (send, receive):
            self.buffers.verify(request)
        watched = self.buffers.watched.pop(receive, None)

        # As many bytes as both have. More than the receive has room for are an error of its wait.
        size = min(source.nbytes, target.nbytes)
        send.array, receive.array = source.view(np.uint8)[:size], target.view(np.uint8)[:size]
        super().deliver(send, receive)
        send.array, receive.array = source, target
        if watched is not None:  # it must stay as it is now until the wait
            self.buffers.watched[receive] = Watched(target, contents(target), watched.open)

        # What the receive did not say is known now.
        receive.peer, receive.tag = send.comm.rank, send.tag
        receive.other, receive.nbytes = send.stream.rank, source.nbytes
        if receive.event is not None:
            receive.event.peer, receive.event.tag, receive.event.nbytes = receive.other, send.tag, source.nbytes

    def cancel(self, request: Any) -> bool:
        """Take back a message that has not been matched; return whether that was possible."""
        if request.kind == "send":
            of_send = request.comm.context, request.stream.rank, request.other, EVERY_TAG
            if request not in self.sends.get(of_send, ()):
                return False
            self.take_send(request)
            request.end = request.end if request.complete else max(request.end, request.arrival)
        elif request.complete:
            return False
        else:
            key = request.comm.context, request.stream.rank
            self.posted[key].remove(request)
            self._go_on(key)
        request.complete = True
        return True

    # probes -----------------------------------------------------------------------------------------------------------

    def probe(self, comm: Any, source: int, tag: int, site: CallSite) -> SimRequest:
        """Return a receive that is not posted: it finds a message, and leaves it where it is."""
        stream = self.state.running
        probe = LocatedRequest()
        probe.comm, probe.kind, probe.array, probe.peer, probe.tag = comm, "probe", _NOTHING, source, tag
        probe.stream, probe.other, probe.arrival, probe.posted_at = stream, source, stream.time, site
        probe.nonblocking, probe.complete, probe.waiter, probe.nbytes = False, False, None, 0
        return probe

    def found(self, probe: SimRequest) -> list[tuple[Candidate, SimRequest, SimRequest]]:
        """Return the messages that a probe, or a receive from any rank, may get now."""
        members, rank, found = probe.comm.members, probe.stream.rank, []
        for source in members if probe.peer == ANY else [members[probe.peer]]:
            send = self.oldest_send(probe, source)
            if send is not None:
                time = max(send.arrival, probe.arrival)
                found.append((Candidate(time, rank, source, probe.comm.context, probe.tag), send, probe))
        return found

    def look(self, probe: SimRequest, polls: bool) -> Any:
        """Wait until a message is there, with `polls` at most until no other rank can run; return the message."""
        if probe.peer == ANY and not polls:  # which message it finds is a choice, as for a receive
            self.probing.append(probe)
            self.block(probe)
            return self.probed.pop(probe)
        self.sleep(lambda: bool(self.found(probe)), probe, polls)
        return self._chosen(self.found(probe))[0] if self.found(probe) else None

    def _chosen(self, found: list[tuple[Candidate, SimRequest, SimRequest]]) -> tuple[SimRequest, SimRequest]:
        """Return the send and the receive that the world's chooser takes of several pairs."""
        found.sort(key=lambda choice: choice[0])  # not in the order of the schedule
        chosen: int = self.state.chooser([candidate for candidate, *_ in found])
        return found[chosen][1:]

    # receives from any rank, and ranks that poll ----------------------------------------------------------------------

    def sleep(self, ready: Callable[[], bool], on: SimRequest | Work, polls: bool = False) -> None:
        """Let other streams run until `ready()`; with `polls` at most until no other stream can. on: for reports."""
        if not ready():
            self.sleepers.append(Sleeper(self.state.running, ready, polls))
            self.block(on)

    def match_one(self) -> bool:
        """No stream can run: wake those that can go on; else match one receive from any rank; else let polls fail."""
        awake = [sleeper for sleeper in self.sleepers if sleeper.ready()]
        if not awake:
            if self._join_from_any() or super().match_one():
                return True
            awake = [sleeper for sleeper in self.sleepers if sleeper.polls]
            if not awake or self._polls_in_vain():
                return False
        for sleeper in awake:
            self.sleepers.remove(sleeper)
            self.state.ready.append(sleeper.stream)
        return True

    def _join_from_any(self) -> bool:
        """Match one receive or probe from any rank; False where none has a message."""
        open_receives = [r for receives in self.posted.values() for r in receives if r.peer == ANY]
        found = [pair for receive in (*open_receives, *self.probing) for pair in self.found(receive)]
        if not found:
            return False
        send, receive = self._chosen(found)
        if receive.kind == "receive":
            self.join(send, receive)
        else:
            self.probing.remove(receive)
            self.probed[receive] = send
            self.state.ready.append(receive.stream)
        return True

    def _polls_in_vain(self) -> bool:
        """Return whether ranks have polled for long without any message being posted or received meanwhile."""
        progress = self.posts, self.met
        if progress != self.progress:
            self.progress, self.idle, self.idle_since = progress, 0, monotonic()
        self.idle += 1
        return self.idle > IDLE_ROUNDS and monotonic() - self.idle_since > IDLE_S
