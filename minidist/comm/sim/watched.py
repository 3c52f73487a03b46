"""The messages of a run and its state: receives from any rank, and whoever watches.

A receive from any rank waits until no stream can run, and then a chooser decides; until then more messages may come. A
receive by name that was posted after one from any rank, and fits the same messages, lets it choose first:

    receives[context, ANY, 0, tag]   from any rank ── from 2 ── from any rank      in the order of their posts
                                     chooses        ▲ meets its send then, as if it were posted now

An object that checks or records messages, or ends ranks, is a *watcher* of the run (core/base/trace.py has those of
operations): it has some of these methods, which are called here. A run without watchers has `AnySource`, so that they
cost nothing there.

    posted(request)       before it meets another message     queued(request)   its other side is not there yet:
    meet(send, receive)   before the array is copied;                           request.error keeps it out
                          True: a watcher has copied it       waiting(request)  its wait begins
                                                              ended(request)    its wait ends

Proved by: tests/comm/sim/test_choosers.py, tests/comm/sim/test_world.py, tests/comm/sim/test_failures.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from minidist.comm.sim.links import LinkModel
from minidist.comm.tags import LocatedRequest
from minidist.core.base.errors import RankDeadError
from minidist.core.base.trace import current_purpose
from minidist.core.comm.communicator import ANY, Request, Work
from minidist.core.comm.sim.matching import Key, Matching, SimRequest, SimState


class Candidate(NamedTuple):
    """A possible match: `receiver` (world rank) would get the oldest message of `sender`, ready at virtual `time`.

    context, tag: of the receive; a rank may have several wildcard receives open.
    """

    time: float
    receiver: int
    sender: int
    context: str = ""
    tag: int = 0


Chooser = Callable[[Sequence[Candidate]], int]  # which of the candidates a receive from any rank gets


def earliest(candidates: Sequence[Candidate]) -> int:
    """Choose the message that is there first; ties by receiver, then sender. The default."""
    return min(range(len(candidates)), key=candidates.__getitem__)


@dataclass(eq=False)
class RunState(SimState):
    """One run of a `SimWorld`."""

    links: LinkModel
    chooser: Chooser = earliest
    eager_limit: int = -1  # sends of at most this size in bytes are buffered; -1: none, not even an empty one
    returned: set[int] = field(default_factory=set)
    dead: dict[int, float] = field(default_factory=dict)  # when each killed rank died
    unwaited: dict[int, Request | Work] = field(default_factory=dict)  # by id: those that no wait was called for

    def items_unwaited(self) -> list[tuple[int, Request | Work]]:
        """Return what no wait was called for, each with its rank, in their order."""
        ranks = ((item.comm.members[item.comm.rank], item) for item in self.unwaited.values())
        return sorted(ranks, key=itemgetter(0))


class AnySource(Matching):
    """The messages of a run whose programs may receive from any rank; until it has one, `other` is ANY."""

    state: RunState
    request_class = LocatedRequest

    def any_source(self) -> int:
        self.key_of = self._behind_any  # from now on
        return ANY

    def _behind_any(self, request: SimRequest, key: Key) -> Key:
        """Let a receive by name stand behind an older one from any rank that fits the same messages."""
        context, _, rank, tag = key
        of_any = context, ANY, rank, tag
        return of_any if request.kind == "receive" and of_any in self.receives else key

    def match_one(self) -> bool:
        """No stream can run: give one receive from any rank its message. Returns False when there is none to give."""
        # The chooser decides among all matches that are possible now.
        found = self._candidates()
        if not found:
            return False
        chosen = self.state.chooser([candidate for candidate, _ in found])

        # The wildcard receive now has a source, and meets the oldest message from it.
        context, source, destination, tag = key = found[chosen][1]
        receive: Any = self.receives[context, ANY, destination, tag][0]
        receive.peer, receive.other = receive.comm.members.index(source), source
        if receive.event is not None:
            receive.event.peer = source
        self.deliver(take(self.sends, key), receive)
        self.withdraw(receive)
        return True

    def _candidates(self) -> list[tuple[Candidate, Key]]:
        """Return every match of a wildcard that there could be now, sorted: not in the order of the schedule."""
        # A candidate for each sender: its oldest message and the oldest wildcard that it fits.
        found = []
        for key, queue in self.sends.items():
            context, source, destination, tag = key
            receives = self.receives.get((context, ANY, destination, tag))
            if receives is not None:
                time = max(queue[0].arrival, receives[0].arrival)
                found.append((Candidate(time, destination, source, context, tag), key))
        return sorted(found)

    def withdraw(self, receive: SimRequest) -> None:
        """Take a receive out of its queue; those that had to wait for it meet their sends now."""
        context, rank, tag = receive.comm.context, receive.stream.rank, receive.tag
        of_any = context, ANY, rank, tag
        receives = self.receives.get(of_any, [])
        if receive not in receives:
            take(self.receives, (context, receive.other, rank, tag), receive)
            return
        receives.remove(receive)
        while receives and receives[0].peer != ANY:
            behind = receives.pop(0)
            key = context, behind.other, rank, tag
            if key in self.sends:
                self.deliver(take(self.sends, key), behind)
            elif self.keeps is None or self.keeps(behind, key):
                self.receives.setdefault(key, []).append(behind)
        if not receives:
            del self.receives[of_any]


def take(queues: dict[Key, list[Any]], key: Key, request: SimRequest | None = None) -> Any:
    """Remove a request, or the oldest one, from its queue, and return it; an empty queue is deleted."""
    queue = queues[key]
    taken = queue.pop(queue.index(request) if request else 0)
    if not queue:
        del queues[key]
    return taken


class Watched(AnySource):
    """The messages of a run with watchers, buffered sends, or messages that take no time."""

    def __init__(self, state: RunState, block: Callable[[Request | Work], None], watchers: Sequence[Any] = ()) -> None:
        super().__init__(state, block)
        self.on_posted, self.on_queued, self.on_meet, self.on_waiting, self.on_ended = (
            [getattr(watcher, name) for watcher in watchers if hasattr(watcher, name)]
            for name in ("posted", "queued", "meet", "waiting", "ended")
        )
        if state.eager_limit >= 0:
            self.on_posted.append(self._buffer)
        if self.on_queued or state.eager_limit >= 0:
            self.keeps = self._stays
        if state.links.free_startup:
            self.on_posted.append(self._free_of_startup)

    def _buffer(self, request: SimRequest) -> None:
        """Let a short send be complete at once."""
        request.complete = request.kind == "send" and request.nbytes <= self.state.eager_limit

    def _free_of_startup(self, request: Any) -> None:
        """Let a message of purpose startup take no time."""
        request.is_free = current_purpose() == "startup"

    def _stays(self, request: Any, key: Key) -> bool:
        """Tell the watchers of a message whose other side is not there; return whether none of them keeps it out."""
        # A receive behind one from any rank may have its message there already.
        if key[1] != ANY or (key[0], request.other, *key[2:]) not in self.sends:
            for queued in self.on_queued:
                queued(request)
        if request.error is None and request.complete:
            # It is complete before it is received, so its line is found now and its buffer may be written again.
            request.array = request.array.copy()
            request.posted_at = request.site
        return request.error is None

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
