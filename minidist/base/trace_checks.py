"""The checks of a trace file: what it holds names only ranks that exist, and times that are numbers.

A trace may have been cut by a kill, edited, or made by another program. Each line is checked before it becomes an
event, so that a picture is drawn of it or one sentence says which line is wrong.

Proved by: tests/base/test_trace_file.py
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeGuard

from minidist.base.errors import UsageError, quoted, reason
from minidist.base.read_file import parse_json

FORMAT = "minidist-trace-1"
MAX_RANKS = 100_000
MAX_LINE = 10_000_000  # characters: the header holds one loss per step
MAX_TEXT = 400  # characters of a name
MAX_INTEGER = 2**63
MAX_SECONDS = 1e12


class BadLineError(UsageError):
    """A line that is not an event; the text is the reason, without the file and the line's number."""


def parse(line: str) -> Any:
    """Return the JSON value of a line; BadLineError when it is none, or is too long or too deep."""
    if len(line) > MAX_LINE:
        raise BadLineError(f"the line has {len(line):,} characters; at most {MAX_LINE:,} are read")
    try:
        # A loss may be infinite or NaN: a run that diverged is drawn, too.
        return parse_json(line, any_float=True)
    except ValueError as error:
        raise BadLineError(f"{quoted(line.strip())} is not JSON: {reason(error)}") from None


# --- values ---


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether the value is an integer (a bool is not) of at most 64 bits."""
    return type(value) is int and -MAX_INTEGER < value < MAX_INTEGER


def is_number(value: object) -> TypeGuard[float]:
    """Return whether the value is a finite number that a picture can have on an axis."""
    return type(value) in (int, float) and abs(value) <= MAX_SECONDS  # type: ignore[arg-type]


def is_name(value: object) -> TypeGuard[str]:
    """Return whether the value is a short text of printable characters."""
    return type(value) is str and len(value) <= MAX_TEXT and value.isprintable()


def is_counts(value: object) -> TypeGuard[dict[str, int]]:
    """Return whether the value maps names to numbers of bytes."""
    return isinstance(value, dict) and all(is_name(k) and is_integer(v) and v >= 0 for k, v in value.items())


def _is_losses(value: object) -> bool:
    # A loss may be infinite or NaN: a run that diverged is drawn, too.
    return isinstance(value, list) and all(type(x) is float or is_number(x) for x in value)


def _is_volumes(value: object) -> bool:
    return isinstance(value, dict) and all(
        is_name(name) and isinstance(row, dict) and is_integer(row.get("measured")) and is_counts(row)
        for name, row in value.items()
    )


Check = tuple[Callable[[Any], bool], str]
OF_TYPE: dict[Any, Check] = {
    int: (is_integer, "an integer"),
    float: (is_number, f"a number between -{MAX_SECONDS:g} and {MAX_SECONDS:g}"),
    str: (is_name, f"a printable text of at most {MAX_TEXT} characters"),
    bool: (lambda value: type(value) is bool, "true or false"),
}

# What the pictures read of a header. Everything else in it is left alone.
OF_HEADER: dict[str, Check] = {
    "command": (lambda value: isinstance(value, str) and len(value) <= 10_000, "a text of at most 10,000 characters"),
    "title": OF_TYPE[str],
    "incomplete": OF_TYPE[str],
    "events": (lambda value: is_integer(value) and value >= 0, "a number of events"),
    "world": OF_TYPE[str],
    "closed_form": (is_counts, "an object of names and numbers of bytes"),
    "bytes_by_purpose": (_is_volumes, 'an object of names and {"measured": bytes}'),
    "losses": (_is_losses, "a list of one number per step"),
    "reference_losses": (_is_losses, "a list of one number per step"),
    "max_difference": (_is_losses, "a list of one number per step"),
    "gradient_exponents": (
        lambda value: (
            is_counts(value) and all(name in ("zero", "not finite") or name.lstrip("-").isdecimal() for name in value)
        ),
        "an object of exponents and counts",
    ),
    "loss_scale": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "mesh": (lambda value: is_counts(value) and all(value.values()), "an object of axes and their numbers of ranks"),
}


def check_header(header: object) -> dict[str, Any]:
    """Return the first line's value when it is the header of a trace; BadLineError with what is wrong with it."""
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise BadLineError(f"its first line has no format {FORMAT!r}")
    ranks = header.get("ranks")
    if not is_integer(ranks) or not 1 <= ranks <= MAX_RANKS:
        raise BadLineError(f"ranks is {quoted(ranks)}, which is not a number of ranks from 1 to {MAX_RANKS:,}")
    for name, (check, words) in OF_HEADER.items():
        if header.get(name) is not None and not check(header[name]):
            raise BadLineError(f"{name} is {quoted(header[name])}, which is not {words}")

    # The bytes of a command that are not UTF-8 are surrogates, which no picture can show.
    if header.get("command"):
        header["command"] = header["command"].encode("utf-8", "replace").decode("utf-8")
    return header


def event_of(kind: type, record: Mapping[str, Any], ranks: int) -> Any:
    """Return the event of class `kind` with the fields of `record`; BadLineError with what is wrong with it.

    ranks: of the run; an event of another rank is refused.
    """
    # Every field is there, or has a default, and there is no other.
    known = {field.name: field for field in fields(kind)}
    unknown = [name for name in record if name not in known]
    absent = [name for name, field in known.items() if name not in record and field.default is MISSING]
    if unknown or absent:
        raise BadLineError(
            f"the field {quoted(unknown[0])} is unknown" if unknown else f"the field {quoted(absent[0])} is missing"
        )

    # Each value by itself, then the ranks, which the header bounds.
    for name, value in record.items():
        check, words = OF_TYPE[known[name].type]
        if not check(value):
            raise BadLineError(f"{name} is {quoted(value)}, which is not {words}")
    check_rank(record["rank"], ranks)
    if not -1 <= record.get("peer", -1) < ranks:
        raise BadLineError(f"peer {record['peer']} is out of range: the run has ranks 0..{ranks - 1}")
    if record.get("nbytes", 0) < 0:
        raise BadLineError(f"nbytes is {record['nbytes']}; a message has at least 0")
    return kind(**record)


def check_rank(rank: object, ranks: int) -> int:
    """Return the rank; BadLineError when the run does not have it."""
    if not is_integer(rank) or not 0 <= rank < ranks:
        raise BadLineError(f"rank {quoted(rank)} is out of range: the run has ranks 0..{ranks - 1}")
    return rank


def memory_samples(record: Mapping[str, Any], before: dict[str, int]) -> list[tuple[float, dict[str, int]]]:
    """Return the samples of memory of an event, (seconds, bytes by purpose); BadLineError with what is wrong with it.

    before: the rank's last sample of the event before. Older traces have an event for each sample.
    """
    if "live" in record:
        if not is_number(record.get("time")) or not is_counts(record["live"]):
            raise BadLineError("a sample of memory has a time in seconds, and bytes by name")
        return [(record["time"], record["live"])]

    # One number for each time in every list.
    times, changes = record.get("times"), record.get("changes")
    if not isinstance(times, list) or not all(map(is_number, times)):
        raise BadLineError("the times of the samples of memory are a list of seconds")
    if not _is_table(changes, len(times)):
        raise BadLineError(f"the changes of memory are {len(times)} whole numbers of bytes for each name")

    # A purpose appears with its first byte, and stays.
    live, samples = before, []
    for place, time in enumerate(times):
        live = live | {name: live.get(name, 0) + column[place] for name, column in changes.items() if column[place]}
        if min(live.values(), default=0) < 0:
            raise BadLineError(f"sample {place} of memory has less than 0 bytes")
        samples.append((time, live))
    return samples


def _is_table(changes: Any, length: int) -> TypeGuard[dict[str, list[int]]]:
    """Return whether this is a dict of names, each with a list of `length` whole numbers."""
    return isinstance(changes, dict) and all(
        is_name(name) and isinstance(column, list) and len(column) == length and all(map(is_integer, column))
        for name, column in changes.items()
    )
