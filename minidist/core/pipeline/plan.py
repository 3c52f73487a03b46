"""A plan: the order of actions of each rank. It is data; one plan is validated, timed, drawn and executed.

    rank 0   0F0 0F1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1          CSV: one line per rank, a comma between actions, an empty cell for an idle slot

A stage is placed on the rank that computes its actions; nothing else says where it is.

An action is what a rank does to one micro-batch at one stage. A plan of 1,024 ranks and 4,096 micro-batches has eight
million of them, so an action is stored as a number, and `Action` is that number with names for its three parts:

    stage | micro-batch | kind          F(2, 0) is stage 2's forward of micro-batch 0 and prints as 2F0

Kinds: F forward; I input gradient; W weight gradient; B both as one action; RECOMPUTE a second forward
before a backward; SEND_F, RECV_F an activation leaves stage s or arrives at it; SEND_B, RECV_B a gradient likewise;
REDUCE_GRAD the stage's gradients are complete. An item of a rank's order is one action, or a pair of actions that
overlap: (1F4;2B1)OVERLAP_F_B. The grammar is the one of torch.distributed.pipelining.

`lower` makes of a plan of computations one that can be executed, with sends, receives posted ahead, and reductions:

    1F1 → 1RECV_F1 .. 1F1 1SEND_F1      for every neighbour on another rank
    0B3 → 0B3 0REDUCE_GRAD              directly after a stage's last B or W, where a step has one update

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from minidist.core.base import hooks

KINDS = ("F", "I", "W", "B", "RECOMPUTE", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD")
FORWARD, INPUT, WEIGHT, BACKWARD, RECOMPUTE, SEND_F, RECV_F, SEND_B, RECV_B, REDUCE_GRAD = range(len(KINDS))
COMPUTE = KINDS[: RECOMPUTE + 1]
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
KIND_BITS, MICROBATCH_BITS = 4, 28
STEP = 1 << KIND_BITS  # from one micro-batch to the next
STAGE = 1 << KIND_BITS + MICROBATCH_BITS  # from one stage to the next
Item = int | tuple[int, int]
Orders = Sequence[Sequence[Item]]
Key = tuple[int, int]  # stage, micro-batch


class Action(int):
    """An action's number with names for its parts: `Action(F(2, 0)).stage` is 2.

    It equals, and hashes as, the plain number. `microbatch` is 0 and without meaning for REDUCE_GRAD.
    """

    __slots__ = ()

    @classmethod
    def of(cls, kind: str, stage: int, microbatch: int = 0) -> "Action":
        """Return the action of that kind, stage and micro-batch."""
        return cls(stage * STAGE + microbatch * STEP + NUMBERS[kind])

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return KINDS[self % STEP]

    @property
    def stage(self) -> int:
        """Stage number in the model."""
        return self // STAGE

    @property
    def microbatch(self) -> int:
        """Number of the micro-batch."""
        return self % STAGE // STEP

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.kind == 'REDUCE_GRAD' else self.microbatch}"

    __repr__ = __str__


def F(stage: int, microbatch: int = 0) -> int:
    """Forward."""
    return stage * STAGE + microbatch * STEP + FORWARD


def I(stage: int, microbatch: int = 0) -> int:  # noqa: E743
    """Input gradient alone (Zero Bubble's paper calls it B)."""
    return stage * STAGE + microbatch * STEP + INPUT


def W(stage: int, microbatch: int = 0) -> int:
    """Weight gradient alone."""
    return stage * STAGE + microbatch * STEP + WEIGHT


def B(stage: int, microbatch: int = 0) -> int:
    """Full backward: input gradient, then weight gradient."""
    return stage * STAGE + microbatch * STEP + BACKWARD


def every(action: int, microbatches: int) -> range:
    """Return `action` for the next micro-batches, not as a list: every(F(2, 0), 3) is 2F0 2F1 2F2."""
    return range(action, action + microbatches * STEP, STEP)


def actions_of(item: Item) -> tuple[Action, ...]:
    """Return the actions of an item: itself, or the two that overlap."""
    return (Action(item[0]), Action(item[1])) if isinstance(item, tuple) else (Action(item),)


@dataclass(frozen=True)
class Plan:
    """The orders of all ranks for one step (or, with asynchronous updates, for a whole stream of micro-batches).

    updates: when weights change: "flush" (one update after the last backward), "none" (evaluation), or on the way, by
    an `UpdateRule`. batch: the micro-batches of an update.
    """

    name: str
    orders: Orders = field(repr=False)
    stages: int
    microbatches: int
    updates: str = "flush"
    batch: int = 1

    holders, to_csv, to_text = (hooks.added("plan_methods", name) for name in ("holders", "to_csv", "to_text"))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @property
    def is_lowered(self) -> bool:
        """Whether sends and receives are part of the orders already."""
        # On the plain numbers, which is ten times as fast; an overlapped pair computes.
        kinds = {item % STEP for order in self.orders for item in order if not isinstance(item, tuple)}
        return any(kind > RECOMPUTE for kind in kinds)

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

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that `rank` computes, ascending."""
        return sorted({action.stage for action in self.actions(rank) if action.kind in COMPUTE})

    def with_orders(self, orders: Orders) -> "Plan":
        """Return the same plan with other orders."""
        return replace(self, orders=orders)


def lower(plan: Plan) -> Plan:
    """Add sends, posted receives and gradient reductions to a plan of computations. The plan must be valid."""
    hooks.check_not_lowered(plan)
    rank_of = plan.rank_of_stage()
    orders = [_lower_rank(plan, rank, rank_of) for rank in range(plan.ranks)]
    hooks.prevent_deadlocks(plan.with_orders(orders), orders, rank_of)
    return plan.with_orders(orders)


def _lower_rank(plan: Plan, rank: int, rank_of: dict[Key, int]) -> list[Item]:
    """Return a rank's order with its transfers: each neighbour's next receive is posted when one has been used."""
    receives: dict[tuple[str, int], list[Action]] = {}  # (RECV kind, stage) -> in the order of use
    for action in plan.actions(rank):
        if (receive := transfer("RECV", action, rank, rank_of)) is not None:
            receives.setdefault((receive.kind, receive.stage), []).append(receive)
    result: list[Item] = [waiting.pop(0) for waiting in receives.values()]

    # Behind an item: the stages whose gradients it completes, the receives that take the place of those that it used,
    # then the sends of what it made.
    last = {a.stage: a for a in plan.actions(rank) if a.kind in ("B", "W") and plan.updates == "flush"}
    for item in plan.orders[rank]:
        complete = sorted(a.stage for a in actions_of(item) if last.get(a.stage) == a)
        result += [item, *(Action.of("REDUCE_GRAD", stage) for stage in complete)]
        for action in actions_of(item):
            receive = transfer("RECV", action, rank, rank_of)
            if receive is not None and (waiting := receives[receive.kind, receive.stage]):
                result.append(waiting.pop(0))
        result += filter(None, (transfer("SEND", action, rank, rank_of) for action in actions_of(item)))
    return result


def transfer(kind: str, action: Action, rank: int, rank_of: dict[Key, int]) -> Action | None:
    """Return the SEND of what an F, I or B made, or the RECV that it waits for; None at the ends and within a rank.

    kind: "SEND" or "RECV".
    """
    if action.kind not in ("F", "I", "B"):
        return None
    forward = action.kind == "F"
    other = action.stage + 1 if forward == (kind == "SEND") else action.stage - 1
    if rank_of.get((other, action.microbatch), rank) == rank:
        return None
    return Action.of(f"{kind}_{'F' if forward else 'B'}", action.stage, action.microbatch)
