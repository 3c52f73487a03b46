"""A plan: the order of actions of each rank. It is data; one plan is validated, timed, drawn and executed.

    rank 0   0F0 0F1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1          CSV: one line per rank, a comma between actions, an empty cell for an idle slot

A stage is placed on the rank that computes its actions; nothing else says where it is. In DualPipe, and where a stage
is replicated, several ranks compute one stage, each for different micro-batches.

Proved by: tests/pipeline/test_plans.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from minidist.core.base.errors import UsageError
from minidist.core.pipeline.plan.action import COMPUTE, RECOMPUTE, STEP, Action, Item, actions_of, show


class PlanError(UsageError):
    """A plan that cannot be executed, or whose result would be wrong."""


@dataclass(frozen=True)
class Plan:
    """The orders of all ranks for one step (or, with asynchronous updates, for a whole stream of micro-batches).

    updates: when weights change: "flush" (one update after the last backward), "none" (evaluation), or on the way, by
    an `UpdateRule`. batch: the micro-batches of an update.
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

    def with_orders(self, orders: Sequence[Sequence[Item]]) -> "Plan":
        """Return the same plan with other orders."""
        return replace(self, orders=orders)

    def to_text(self) -> str:
        """Return lines such as `rank 0: 0F0 0B0`, one per rank."""
        return "".join(f"rank {rank}: {' '.join(map(show, order))}\n" for rank, order in enumerate(self.orders))

    def to_csv(self) -> str:
        """Return one line per rank, with a comma between items."""
        return "".join(",".join(map(show, order)) + "\n" for order in self.orders)
