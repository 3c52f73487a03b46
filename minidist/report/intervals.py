"""Stretches of time of one lane: what it computed, what it waited for, and for whom."""

from collections.abc import Iterable

from minidist.base.trace import MessageEvent, SpanEvent
from minidist.report.pairs import Pair

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union: sorted, apart from each other, none empty."""
    result: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """The parts of `intervals` that lie in none of `removed`."""
    left = merged(intervals)
    for low, high in merged(removed):
        pieces = [piece for start, end in left for piece in ((start, min(end, low)), (max(start, high), end))]
        left = [(start, end) for start, end in pieces if end > start]
    return left


def waits(pairs: Iterable[Pair], end: float) -> dict[tuple[int, str], tuple[list[Interval], list[Interval]]]:
    """(rank, lane) -> (blocked, transfer): waiting for a partner who has not come, and for bytes that are on their way.

    A receive is blocked until its message has left; a synchronous send until its receive is posted; a message that
    never met its partner blocks until `end`, the right edge of the picture.
    """
    blocked: dict[tuple[int, str], list[Interval]] = {}
    transfer: dict[tuple[int, str], list[Interval]] = {}

    def add(event: MessageEvent, start: float, partner: float, stop: float) -> None:
        key = (event.rank, event.lane)
        met = min(max(partner, start), stop)
        blocked.setdefault(key, []).append((start, met))
        transfer.setdefault(key, []).append((met, stop))

    for send, receive in pairs:
        if send.end >= 0:
            late = receive.posted if receive is not None and send.posted < receive.posted <= send.end else send.posted
            add(send, send.posted, late, send.end)
        elif send.start >= 0:
            add(send, send.posted, end, end)
        if receive is not None and receive.end >= 0:
            add(receive, receive.start, send.start if send.start >= 0 else receive.start, receive.end)
    return {key: (merged(blocked[key]), without(transfer[key], blocked[key])) for key in blocked}


def unanswered(events: Iterable[MessageEvent]) -> list[MessageEvent]:
    """Requests that a rank waited for and that never completed: where it stands in a deadlock."""
    return [event for event in events if event.start >= 0 and event.end < 0]


def compute_of(spans: Iterable[SpanEvent], lane: str) -> list[SpanEvent]:
    """A lane's computing."""
    return [span for span in spans if span.lane == lane and span.category == "compute"]
