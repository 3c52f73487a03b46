"""The record of a run: every message, computation and byte of memory, in one format in every world.

Lessons draw it, tests count it, closed forms are compared with it. A `Trace` belongs to one rank and is only ever
appended to. `minidist/base/trace_file.py` writes and reads a whole run as JSON lines (one event per line, so that a
killed run leaves a readable file; an event holds many samples of memory).

A message is recorded once on each side, at the moment its request is *posted* (`kind` "send" or "receive"), and its
times are filled in when it completes. Volumes count payload bytes; the bytes of check headers are counted
separately.

Proved by: tests/comm/test_conformance.py, tests/base/test_trace_file.py, tests/report/test_page.py
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class MessageEvent:
    """One side of one message. Times are seconds on the world's clock (virtual or real)."""

    rank: int
    lane: str  # the stream that posted it: "main", or "lane:" and the name of its communicator
    kind: str  # "send" | "receive"
    peer: int  # world rank; -1 while a wildcard receive has not matched
    tag: int
    nbytes: int
    purpose: str
    operation: str  # "send", or the collective and its algorithm: "all_reduce/ring"
    communicator: str
    posted: float
    start: float = -1.0  # sender: departure; receiver: the wait began
    end: float = -1.0  # sender: buffer free; receiver: data there
    header_bytes: int = 0
    dtype: str = ""
    wildcard: bool = False
    staged: bool = False  # went through pinned host memory


@dataclass(slots=True)
class SpanEvent:
    """A stretch of a rank's time that is not a message: computation, a schedule's action, a wait, a whole step."""

    rank: int
    lane: str
    name: str
    start: float
    end: float
    category: str = "compute"


@dataclass(slots=True)
class Trace:
    """Events of one rank, in program order for each lane.

    totals, counts: bytes and messages sent by purpose, of a world with record="totals", which keeps no events.
    keeps_events: False there, and where nothing is recorded. ranks: how many ranks the totals are of (`FoldedWorld`).
    busy: seconds of computing of the main program.
    """

    rank: int = 0
    size: int = 1
    messages: list[MessageEvent] = field(default_factory=list)
    spans: list[SpanEvent] = field(default_factory=list)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)  # seconds, and live bytes by purpose
    totals: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    keeps_events: bool = True
    ranks: int = 1
    busy: float = 0.0
    computed: float = 0.0  # seconds between messages since `take_computed`

    def take_computed(self) -> float:
        """Return the seconds that this rank has computed since the last call, without those in which it waited."""
        result, self.computed = self.computed, 0.0
        return result

    def add_computed(self, stream: Any, name: str, start: float, seconds: float) -> None:
        """Record what a simulated stream of this rank has computed since `start`, for `seconds` on its clock."""
        self.computed += seconds
        self.busy += seconds if stream.is_main else 0.0
        if self.keeps_events and stream.time > start:
            self.spans.append(SpanEvent(self.rank, stream.name, name, start, stream.time))

    def add_span(self, span: SpanEvent) -> None:
        """Record a span, where events are kept."""
        if self.keeps_events:
            self.spans.append(span)

    def add_to_totals(self, purpose: str, messages: int, nbytes: int) -> None:
        """Count what is sent, where events are not kept."""
        self.totals[purpose] = self.totals.get(purpose, 0) + nbytes
        self.counts[purpose] = self.counts.get(purpose, 0) + messages

    def sent(self, purpose: str | None = None) -> list[MessageEvent]:
        """Send events, of one purpose or of all."""
        return [m for m in self.messages if m.kind == "send" and (purpose is None or m.purpose == purpose)]

    def bytes_by_purpose(self) -> dict[str, int]:
        """Payload bytes that this rank sent, by purpose."""
        result = defaultdict(int, self.totals)
        for message in self.sent():
            result[message.purpose] += message.nbytes
        return dict(result)

    def messages_by_purpose(self) -> dict[str, int]:
        """Messages that this rank sent, by purpose."""
        return dict(Counter(self.counts) + Counter(message.purpose for message in self.sent()))


def sent_by_purpose(traces: Iterable[Trace]) -> tuple[Counter[str], Counter[str]]:
    """Return the bytes that all ranks sent, by purpose, and the messages: each is counted once, at its sender."""
    nbytes, messages = Counter[str](), Counter[str]()
    for trace in traces:
        nbytes.update(trace.bytes_by_purpose())
        messages.update(trace.messages_by_purpose())
    return nbytes, messages


def signature(message: MessageEvent) -> tuple[Any, ...]:
    """What must be the same in the simulated world and under MPI: everything but the times."""
    where = (message.kind, message.peer, message.tag, message.nbytes)
    return (*where, message.purpose, message.operation, message.communicator)


def sequences(trace: Trace) -> dict[str, list[tuple[Any, ...]]]:
    """For each lane the signatures of its messages in program order: equal in every world."""
    result: dict[str, list[tuple[Any, ...]]] = {}
    for message in trace.messages:
        result.setdefault(message.lane, []).append(signature(message))
    return result
