"""Which send belongs to which receive? A trace has two events a message, one on each side; an arrow needs both.

Messages between two ranks with one tag on one communicator never overtake each other, so the k-th send of such a queue
belongs to its k-th receive. The messages of collectives travel in a context of their own.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from minidist.base.trace import MessageEvent, Trace


class Pair(NamedTuple):
    """A send and its receive; `receive` is None for a message that nobody took."""

    send: MessageEvent
    receive: MessageEvent | None


def pairs(traces: Iterable[Trace]) -> list[Pair]:
    """Every send of a run with its receive, in the order of the traces."""
    sends: dict[Any, list[MessageEvent]] = defaultdict(list)
    receives: dict[Any, list[MessageEvent]] = defaultdict(list)
    for trace in traces:
        for event in trace.messages:
            collective = event.operation != "message"
            if event.kind == "send":
                sends[event.communicator, collective, event.rank, event.peer, event.tag].append(event)
            elif event.peer >= 0:
                receives[event.communicator, collective, event.peer, event.rank, event.tag].append(event)
    result = []
    for key, queue in sends.items():
        answers: Sequence[MessageEvent] = receives.get(key, ())
        for place, send in enumerate(queue):
            result.append(Pair(send, answers[place] if place < len(answers) else None))
    return result


def arrived(pair: Pair) -> bool:
    """Was the message delivered, as far as the receiver knows?"""
    return pair.receive is not None and pair.receive.end >= 0
