"""Receives from any rank in the simulated world: they wait until no stream can run, and then a chooser decides.

Until then more messages may come. A receive by name that was posted after one from any rank, and fits the same
messages, lets it choose first. `Matching` calls `match_one` and `is_behind` where such a receive is open.

Proved by: tests/comm/sim/test_choosers.py, tests/comm/sim/test_world.py
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from minidist.core.comm.sim.matching import Matching
from minidist.core.comm.sim.state import Key, SimRequest, SimState


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


def match_one(matching: Matching) -> bool:
    """No stream can run: give one receive from any rank its message. Returns False when there is none to give."""
    # The chooser decides among all matches that are possible now.
    state = matching.state
    found = _candidates(state)
    if not found:
        return False
    chosen = (state.chooser or earliest)([candidate for candidate, _ in found])
    # The wildcard now has a source, and meets the oldest message of it.
    context, source, destination, tag = key = found[chosen][1]
    receive = take(state.wildcards, (context, destination, tag))
    send = take(state.sends, key)
    receive.peer, receive.other = receive.comm.members.index(source), source
    if receive.event is not None:
        receive.event.peer = source
    matching.deliver(send, receive)

    # Receives by name, posted after it, had to let it choose first; they may go on now.
    match_waiting(matching, context, destination, tag)
    return True


def _candidates(state: SimState) -> list[tuple[Candidate, Key]]:
    """Return every match of a wildcard that there could be now, sorted: not in the order of the schedule."""
    # A candidate for each sender: its oldest message and the oldest wildcard that it fits.
    found = []
    for key, queue in state.sends.items():
        context, source, destination, tag = key
        receives = state.wildcards.get((context, destination, tag))
        if receives is not None:
            time = max(queue[0].arrival, receives[0].posted)
            found.append((Candidate(time, destination, source, context, tag), key))
    return sorted(found)


def match_waiting(matching: Matching, context: str, destination: int, tag: int) -> None:
    """Match the receives that had to wait for an older receive from any rank."""
    state = matching.state
    sends, receives = state.sends, state.receives
    for key in [k for k in receives if k[0] == context and k[2:] == (destination, tag)]:
        while key in receives and key in sends and not is_behind(state, receives[key][0], key):
            matching.deliver(take(sends, key), take(receives, key))


def is_behind(state: SimState, receive: SimRequest, key: Key) -> bool:
    """Return whether a receive from any rank for the same messages is older than `receive`: it chooses first."""
    context, _, destination, tag = key
    older = state.wildcards.get((context, destination, tag))
    return older is not None and older[0].order < receive.order


def take(queues: dict[Any, list[SimRequest]], key: Any) -> SimRequest:
    """Remove and return the oldest request of a queue; an empty queue is deleted."""
    queue = queues[key]
    if len(queue) == 1:
        del queues[key]
    return queue.pop(0)


def remove(queues: dict[Any, list[SimRequest]], key: Any, request: SimRequest) -> None:
    """Remove a request from its queue; an empty queue is deleted."""
    queue = queues[key]
    queue.remove(request)
    if not queue:
        del queues[key]
