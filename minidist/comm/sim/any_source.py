"""Receives from any rank in the simulated world: they wait until no stream can run, and then a chooser decides.

Until then more messages may come. A receive by name that was posted after one from any rank, and fits the same
messages, lets it choose first:

    open[context, 0, tag]   from any rank ── from 2 ── from any rank      in the order of their posts
                            chooses        ▲ meets its send then, as if it were posted now

Proved by: tests/comm/sim/test_choosers.py, tests/comm/sim/test_world.py
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minidist.comm.sim.state import RunState
from minidist.comm.tags import LocatedRequest
from minidist.core.comm.point_to_point import ANY, Request, Work
from minidist.core.comm.sim.matching import Matching
from minidist.core.comm.sim.state import Key, SimRequest


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


class AnySource(Matching):
    """The messages of a run whose programs may receive from any rank."""

    state: RunState
    requests = LocatedRequest

    def __init__(self, state: RunState, block: Callable[[Request | Work], None]) -> None:
        super().__init__(state, block)
        self.open = state.open

    def receive(self, request: SimRequest) -> None:
        if request.peer != ANY and not self.open:
            Matching.receive(self, request)
            return
        key = request.comm.context, request.stream.rank, request.tag
        if request.peer == ANY:
            self.open.setdefault(key, []).append(request)
        elif key in self.open:
            self._behind(request, self.open[key])
        else:
            Matching.receive(self, request)

    def _behind(self, request: SimRequest, older: list[SimRequest]) -> None:
        """Keep a receive by name that must let an older one choose first."""
        older.append(request)

    def match_one(self) -> bool:
        """No stream can run: give one receive from any rank its message. Returns False when there is none to give."""
        # The chooser decides among all matches that are possible now.
        found = self._candidates() if self.open else []
        if not found:
            return False
        chosen = self.state.chooser([candidate for candidate, _ in found])

        # The wildcard receive now has a source, and meets the oldest message from it.
        context, source, destination, tag = key = found[chosen][1]
        receive: Any = self.open[context, destination, tag][0]
        receive.peer, receive.other = receive.comm.members.index(source), source
        if receive.event is not None:
            receive.event.peer = source
        send = self.sends[key][0]
        remove(self.sends, key, send)
        self.deliver(send, receive)
        self.withdraw(receive)
        return True

    def _candidates(self) -> list[tuple[Candidate, Key]]:
        """Return every match of a wildcard that there could be now, sorted: not in the order of the schedule."""
        # A candidate for each sender: its oldest message and the oldest wildcard that it fits.
        found = []
        for key, queue in self.sends.items():
            context, source, destination, tag = key
            receives = self.open.get((context, destination, tag))
            if receives is not None:
                time = max(queue[0].arrival, receives[0].arrival)
                found.append((Candidate(time, destination, source, context, tag), key))
        return sorted(found)

    def withdraw(self, receive: SimRequest) -> None:
        """Take a receive out of its queue; those that had to wait for it meet their sends now."""
        context, rank, tag = receive.comm.context, receive.stream.rank, receive.tag
        receives = self.open.get((context, rank, tag), [])
        if receive not in receives:
            remove(self.receives, (context, receive.other, rank, tag), receive)
            return
        receives.remove(receive)
        while receives and receives[0].peer != ANY:
            Matching.receive(self, receives.pop(0))
        if not receives:
            del self.open[context, rank, tag]


def remove(queues: dict[Any, list[SimRequest]], key: Any, request: SimRequest) -> None:
    """Remove a request from its queue; an empty queue is deleted."""
    queue = queues[key]
    queue.remove(request)
    if not queue:
        del queues[key]
