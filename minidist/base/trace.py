"""The record of a run: every message, computation and byte of memory, in one format in every world.

Lessons draw it, tests count it, closed forms are compared with it. A `Trace` belongs to one rank and is only ever
appended to; `TraceFile` functions write and read a whole run as JSON lines (one event a line, so that a killed run
leaves a readable file).

A message is recorded once on each side, at the moment its request is *posted* (`kind` "send" or "receive"), and its
times are filled in when it completes. Volumes count payload bytes; the bytes of check headers have a column of their
own.

Proved by: tests/comm/test_conformance.py, tests/report/test_page.py
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError
from minidist.base.files import writing

PURPOSES = (
    "gradient_reduce",
    "parameter_gather",
    "tensor_forward",
    "tensor_backward",
    "regather",
    "pipeline_activation",
    "pipeline_gradient",
    "tied",
    "dispatch",
    "loss_divisor",
    "overflow",
    "clip_norm",
    "metrics",
    "evaluation",
    "checkpoint",
    "startup",
    "parameter_push",
    "parameter_pull",
    "user",
)

_purpose: ContextVar[str] = ContextVar("minidist_message_purpose", default="user")
_settled: ContextVar[bool] = ContextVar("minidist_message_purpose_settled", default=False)


@contextmanager
def purpose(name: str, whole: bool = False) -> Iterator[None]:
    """Messages posted inside the block are recorded under `name`, one of `PURPOSES`.

    whole: also those of blocks inside that name another purpose: what a layer sends for an evaluation is evaluation's.
    """
    if name not in PURPOSES:
        raise ValueError(f"unknown message purpose {name!r}; one of {', '.join(PURPOSES)}")
    token, settled = _purpose.set(_purpose.get() if _settled.get() else name), _settled.set(whole or _settled.get())
    try:
        yield
    finally:
        _purpose.reset(token)
        _settled.reset(settled)


current_purpose = _purpose.get


@dataclass(slots=True)
class MessageEvent:
    """One side of one message. Times are seconds on the world's clock (virtual or real)."""

    rank: int
    lane: str
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

    def signature(self) -> tuple[Any, ...]:
        """What must be the same in the simulated world and under MPI: everything but the times."""
        return (self.kind, self.peer, self.tag, self.nbytes, self.purpose, self.operation, self.communicator)


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
    """Events of one rank, in program order for each lane."""

    rank: int = 0
    size: int = 1
    messages: list[MessageEvent] = field(default_factory=list)
    spans: list[SpanEvent] = field(default_factory=list)
    memory: list[tuple[float, dict[str, int]]] = field(default_factory=list)

    def sent(self, purpose: str | None = None) -> list[MessageEvent]:
        """Send events, of one purpose or of all."""
        return [m for m in self.messages if m.kind == "send" and (purpose is None or m.purpose == purpose)]

    def bytes_by_purpose(self) -> dict[str, int]:
        """Payload bytes that this rank sent, by purpose."""
        result: dict[str, int] = {}
        for message in self.messages:
            if message.kind == "send":
                result[message.purpose] = result.get(message.purpose, 0) + message.nbytes
        return result

    def sequences(self) -> dict[str, list[tuple[Any, ...]]]:
        """For each lane the signatures of its messages in program order: equal in every world."""
        result: dict[str, list[tuple[Any, ...]]] = {}
        for message in self.messages:
            result.setdefault(message.lane, []).append(message.signature())
        return result


def write_traces(path: str | Path, traces: Iterable[Trace], **header: Any) -> Path:
    """Write a run as JSON lines: one header line, then one line an event. Returns the path."""
    path = Path(path)
    traces = list(traces)
    with writing("the trace", path, "choose another --trace"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with (
        writing("the trace", path, "make room there, or choose another --trace"),
        path.open("w", encoding="utf-8") as file,
    ):
        file.write(json.dumps({"format": "minidist-trace-1", "ranks": len(traces), **header}) + "\n")
        for trace in traces:
            for message in trace.messages:
                file.write(json.dumps({"event": "message", **asdict(message)}) + "\n")
            for span in trace.spans:
                file.write(json.dumps({"event": "span", **asdict(span)}) + "\n")
            for time, live in trace.memory:
                file.write(json.dumps({"event": "memory", "rank": trace.rank, "time": time, "live": live}) + "\n")
    return path


def read_traces(path: str | Path) -> tuple[list[Trace], dict[str, Any]]:
    """Read what `write_traces` wrote: the traces in rank order, and the header."""
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        first = file.readline()
        if '"minidist-trace-1"' not in first:
            raise UsageError(
                f"{path} is not a minidist trace: its first line has no format 'minidist-trace-1'; --trace writes one"
            )
        header = json.loads(first)
        traces = [Trace(rank, header["ranks"]) for rank in range(header["ranks"])]
        for line in file:
            record = json.loads(line)
            event = record.pop("event")
            trace = traces[record["rank"]]
            if event == "message":
                trace.messages.append(MessageEvent(**record))
            elif event == "span":
                trace.spans.append(SpanEvent(**record))
            elif event == "memory":
                trace.memory.append((record["time"], record["live"]))
    return traces, header


def read_unfinished(folder: str | Path) -> tuple[list[Trace], dict[str, Any]]:
    """The traces that the ranks of a job that hung or died under MPI left in `folder`, as the watchdog's report names
    it.
    """
    paths = sorted(Path(folder).glob("rank*.trace.jsonl"), key=lambda path: int(path.name[4:].split(".")[0]))
    if not paths:
        raise UsageError(f"there are no rank*.trace.jsonl in {folder}; a report of the watchdog names the folder")
    ranks = 1 + max(int(path.name[4:].split(".")[0]) for path in paths)
    traces = [Trace(rank, ranks) for rank in range(ranks)]
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):  # a killed rank may have left half a line
                record = json.loads(line)
                del record["event"]
                traces[record["rank"]].messages.append(MessageEvent(**record))
    return traces, {"format": "minidist-trace-1", "ranks": ranks, "world": "mpi"}


def steps_of(traces: Iterable[Trace]) -> int:
    """How many training steps the traces recorded."""
    return max((sum(span.category == "step" for span in trace.spans) for trace in traces), default=0)


def only_steps(traces: list[Trace], first: int, stop: int) -> list[Trace]:
    """The events of steps first, first + 1, ..., stop - 1 (each a span of category "step"), times as recorded."""
    wanted = {f"step {number}" for number in range(first, stop)}
    spans = [span for trace in traces for span in trace.spans if span.category == "step" and span.name in wanted]
    if not spans:
        raise UsageError(f"the trace has no steps {first}:{stop}; it has 0:{steps_of(traces)}")
    begin, end = min(span.start for span in spans), max(span.end for span in spans)

    def inside(start: float) -> bool:
        return begin <= start <= end

    return [
        Trace(
            trace.rank,
            trace.size,
            [message for message in trace.messages if inside(message.posted)],
            [span for span in trace.spans if inside(span.start) and span.end <= end],
            [sample for sample in trace.memory if inside(sample[0])],
        )
        for trace in traces
    ]
