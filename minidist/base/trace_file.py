"""Traces in files: a header, then a line of JSON for each event; and the part of a trace that belongs to some steps.

Proved by: tests/base/test_trace_file.py
"""

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.base.files import writing
from minidist.base.trace_checks import (
    FORMAT,
    MAX_LINE,
    MAX_RANKS,
    BadLineError,
    check_header,
    check_rank,
    event_of,
    memory_samples,
    parse,
)
from minidist.base.traces import MessageEvent, SpanEvent, Trace

TRACE_BEGINS = f'{{"format": "{FORMAT}"'  # the first characters of every trace file
SAMPLES = 1_000  # of memory in an event


def write_traces(path: str | Path, traces: Iterable[Trace], **header: Any) -> Path:
    """Write a run as JSON lines: one header line, which counts the events, then one line per event. Returns the path.

    header: what the pictures read, such as `command`; `incomplete` says why events of the run are missing.
    """
    path = Path(path)
    traces = list(traces)
    events = sum(len(trace.messages) + len(trace.spans) + len(trace.memory) for trace in traces)
    with writing("the trace", path, "choose another --trace"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with (
        writing("the trace", path, "make room there, or choose another --trace"),
        path.open("w", encoding="utf-8") as file,
    ):
        file.write(json.dumps({"format": FORMAT, "ranks": len(traces), "events": events, **header}) + "\n")
        for trace in traces:
            for message in trace.messages:
                file.write(json.dumps({"event": "message", **_record(message)}) + "\n")
            for span in trace.spans:
                file.write(json.dumps({"event": "span", **_record(span)}) + "\n")
            for event in _memory_events(trace):
                file.write(json.dumps(event, separators=(",", ":")) + "\n")
    return path


def _record(event: MessageEvent | SpanEvent) -> dict[str, Any]:
    """Return an event's fields, which are numbers and texts; `asdict` would copy each of them."""
    return {name: getattr(event, name) for name in event.__slots__}


def _memory_events(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield a rank's samples of memory, SAMPLES of them per event: times, and by purpose the change since the last one.

    A sample has up to ten purposes and changes one of them, so a line for each sample would have four times the bytes.
    """
    before: dict[str, int] = {}
    for first in range(0, len(trace.memory), SAMPLES):
        part = trace.memory[first : first + SAMPLES]
        states = [before, *(live for _, live in part)]
        purposes = dict.fromkeys(name for live in states for name in live)
        changes = {name: [new.get(name, 0) - old.get(name, 0) for old, new in pairwise(states)] for name in purposes}
        yield {"event": "memory", "rank": trace.rank, "times": [time for time, _ in part], "changes": changes}
        before = states[-1]


def read_traces(path: str | Path) -> tuple[list[Trace], dict[str, Any]]:
    """Read what `write_traces` wrote: the traces in rank order, and the header.

    Half a line at the end, which a killed run may leave, is left out. Where events are missing, the header's
    `incomplete` says so. Raises UsageError with the number of the first line that is not an event of a rank of the run.
    """
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        traces: list[Trace] = []
        header: dict[str, Any] = {}
        number = 0
        # One character more than allowed is asked for, so that a file of one endless line is not read to its end.
        while line := file.readline(MAX_LINE + 1):
            number += 1
            try:
                if not header:
                    header = check_header(parse(line))
                    traces = [Trace(rank, header["ranks"]) for rank in range(header["ranks"])]
                else:
                    _add_event(traces, parse(line))
            except BadLineError as error:
                if header and not line.endswith("\n") and len(line) <= MAX_LINE:
                    header["incomplete"] = "the end of its file is missing"
                    break
                if not header:
                    raise UsageError(f"{path} is not a minidist trace: {error}; --trace writes one") from None
                raise UsageError(f"{path}, line {number}: {error}; write the trace again with --trace") from None
    if not header:
        raise UsageError(f"{path} is not a minidist trace: it is empty; --trace writes one")

    # The header of an older trace does not count its events.
    found = sum(len(trace.messages) + len(trace.spans) + len(trace.memory) for trace in traces)
    if found < header.get("events", 0):
        header["incomplete"] = f"its file ends after {found:,} of {header['events']:,} events"
    return traces, header


def _add_event(traces: list[Trace], record: Any) -> None:
    """Append the event of a line to its rank's trace; BadLineError when it is none."""
    if not isinstance(record, dict):
        raise BadLineError(f"{quoted(record)} is not an event")
    kind = record.pop("event", None)
    if kind == "message":
        message = event_of(MessageEvent, record, len(traces))
        traces[message.rank].messages.append(message)
    elif kind == "span":
        span = event_of(SpanEvent, record, len(traces))
        traces[span.rank].spans.append(span)
    elif kind == "memory":
        rank = check_rank(record.get("rank"), len(traces))
        samples = traces[rank].memory
        samples.extend(memory_samples(record, samples[-1][1] if samples else {}))
    else:
        raise BadLineError(f"event {quoted(kind)} is not known; it must be message, span or memory")


def read_unfinished(folder: str | Path) -> tuple[list[Trace], dict[str, Any]]:
    """The traces that the ranks of a job that hung or died under MPI left in `folder`, as the watchdog's report names
    it.
    """
    # The file's name says whose it is.
    numbers = {path: path.name[4:].split(".")[0] for path in Path(folder).glob("rank*.trace.jsonl")}
    paths = {path: int(text) for path, text in numbers.items() if text.isdecimal() and int(text[:9]) < MAX_RANKS}
    if not paths:
        raise UsageError(f"there are no rank*.trace.jsonl in {folder}; a report of the watchdog names the folder")
    ranks = 1 + max(paths.values())
    traces = [Trace(rank, ranks) for rank in range(ranks)]

    # A killed rank may have left half a line.
    for path in sorted(paths, key=paths.__getitem__):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if not line.endswith("}"):
                continue
            try:
                _add_event(traces, parse(line))
            except BadLineError as error:
                raise UsageError(f"{path}, line {number}: {error}; remove the line") from None
    why = "the job did not end, and its ranks have written no more"
    return traces, {"format": FORMAT, "ranks": ranks, "world": "mpi", "incomplete": why}


def steps_of(traces: Iterable[Trace]) -> int:
    """How many training steps the traces recorded."""
    return max((sum(span.category == "step" for span in trace.spans) for trace in traces), default=0)


def only_steps(traces: list[Trace], first: int, stop: int) -> list[Trace]:
    """The events of steps first, first + 1, ..., stop - 1 (each a span of category "step"), times as recorded.

    Each rank has its own windows, because the stages of a pipeline begin and end a step at different times. A step ends
    where the next one begins, so an event at that very time belongs to the next one.
    """

    # A range may name a billion steps, so names are compared with those that the trace has.
    def is_wanted(span: SpanEvent) -> bool:
        number = span.name.removeprefix("step ")
        return span.category == "step" and number.isdecimal() and first <= int(number) < stop

    if not any(is_wanted(span) for trace in traces for span in trace.spans):
        raise UsageError(f"the trace has no steps {first}:{stop}; it has 0:{steps_of(traces)}")
    return [_part_of(trace, [span for span in trace.spans if is_wanted(span)]) for trace in traces]


def _part_of(trace: Trace, steps: list[SpanEvent]) -> Trace:
    """Return a rank's events within its steps; without a step on this rank, none."""
    if not steps:
        return Trace(trace.rank, trace.size)
    begin, end = min(step.start for step in steps), max(step.end for step in steps)

    # What happens at the end of the last step of all, or in a step without duration, has no later step to belong to.
    later = any(span.category == "step" and span.start >= end and span not in steps for span in trace.spans)
    closed = begin == end or not later

    def inside(start: float) -> bool:
        return begin <= start < end or (closed and start == end)

    return Trace(
        trace.rank,
        trace.size,
        [message for message in trace.messages if inside(message.posted)],
        [span for span in trace.spans if (span in steps if span.category == "step" else inside(span.start))],
        [sample for sample in trace.memory if inside(sample[0])],
    )
