"""Writes a simulated run in the form of PyTorch's Flight Recorder, one file per rank.

A program that analyses dumps is tried on runs whose cause of hanging is known. What a run records is enough for that:
every message and, of every collective, its number on its communicator. The shapes of collectives are not recorded and
are written as []. A communicator becomes a process group, and `split` is not written: PyTorch does not record it.

Proved by: tests/flight_recorder/test_write.py
"""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minidist.base.files import writing
from minidist.base.traces import MessageEvent
from minidist.comm import SimWorld
from minidist.comm.tags import LocatedRequest
from minidist.core.base.errors import UsageError

VERSION = "2.10"
DTYPES = {"float16": "Half", "bfloat16": "BFloat16", "float32": "Float", "float64": "Double", "int64": "Long"}
STARTUP = "split"


def write_dumps(world: SimWorld, folder: str | Path, form: str = "pickle") -> list[Path]:
    """Write what each rank of the last run of a world has recorded; return the files.

    form: "pickle", as PyTorch's watchdog writes them, or "json". The world must keep its events (record=True).
    """
    if form not in ("pickle", "json"):
        raise UsageError(f"form={form!r}; it must be pickle or json")
    folder = Path(folder)
    with writing("the dumps", folder, "choose another folder"):
        folder.mkdir(parents=True, exist_ok=True)

    files = []
    for trace in world.traces:
        dump = {
            "version": VERSION,
            "pg_config": {
                group["name"]: {**group, "ranks": json.dumps(group["ranks"])} for group in groups_of(world).values()
            },
            "pg_status": {},
            "comm_lib_version": "",
            "entries": list(entries_of(world, trace.rank)),
        }
        files.append(folder / (f"nccl_trace_rank_{trace.rank}" + ".json" * (form == "json")))
        content = json.dumps(dump).encode() if form == "json" else pickle.dumps(dump, protocol=2)
        with writing("a dump", files[-1], "make room there, or choose another folder"):
            files[-1].write_bytes(content)
    return files


def groups_of(world: SimWorld) -> dict[str, dict[str, Any]]:
    """Return the process groups: communicator -> {"name": its number, "desc": a text, "ranks": its ranks}."""
    members: dict[str, set[int]] = {"world": set(range(world.size))}
    for name, logs in world.calls.logs.items():
        members.setdefault(name, set()).update(logs)
    return {
        name: {"name": str(number), "desc": "default_pg" if name == "world" else name, "ranks": sorted(ranks)}
        for number, (name, ranks) in enumerate(members.items())
    }


def entries_of(world: SimWorld, rank: int) -> Iterator[dict[str, Any]]:
    """Yield the operations of a rank in the order in which it began them."""
    groups = groups_of(world)
    collectives: dict[tuple[str, int], dict[str, Any]] = {}
    counts: dict[tuple[str, bool], int] = {}
    found: list[dict[str, Any]] = []
    for message in world.traces[rank].messages:
        if message.operation == STARTUP:
            continue
        is_message = message.operation == "message"
        place = message.communicator, message.tag
        # The messages of a collective are one entry, which has ended when all of them have.
        if not is_message and place in collectives:
            end(collectives[place], message)
            continue
        key = message.communicator, is_message
        counts[key] = counts.get(key, 0) + 1
        entry = entry_of(message, groups[message.communicator], len(found), counts[key])
        entry["frames"] = frames_of(world, message)
        if not is_message:
            collectives[place] = entry
        found.append(entry)
    yield from found


def entry_of(message: MessageEvent, group: dict[str, Any], number: int, sequence: int) -> dict[str, Any]:
    """Return the entry of a message, or of the collective whose first message it is."""
    members = group["ranks"]
    name = message.operation.partition("/")[0]
    shapes: list[list[int]] = [[]]
    dtype = DTYPES.get(message.dtype, message.dtype)
    is_message = message.operation == "message"
    if is_message:
        shapes = [[message.nbytes // itemsize(message.dtype)]]
        arrow, kind = ("->", "send") if message.kind == "send" else ("<-", "recv")
        peer = members.index(message.peer) if message.peer in members else 0
        name = f"{kind} {members.index(message.rank)}{arrow}{peer}"
    entry = {
        "record_id": number,
        "pg_id": int(group["name"]),
        "process_group": (group["name"], group["desc"]),
        "collective_seq_id": 0 if is_message else sequence,
        "p2p_seq_id": sequence if is_message else 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": round(message.posted * 1e9),
        "input_sizes": shapes,
        "input_dtypes": [dtype],
        "output_sizes": shapes,
        "output_dtypes": [dtype],
        "state": "completed",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": True,
        "timeout_ms": 600_000,
        "is_p2p": is_message,
        "frames": [],
    }
    end(entry, message)
    return entry


def end(entry: dict[str, Any], message: MessageEvent) -> None:
    """Note in an entry that one of its messages has not ended."""
    if message.end < 0:
        entry["state"], entry["retired"] = "scheduled", False


def itemsize(dtype: str) -> int:
    """Return the bytes of an element."""
    return 2 if dtype in ("float16", "bfloat16") else 8 if dtype.endswith("64") else 4


def frames_of(world: SimWorld, message: MessageEvent) -> list[dict[str, Any]]:
    """Return the line of the program that began an operation, where the world still remembers it.

    It remembers the last collectives of each communicator, and the message that each stream waits for.
    """
    sites: list[Any] = []
    if message.operation == "message":
        waiting = [
            s.waiting for s in world.state.streams() if s.rank == message.rank and isinstance(s.waiting, LocatedRequest)
        ]
        key = message.kind, message.tag, message.communicator
        sites = [w.site for w in waiting if (w.kind, w.tag, w.comm.name) == key and message.end < 0]
    else:
        log = world.calls.logs.get(message.communicator, {}).get(message.rank)
        sites = [site for number, _, site, _ in log.recent if number == message.tag] if log is not None else []
    return [{"name": "main", "filename": site.filename, "line": site.line} for site in sites[:1]]
