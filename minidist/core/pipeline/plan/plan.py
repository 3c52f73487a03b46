"""A plan: the order of actions of each rank. It is data; one plan is validated, timed, drawn and executed.

    rank 0   0F0 0F1 0B0 0B1
    rank 1   1F0 1B0 1F1 1B1          CSV: one line per rank, a comma between actions, an empty cell for an idle slot

A stage is placed on the rank that computes its actions; nothing else says where it is. In DualPipe several ranks
compute one stage, each for different micro-batches.

An action is what a rank does to one micro-batch at one stage. A plan of 1,024 ranks and 4,096 micro-batches has eight
million of them, so an action is stored as a number, and `Action` is that number with names for its three parts:

    stage | micro-batch | kind          F(2, 0) is stage 2's forward of micro-batch 0 and prints as 2F0

Kinds: F forward; I input gradient; W weight gradient; B both as one action; RECOMPUTE a second forward
before a backward; SEND_F, RECV_F an activation leaves stage s or arrives at it; SEND_B, RECV_B a gradient likewise;
REDUCE_GRAD the stage's gradients are complete. An item of a rank's order is one action, or a pair of actions that
overlap: (1F4;2B1)OVERLAP_F_B. The grammar is the one of torch.distributed.pipelining.

A new schedule, which makes a plan, is one new file:

    @schedule("my-schedule")
    def my_schedule(p, m): ...      returns for each of the p ranks the list of its actions on m micro-batches

A function that takes it gets `v`, chunks per rank; further keyword arguments are options.

Proved by: tests/pipeline/test_plans.py
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from minidist.core.base import hooks
from minidist.core.base.registry import Registry

KINDS = ("F", "I", "W", "B", "RECOMPUTE", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE_GRAD")
FORWARD, INPUT, WEIGHT, BACKWARD, RECOMPUTE, SEND_F, RECV_F, SEND_B, RECV_B, REDUCE_GRAD = range(len(KINDS))
COMPUTE = KINDS[: RECOMPUTE + 1]
NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
KIND_BITS, MICROBATCH_BITS = 4, 28
STEP = 1 << KIND_BITS  # from one micro-batch to the next
STAGE = 1 << KIND_BITS + MICROBATCH_BITS  # from one stage to the next
Item = int | tuple[int, int]
Orders = Sequence[Sequence[Item]]


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
        return show(self)

    __repr__ = __str__


def F(stage: int, microbatch: int) -> int:
    """Forward."""
    return stage * STAGE + microbatch * STEP + FORWARD


def I(stage: int, microbatch: int) -> int:  # noqa: E743
    """Input gradient alone (Zero Bubble's paper calls it B)."""
    return stage * STAGE + microbatch * STEP + INPUT


def W(stage: int, microbatch: int) -> int:
    """Weight gradient alone."""
    return stage * STAGE + microbatch * STEP + WEIGHT


def B(stage: int, microbatch: int) -> int:
    """Full backward: input gradient, then weight gradient."""
    return stage * STAGE + microbatch * STEP + BACKWARD


def every(action: int, microbatches: int) -> range:
    """Return `action` for the next micro-batches, not as a list: every(F(2, 0), 3) is 2F0 2F1 2F2."""
    return range(action, action + microbatches * STEP, STEP)


def actions_of(item: Item) -> tuple[Action, ...]:
    """Return the actions of an item: itself, or the two that overlap."""
    return (Action(item[0]), Action(item[1])) if isinstance(item, tuple) else (Action(item),)


def show(item: Item) -> str:
    """Return an item in the field's grammar."""
    if isinstance(item, tuple):
        return f"({show(item[0])};{show(item[1])})OVERLAP_F_B"
    kind = item % STEP
    if kind == REDUCE_GRAD:
        return f"{item // STAGE}REDUCE_GRAD"
    return f"{item // STAGE}{KINDS[kind]}{item % STAGE // STEP}"


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

    def with_orders(self, orders: Orders) -> "Plan":
        """Return the same plan with other orders."""
        return replace(self, orders=orders)

    def to_text(self) -> str:
        """Return lines such as `rank 0: 0F0 0B0`, one per rank."""
        return "".join(f"rank {rank}: {' '.join(map(show, order))}\n" for rank, order in enumerate(self.orders))

    def to_csv(self) -> str:
        """Return one line per rank, with a comma between items."""
        return "".join(",".join(map(show, order)) + "\n" for order in self.orders)


@dataclass(frozen=True)
class Schedule:
    """A schedule by name.

    chunks: stages per rank, or None when the caller chooses (default 2). takes: (p, m, v, and the options that it
    names) -> None, or the end of a sentence that says which m it can take. updates: see Plan. complete: (plan, options)
    -> the plan, where options change more of it than its orders.
    """

    name: str
    function: Callable[..., Orders]
    aliases: tuple[str, ...] = ()
    chunks: int | None = 1
    takes: Callable[..., str | None] | None = None
    updates: str = "flush"
    complete: Callable[[Plan, Mapping[str, Any]], Plan] | None = None

    def plan(self, stages: int, microbatches: int, chunks: int | None = None, **options: Any) -> Plan:
        """Return the plan for `stages` pipeline ranks with `chunks` stages each; UsageError where there is none."""
        hooks.check_schedule(self, stages, microbatches, chunks, options)
        v = self.chunks or chunks or 2
        arguments: dict[str, Any] = {"p": stages, "m": microbatches}
        if "v" in inspect.signature(self.function).parameters:
            arguments["v"] = v
        plan = Plan(self.name, self.function(**arguments, **options), stages * v, microbatches, self.updates)
        return plan if self.complete is None else self.complete(plan, options)


SCHEDULES: Registry[Schedule] = Registry("schedule")


def schedule(
    name: str, *, aliases: tuple[str, ...] = (), **attributes: Any
) -> Callable[[Callable[..., Orders]], Callable[..., Orders]]:
    """Register a function as the schedule `name`. attributes: those of `Schedule`."""

    def register(function: Callable[..., Orders]) -> Callable[..., Orders]:
        SCHEDULES.add(name, Schedule(name, function, aliases, **attributes), aliases)
        return function

    return register


def get_schedule(name: str) -> Schedule:
    """Return the schedule of that name or alias (in any case); UsageError with the nearest name."""
    return SCHEDULES[str(name)]
