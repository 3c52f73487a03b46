"""Plans made from plans: recomputation, evaluation, and what other runtimes do with their receives.

    recompute        0B2 → 0RECOMPUTE2 0B2               GPipe's: keep the stage's input, run its forward again
    forwards         0F0 0B0 0F1 0B1 → 0F0 0F1           evaluation
    computations     0F0 0SEND_F0 0B0 → 0F0 0B0          without transfers
    lower_blocking   receives stand where the sender's send stood

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from collections.abc import Iterable
from dataclasses import replace

from minidist.core.base.errors import UsageError
from minidist.core.pipeline.plan import COMPUTE, Action, Item, Plan, actions_of, transfer
from minidist.pipeline.deadlocks import deadlock_error
from minidist.pipeline.plan_methods import show
from minidist.pipeline.simulate import Dependencies, Simulation, partner


def lower_blocking(plan: Plan) -> Plan:
    """Return the order of runtimes whose RECV stops the rank where it stands.

    One item per rank and turn, rank after rank; a RECV stands where the receiver was when the sender sent. Nothing is
    posted ahead, so a rank waits for data that it does not need yet. For comparison only (time_plan with
    receives="blocking"): 1F1B idles two to four times as long.
    """
    check_not_lowered(plan)
    rank_of = plan.rank_of_stage()
    simulation = Simulation(plan.orders, Dependencies(plan).needs)
    orders: list[list[Item]] = [[] for _ in plan.orders]
    while simulation.blocked:
        moved = False
        for rank in range(plan.ranks):
            item = simulation.advance(rank)
            if item is None:
                continue
            moved = True
            orders[rank].append(item)
            for action in actions_of(item):
                if (send := transfer("SEND", action, rank, rank_of)) is not None:
                    receive = partner(send)
                    orders[rank].append(send)
                    orders[rank_of[receive.stage, receive.microbatch]].append(receive)
        if not moved:
            raise deadlock_error(plan)
    return plan.with_orders(orders)


def recompute(plan: Plan, stages: Iterable[int] | None = None) -> Plan:
    """Add RECOMPUTE directly before the B or I of the given stages (default: all).

    Raises UsageError when one of these is in an overlapped pair.
    """
    if plan.updates == "none":
        return plan
    chosen = set(range(plan.stages)) if stages is None else set(stages)
    for stage in sorted(chosen):
        if not 0 <= stage < plan.stages:
            raise UsageError(f"cannot recompute stage {stage}: the plan has stages 0 to {plan.stages - 1}")
    orders: list[list[Item]] = []
    for order in plan.orders:
        orders.append([])
        for item in order:
            for action in actions_of(item):
                if action.kind in ("B", "I") and action.stage in chosen:
                    if isinstance(item, tuple):
                        raise UsageError(
                            f"cannot recompute in the overlapped {show(item)}; recompute stages without overlap only"
                        )
                    orders[-1].append(Action.of("RECOMPUTE", action.stage, action.microbatch))
            orders[-1].append(item)
    return plan.with_orders(orders)


def forwards(plan: Plan, count: int | None = None) -> Plan:
    """Return the plan's forward passes alone: an evaluation with every stage where the plan has it.

    count: of its first micro-batches only. Forwards wait only for forwards, so the result cannot deadlock if the plan
    did not.
    """
    count = plan.microbatches if count is None else count
    orders = [
        [action for action in plan.actions(rank) if action.kind == "F" and action.microbatch < count]
        for rank in range(plan.ranks)
    ]
    return replace(plan, name=f"{plan.name} (forwards)", orders=orders, microbatches=count, updates="none", batch=1)


def additions(plan: Plan) -> dict[int, list[list[int]]]:
    """Return stage -> for each rank that holds it, the micro-batches in the order in which its gradient adds them.

    The ranks of a stage are in rank order.
    """
    result: dict[int, dict[int, list[int]]] = {}
    for rank in range(plan.ranks):
        for action in plan.actions(rank):
            if action.kind in ("B", "W"):
                result.setdefault(action.stage, {}).setdefault(rank, []).append(action.microbatch)
    return {stage: list(result[stage].values()) for stage in sorted(result)}


def computations(plan: Plan) -> Plan:
    """Return a lowered plan without its transfers and reductions."""
    return plan.with_orders([[item for item in order if actions_of(item)[0].kind in COMPUTE] for order in plan.orders])


def check_not_lowered(plan: Plan) -> None:
    """Raise UsageError for a plan with transfers."""
    if plan.is_lowered:
        raise UsageError(f"plan {plan.name!r} has sends and receives already; lower a plan of computations only")
