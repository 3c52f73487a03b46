"""What a deadlock error says: which rank waits for what, at which line, in which circle, and what was probably meant.

Proved by: tests/comm/sim/test_world.py
"""

from collections import defaultdict
from collections.abc import Callable

from minidist.base.errors import DeadlockError
from minidist.comm.call_site import call_site
from minidist.comm.point_to_point import ANY, Request, Work, tag_text
from minidist.comm.sim.state import SimRequest, SimState, Stream
from minidist.comm.waiting import Waiting, circle_text, error_line, find_cycle

MAX_STREAMS, MAX_LINES = 16, 6  # that are shown; a report must be read on a screen


def deadlock(state: SimState, explain: Callable[[str], str]) -> DeadlockError:
    """Return the error for a run in which no stream can run any more.

    explain: returns a sentence about the calls of a communicator in which ranks differ, "" if none is known.
    """
    # What every blocked stream waits in.
    blocked = [stream for stream in state.streams() if stream.waiting is not None]
    waiting = [_waiting(stream) for stream in blocked]
    ranks = {w.rank for w in waiting}
    lines = [f"deadlock: {len(ranks)} of {state.size} ranks are blocked and none can make progress"]
    lines += [f"  {w}" for w in waiting[:MAX_STREAMS]]
    if len(waiting) > MAX_STREAMS:
        lines.append(f"  ... and {len(waiting) - MAX_STREAMS} more")

    # An exception that led into a wait is often the cause, and would not be seen otherwise.
    for stream in [stream for stream in blocked if stream.handling][:MAX_LINES]:
        lines.append(f"  rank {stream.rank} waits while it handles {error_line(stream.handling)}")
    killed = sorted(state.dead.items())[:MAX_LINES]
    lines += [f"  rank {rank} was killed at virtual time {time:.6g} s" for rank, time in killed]

    # The circle of waits, and what was probably meant.
    cycle = find_cycle(waiting)
    if cycle:
        lines.append(f"  circle: {circle_text(cycle)}")
    lines += [f"  hint: {hint}" for hint in _hints(state, blocked, waiting, explain)[:MAX_LINES]]
    return DeadlockError("\n".join(lines), waiting, cycle)


def _waiting(stream: Stream) -> Waiting:
    """Describe one blocked stream, with the line of the wait when that is another one than the post's."""
    item = stream.waiting
    assert item is not None
    # A suspended fiber's stack shows where the program waits, which may be far from where it posted.
    frame = stream.fiber.gr_frame if stream.fiber is not None and stream.is_main else None
    site = call_site(frame) if frame is not None else item.site  # no user code is on another stream's stack
    waited_at = "" if site == item.site else f", waited for at {site}"

    # A work has no peers of its own: its stream is blocked too and says which rank it waits for.
    if isinstance(item, Work):
        return Waiting(stream.rank, stream.name, (), f"wait() of {item.describe()}{waited_at}")
    members = item.comm.members
    peers = tuple(m for m in members if m != stream.rank) if item.peer == ANY else (members[item.peer],)
    return Waiting(stream.rank, stream.name, peers, item.describe() + waited_at)


def _hints(state: SimState, blocked: list[Stream], waiting: list[Waiting], explain: Callable[[str], str]) -> list[str]:
    # Collective calls that differ between the ranks are the cause of all else.
    names = {stream.waiting.comm.name: None for stream in blocked if stream.waiting is not None}
    hints = [text for name in names if (text := explain(name))]

    # A rank that has returned sends and receives nothing any more.
    for w in waiting:
        if len(w.peers) == 1 and w.peers[0] in state.returned:
            hints.append(f"rank {w.peers[0]} has returned: it cannot complete what rank {w.rank} waits for")

    # A receive that waits while a message of another tag or communicator is there.
    queued: dict[int, list[SimRequest]] = defaultdict(list)
    for (_, _, destination, _), sends in state.sends.items():
        queued[destination] += sends
    messages = [(stream, stream.waiting) for stream in blocked if isinstance(stream.waiting, Request)]
    for stream, item in messages:
        if item.kind == "receive":
            source = None if item.peer == ANY else item.comm.members[item.peer]
            for send in [s for s in queued[stream.rank] if source in (None, s.stream.rank)][:2]:
                hints.append(
                    f"rank {stream.rank} waits for {_which(item)}, but queued from rank {send.stream.rank} is "
                    f"{_which(send)} ({send.array.nbytes} B, sent at {send.site})"
                )

    # A message to itself: an MPI library buffers a short one, which the standard does not promise.
    for stream, item in messages:
        if item.kind == "send" and item.comm.members[item.peer] == stream.rank:
            hints.append(
                f"rank {stream.rank} sends to itself and waits: start the send with isend, or the receive with irecv"
                " before it; under mpiexec such a program runs only while the MPI library buffers the message"
            )
            break

    # All are senders: the program relied on buffering.
    if messages and len(blocked) == state.size and all(item.kind == "send" for _, item in messages):
        hints.append("every rank sends and none receives: let some ranks receive first, or use sendrecv or isend")
    return hints


def _which(request: Request) -> str:
    """Return what decides whether two sides of a message meet, beside the two ranks."""
    where = "" if request.comm.name == "world" else f" on {request.comm.name}"
    if request.comm.match_key == "message":
        return f"tag {tag_text(request.tag, request.comm.match_key)}{where}"
    return f"call {tag_text(request.tag)}{where}, {request.comm.match_key}"
