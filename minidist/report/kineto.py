"""A recorded run in the form of PyTorch's profiler, which HolisticTraceAnalysis (HTA) and other tools read.

HTA looks at kernels of a GPU: it divides their time into computing, communicating and neither, and says how much of the
communication is hidden. So stretches of computing, collective calls and messages are written as kernels, each on the
stream where a GPU would run it, under the names of NCCL's kernels, by which HTA knows them:

    stream 7    computing                stream 9    sends, ncclDevKernel_SendRecv
    stream 8    collective calls,        stream 10   receives, ncclDevKernel_SendRecv
                ncclDevKernel_AllReduce_Sum_f32_RING ...
    stream 11   collective calls of the first communication stream, and so on

Each rank has one file, NAME-rank-R.json, with `distributedInfo`; a step is an annotation ProfilerStep#K. Times are
microseconds.

Source: the traces that torch.profiler writes with `export_chrome_trace`.
Proved by: tests/report/test_kineto.py
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minidist.base.files import writing
from minidist.base.traces import Trace
from minidist.core.base.errors import UsageError
from minidist.report.chakra import COLLECTIVES, calls_of, computing

COMPUTE, CALLS, SENDS, RECEIVES = 7, 8, 9, 10  # streams; those of PyTorch begin at 7
KERNELS = {
    "all_reduce": "AllReduce_Sum",
    "reduce": "Reduce_Sum",
    "all_gather": "AllGather",
    "broadcast": "Broadcast",
    "reduce_scatter": "ReduceScatter_Sum",
}


def kineto(trace: Trace, world: str = "") -> dict[str, Any]:
    """Return the JSON object of one rank."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": f"rank {trace.rank}"}}
    ]
    lanes = sorted({message.lane for message in trace.messages} - {"main"})
    streams = {"main": CALLS} | {lane: RECEIVES + 1 + place for place, lane in enumerate(lanes)}

    for span in trace.spans:
        if span.category == "step":
            name = f"ProfilerStep#{span.name.removeprefix('step ')}"
            step = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "args": {}}
            events.append({**step, "ts": 1e6 * span.start, "dur": 1e6 * (span.end - span.start)})
    for name, stream, start, end, about in _kernels(trace, streams):
        # A kernel is launched by a call on the host with the same correlation number.
        number = len(events)
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
        events.append({**launch, "ts": 1e6 * start, "dur": 0, "args": {"correlation": number}})
        details = {"stream": stream, "correlation": number, "device": 0, **about}
        place = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream}
        events.append({**place, "ts": 1e6 * start, "dur": 1e6 * (end - start), "args": details})
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": world or "minidist", "rank": trace.rank, "world_size": trace.size},
        "traceEvents": events,
    }


def _kernels(trace: Trace, streams: dict[str, int]) -> Iterator[tuple[str, int, float, float, dict[str, Any]]]:
    """Yield (name, stream, start, end, details) of each computing span, collective call and other message."""
    for span in computing(trace):
        yield span.name, COMPUTE, span.start, span.end, {}
    for call in calls_of([trace]):
        sides = [message for message in call.messages[trace.rank] if message.start >= 0]
        if sides and is_collective(call.operation):
            start, end = min(side.start for side in sides), max(side.end for side in sides)
            sent = sum(side.nbytes for side in sides if side.kind == "send")
            about = {"Collective name": call.operation, "bytes sent": sent, "purpose": sides[0].purpose}
            yield kernel_name(call.operation), streams[sides[0].lane], start, max(start, end), about
    for message in trace.messages:
        if not is_collective(message.operation) and 0 <= message.start <= message.end:
            about = {"bytes": message.nbytes, "purpose": message.purpose, "peer": message.peer}
            stream = SENDS if message.kind == "send" else RECEIVES
            yield kernel_name(message.operation), stream, message.start, message.end, about


def is_collective(operation: str) -> bool:
    """Return whether messages of this operation belong to a call of all ranks, and so to one kernel."""
    return operation.partition("/")[0] in COLLECTIVES


def kernel_name(operation: str) -> str:
    """Return the name that NCCL's kernel of the same operation has; a gather has no kernel there."""
    kind = operation.partition("/")[0]
    return f"ncclDevKernel_{KERNELS[kind]}_f32_RING" if kind in KERNELS else "ncclDevKernel_SendRecv"


def write_kineto(folder: str | Path, name: str, traces: Sequence[Trace], incomplete: str = "") -> Path:
    """Write NAME-rank-R.json for every rank into `folder`; returns it. A run that records no step is refused."""
    folder = Path(folder)
    if not any(span.category == "step" for trace in traces for span in trace.spans):
        raise UsageError("the trace has no steps, which HTA divides a run by; --trace of `minidist train` records them")
    with writing("the trace", folder, "make room there, or choose another --output"):
        folder.mkdir(parents=True, exist_ok=True)
        for trace in traces:
            note = {"otherData": {"note": incomplete}} if incomplete else {}
            text = json.dumps({**kineto(trace), **note})
            (folder / f"{name}-rank-{trace.rank}.json").write_text(text, encoding="utf-8")
    return folder
