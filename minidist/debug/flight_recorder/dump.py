"""Dumps of PyTorch's Flight Recorder: one file per rank, a pickle or JSON, becomes a list of operations.

PyTorch keeps the last operations of every rank in a ring buffer and writes them where a watchdog ends the job
(TORCH_FR_BUFFER_SIZE, TORCH_NCCL_DUMP_ON_TIMEOUT; TORCH_NCCL_DEBUG_INFO_TEMP_FILE names the files, by default
/tmp/nccl_trace_rank_0 and so on). A dump of version 2 has

    version     "2.10"
    pg_config   group -> {"name", "desc", "ranks": "[0, 1]"}
    entries     one per operation: record_id, process_group (name, description), collective_seq_id, p2p_seq_id, is_p2p,
                profiling_name ("nccl:all_reduce", "nccl:send 0->1", "nccl:recv 1<-0"), input_sizes, output_sizes,
                input_dtypes, output_dtypes, state ("scheduled", "started", "completed"), retired, frames

A dump comes from another machine, so nothing of it is trusted: a pickle may hold plain values only, no code is run, and
every value is checked before it is used.

Proved by: tests/flight_recorder/test_dump.py
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from minidist.base.errors import UsageError, quoted
from minidist.base.read_file import parse_json

MAX_ENTRIES = 1_000_000
MAX_RANKS = 1_000_000
MAX_TEXT = 1_000  # characters of a name; a report shows fewer
DONE = ("completed",)
MESSAGES = ("send", "recv", "recvanysource", "batch_op_issue")


class BadDumpError(UsageError):
    """A file that is not a dump; the text is the reason."""


@dataclass(frozen=True)
class Operation:
    """One entry of a dump: what a rank has called.

    rank, peer: in the whole job; peer None of a collective. number: of all that the rank has recorded. group: the name
    of the process group. sequence: of the rank's collectives in the group, or of its messages. shapes: inputs and
    outputs, as text. is_done: the operation has ended. site: file:line in function, of the caller outside PyTorch.
    """

    rank: int
    number: int
    group: str
    kind: str
    sequence: int
    peer: int | None
    inputs: str
    outputs: str
    dtypes: str
    is_done: bool
    created: int
    site: str
    in_log: ClassVar[bool] = False  # it is of a text log, which may leave the kind, the number and the sizes open

    @property
    def is_message(self) -> bool:
        """Whether this is a send or a receive; where the other side is not named, peer is None."""
        return self.peer is not None or self.kind.lower() in MESSAGES


@dataclass(frozen=True)
class Dump:
    """What one rank has recorded. groups: name -> (description, ranks; empty when the dump does not say)."""

    rank: int
    version: str
    groups: dict[str, tuple[str, tuple[int, ...]]]
    operations: tuple[Operation, ...]
    is_whole: bool  # the ring buffer has lost nothing
    reach: Mapping[str, float] | None = None  # of a text log: group -> number of the last call; without a group unknown


def dump_of(rank: int, content: Any) -> Dump:
    """Return the dump that a file's content describes; BadDumpError names the first value that is wrong."""
    # A dump in JSON of a rank that has recorded nothing has no key `entries`.
    entries = content.get("entries", [] if "pg_config" in content else None) if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise BadDumpError("it has no list `entries`")
    version = text_of(content.get("version"), "version")
    if not version.startswith("2."):
        raise BadDumpError(f"its version is {quoted(version)}, and versions 2.0 and later are read")
    if len(entries) > MAX_ENTRIES:
        raise BadDumpError(f"it has {len(entries):,} entries; at most {MAX_ENTRIES:,} are read")

    groups = groups_of(content.get("pg_config", {}))
    operations = []
    for entry in entries:
        if not isinstance(entry, dict):
            raise BadDumpError(f"the entry {quoted(entry)} is not a table")
        try:
            operations.append(operation_of(rank, entry, groups))
        except BadDumpError as error:
            raise BadDumpError(f"entry {quoted(entry.get('record_id'))}: {error}") from None
    operations.sort(key=lambda operation: operation.number)
    is_whole = not operations or operations[0].number == 0
    if is_of_torchcomms(entries):
        operations = renumbered(operations, is_whole)
    return Dump(rank, version, groups, tuple(coalesced(operations)), is_whole)


def groups_of(config: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the process groups of `pg_config`: name -> (description, ranks)."""
    if not isinstance(config, dict):
        raise BadDumpError("`pg_config` is not a table")
    groups = {}
    for key, group in config.items():
        if not isinstance(group, dict):
            raise BadDumpError(f"group {quoted(key)} is not a table")
        # The ranks are a list, or the text of one.
        ranks = group.get("ranks", [])
        if isinstance(ranks, str):
            try:
                ranks = parse_json(ranks)
            except ValueError:
                raise BadDumpError(f"the ranks of group {quoted(key)} are {quoted(ranks)}, not a list") from None
        if not isinstance(ranks, list) or not all(is_count(rank, MAX_RANKS) for rank in ranks):
            raise BadDumpError(f"the ranks of group {quoted(key)} are {quoted(ranks)}, not numbers of ranks")
        name = text_of(group.get("name", str(key)), "name of a group")
        groups[name] = (text_of(group.get("desc", ""), "desc of a group"), tuple(sorted(set(ranks))))
    return groups


def operation_of(rank: int, entry: Mapping[str, Any], groups: dict[str, tuple[str, tuple[int, ...]]]) -> Operation:
    """Return the operation that an entry describes, and note its group in `groups` where it is not listed there."""
    group = entry.get("process_group")
    if not isinstance(group, (list, tuple)) or len(group) != 2:
        raise BadDumpError(f"`process_group` is {quoted(group)}; it must be a name and a description")
    name, description = text_of(group[0], "process_group"), text_of(group[1], "process_group")
    title = text_of(entry.get("profiling_name"), "profiling_name")
    members = groups.setdefault(name, (description, ()))[1]  # gloo lists no group

    # "nccl:send 0->1" and "nccl:recv 1<-0" have ranks of the group, this rank first.
    kind, peer = title.partition(":")[2] or title, None
    message = re.fullmatch(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})", kind)
    if message:
        kind, peer = message[1], int(message[3])
        if members:
            if peer >= len(members):
                raise BadDumpError(f"{quoted(title)} in a group of {len(members)} ranks")
            peer = members[peer]

    is_message = entry.get("is_p2p") is True
    return Operation(
        rank,
        count_of(entry, "record_id"),
        name,
        kind,
        count_of(entry, "p2p_seq_id" if is_message else "collective_seq_id"),
        peer,
        shapes_of(entry.get("input_sizes")),
        shapes_of(entry.get("output_sizes")),
        dtypes_of(entry.get("input_dtypes") or entry.get("output_dtypes")),  # a scatter gives most ranks no input
        entry.get("state") in DONE or entry.get("retired") is True,
        count_of(entry, "time_created_ns", 0),
        site_of(entry.get("frames", [])),
    )


def is_of_torchcomms(entries: list[Any]) -> bool:
    """Return whether torchcomms has written the entries: a group's description is its backend, and none is `is_p2p`."""
    return bool(entries) and all(
        not entry.get("is_p2p") and str(entry["profiling_name"]).startswith(f"{entry['process_group'][1]}:")
        for entry in entries
    )


def renumbered(operations: list[Operation], is_whole: bool) -> list[Operation]:
    """Return the operations of a dump of torchcomms with the number of each in its group.

    torchcomms counts all operations of a rank together, messages and those of other groups, too.
    """
    if not is_whole and len({operation.group for operation in operations}) > 1:
        raise BadDumpError(
            "it is of torchcomms, which counts the operations of all its communicators together, and the first ones are"
            " lost; give FlightRecorderHook a larger max_entries"
        )
    counts: dict[tuple[str, bool], int] = {}
    result = []
    for operation in operations:
        key = operation.group, operation.is_message
        counts[key] = counts.get(key, 0) + 1
        result.append(replace(operation, sequence=counts[key]) if is_whole else operation)
    return result


def coalesced(operations: list[Operation]) -> list[Operation]:
    """Return the operations without the entries of coalesced calls, which say of those before them whether they ended.

    PyTorch records batch_isend_irecv and coalesced collectives one by one, with one sequence number, and then an entry
    `coalesced` whose state is that of all.
    """
    ended = {(o.group, o.sequence) for o in operations if o.kind == "coalesced" and o.is_done}
    result = []
    for operation in operations:
        if operation.kind == "coalesced":
            continue
        if (operation.group, operation.sequence) in ended and not operation.is_done:
            operation = replace(operation, is_done=True)
        result.append(operation)
    return result


def text_of(value: Any, what: str) -> str:
    """Return a text of the dump, with numbers as their digits; BadDumpError unless it is a short one."""
    text = str(value) if isinstance(value, int) and is_count(value) else value
    if not isinstance(text, str) or len(text) > MAX_TEXT or not text.isprintable():
        raise BadDumpError(f"`{what}` is {quoted(value)}; it must be a text of at most {MAX_TEXT:,} characters")
    return text


def is_count(value: Any, most: int = 2**63) -> bool:
    """Return whether the value is a whole number of a size that a dump can have."""
    return type(value) is int and 0 <= value < most


def count_of(entry: Mapping[str, Any], key: str, otherwise: int | None = None) -> int:
    """Return a whole number of an entry."""
    value = entry.get(key, otherwise)
    if not is_count(value):
        raise BadDumpError(f"`{key}` is {quoted(value)}; it must be a whole number")
    return value  # type: ignore[no-any-return]


def shapes_of(value: Any) -> str:
    """Return a list of shapes as text: "[4] [2, 3]"; of more than four the first ones."""
    if value is None:
        return ""
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(shape, (list, tuple)) and len(shape) <= MAX_TEXT and all(is_count(n) for n in shape)
        for shape in value
    ):
        raise BadDumpError(f"{quoted(value)} is not a list of shapes")
    shown = [str(list(shape)) for shape in value[:4]] + ["..."] * (len(value) > 4)
    return " ".join(shown)


def dtypes_of(value: Any) -> str:
    """Return a list of names of dtypes as text, each once."""
    if value is None:
        return ""
    if not isinstance(value, (list, tuple)):
        raise BadDumpError(f"{quoted(value)} is not a list of dtypes")
    return " ".join(dict.fromkeys(text_of(name, "dtypes") for name in value[:MAX_TEXT]))


def site_of(frames: Any) -> str:
    """Return the innermost line outside PyTorch, "train.py:31 in step"; "" for a dump without frames."""
    if not isinstance(frames, list) or not all(isinstance(frame, dict) for frame in frames):
        raise BadDumpError(f"`frames` is {quoted(frames)}; it must be a list of tables")
    for frame in frames:
        file = text_of(frame.get("filename", ""), "filename")
        if "/torch/" not in file and not file.startswith("??"):
            return f"{file}:{count_of(frame, 'line', 0)} in {text_of(frame.get('name', '?'), 'name')}"
    return ""
