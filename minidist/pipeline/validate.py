"""The validator of plans. It shares no code with the generators of schedules: it takes a plan apart and simulates it.

    1 each action once, in range, a micro-batch's actions of a stage on one rank
    2 F before I before W on a rank, and nothing after REDUCE_GRAD
    3 sends and receives match, where a plan has them already (transfers.py)
    4 all ranks reach the end of their orders: no deadlock, even with synchronous sends (simulate.py)
    5 F and B of a micro-batch see the same weights: nothing to check, unless they change on the way (`UpdateRule`)

A plan that fails raises a PlanError of one sentence; no plan is executed before it has passed.

Proved by: tests/pipeline/test_plans.py
"""

from collections import Counter
from dataclasses import dataclass

from minidist.core.pipeline.plan import Action, Plan, actions_of
from minidist.pipeline.errors import PlanError
from minidist.pipeline.simulate import Dependencies, simulate
from minidist.pipeline.transfers import Items, RankOf, check_transfers, check_transfers_alone
from minidist.pipeline.updates import update_rule


@dataclass(frozen=True)
class PlanFacts:
    """What a valid plan needs on each rank: most micro-batch activations alive, and versions of the weights."""

    peak: list[int]
    weight_versions: list[int]


def validate(plan: Plan, allow_wrong_gradients: bool = False) -> PlanFacts:
    """Raise PlanError when `plan` is wrong; otherwise return what it needs.

    allow_wrong_gradients: let "no-stash" pass, whose backward sees other weights than its forward.
    """
    items = [[actions_of(item) for item in order] for order in plan.orders]
    _check_range(plan, items)
    _check_local_order(items)
    if plan.is_lowered:
        check_transfers_alone(plan, items)
    rank_of = _check_complete(plan, items)
    has_transfers = plan.is_lowered and check_transfers(plan, items, rank_of)
    _check_no_deadlock(plan, rank_of, has_transfers)
    if (rule := update_rule(plan)) is not None:
        return PlanFacts(_peaks(items), rule.versions(plan, allow_wrong_gradients))
    peak = [min(1, len(order)) for order in items] if plan.updates == "none" else _peaks(items)
    return PlanFacts(peak, [1] * plan.ranks)


def _check_range(plan: Plan, items: Items) -> None:
    for rank, order in enumerate(items):
        for action in (a for item in order for a in item):
            if action.stage >= plan.stages or (action.kind != "REDUCE_GRAD" and action.microbatch >= plan.microbatches):
                raise PlanError(
                    f"rank {rank}: {action} is outside of {plan.stages} stages and {plan.microbatches} micro-batches;"
                    " numbers begin at 0"
                )
        for item in order:
            if len(item) == 2 and {a.kind for a in item} not in ({"F", "B"}, {"F", "I"}):
                raise PlanError(f"rank {rank}: ({item[0]};{item[1]}) must overlap one F with one B or I")


def _check_local_order(items: Items) -> None:
    """1 and 2: nothing twice on a rank, F before its backward, I before its W, and nothing after REDUCE_GRAD."""
    for rank, order in enumerate(items):
        seen: set[Action] = set()
        for item in order:
            for action in item:
                kind, stage, i = action.kind, action.stage, action.microbatch
                if action in seen:
                    raise PlanError(f"rank {rank}: {action} appears twice; each action may appear once")
                if kind in ("I", "W", "B", "RECOMPUTE"):
                    needed = Action.of("I" if kind == "W" else "F", stage, i)
                    if needed not in seen:
                        raise PlanError(
                            f"rank {rank}: {action} comes before {needed}, which it needs; put {needed} first"
                        )
                if kind == "RECOMPUTE" and (Action.of("I", stage, i) in seen or Action.of("B", stage, i) in seen):
                    raise PlanError(f"rank {rank}: {action} comes after the backward that it is for; put it before")
                if kind in ("W", "B") and Action.of("REDUCE_GRAD", stage) in seen:
                    raise PlanError(
                        f"rank {rank}: {action} adds to a gradient after {stage}REDUCE_GRAD sent it; put the reduction"
                        " last"
                    )
            seen.update(item)


def _check_complete(plan: Plan, items: Items) -> RankOf:
    """1: every stage runs every micro-batch on one rank. Returns (stage, micro-batch) -> rank."""
    rank_of: RankOf = {}
    count: Counter[Action] = Counter()
    for rank, order in enumerate(items):
        for action in (a for item in order for a in item if a.kind in ("F", "I", "W", "B")):
            stage, i = action.stage, action.microbatch
            if rank_of.setdefault((stage, i), rank) != rank:
                raise PlanError(
                    f"rank {rank}: {action} belongs to rank {rank_of[stage, i]}, which also works on stage {stage}'s"
                    f" micro-batch {i}; keep all of its actions on one rank"
                )
            count[action] += 1
    for stage in range(plan.stages):
        for i in range(plan.microbatches):
            _check_passes(plan, stage, i, count)
    return rank_of


def _check_passes(plan: Plan, stage: int, i: int, count: Counter[Action]) -> None:
    """1: a micro-batch has a forward on a stage and, unless the plan only evaluates, B or both I and W."""
    f, x, w, b = (count[Action.of(kind, stage, i)] for kind in "FIWB")
    if not f:
        raise PlanError(f"{stage}F{i} is missing; every stage must run every micro-batch forward")
    if plan.updates == "none":
        if any((b, w, x)):
            raise PlanError(f"stage {stage} runs micro-batch {i} backward in an evaluation; leave its backward out")
    elif b and (w or x):
        raise PlanError(f"stage {stage} has B and also I or W of micro-batch {i}; B is I and W together, take one form")
    elif not b and not (w and x):
        missing = "B" if not (w or x) else "W" if x else "I"
        raise PlanError(f"{stage}{missing}{i} is missing; its gradient would never be computed")


def _check_no_deadlock(plan: Plan, rank_of: RankOf, has_transfers: bool) -> None:
    """4: every rank reaches the end of its order."""
    run = simulate(plan.orders, Dependencies(plan).needs)
    if run.blocked:
        reasons = []
        for rank in run.blocked:
            action, needed = run.missing(rank)
            reasons.append(
                f"rank {rank} at {action} waits for {needed} on rank {rank_of[needed.stage, needed.microbatch]}"
            )
        raise PlanError(
            f"deadlock{' with synchronous sends' if has_transfers else ''}: {'; '.join(reasons)}; reorder one of them"
        )


def _peaks(items: Items) -> list[int]:
    """Return the most micro-batch activations alive on each rank, from F until B or W."""
    peaks = []
    for order in items:
        alive = peak = 0
        for item in order:
            alive += sum(a.kind == "F" for a in item)
            peak = max(peak, alive)
            alive -= sum(a.kind in ("B", "W") for a in item)
        peaks.append(peak)
    return peaks
