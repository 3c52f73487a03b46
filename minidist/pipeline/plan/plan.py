"""A plan: for each rank the order of its actions. Data, nothing else; the same plan is validated, timed, drawn and
executed.

    rank 0   0F0 0F1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1          CSV: one line a rank, a comma between actions, an empty cell for an idle slot

Which rank holds a stage is not said apart: it is the rank that computes the stage's actions. In DualPipe, and where a
stage is replicated, several ranks compute a stage, each for micro-batches of its own.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from minidist.base.errors import UsageError
from minidist.base.layout import GradientOrder
from minidist.pipeline.plan.action import (
    BACKWARD,
    COMPUTE,
    WEIGHT,
    Item,
    kind_of,
    microbatch_of,
    parts,
    read,
    show,
    stage_of,
)

UPDATES = ("flush", "none", "stash", "no-stash", "vertical-sync", "2bw")


@dataclass(frozen=True)
class Plan:
    """Orders of all ranks for one step (or, with asynchronous updates, for a whole stream of micro-batches).

    updates: when weights change: "flush" (one update after the last backward), "none" (evaluation), "stash" (after
    every backward; a micro-batch keeps the version that its forward saw), "no-stash" (the same without keeping it: a
    wrong gradient), "vertical-sync" (every stage uses the version of stage 0's forward), "2bw" (after every `batch`
    micro-batches, one late).
    """

    name: str
    orders: Sequence[Sequence[Item]] = field(repr=False)
    stages: int
    microbatches: int
    updates: str = "flush"
    batch: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @property
    def actions(self) -> int:
        """Number of actions of all ranks together."""
        return sum(len(parts(item)) for order in self.orders for item in order if isinstance(item, tuple)) + sum(
            not isinstance(item, tuple) for order in self.orders for item in order
        )

    @property
    def is_lowered(self) -> bool:
        """Are sends and receives part of the orders already?"""
        return any(kind_of(part) not in COMPUTE for order in self.orders for item in order for part in parts(item))

    def holders(self) -> dict[int, list[int]]:
        """Stage -> the ranks that compute it, in rank order."""
        found: dict[int, list[int]] = {}
        for rank, order in enumerate(self.orders):
            for stage in {stage_of(part) for item in order for part in parts(item) if kind_of(part) in COMPUTE}:
                found.setdefault(stage, []).append(rank)
        return dict(sorted(found.items()))

    def stages_of(self, rank: int) -> list[int]:
        """The stages that `rank` computes, ascending."""
        return [stage for stage, ranks in self.holders().items() if rank in ranks]

    def additions(self) -> dict[int, list[list[int]]]:
        """Stage -> for each rank that holds it, in rank order, the micro-batches in the order in which its gradient
        adds them.
        """
        result: dict[int, dict[int, list[int]]] = {}
        for rank, order in enumerate(self.orders):
            for item in order:
                for part in parts(item):
                    if kind_of(part) in (BACKWARD, WEIGHT):
                        result.setdefault(stage_of(part), {}).setdefault(rank, []).append(microbatch_of(part))
        return {stage: list(result[stage].values()) for stage in sorted(result)}

    def gradient_order(self) -> GradientOrder:
        """The declared order of additions, stage after stage. UsageError when several ranks hold a stage (see
        `additions`).
        """
        additions = self.additions()
        if any(len(ranks) > 1 for ranks in additions.values()):
            raise UsageError(
                f"plan {self.name!r} computes a stage on several ranks; read its order from Plan.additions()"
            )
        return GradientOrder(1, tuple(tuple(additions.get(stage, [[]])[0]) for stage in range(self.stages)))

    def with_orders(self, orders: Sequence[Sequence[Item]]) -> "Plan":
        """The same plan with other orders."""
        return replace(self, orders=orders)

    def to_text(self) -> str:
        """`rank 0: 0F0 0B0`, one line a rank."""
        return "".join(f"rank {rank}: {' '.join(map(show, order))}\n" for rank, order in enumerate(self.orders))

    def to_csv(self) -> str:
        """One line a rank."""
        return "".join(",".join(map(show, order)) + "\n" for order in self.orders)


def from_cells(rows: Iterable[Sequence[str]], name: str, where: str = "plan") -> Plan:
    """A plan from cells; stages and micro-batches are counted from the actions. UsageError names line and cell (from
    1).
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
    every = [part for order in orders for item in order for part in parts(item)]
    if not every:
        raise UsageError(f"{where} has no action; write one line a rank, such as 0F0,0B0")
    forward_only = not any(kind_of(part) in (BACKWARD, WEIGHT, 1) for part in every)
    return Plan(
        name,
        orders,
        1 + max(map(stage_of, every)),
        1 + max(map(microbatch_of, every)),
        "none" if forward_only else "flush",
    )


def from_csv(text: str, name: str = "csv", where: str = "plan") -> Plan:
    """Read what `Plan.to_csv` writes. A comma inside an overlapped pair does not exist, so lines are cut at commas."""
    lines = text.splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    return from_cells([line.split(",") for line in lines], name, where)


def from_text(text: str, name: str = "text", where: str = "plan") -> Plan:
    """Read what `Plan.to_text` writes; `rank N:` may be left out, empty lines do not count."""
    lines = [re.sub(r"^\s*rank \d+:", "", line) for line in text.splitlines() if line.strip()]
    return from_cells([line.split() for line in lines], name, where)


def read_csv(path: str | Path) -> Plan:
    """A plan from a CSV file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # some spreadsheets begin a file with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the plan {str(path)!r} ({error.__class__.__name__}); give a CSV file with one line a rank"
        ) from None
    return from_csv(text, path.stem, str(path))
