"""A recorded run as execution traces of MLCommons Chakra, which ASTRA-sim and other simulators of networks replay.

Simulators need traces of many ranks, and recording them takes a cluster. A simulated or dry run of `minidist train`
records any layout on one machine. Each rank's trace is a graph:

    COMP ──▶ COLL all_reduce of group 3 ──▶ COMP ──▶ SEND to rank 4 ──▶ ...
       └────▶ COLL of a stream ───────────────────────▶ (next step)

[1] Calls: a rank's messages that have one communicator, tag and operation, one after the other, are one call of a
    collective. Their bytes give the size of its array: each algorithm sends a known multiple of it.
[2] Computing is what the spans have left when the receives of the same stream are taken out of them.
[3] Dependencies: an item depends on the items of its stream that had ended when it was posted. The first item of
    another stream depends on the main program's last one. The main program waits for another stream where it goes on
    at the very moment at which that stream's item ends, and at the end of each step.
[4] A file per rank, NAME.RANK.et: the metadata, then the nodes; and the ranks of each group as comm_groups.json.

comm_size is the number of bytes that a rank passes to the call: of an all-gather its shard, of a broadcast the array.
A call whose array size does not follow from its bytes (a user's algorithm, experts with unequal loads) is written as
its messages. Durations are whole microseconds, and their sum is right.

Source: the schema et_def.proto of github.com/mlcommons/chakra, version 0.0.4.
Proved by: tests/report/test_chakra.py
"""

import inspect
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, quoted_path, reason
from minidist.base.files import writing
from minidist.base.traces import MessageEvent, SpanEvent, Trace
from minidist.collectives.algorithms import ALGORITHMS
from minidist.collectives.closed_forms import volume
from minidist.report import protobuf
from minidist.report.timeline import pairs, without

VERSION = "0.0.4"
COMP, SEND, RECV, COLL = 4, 5, 6, 7  # enum NodeType
NODE_TYPES = {COMP: "COMP", SEND: "SEND", RECV: "RECV", COLL: "COLL"}
COLLECTIVES = {  # enum CollectiveCommType
    "all_reduce": 0,
    "reduce": 1,
    "all_gather": 2,
    "gather": 3,
    "scatter": 4,
    "broadcast": 5,
    "all_to_all": 6,
    "reduce_scatter": 7,
}
DIMENSIONS = 4  # of the network that a collective may use: all of them, in a simulator with up to four


@dataclass
class Item:
    """A node: what a rank did, from `posted` to `end` in seconds. attributes: of the node, by name."""

    kind: int
    name: str
    lane: str
    posted: float
    end: float
    attributes: dict[str, int | str] = field(default_factory=dict)
    depends: list[int] = field(default_factory=list)  # positions of other items of this rank


@dataclass
class Call:
    """One collective call: the messages of each rank, by rank."""

    operation: str
    communicator: str
    messages: dict[int, list[MessageEvent]] = field(default_factory=lambda: defaultdict(list))


# --- [1] calls --------------------------------------------------------------------------------------------------------


def calls_of(traces: Sequence[Trace]) -> list[Call]:
    """Return the collective calls of a run. A rank's k-th call with a communicator, tag and operation is one of all."""
    found: dict[Any, Call] = {}
    for trace in traces:
        number: Counter[Any] = Counter()
        current: dict[str, Any] = {}  # what the last message of each lane belongs to
        for event in trace.messages:
            key = (event.communicator, event.tag, event.operation) if event.operation != "message" else None
            if key != current.get(event.lane):
                current[event.lane] = key
                number[key] += 1
            if key is not None:
                call = found.setdefault((key, number[key]), Call(event.operation, event.communicator))
                call.messages[event.rank].append(event)
    return list(found.values())


def array_bytes(call: Call) -> int | None:
    """Return the bytes of the whole array of a call, or None where they do not follow from what the ranks sent.

    The formula of the algorithm says how much all ranks send of an array; one size of the array must fit exactly.
    """
    operation, _, rest = call.operation.partition("/")
    algorithm, ranks = rest.split(" ")[0], len(call.messages)
    if operation not in COLLECTIVES or algorithm not in ALGORITHMS[operation] or ranks < 2:
        return None
    formula = ALGORITHMS[operation][algorithm].sends
    if formula is None or "rows" in inspect.signature(formula).parameters:  # it asks for more than the array
        return None
    sent = [[event.nbytes for event in call.messages[rank] if event.kind == "send"] for rank in sorted(call.messages)]
    if operation == "all_to_all" and len(set(map(sum, sent))) > 1:
        return None

    # About the size, by the formula of an array that every algorithm cuts evenly; then the size whose bytes are exact.
    def elements_sent(elements: int) -> int:
        return sum(volume(operation, algorithm, elements, ranks, rank).elements for rank in range(ranks))

    dtype = next(iter(call.messages.values()))[0].dtype
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize  # NumPy does not know bfloat16
    moved, trial = sum(map(sum, sent)) // itemsize, 64 * ranks
    about = moved * trial // elements_sent(trial)
    fitting = [n for n in range(max(0, about - ranks), about + ranks + 1) if elements_sent(n) == moved]
    return fitting[0] * itemsize if len(fitting) == 1 else None


def comm_size(operation: str, total: int, ranks: int) -> int:
    """Return the bytes that a rank passes to a call with an array of `total` bytes."""
    return total // ranks if operation in ("all_gather", "gather") else total


# --- [2] and [3] the graph of a rank ----------------------------------------------------------------------------------


def computing(trace: Trace) -> Iterator[SpanEvent]:
    """Yield the parts of a rank's computing spans during which the same stream did not wait for a message."""
    busy: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in trace.messages:
        if event.kind == "receive" and event.start >= 0:
            busy[event.lane].append((event.start, max(event.end, event.start)))
    for span in trace.spans:
        if span.category == "compute":
            for start, end in without([(span.start, span.end)], busy[span.lane]):
                yield SpanEvent(span.rank, span.lane, span.name, start, end)


def connect(items: Sequence[Item], steps: Sequence[float]) -> None:
    """Fill in what each item depends on. items: by the time at which they were posted. steps: their ends, rising."""
    open_items: dict[str, list[int]] = defaultdict(list)  # by lane: posted, and not known to have ended
    behind: dict[str, list[int]] = defaultdict(list)  # by lane: what its next item depends on
    steps_ended = 0
    for place, item in enumerate(items):
        for lane in (item.lane, "main"):
            ended = [i for i in open_items[lane] if items[i].end <= item.posted]
            if ended:
                open_items[lane] = sorted({*open_items[lane]} - {*ended})
                behind[lane] = ended
        depends = behind[item.lane]
        if item.lane != "main":
            depends = [*depends, *behind["main"][-1:]] if depends else behind["main"]

        # The main program has waited for a stream that ends at this moment, and for all streams between two steps.
        before, steps_ended = steps_ended, bisect_right(steps, item.posted)
        step_ends = steps_ended > before
        if item.lane == "main":
            others = chain.from_iterable(places for lane, places in open_items.items() if lane != "main")
            depends = [*depends, *(i for i in others if step_ends or items[i].end == item.posted)]
        item.depends = sorted(set(depends))
        open_items[item.lane].append(place)


def items_of(
    trace: Trace, collectives: dict[int, tuple[Call, int]], groups: dict[str, int], tags: dict[int, int]
) -> list[Item]:
    """Return a rank's nodes with their dependencies.

    collectives: id of a message of a call -> the call and its array's bytes. groups: communicator -> its number. tags:
    id of a message -> the number of the message among those from its sender to its receiver.
    """
    items = [Item(COMP, span.name, span.lane, span.start, span.end) for span in computing(trace)]
    calls: dict[int, Item] = {}  # by the id of the call
    for event in trace.messages:
        end = max(event.end, event.posted)
        if id(event) in collectives:
            call, total = collectives[id(event)]
            if id(call) not in calls:
                operation = call.operation.partition("/")[0]
                attributes: dict[str, int | str] = {
                    "comm_type": COLLECTIVES[operation],
                    "comm_size": comm_size(operation, total, len(call.messages)),
                    "pg_name": str(groups[call.communicator]),
                    "pg_desc": call.communicator,
                    "purpose": event.purpose,
                }
                calls[id(call)] = item = Item(COLL, call.operation, event.lane, event.posted, end, attributes)
                items.append(item)
            calls[id(call)].end = max(calls[id(call)].end, end)
            continue
        sends = event.kind == "send"
        attributes = {
            "comm_src": event.rank if sends else event.peer,
            "comm_dst": event.peer if sends else event.rank,
            "comm_tag": tags[id(event)],
            "comm_size": event.nbytes,
            "purpose": event.purpose,
        }
        items.append(Item(SEND if sends else RECV, event.operation, event.lane, event.posted, end, attributes))
    items.sort(key=lambda item: (item.posted, item.end))
    connect(items, sorted(span.end for span in trace.spans if span.category == "step"))
    return items


# --- [4] files --------------------------------------------------------------------------------------------------------


def attribute(name: str, value: int | str) -> bytes:
    """Encode an AttributeProto: ranks and tags are int32, other numbers int64, as Chakra's own generators have them."""
    if isinstance(value, str):
        return protobuf.field(1, name) + protobuf.field(29, value)
    return protobuf.field(1, name) + protobuf.field(7 if name in ("comm_src", "comm_dst", "comm_tag") else 9, value)


def node(number: int, item: Item) -> bytes:
    """Encode a Node."""
    start, end = round(1e6 * item.posted), round(1e6 * item.end)
    parts = [
        protobuf.field(1, number),
        protobuf.field(2, item.name),
        protobuf.field(3, item.kind),
        protobuf.field(5, b"".join(map(protobuf.varint, item.depends))) if item.depends else b"",
        protobuf.field(6, start),
        protobuf.field(7, end - start),
        protobuf.field(10, protobuf.field(1, "is_cpu_op") + protobuf.field(27, 0)),
        *(protobuf.field(10, attribute(*each)) for each in item.attributes.items()),
    ]
    if item.kind == COLL:  # a BoolList: the collective may use every dimension of the network
        dimensions = protobuf.field(1, b"\x01" * DIMENSIONS)
        parts.append(protobuf.field(10, protobuf.field(1, "involved_dim") + protobuf.field(28, dimensions)))
    return b"".join(parts)


def write_chakra(
    folder: str | Path, name: str, traces: Sequence[Trace], messages: bool = False, incomplete: str = ""
) -> Path:
    """Write NAME.RANK.et for every rank and comm_groups.json into `folder`; returns it.

    messages: write the messages of collectives instead of the calls, so that a simulator replays our algorithms.
    Raises UsageError for a trace without messages, or with missing events: a simulator would wait for ever.
    """
    folder = Path(folder)
    if incomplete:
        raise UsageError(f"{incomplete}; an execution trace must be whole, or its simulation never ends")
    if not any(trace.messages for trace in traces):
        raise UsageError("the trace has no messages; --trace of a run on 2 or more ranks, without --fold, records them")

    # Calls that are written as such, and the number of every group that has one.
    collectives: dict[int, tuple[Call, int]] = {}
    members: dict[str, list[int]] = {}
    for call in [] if messages else calls_of(traces):
        total = array_bytes(call)
        if total is not None:
            collectives |= {id(event): (call, total) for events in call.messages.values() for event in events}
            members[call.communicator] = sorted({*call.messages, *members.get(call.communicator, ())})
    groups = {communicator: number for number, communicator in enumerate(members, 1)}

    # A message's tag is its number among those of its two ranks, so that every simulator pairs them in the same way.
    tags: dict[int, int] = {}
    count: Counter[tuple[int, int]] = Counter()
    for send, receive in pairs(traces):
        if receive is None:
            raise UsageError(f"rank {send.peer} never received a message of rank {send.rank}; the trace is not whole")
        tags[id(send)] = tags[id(receive)] = count[send.rank, send.peer]
        count[send.rank, send.peer] += 1

    with writing("the execution trace", folder, "make room there, or choose another --output"):
        folder.mkdir(parents=True, exist_ok=True)
        table = {str(number): members[communicator] for communicator, number in groups.items()}
        (folder / "comm_groups.json").write_text(json.dumps(table) + "\n", encoding="utf-8")
        for trace in traces:
            with (folder / f"{name}.{trace.rank}.et").open("wb") as file:
                file.write(protobuf.delimited(protobuf.field(1, VERSION)))
                for number, item in enumerate(items_of(trace, collectives, groups, tags)):
                    file.write(protobuf.delimited(node(number, item)))
    return folder


# --- reading ----------------------------------------------------------------------------------------------------------


def read_chakra(path: str | Path) -> list[Item]:
    """Read the nodes of one rank's file. UsageError, which names the file, if it is not such a file."""
    result: list[Item] = []
    try:
        with Path(path).open("rb") as file:
            parts = protobuf.messages(file)
            version = dict(protobuf.fields(next(parts, b""))).get(1)
            if not isinstance(version, bytes) or not version:
                raise UsageError("it does not begin with a version")
            for message in parts:
                result.append(_item(message, len(result)))
    except (UsageError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{quoted_path(path)} is not an execution trace: {reason(error)}; report --format chakra writes them"
        ) from None
    return result


def _item(message: bytes, number: int) -> Item:
    """Decode a Node. Its dependencies must be earlier nodes, so that the graph has no circle."""
    item = Item(0, "", "", 0.0, 0.0)
    integers = {3: 0, 6: 0, 7: 0}  # its type, start and duration
    for key, value in protobuf.fields(message):
        if key == 1 and value != number:
            raise UsageError(f"node {value!r} stands at position {number}")
        if isinstance(value, int):
            integers[key] = value
        elif key == 2:
            item.name = value.decode()
        elif key == 5:
            item.depends = list(protobuf.varints(value))
        elif key == 10:
            item.attributes |= _attribute_of(value, number)
    item.kind, start, duration = integers[3], integers[6], integers[7]
    if item.kind not in NODE_TYPES:
        raise UsageError(f"node {number} has type {item.kind}; known are {', '.join(map(str, NODE_TYPES))}")
    if any(other >= number for other in item.depends):
        raise UsageError(f"node {number} depends on {max(item.depends)}, which is not an earlier one")
    item.posted, item.end = 1e-6 * start, 1e-6 * (start + duration)
    return item


def _attribute_of(message: bytes, number: int) -> dict[str, int | str]:
    """Decode an AttributeProto of node `number`: {its name: its text or number}, and nothing for any other value."""
    about = dict(protobuf.fields(message))
    called, text = about.pop(1, b""), about.pop(29, None)
    if not isinstance(called, bytes):
        raise UsageError(f"node {number} has an attribute whose name is a number")
    found: dict[str, int | str] = {}
    if isinstance(text, bytes):
        found[called.decode()] = text.decode()
    for content in (text, *about.values()):
        if isinstance(content, int):
            found[called.decode()] = content
    return found


def summary(path: Path) -> str:
    """Return what a rank's file has: a line for each kind of node, with its number, bytes and microseconds."""
    rows: dict[tuple[str, str], list[int]] = {}
    for item in read_chakra(path):
        row = rows.setdefault((NODE_TYPES[item.kind], item.name if item.kind == COLL else ""), [0, 0, 0])
        size = item.attributes.get("comm_size", 0)
        row[0] += 1
        row[1] += size if isinstance(size, int) else 0
        row[2] += round(1e6 * (item.end - item.posted))
    lines = [f"{'node':<5} {'operation':<26} {'number':>8} {'bytes':>16} {'us':>12}"]
    for (kind, name), (number, nbytes, microseconds) in rows.items():
        lines.append(f"{kind:<5} {name:<26} {number:>8,} {nbytes:>16,} {microseconds:>12,}")
    return "\n".join(lines)
