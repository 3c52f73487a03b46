"""From a schedule to something that can be executed: sends, receives posted ahead of use, and reductions.

    1F1 → 1RECV_F1 .. 1F1 1SEND_F1      for every neighbour on another rank
    0B3 → 0B3 0REDUCE_GRAD              directly after a stage's last B or W, where a step has one update

RECV posts a receive into a fresh buffer; the F, I or B that needs it waits. SEND does not block. A stage posts one
receive per neighbour ahead of use, so its buffers can be counted.

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_runtime.py
"""

from minidist.core.base import hooks
from minidist.core.base.errors import UsageError
from minidist.core.pipeline.plan.plan import Action, Item, Plan, actions_of

Key = tuple[int, int]  # stage, micro-batch
Orders = list[list[Item]]


def lower(plan: Plan) -> Plan:
    """Add sends, posted receives and gradient reductions to a plan of computations. The plan must be valid."""
    check_not_lowered(plan)
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
        sends: list[Action] = []
        for action in actions_of(item):
            receive, send = transfer("RECV", action, rank, rank_of), transfer("SEND", action, rank, rank_of)
            if receive is not None and (waiting := receives[receive.kind, receive.stage]):
                result.append(waiting.pop(0))
            if send is not None:
                sends.append(send)
        result += sends
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


def check_not_lowered(plan: Plan) -> None:
    if plan.is_lowered:
        raise UsageError(f"plan {plan.name!r} has sends and receives already; lower a plan of computations only")
