"""A plan: the order of actions of each rank. It is data; one plan is validated, timed, drawn and executed.

    rank 0   0F0 0F1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1          CSV: one line per rank, a comma between actions, an empty cell for an idle slot

A stage is placed on the rank that computes its actions; nothing else says where it is. In DualPipe, and where a stage
is replicated, several ranks compute one stage, each for different micro-batches.

Proved by: tests/pipeline/test_plans.py
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.base.layout import GradientOrder
from minidist.base.read_file import read_text
from minidist.pipeline.plan.action import COMPUTE, RECOMPUTE, STEP, Action, Item, actions_of, read, show

UPDATES = ("flush", "none", "stash", "no-stash", "vertical-sync", "2bw")


@dataclass(frozen=True)
class Plan:
    """The orders of all ranks for one step (or, with asynchronous updates, for a whole stream of micro-batches).

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
    def action_count(self) -> int:
        """Number of actions of all ranks together."""
        return sum(len(order) for order in self.orders) + sum(
            isinstance(item, tuple) for order in self.orders for item in order
        )

    @property
    def is_lowered(self) -> bool:
        """Whether sends and receives are part of the orders already."""
        # On the plain numbers, which is five times as fast; an overlapped pair computes.
        return any(not isinstance(item, tuple) and item % STEP > RECOMPUTE for order in self.orders for item in order)

    def actions(self, rank: int) -> Iterator[Action]:
        """Return the actions of `rank` in their order; an overlapped pair gives its two actions."""
        return (action for item in self.orders[rank] for action in actions_of(item))

    def rank_of_stage(self) -> dict[tuple[int, int], int]:
        """Return (stage, micro-batch) -> the rank that runs this forward."""
        return {
            (action.stage, action.microbatch): rank
            for rank in range(self.ranks)
            for action in self.actions(rank)
            if action.kind == "F"
        }

    def holders(self) -> dict[int, list[int]]:
        """Return stage -> the ranks that compute it, in rank order."""
        found: dict[int, list[int]] = {}
        for rank in range(self.ranks):
            for stage in {action.stage for action in self.actions(rank) if action.kind in COMPUTE}:
                found.setdefault(stage, []).append(rank)
        return dict(sorted(found.items()))

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that `rank` computes, ascending."""
        return sorted({action.stage for action in self.actions(rank) if action.kind in COMPUTE})

    def additions(self) -> dict[int, list[list[int]]]:
        """Return stage -> for each rank that holds it, the micro-batches in the order in which its gradient adds them.

        The ranks of a stage are in rank order.
        """
        result: dict[int, dict[int, list[int]]] = {}
        for rank in range(self.ranks):
            for action in self.actions(rank):
                if action.kind in ("B", "W"):
                    result.setdefault(action.stage, {}).setdefault(rank, []).append(action.microbatch)
        return {stage: list(result[stage].values()) for stage in sorted(result)}

    def gradient_order(self) -> GradientOrder:
        """Return the declared order of additions, stage after stage.

        Raises UsageError when several ranks hold a stage (see `additions`).
        """
        additions = self.additions()
        if any(len(ranks) > 1 for ranks in additions.values()):
            raise UsageError(
                f"plan {quoted(self.name)} computes a stage on several ranks; read its order from Plan.additions()"
            )
        return GradientOrder(1, tuple(tuple(additions.get(stage, [[]])[0]) for stage in range(self.stages)))

    def with_orders(self, orders: Sequence[Sequence[Item]]) -> "Plan":
        """Return the same plan with other orders."""
        return replace(self, orders=orders)

    def to_text(self) -> str:
        """Return lines such as `rank 0: 0F0 0B0`, one per rank."""
        return "".join(f"rank {rank}: {' '.join(map(show, order))}\n" for rank, order in enumerate(self.orders))

    def to_csv(self) -> str:
        """Return one line per rank, with a comma between items."""
        return "".join(",".join(map(show, order)) + "\n" for order in self.orders)


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
