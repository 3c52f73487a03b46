"""Plans that update their weights on the way: the versions of the weights that a rank needs, what an update waits for.

    stash           after every backward; a micro-batch keeps the version that its forward saw
    no-stash        the same without keeping it: a wrong gradient
    vertical-sync   every stage uses the version of stage 0's forward
    2bw             after every `batch` micro-batches, one late

Proved by: tests/pipeline/test_plans.py, tests/pipeline/test_pipedream.py
"""

from collections.abc import Callable
from typing import NamedTuple

from minidist.core.pipeline.plan import Action, Plan
from minidist.pipeline.errors import PlanError


def waits_for_replicas(plan: Plan) -> dict[Action, list[Action]]:
    """Return action -> the backwards of all replicas of its stage that are summed before it.

    With an update after every backward, the n-th backwards of a stage's replicas make one update, before the next F or
    B of any of them. The exchange of gradients itself takes no time here.
    """
    backwards = [[a for a in plan.actions(rank) if a.kind in ("B", "W")] for rank in range(plan.ranks)]
    result: dict[Action, list[Action]] = {}
    for ranks in (group for group in plan.holders().values() if len(group) > 1):
        for rank in ranks:
            finished = 0
            for action in plan.actions(rank):
                if action.kind in ("F", "B", "I") and finished:
                    result[action] = [
                        backwards[other][finished - 1] for other in ranks if finished <= len(backwards[other])
                    ]
                finished += action.kind in ("B", "W")
    return result


def most_versions(plan: Plan, allow_wrong_gradients: bool) -> list[int]:
    """Return, for each rank, the most versions of a stage's weights that are needed at once.

    Raises PlanError for a version that does not exist yet, and for a backward that sees another one than its forward.
    """
    result, delay = [], plan.ranks - 1
    may_differ = plan.updates != "no-stash" or allow_wrong_gradients
    for rank in range(plan.ranks):
        updates, used, most = 0, dict[int, int](), 1  # used: the version of each micro-batch between F and B
        for action in plan.actions(rank):
            i = action.microbatch

            # A forward uses the latest version, with vertical sync the one that stage 0 had when i entered.
            if action.kind == "F":
                used[i] = max(0, i - delay) if plan.updates == "vertical-sync" else updates
                if used[i] > updates:
                    raise PlanError(
                        f"rank {rank}: {action} needs version {used[i]} of the weights, and only {updates} updates were"
                        " made"
                    )
            elif action.kind in ("B", "I") and not may_differ and used[i] != updates:
                raise PlanError(
                    f"rank {rank}: {action} would see version {updates} of the weights and its forward saw version"
                    f" {used[i]}: a wrong gradient; stash the weights (stashing=True)"
                )
            if action.kind in ("B", "W"):
                used.pop(i)
                updates += 1
            most = max(most, _kept_versions(plan, delay, updates, list(used.values())))
        result.append(most)
    return result


def _kept_versions(plan: Plan, delay: int, updates: int, used: list[int]) -> int:
    """Return how many are kept: the latest, those in use, with vertical sync what the next micro-batch may ask for."""
    if plan.updates == "stash":
        return len({*used, updates})
    if plan.updates != "vertical-sync" or updates == plan.microbatches:
        return 1
    entering = updates + len(used)  # the next micro-batch, or past the end
    upcoming = max(0, entering - delay) if entering < plan.microbatches else updates
    return updates - min([*used, upcoming]) + 1


def two_versions(plan: Plan, allow_wrong_gradients: bool) -> list[int]:
    """Return the two versions of 2BW on each rank; PlanError where an action needs another one."""
    m = plan.batch
    for rank in range(plan.ranks):
        finished = 0
        for action in plan.actions(rank):
            needed = max(action.microbatch // m - 1, 0)
            if action.kind == "F" and finished // m < needed:
                raise PlanError(
                    f"rank {rank}: {action} needs version {needed} of the weights, and only {finished // m} updates"
                    " were made"
                )
            if action.kind in ("B", "I") and finished // m > needed + 1:
                raise PlanError(
                    f"rank {rank}: {action} needs version {needed} of the weights, which two buffers no longer hold"
                )
            finished += action.kind in ("B", "W")
    return [2] * plan.ranks


class UpdateRule(NamedTuple):
    """What follows from updates on the way.

    versions(plan, allow_wrong_gradients): of each rank, the most versions of a stage's weights that are needed at once;
    PlanError where a backward would see other weights than its forward. waits(plan): action -> what it waits for in
    addition, because the update before it does; None: the rounds of these updates are not simulated.
    """

    versions: Callable[[Plan, bool], list[int]]
    waits: Callable[[Plan], dict[Action, list[Action]]] | None = None


UPDATE_RULES = {
    "stash": UpdateRule(most_versions, waits_for_replicas),
    "no-stash": UpdateRule(most_versions, waits_for_replicas),
    "vertical-sync": UpdateRule(most_versions),
    "2bw": UpdateRule(two_versions),
}


def update_rule(plan: Plan) -> UpdateRule | None:
    """Return the rule of a plan whose weights change on the way, None for others; PlanError where there is none."""
    if plan.updates in ("flush", "none"):
        return None
    if plan.updates not in UPDATE_RULES:
        known = ", ".join(("flush", "none", *UPDATE_RULES))
        raise PlanError(f"plan {plan.name!r} has updates={plan.updates!r}; it must be one of {known}")
    return UPDATE_RULES[plan.updates]
