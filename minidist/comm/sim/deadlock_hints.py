"""What was probably meant by a program that waits for ever: calls that differ, a tag that does not fit.

Imported when a run has ended in a deadlock.

Proved by: tests/comm/sim/test_world.py
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minidist.comm.sim.state import RunState
from minidist.comm.tags import tag_text
from minidist.comm.unlike_calls import on_several_communicators
from minidist.comm.waiting import Waiting
from minidist.core.comm.communicator import ANY, Request
from minidist.core.comm.sim.matching import Stream

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
