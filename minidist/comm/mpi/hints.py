"""The probable cause of a hang under MPI, from what each rank waits in and what each has sent so far.

The simulated world knows its queues (`sim.deadlock_report`); here they are worked out from the ranks' traces: what a
rank has sent to another, less what that one has posted receives for, is on its way or in MPI's buffers.

Proved by: tests/comm/mpi/test_failures.py
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from minidist.comm.call_log import Call
from minidist.comm.communicator import Claim, unlike_claims
from minidist.comm.tags import tag_text
from minidist.comm.unlike_calls import on_several_communicators, ranks_text, unlike_calls

Message = Mapping[str, Any]  # a line of a trace file
States = Mapping[int, Mapping[str, Any]]  # what the watchdogs wrote, by rank
Queue = tuple[str, bool, int]  # communicator, of a collective?, tag


def queue_of(message: Message) -> Queue:
    """Return what must be equal on both sides of a message, in addition to the two ranks."""
    return message["communicator"], message["operation"] != "message", message["tag"]


def name_of(queue: Queue, operation: str) -> str:
    """Return a queue in words."""
    communicator, collective, tag = queue
    where = "" if communicator == "world" else f" on {communicator}"
    return f"call {tag_text(tag)}{where}, {operation}" if collective else f"tag {tag}{where}"


class History(NamedTuple):
    """What a rank has done: its last collective calls by communicator, and its communicators by origin."""

    calls: dict[str, list[Call]]
    made: dict[str, Claim]


def hints(states: States, traces: Mapping[int, Sequence[Message]], histories: Mapping[int, History]) -> list[str]:
    """Return at most six sentences.

    states: what the watchdogs wrote, by rank; traces: each rank's messages so far; histories: its calls.
    """
    # Communicators and collective calls that differ between the ranks are the cause of all else.
    waiting = {rank: state for rank, state in states.items() if state["state"] == "waiting"}
    names = {state["message"]["communicator"]: None for state in waiting.values() if "message" in state}
    logs = {name: {rank: of.calls[name] for rank, of in histories.items() if name in of.calls} for name in names}
    found = _unlike_communicators(waiting, histories)
    over = {rank for rank, state in states.items() if state["state"] == "returned"}
    found += [text for name, of_ranks in logs.items() if (text := unlike_calls(name, of_ranks, over))]

    found += _for_what_has_returned(waiting, over, histories)
    found += _for_another_message(waiting, traces)
    found += on_several_communicators(
        (message["operation"], message["communicator"], state["members"], rank)
        for rank, state in waiting.items()
        if (message := state.get("message")) and message["operation"] != "message"
    )
    return [*found, *_for_buffering(waiting, len(states))][:6]


def _for_what_has_returned(waiting: States, over: Collection[int], histories: Mapping[int, History]) -> Iterator[str]:
    """Yield who waits for ranks that have returned: they send and receive nothing, and make no communicator."""
    for rank, state in waiting.items():
        if origin := state.get("origin"):
            late = [peer for peer in state["peers"] if peer in over and origin not in histories[peer].made]
            if late:
                parent, _, number = origin.rpartition(".")
                yield (
                    f"{ranks_text(late)} returned without call {number} of group, dup or split on {parent}, for which"
                    f" rank {rank} waits"
                )
        if len(state["peers"]) == 1 and state["peers"][0] in over:
            yield f"rank {state['peers'][0]} has returned: it cannot complete what rank {rank} waits for"


def _for_another_message(waiting: States, traces: Mapping[int, Sequence[Message]]) -> Iterator[str]:
    """Yield the receives that wait while a message of another tag or communicator is there."""
    for rank, state in waiting.items():
        wanted = state.get("message")
        if not wanted or wanted["kind"] != "receive":
            continue
        for source in state["peers"]:
            queued = sent_to(rank, traces.get(source, ()), traces.get(rank, ()))
            queued.pop(queue_of(wanted), None)
            for queue, message in list(queued.items())[:2]:
                yield (
                    f"rank {rank} waits for {name_of(queue_of(wanted), wanted['operation'])}, but queued from rank"
                    f" {source} is {name_of(queue, message['operation'])} ({message['nbytes']} B)"
                )


def _for_buffering(waiting: States, ranks: int) -> Iterator[str]:
    """Yield the ranks that send to themselves, and that all are senders: the program relied on buffering."""
    sending = [rank for rank, s in waiting.items() if s.get("message", {}).get("kind") == "send"]
    own = [rank for rank in sending if list(waiting[rank]["peers"]) == [rank]]
    for rank in own:  # whether MPI buffers the message depends on its size
        yield (
            f"rank {rank} sends to itself, and posts no receive before that send is done (an MPI library may buffer the"
            " message, and then it passes): use isend, or sendrecv"
        )
    if waiting and not own and len(sending) == ranks:
        yield "every rank sends and none receives: let some ranks receive first, or use sendrecv or isend"


def _unlike_communicators(waiting: States, histories: Mapping[int, History]) -> list[str]:
    """Return a sentence about the first communicator that a rank waits for and that another one made unlike."""
    for rank, state in waiting.items():
        mine = histories[rank].made.get(state.get("origin", ""))
        for other in mine.members if mine else ():
            theirs = histories[other].made.get(mine.origin) if mine and other in histories else None
            if mine and theirs and not mine.agrees(theirs):
                return [str(unlike_claims(mine, theirs))]
    return []


def sent_to(rank: int, theirs: Sequence[Message], ours: Sequence[Message]) -> dict[Queue, Message]:
    """Return, by queue, the first message that `theirs` holds for `rank` and for which `ours` has no receive."""
    # Each receive posted takes one message of its queue; the first message beyond them is still on its way.
    source = theirs[0]["rank"] if theirs else -1
    asked = Counter(queue_of(m) for m in ours if m["kind"] == "receive" and m["peer"] == source)
    result: dict[Queue, Message] = {}
    for message in theirs:
        if message["kind"] == "send" and message["peer"] == rank:
            queue = queue_of(message)
            if asked[queue]:
                asked[queue] -= 1
            else:
                result.setdefault(queue, message)
    return result
