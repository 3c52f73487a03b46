"""The trace as Chrome's JSON, for ui.perfetto.dev and chrome://tracing: zoom into runs too wide for any page.

A rank is a process with three threads, compute, send and receive (of each lane), and a flow arrow joins the two sides
of a message. Times are microseconds. The viewers are comfortable up to about 200,000 messages.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minidist.base.trace import MessageEvent, Trace
from minidist.report.pairs import arrived, pairs

_THREADS = ("compute", "send", "receive")


def perfetto(traces: Sequence[Trace]) -> dict[str, Any]:
    """The JSON object: {"traceEvents": [...], "displayTimeUnit": "ns"}."""
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, str, str], int] = {}

    def thread(rank: int, lane: str, what: str) -> int:
        key = (rank, lane, what)
        if key not in threads:
            threads[key] = tid = 1 + sum(1 for r, _, _ in threads if r == rank)
            name = what if lane == "main" else f"{what} ({lane})"
            about = {"ph": "M", "pid": rank, "tid": tid}
            events.append({**about, "name": "thread_name", "args": {"name": name}})
            events.append({**about, "name": "thread_sort_index", "args": {"sort_index": tid}})
        return threads[key]

    def slice_of(message: MessageEvent, start: float, end: float) -> dict[str, Any]:
        way = "to" if message.kind == "send" else "from"
        details = {
            "bytes": message.nbytes, "tag": message.tag, "purpose": message.purpose,
            "communicator": message.communicator,
        }  # fmt: skip
        return {
            "ph": "X", "name": f"{message.operation} {way} {message.peer}", "cat": message.purpose, "pid": message.rank,
            "tid": thread(message.rank, message.lane, message.kind), "ts": start * 1e6, "dur": (end - start) * 1e6,
            "args": details,
        }  # fmt: skip

    for trace in traces:
        events.append({"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": f"rank {trace.rank}"}})
        for what in _THREADS:
            thread(trace.rank, "main", what)
        for span in trace.spans:
            events.append({
                "ph": "X", "name": span.name, "cat": span.category, "pid": trace.rank,
                "tid": thread(trace.rank, span.lane, "compute"), "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
            })  # fmt: skip
        for time, live in trace.memory:
            events.append({"ph": "C", "name": "memory [B]", "pid": trace.rank, "ts": time * 1e6, "args": dict(live)})
    for number, pair in enumerate(pairs(traces)):
        send, receive = pair
        start = send.start if send.start >= 0 else send.posted
        out = slice_of(send, start, max(send.end, start))
        events.append(out)
        if not arrived(pair):
            continue
        assert receive is not None
        into = slice_of(receive, receive.start, receive.end)
        events.append(into)
        flow = {"name": "message", "cat": "message", "id": number}
        events.append({"ph": "s", **flow, "pid": send.rank, "tid": out["tid"], "ts": out["ts"]})
        end = into["ts"] + into["dur"]
        events.append({"ph": "f", "bp": "e", **flow, "pid": receive.rank, "tid": into["tid"], "ts": end})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def write_perfetto(path: str | Path, traces: Sequence[Trace]) -> Path:
    """Write the trace for the viewer; returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(perfetto(traces)), encoding="utf-8")
    return path
