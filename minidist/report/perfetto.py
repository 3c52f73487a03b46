"""The trace as Chrome's JSON, for ui.perfetto.dev and chrome://tracing: to zoom into long runs.

A rank is a process with three threads, compute, send and receive (of each stream), and a flow arrow joins the two sides
of a message. Slices of one thread must nest or be apart, so messages that are on their way at the same time get threads
"send 2", "send 3", and so on. Times are microseconds. The viewers are comfortable up to about 200,000 messages.

The rules: "Trace Event Format" (Chrome), sections complete, flow, counter and metadata events.
Proved by: tests/report/test_page.py
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minidist.base.files import writing
from minidist.base.traces import MessageEvent, Trace
from minidist.comm.launching import writable
from minidist.report.timeline import arrived, pairs

_THREADS = ("compute", "send", "receive")


class _Threads:
    """The events of a file, and the threads of each rank on which they are drawn."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._threads: dict[tuple[int, str, str], int] = {}
        self._used: Counter[int] = Counter()  # threads of each rank
        self._busy: dict[tuple[int, str, str], list[float]] = {}  # until when each of the threads of a kind is taken

    def thread(self, rank: int, lane: str, what: str) -> int:
        """Return the number of a thread within its rank; it is made at its first use."""
        key = (rank, lane, what)
        if key not in self._threads:
            self._used[rank] += 1
            self._threads[key] = tid = self._used[rank]
            name = what if lane == "main" else f"{what} ({lane})"
            about = {"ph": "M", "pid": rank, "tid": tid}
            self.events.append({**about, "name": "thread_name", "args": {"name": name}})
            self.events.append({**about, "name": "thread_sort_index", "args": {"sort_index": tid}})
        return self._threads[key]

    def draw(self, message: MessageEvent, start: float, end: float) -> dict[str, Any]:
        """Add the slice of a message and return it: the first thread of its kind that is free takes it."""
        # A slice may begin when the last one of its thread has ended.
        way = "to" if message.kind == "send" else "from"
        ends = self._busy.setdefault((message.rank, message.lane, message.kind), [])
        place = next((i for i, taken in enumerate(ends) if taken <= start), len(ends))
        ends[place:] = [end, *ends[place + 1 :]]
        what = message.kind if place == 0 else f"{message.kind} {place + 1}"

        # What the viewer shows when the slice is selected.
        details = {
            "bytes": message.nbytes,
            "tag": message.tag,
            "purpose": message.purpose,
            "communicator": message.communicator,
        }
        event = {
            "ph": "X",
            "name": f"{message.operation} {way} {message.peer}",
            "cat": message.purpose,
            "pid": message.rank,
            "tid": self.thread(message.rank, message.lane, what),
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
            "args": details,
        }
        self.events.append(event)
        return event


def perfetto(traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the JSON object: {"traceEvents": [...], "displayTimeUnit": "ns"}."""
    # [1] Per rank: its name, its threads in a fixed order, computing, and memory as a counter.
    threads = _Threads()
    events = threads.events
    for trace in traces:
        events.append({"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": f"rank {trace.rank}"}})
        for what in _THREADS:
            threads.thread(trace.rank, "main", what)
        for span in trace.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.category,
                    "pid": trace.rank,
                    "tid": threads.thread(trace.rank, span.lane, "compute"),
                    "ts": span.start * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                }
            )
        for time, live in trace.memory:
            events.append({"ph": "C", "name": "memory [B]", "pid": trace.rank, "ts": time * 1e6, "args": dict(live)})

    # [2] Both sides of each message, in the order of their starts, so that few threads are enough.
    flows = pairs(traces)
    sides: list[tuple[float, float, int, MessageEvent]] = []
    for number, (send, receive) in enumerate(flows):
        start = send.start if send.start >= 0 else send.posted
        sides.append((start, max(send.end, start), number, send))
        if receive is not None and arrived(flows[number]):
            sides.append((receive.start, receive.end, number, receive))
    drawn: dict[tuple[int, str], dict[str, Any]] = {}
    for start, end, number, message in sorted(sides, key=lambda side: side[:3]):
        drawn[number, message.kind] = threads.draw(message, start, end)

    # [3] A flow arrow from the send's slice to the receive's, by the number of the message.
    for number in range(len(flows)):
        out, into = drawn[number, "send"], drawn.get((number, "receive"))
        if into is None:
            continue
        flow = {"name": "message", "cat": "message", "id": number}
        events.append({"ph": "s", **flow, "pid": out["pid"], "tid": out["tid"], "ts": out["ts"]})
        inside = into["ts"] + 0.999 * into["dur"]  # the end itself may belong to the next slice
        events.append(
            {"ph": "f", "bp": "e", **flow, "pid": into["pid"], "tid": into["tid"], "ts": max(inside, out["ts"])}
        )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write_perfetto(path: str | Path, traces: Sequence[Trace], incomplete: str = "") -> Path:
    """Write the trace for the viewer; returns the path. incomplete: a sentence for the viewer's information panel."""
    path = Path(path)
    writable(path, "--output", '{"traceEvents": [')
    with writing("the trace", path, "make room there, or choose another --output"):
        note = {"otherData": {"note": incomplete}} if incomplete else {}
        path.write_text(json.dumps({**perfetto(traces), **note}), encoding="utf-8")
    return path
