"""What the ranks of a program have printed and sent: compared between two runs, and added up.

Proved by: tests/torch_ranks/test_program.py, tests/mpi_ranks/test_program.py
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from minidist.base.errors import quoted
from minidist.base.traces import Trace


def unlike_line(first: Sequence[str], other: Sequence[str], ranks: int, which: str) -> str:
    """Return the first line that two runs print differently; "" for none.

    first, other: the outputs by rank, after which may come that of the program that starts them. which: the first run.
    """
    for rank, (before, now) in enumerate(zip_longest(first, other, fillvalue="")):
        for line, pair in enumerate(zip_longest(before.splitlines(), now.splitlines(), fillvalue=""), 1):
            if pair[0] != pair[1]:
                who = f"rank {rank}" if rank < ranks else "the main program"
                return f"{who} prints {quoted(pair[1])} in line {line}, and {quoted(pair[0])} in {which}"
    return ""


def bytes_by_operation(traces: Iterable[Trace], names: Mapping[str, str], key: str) -> list[dict[str, Any]]:
    """Return what all ranks have sent, a row for each communicator and operation, the most bytes first.

    names: of communicators, in place of ours. key: what a row calls a communicator.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for trace in traces:
        for message in trace.sent():
            group = names.get(message.communicator, message.communicator)
            operation = "send" if message.operation == "message" else message.operation
            row = rows.setdefault((group, operation), {key: group, "operation": operation, "messages": 0, "bytes": 0})
            row["messages"] += 1
            row["bytes"] += message.nbytes
    return sorted(rows.values(), key=lambda row: (-row["bytes"], row[key], row["operation"]))


def print_sent(ranks: int, virtual_seconds: float, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    """Print the rows of `bytes_by_operation`."""
    print(f"{ranks} ranks, {virtual_seconds:.6g} virtual seconds of communication")
    for row in rows:
        print(f"  {row['operation']:24} {row[key]:16} {row['messages']:8,} messages {row['bytes']:14,} B")
