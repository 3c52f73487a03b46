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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, quoted, quoted_path, reason
from minidist.base.plain_pickle import BadPickleError, read_plain_pickle
from minidist.base.read_file import check_path, parse_json

MAX_FILES = 4_096
MAX_BYTES = 64_000_000  # of a dump; a ring buffer of 20,000 operations with their frames has about 20 MB
MAX_ENTRIES = 1_000_000
MAX_RANKS = 1_000_000
MAX_TEXT = 1_000  # characters of a name, of which a report shows fewer
DONE = ("completed",)
REMEDY = "give the folder with one dump of PyTorch's Flight Recorder per rank"


class BadDumpError(UsageError):
    """A file that is not a dump; the text is the reason, without the file's name."""


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

    @property
    def is_message(self) -> bool:
        """Whether this is a send or a receive."""
        return self.peer is not None


@dataclass(frozen=True)
class Dump:
    """What one rank has recorded. groups: name -> (description, ranks; empty when the dump does not say)."""

    rank: int
    version: str
    groups: dict[str, tuple[str, tuple[int, ...]]]
    operations: tuple[Operation, ...]
    is_whole: bool  # the ring buffer has lost nothing


def read_dumps(folder: str | Path) -> list[Dump]:
    """Read all dumps of a folder, or one file; return them by rank. UsageError names the file that is no dump."""
    path = check_path(folder, "hang")
    try:
        files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    except OSError as error:
        raise UsageError(f"{quoted_path(folder)} cannot be read ({error.strerror}); {REMEDY}") from None
    ranks = {file: rank for file in files if (rank := rank_of(file)) is not None}
    if not ranks:
        raise UsageError(f"{quoted_path(folder)} has no file whose name ends in the number of a rank; {REMEDY}")
    if len(ranks) > MAX_FILES:
        raise UsageError(f"{quoted_path(folder)} has {len(ranks):,} files; at most {MAX_FILES:,} dumps are read")

    dumps: dict[int, Dump] = {}
    for file, rank in ranks.items():
        if rank in dumps:
            raise UsageError(f"{quoted_path(folder)} has two dumps of rank {rank}; remove the older one")
        try:
            dumps[rank] = dump_of(rank, content_of(file))
        except (BadDumpError, BadPickleError) as error:
            raise UsageError(f"{quoted_path(file)} is not a dump of the Flight Recorder: {error}; {REMEDY}") from None
    return [dumps[rank] for rank in sorted(dumps)]


def rank_of(file: Path) -> int | None:
    """Return the rank with which the name of a dump ends: 3 of nccl_trace_rank_3 and of rank3.json; else None."""
    found = re.search(r"(\d{1,7})$", file.stem if file.suffix in (".json", ".pickle", ".pkl") else file.name)
    return int(found[1]) if found else None


def content_of(file: Path) -> Any:
    """Return what a file holds, as plain values; an error for what is neither JSON nor a plain pickle."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadDumpError(f"it cannot be read ({error.strerror})") from None
    if len(content) > MAX_BYTES:
        raise BadDumpError(f"it has more than {MAX_BYTES:,} bytes")
    if content[:1] == b"\x80":
        return read_plain_pickle(content)
    try:
        return parse_json(content.decode("utf-8-sig"), any_number=True)
    except ValueError as error:  # also of what is not UTF-8
        raise BadDumpError(f"it is neither a pickle nor JSON ({reason(error)})") from None


def dump_of(rank: int, content: Any) -> Dump:
    """Return the dump that a file's content describes; BadDumpError names the first value that is wrong."""
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise BadDumpError("it has no list `entries`")
    version = text_of(content.get("version"), "version")
    if not version.startswith("2."):
        raise BadDumpError(f"its version is {quoted(version)}, and versions 2.0 and later are read")
    if len(content["entries"]) > MAX_ENTRIES:
        raise BadDumpError(f"it has {len(content['entries']):,} entries; at most {MAX_ENTRIES:,} are read")

    groups = groups_of(content.get("pg_config", {}))
    operations = []
    for entry in content["entries"]:
        if not isinstance(entry, dict):
            raise BadDumpError(f"the entry {quoted(entry)} is not a table")
        try:
            operations.append(operation_of(rank, entry, groups))
        except BadDumpError as error:
            raise BadDumpError(f"entry {quoted(entry.get('record_id'))}: {error}") from None
    operations.sort(key=lambda operation: operation.number)
    is_whole = not operations or operations[0].number == 0
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


def operation_of(rank: int, entry: Mapping[str, Any], groups: Mapping[str, tuple[str, tuple[int, ...]]]) -> Operation:
    """Return the operation that an entry describes."""
    group = entry.get("process_group")
    if not isinstance(group, (list, tuple)) or len(group) != 2:
        raise BadDumpError(f"`process_group` is {quoted(group)}; it must be a name and a description")
    name = text_of(group[0], "process_group")
    title = text_of(entry.get("profiling_name"), "profiling_name")
    members = groups.get(name, ("", ()))[1]

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
        dtypes_of(entry.get("input_dtypes")),
        entry.get("state") in DONE or entry.get("retired") is True,
        count_of(entry, "time_created_ns", 0),
        site_of(entry.get("frames", [])),
    )


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
            operation = Operation(**{**vars(operation), "is_done": True})
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
