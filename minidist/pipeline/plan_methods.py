"""Methods of `Plan` that the core does not need: the plan as text and as CSV, and which ranks compute each stage.

Proved by: tests/pipeline/test_plans.py
"""

from minidist.core.pipeline.plan import COMPUTE, KINDS, REDUCE_GRAD, STAGE, STEP, Item, Plan


def show(item: Item) -> str:
    """Return an item as PyTorch writes it, such as 0F2, 1REDUCE_GRAD or (1F4;2B1)OVERLAP_F_B."""
    if isinstance(item, tuple):
        return f"({show(item[0])};{show(item[1])})OVERLAP_F_B"
    kind = item % STEP
    if kind == REDUCE_GRAD:
        return f"{item // STAGE}REDUCE_GRAD"
    return f"{item // STAGE}{KINDS[kind]}{item % STAGE // STEP}"


def to_text(plan: Plan) -> str:
    """Return lines such as `rank 0: 0F0 0B0`, one per rank."""
    return "".join(f"rank {rank}: {' '.join(map(show, order))}\n" for rank, order in enumerate(plan.orders))


def to_csv(plan: Plan) -> str:
    """Return one line per rank, with a comma between items."""
    return "".join(",".join(map(show, order)) + "\n" for order in plan.orders)


def holders(plan: Plan) -> dict[int, list[int]]:
    """Return stage -> the ranks that compute it, in rank order."""
    found: dict[int, list[int]] = {}
    for rank in range(plan.ranks):
        for stage in {action.stage for action in plan.actions(rank) if action.kind in COMPUTE}:
            found.setdefault(stage, []).append(rank)
    return dict(sorted(found.items()))
