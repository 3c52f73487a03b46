"""What a deadlock error says: which rank waits for what, at which line, in which circle, and what was probably meant.

Imported when a run has ended in a deadlock.

Proved by: tests/comm/sim/test_world.py
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minidist.comm.call_site import call_site
from minidist.comm.sim.watched import RunState
from minidist.comm.tags import tag_text
from minidist.comm.unlike_calls import on_several_communicators
from minidist.comm.waiting import Waiting, circle_text, error_line, find_cycle
from minidist.core.base.errors import DeadlockError
from minidist.core.comm.communicator import ANY, Request, Work
from minidist.core.comm.sim.matching import Stream

MAX_STREAMS, MAX_LINES = 16, 6  # that are shown; a report must be read on a screen


def deadlock(state: RunState, blocked: list[Stream], explain: Callable[[str], str]) -> DeadlockError:
    """Return the error for a run in which no stream can run any more. explain: see `hints`."""
    # What every blocked stream waits in.
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
    lines += [f"  hint: {hint}" for hint in hints(state, blocked, waiting, explain)[:MAX_LINES]]
    return DeadlockError("\n".join(lines), waiting, cycle)


def _waiting(stream: Stream) -> Waiting:
    """Describe one blocked stream, with the line of the wait when that is another one than the post's."""
    item: Any = stream.waiting
    assert item is not None
    # A suspended fiber's stack shows where the program waits, which may be far from where it posted.
    frame = stream.fiber.gr_frame if stream.fiber is not None and stream.is_main else None
    site = call_site(frame) if frame is not None else item.site  # no user code is on another stream's stack
    waited_at = "" if site == item.site else f", waited for at {site}"

    # A work has no peers: its stream is blocked too and says which rank it waits for.
    if isinstance(item, Work):
        return Waiting(stream.rank, stream.name, (), f"wait() of {item.describe()}{waited_at}")
    members = item.comm.members
    peers = tuple(m for m in members if m != stream.rank) if item.peer == ANY else (members[item.peer],)
    return Waiting(stream.rank, stream.name, peers, item.describe() + waited_at)


# --- what the program probably meant: calls that differ, a tag that does not fit ---

Messages = Sequence[tuple[Stream, Request]]  # what streams wait in


def hints(state: RunState, blocked: list[Stream], waiting: list[Waiting], explain: Callable[[str], str]) -> list[str]:
    """Return sentences about a deadlock.

    explain: returns the sentence about the calls of a communicator in which ranks differ, "" if none is known.
    """
    # Collective calls that differ between the ranks are the cause of all else.
    names = {stream.waiting.comm.name: None for stream in blocked if stream.waiting is not None}
    found = [text for name in names if (text := explain(name))]

    # A rank that has returned sends and receives nothing any more.
    for w in waiting:
        if len(w.peers) == 1 and w.peers[0] in state.returned:
            found.append(f"rank {w.peers[0]} has returned: it cannot complete what rank {w.rank} waits for")

    messages = [(stream, stream.waiting) for stream in blocked if isinstance(stream.waiting, Request)]
    found += _other_messages(state, messages)
    found += on_several_communicators(
        (item.comm.operation, item.comm.name, item.comm.members, stream.rank)
        for stream, item in messages
        if item.comm.match_key != "message"
    )
    return [*found, *_for_buffering(state, blocked, messages)]


def _for_buffering(state: RunState, blocked: Sequence[Stream], messages: Messages) -> Iterator[str]:
    """Yield the first rank that sends to itself, and that all are senders: the program relied on buffering."""
    # An MPI library buffers a short message to oneself, which the standard does not promise.
    for stream, item in messages:
        if item.kind == "send" and item.comm.members[item.peer] == stream.rank:
            yield (
                f"rank {stream.rank} sends to itself and waits: start the send with isend, or the receive with irecv"
                " before it; under mpiexec such a program runs only while the MPI library buffers the message"
            )
            break

    if messages and len(blocked) == state.size and all(item.kind == "send" for _, item in messages):
        yield "every rank sends and none receives: let some ranks receive first, or use sendrecv or isend"


def _other_messages(state: RunState, messages: Messages) -> Iterator[str]:
    """Yield the receives that wait while a message of another tag or communicator is there."""
    queued: dict[int, list[Any]] = defaultdict(list)
    for (_, _, destination, _), sends in state.sends.items():
        queued[destination] += sends
    for stream, item in messages:
        if item.kind != "receive":
            continue
        source = None if item.peer == ANY else item.comm.members[item.peer]
        for send in [s for s in queued[stream.rank] if source in (None, s.stream.rank)][:2]:
            yield (
                f"rank {stream.rank} waits for {_which(item)}, but queued from rank {send.stream.rank} is "
                f"{_which(send)} ({send.array.nbytes} B, sent at {send.site})"
            )


def _which(request: Request) -> str:
    """Return in words what must be equal on both sides of a message, in addition to the two ranks."""
    where = "" if request.comm.name == "world" else f" on {request.comm.name}"
    if request.comm.match_key == "message":
        return f"tag {tag_text(request.tag, request.comm.match_key)}{where}"
    return f"call {tag_text(request.tag)}{where}, {request.comm.match_key}"
