"""Plans and actions as text: what `Plan.to_text`, `Plan.to_csv` and `show` write is read here.

    2F0                     stage 2, forward of micro-batch 0
    (1F4;2B1)OVERLAP_F_B    two actions that overlap
    0F0,0F1,,0B0            CSV: one line per rank, a comma between items, an empty cell for an idle slot

Proved by: tests/pipeline/test_plans.py, tests/base/test_read_file.py
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.base.read_file import read_text
from minidist.core.pipeline.plan import KINDS, MICROBATCH_BITS, Action, Item, Plan, actions_of

_ACTION = re.compile(r"(\d+)(" + "|".join(sorted(KINDS, key=len, reverse=True)) + r")(\d*)")
_OVERLAP = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


def read(text: str) -> Item:
    """Return the item that `text` writes. Raises UsageError with an example of an action."""
    overlap = _OVERLAP.fullmatch(text)
    if overlap:
        first, second = (_read_action(part.strip()) for part in overlap.groups())
        if {first.kind, second.kind} not in ({"F", "B"}, {"F", "I"}):
            raise UsageError(f"{quoted(text)} must overlap one F with one B or I, as (1F4;2B1)OVERLAP_F_B does")
        return first, second
    return _read_action(text)


def _read_action(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None or (match[3] == "") != (match[2] == "REDUCE_GRAD"):
        raise UsageError(
            f"{quoted(text)} is not an action: write stage, kind, micro-batch, as in 2F0, 1I3, 0SEND_F1 or"
            f" 2REDUCE_GRAD; the kinds are {', '.join(KINDS)}"
        )
    if len(match[1]) > 8 or len(match[3]) > 8 or int(match[3] or 0) >= 1 << MICROBATCH_BITS:
        raise UsageError(
            f"{quoted(text)} has a stage or a micro-batch number of more than eight digits; count both from 0"
        )
    return Action.of(match[2], int(match[1]), int(match[3] or 0))


def from_cells(rows: Iterable[Sequence[str]], name: str, where: str = "plan") -> Plan:
    """Return a plan from cells of text; stages and micro-batches are counted from the actions.

    Raises UsageError that names line and cell, counted from 1.
    """
    orders: list[list[Item]] = []
    for line, row in enumerate(rows, 1):
        orders.append([])
        for cell, text in enumerate(row, 1):
            if not text.strip():
                continue  # an idle slot
            try:
                orders[-1].append(read(text.strip()))
            except UsageError as error:
                raise UsageError(f"{where}, line {line}, cell {cell}: {error}") from None
    actions = [action for order in orders for item in order for action in actions_of(item)]
    if not actions:
        raise UsageError(f"{where} has no action; write one line per rank, such as 0F0,0B0")
    return Plan(
        name,
        orders,
        stages=1 + max(action.stage for action in actions),
        microbatches=1 + max(action.microbatch for action in actions),
        updates="flush" if any(action.kind in ("B", "I", "W") for action in actions) else "none",
    )


def from_csv(text: str, name: str = "csv", where: str = "plan") -> Plan:
    """Read what `Plan.to_csv` writes. An overlapped pair has no comma inside, so lines are cut at commas."""
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    return from_cells([line.split(",") for line in lines], name, where)


def from_text(text: str, name: str = "text", where: str = "plan") -> Plan:
    """Read what `Plan.to_text` writes; `rank N:` may be left out, and empty lines do not count."""
    lines = [re.sub(r"^\s*rank \d+:", "", line) for line in text.splitlines() if line.strip()]
    return from_cells([line.split() for line in lines], name, where)


def read_csv(path: str | Path) -> Plan:
    """Return the plan of a CSV file."""
    text = read_text(path, "the plan", "give a CSV file with one line per rank")
    return from_csv(text, Path(path).stem, quoted_path(path, marks=False))
