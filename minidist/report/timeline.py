"""What a trace says about time: which send belongs to which receive, and when a stream computed, waited or transferred.

A trace has two events per message, one on each side; an arrow needs both. Messages between two ranks with one tag on
one communicator never overtake each other, so the k-th send of such a queue belongs to its k-th receive. The messages
of collectives travel in another context.

Proved by: tests/report/test_pictures.py
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from minidist.base.errors import quoted
from minidist.base.traces import MessageEvent, SpanEvent, Trace

Interval = tuple[float, float]


class Pair(NamedTuple):
    """A send and its receive; `receive` is None for a message that was never received."""

    send: MessageEvent
    receive: MessageEvent | None


def pairs(traces: Iterable[Trace]) -> list[Pair]:
    """Return every send of a run with its receive, in the order of the traces."""
    # A queue for each (communicator, collective or not, sender, receiver, tag), on both sides.
    sends: dict[Any, list[MessageEvent]] = defaultdict(list)
    receives: dict[Any, list[MessageEvent]] = defaultdict(list)
    for trace in traces:
        for event in trace.messages:
            collective = event.operation != "message"
            if event.kind == "send":
                sends[event.communicator, collective, event.rank, event.peer, event.tag].append(event)
            elif event.peer >= 0:
                receives[event.communicator, collective, event.peer, event.rank, event.tag].append(event)

    # The k-th send of a queue belongs to its k-th receive.
    result = []
    for key, queue in sends.items():
        taken: Sequence[MessageEvent] = receives.get(key, ())
        for place, send in enumerate(queue):
            result.append(Pair(send, taken[place] if place < len(taken) else None))
    return result


def arrived(pair: Pair) -> bool:
    """Return whether the receiver has seen the message."""
    return pair.receive is not None and pair.receive.end >= 0


class Band(NamedTuple):
    """The messages of one collective call on one stream, from the first departure to the last arrival."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    nbytes: int  # that this stream sent


def bands(pairs: Iterable[Pair]) -> list[Band]:
    """Return one band for each collective call and stream; a call is what has one tag on one communicator."""
    found: dict[Any, Band] = {}
    for pair in pairs:
        if not arrived(pair):
            continue
        send, receive = pair
        assert receive is not None
        start = send.start if send.start >= 0 else send.posted
        for event, sent in ((send, send.nbytes), (receive, 0)):
            # The name is the call's, without its algorithm.
            key = (event.rank, event.lane, event.communicator, event.operation, event.tag)
            name = event.operation.partition("/")[0].replace("_", "-")
            old = found.get(key, Band(event.rank, event.lane, name, start, receive.end, 0))
            found[key] = old._replace(
                start=min(old.start, start), end=max(old.end, receive.end), nbytes=old.nbytes + sent
            )
    return list(found.values())


def row_label(rank: int, lane: str) -> str:
    """Return the name of a stream's line."""
    if lane == "main":
        return f"rank {rank}"
    # A stream is called as its communicator, and that of an axis of a mesh like "world.2dp_pp0_cp0_tp0".
    name = lane.removeprefix("lane:")
    axis = re.search(r"\.\d+([a-z]+(?:x[a-z]+)*)_", name)
    if axis:
        return f"its {axis[1]} stream"
    return "its stream" if name == "world" else f"its stream on {quoted(name, marks=False)}"


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union as sorted intervals that do not touch; empty ones are dropped."""
    result: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        # Sorted by start: it touches the last one, or begins a new one.
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Return the parts of `intervals` that lie in none of `removed`."""
    # One walk along both sorted lists, so that a run of many messages takes no longer than it has intervals.
    holes, result, place = merged(removed), [], 0
    for start, end in merged(intervals):
        while place < len(holes) and holes[place][1] <= start:
            place += 1
        # The holes that begin inside the interval; the last of them may reach into the next one.
        at = place
        while at < len(holes) and holes[at][0] < end:
            low, high = holes[at]
            at += 1
            if low > start:
                result.append((start, low))
            start = max(start, high)
        if start < end:
            result.append((start, end))
    return result


def waits(pairs: Iterable[Pair], end: float) -> dict[tuple[int, str], tuple[list[Interval], list[Interval]]]:
    """Return {(rank, stream): (blocked, transfer)}: waiting for a partner, and for bytes that are on their way.

    A receive is blocked until its message has left; a synchronous send until its receive is posted; a message that
    never met its partner blocks until `end`, the right edge of the picture.
    """
    blocked: dict[tuple[int, str], list[Interval]] = {}
    transfer: dict[tuple[int, str], list[Interval]] = {}

    def add(event: MessageEvent, start: float, partner: float, stop: float) -> None:
        key = (event.rank, event.lane)
        # partner: when the other side came; before that the stream is blocked, after it bytes are on their way.
        met = min(max(partner, start), stop)
        blocked.setdefault(key, []).append((start, met))
        transfer.setdefault(key, []).append((met, stop))

    for send, receive in pairs:
        if send.end >= 0:
            # A send whose receive was posted later waited for it; one that was buffered did not.
            late = receive.posted if receive is not None and send.posted < receive.posted <= send.end else send.posted
            add(send, send.posted, late, send.end)
        elif send.start >= 0:
            add(send, send.posted, end, end)
        if receive is not None and receive.end >= 0:
            add(receive, receive.start, send.start if send.start >= 0 else receive.start, receive.end)
    return {key: (merged(blocked[key]), without(transfer[key], blocked[key])) for key in blocked}


def unanswered(events: Iterable[MessageEvent]) -> list[MessageEvent]:
    """Return the requests that a rank waited for and that never completed: where it is in a deadlock."""
    return [event for event in events if event.start >= 0 and event.end < 0]


def compute_of(spans: Iterable[SpanEvent], stream: str) -> list[SpanEvent]:
    """Return the computing of one stream."""
    return [span for span in spans if span.lane == stream and span.category == "compute"]
