"""The validator of the sends and receives of a plan that has them already: one from a file, or from another runtime.

Proved by: tests/pipeline/test_plans.py
"""

from minidist.core.pipeline.plan import Action, Plan
from minidist.pipeline.errors import PlanError
from minidist.pipeline.simulate import Dependencies, partner, simulate

Items = list[list[tuple[Action, ...]]]
RankOf = dict[tuple[int, int], int]  # (stage, micro-batch) -> rank


def check_transfers_alone(plan: Plan, items: Items) -> None:
    """4, a necessary part, which also fragments of plans pass: sends and receives without what is computed between."""
    queues = [[a for item in order for a in item if a.kind.startswith(("SEND", "RECV"))] for order in items]
    transfers = {action for queue in queues for action in queue}
    needs = Dependencies(plan).needs
    run = simulate(queues, lambda action: [needed for needed in needs(action) if needed in transfers])
    if run.blocked:
        missing = [(rank, *run.missing(rank)) for rank in run.blocked]
        reasons = "; ".join(
            f"rank {rank} at {action} waits for {needed} to be posted" for rank, action, needed in missing
        )
        raise PlanError(f"deadlock with synchronous sends: {reasons}; post a receive earlier")


def check_transfers(plan: Plan, items: Items, rank_of: RankOf) -> bool:
    """3: if there are any transfers, they are those between stages on different ranks, each on its side of the data.

    Returns whether there are any; PlanError where they do not match.
    """
    place = {action: (rank, at) for rank, order in enumerate(items) for at, item in enumerate(order) for action in item}
    transfers = {a for a in place if a.kind.startswith(("SEND", "RECV"))}
    if not transfers:
        return False

    # Exactly those between neighbouring stages on different ranks.
    needed = _needed_transfers(plan, rank_of)
    for action in sorted(needed - transfers):
        other = partner(action)
        rest = f", but its partner {other} is there" if other in transfers else ""
        raise PlanError(
            f"rank {rank_of[action.stage, action.microbatch]}: {action} is missing{rest}; the stages are on different"
            " ranks"
        )
    for action in sorted(transfers - needed):
        raise PlanError(
            f"rank {place[action][0]}: {action} has no partner; its neighbour is on the same rank or does not exist"
        )

    _check_sides(place, sorted(transfers), rank_of)
    return True


def _needed_transfers(plan: Plan, rank_of: RankOf) -> set[Action]:
    """Return the sends and receives of a plan whose neighbouring stages are on these ranks."""
    needed: set[Action] = set()
    for (stage, i), rank in rank_of.items():
        if stage + 1 < plan.stages and rank_of[stage + 1, i] != rank:
            needed |= {Action.of("SEND_F", stage, i), Action.of("RECV_F", stage + 1, i)}
            if plan.updates != "none":
                needed |= {Action.of("SEND_B", stage + 1, i), Action.of("RECV_B", stage, i)}
    return needed


def _check_sides(place: dict[Action, tuple[int, int]], transfers: list[Action], rank_of: RankOf) -> None:
    """3: each is on the rank of its stage, a SEND behind what it sends and a RECV before what needs it."""
    for action in transfers:
        kind, stage, i = action.kind, action.stage, action.microbatch
        rank, at = place[action]
        if rank != rank_of[stage, i]:
            raise PlanError(f"rank {rank}: {action} belongs to rank {rank_of[stage, i]}, which holds stage {stage}")
        around = [Action.of(k, stage, i) for k in (("F",) if kind.endswith("_F") else ("I", "B"))]
        computed = next(place[a][1] for a in around if a in place)
        if kind.startswith("SEND") and at < computed:
            raise PlanError(f"rank {rank}: {action} comes before the action that makes what it sends; put it behind")
        if kind.startswith("RECV") and at > computed:
            raise PlanError(f"rank {rank}: {action} comes after the action that needs it; put it before")
