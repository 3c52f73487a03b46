"""The judge of plans. It shares no code with the generators: it takes a plan apart and runs it on paper.

Every rank is a list and a pointer. A pointer moves on when what its action needs is there:

    F(s,i)   after F(s-1,i)                          1 each action once, in range, at home on one rank
    B or I   after F(s,i) and after B or I of s+1    2 F before I before W on a rank
    W(s,i)   after I(s,i)                            3 sends and receives match
    SEND     when the receiver has posted its RECV   4 all pointers reach the end: no deadlock, even with synchronous
    sends
                                                     5 F and B of a micro-batch see the same weights

A plan that fails is a PlanError of one sentence; nothing is executed before it has passed.
"""

from collections import Counter
from dataclasses import dataclass

from minidist.base.errors import UsageError
from minidist.pipeline.plan import Action, Plan, parts, unpack


class PlanError(UsageError):
    """A plan that cannot be executed, or whose result would be wrong."""


@dataclass(frozen=True)
class PlanFacts:
    """What a valid plan needs on each rank: micro-batch activations alive at most, and versions of the weights."""

    peak: list[int]
    weight_versions: list[int]


Items = list[list[tuple[Action, ...]]]


def validate(plan: Plan, allow_wrong_gradients: bool = False) -> PlanFacts:
    """Raise PlanError when `plan` is wrong; otherwise return what it needs. `allow_wrong_gradients`: let "no-stash"
    pass.
    """
    items = [[tuple(unpack(part) for part in parts(item)) for item in order] for order in plan.orders]
    _in_range(plan, items)
    _local_order(plan, items)
    _transfers_alone(items)
    home = _complete(plan, items)
    lowered = _transfers_match(plan, items, home)
    _no_deadlock(plan, items, home, lowered)
    versions = _versions(plan, items, allow_wrong_gradients)
    return PlanFacts([min(1, len(order)) for order in items] if plan.updates == "none" else _peaks(items), versions)


def _in_range(plan: Plan, items: Items) -> None:
    for rank, order in enumerate(items):
        for action in (a for item in order for a in item):
            if action.stage >= plan.stages or (action.kind != "REDUCE_GRAD" and action.microbatch >= plan.microbatches):
                raise PlanError(
                    f"rank {rank}: {action} is outside of {plan.stages} stages and {plan.microbatches} micro-batches;"
                    " numbers begin at 0"
                )
        for item in order:
            if len(item) == 2 and not (
                (item[0].kind == "F" and item[1].kind in "BI") or (item[1].kind == "F" and item[0].kind in "BI")
            ):
                raise PlanError(f"rank {rank}: ({item[0]};{item[1]}) must overlap one F with one B or I")


def _local_order(plan: Plan, items: Items) -> None:
    """1 and 2: nothing twice on a rank, F before its backward, I before its W, and nothing after REDUCE_GRAD."""
    for rank, order in enumerate(items):
        seen: set[Action] = set()
        for item in order:
            for action in item:
                if action in seen:
                    raise PlanError(f"rank {rank}: {action} stands there twice; every action happens once")
                if action.kind in ("I", "W", "B", "RECOMPUTE"):
                    before = "I" if action.kind == "W" else "F"
                    needed = Action(before, action.stage, action.microbatch)
                    if needed not in seen:
                        raise PlanError(
                            f"rank {rank}: {action} stands before {needed}, which it needs; put {needed} first"
                        )
                if action.kind == "RECOMPUTE" and (
                    Action("I", *action[1:]) in seen or Action("B", *action[1:]) in seen
                ):
                    raise PlanError(f"rank {rank}: {action} stands after the backward that it is for; put it before")
                if action.kind in ("W", "B") and Action("REDUCE_GRAD", action.stage, 0) in seen:
                    raise PlanError(
                        f"rank {rank}: {action} adds to a gradient after {action.stage}REDUCE_GRAD sent it; put the"
                        " reduction last"
                    )
            seen.update(item)


def _transfers_alone(items: Items) -> None:
    """4, necessary part: sends and receives in the ranks' orders, without what is computed between them; also of
    fragments.
    """
    queues = [[a for item in order for a in item if a.kind.startswith(("SEND", "RECV"))] for order in items]
    everywhere = {action for queue in queues for action in queue}
    posted: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and (
                queue[0].kind.startswith("RECV") or _partner(queue[0]) in posted or _partner(queue[0]) not in everywhere
            ):
                posted.add(queue.pop(0))
                moved = True
    stuck = [(rank, queue[0]) for rank, queue in enumerate(queues) if queue]
    if stuck:
        reasons = "; ".join(
            f"rank {rank} at {action} waits for {_partner(action)} to be posted" for rank, action in stuck
        )
        raise PlanError(f"deadlock with synchronous sends: {reasons}; post a receive earlier")


def _complete(plan: Plan, items: Items) -> dict[tuple[int, int], int]:
    """1: every stage does every micro-batch on one rank; returns (stage, micro-batch) -> rank."""
    home: dict[tuple[int, int], int] = {}
    count: Counter[tuple[str, int, int]] = Counter()
    for rank, order in enumerate(items):
        for kind, stage, i in (a for item in order for a in item):
            if kind in ("F", "I", "W", "B"):
                if home.setdefault((stage, i), rank) != rank:
                    raise PlanError(
                        f"rank {rank}: {stage}{kind}{i} belongs to rank {home[stage, i]}, which also works on stage"
                        f" {stage}'s micro-batch {i}; keep all of its actions on one rank"
                    )
                count[kind, stage, i] += 1
    for stage in range(plan.stages):
        for i in range(plan.microbatches):
            if not count["F", stage, i]:
                raise PlanError(f"{stage}F{i} is missing; every stage must run every micro-batch forward")
            b, w, x = count["B", stage, i], count["W", stage, i], count["I", stage, i]
            if plan.updates == "none":
                if b or w or x:
                    raise PlanError(
                        f"stage {stage} runs micro-batch {i} backward in an evaluation; leave its backward out"
                    )
            elif b and (w or x):
                raise PlanError(
                    f"stage {stage} has B and also I or W of micro-batch {i}; B is I and W together, take one form"
                )
            elif not b and not (w and x):
                missing = "B" if not (w or x) else "W" if x else "I"
                raise PlanError(f"{stage}{missing}{i} is missing; its gradient would never be computed")
    return home


def _transfers_match(plan: Plan, items: Items, home: dict[tuple[int, int], int]) -> bool:
    """3: if there are sends or receives, then exactly those that the stage borders need, each after what it sends."""
    place = {action: (rank, at) for rank, order in enumerate(items) for at, item in enumerate(order) for action in item}
    transfers = {a for a in place if a.kind.startswith(("SEND", "RECV"))}
    if not transfers:
        return False
    needed: set[Action] = set()
    for (stage, i), rank in home.items():
        if stage + 1 < plan.stages and home[stage + 1, i] != rank:
            needed |= {Action("SEND_F", stage, i), Action("RECV_F", stage + 1, i)}
            if plan.updates != "none":
                needed |= {Action("SEND_B", stage + 1, i), Action("RECV_B", stage, i)}
    for action in sorted(needed - transfers):
        other = _partner(action)
        rest = f", but its partner {other} is there" if other in transfers else ""
        raise PlanError(
            f"rank {home[action.stage, action.microbatch]}: {action} is missing{rest}; the stages are on different"
            " ranks"
        )
    for action in sorted(transfers - needed):
        raise PlanError(
            f"rank {place[action][0]}: {action} has no partner; its neighbour is on the same rank or does not exist"
        )
    for action in sorted(transfers):
        rank, at = place[action]
        owner = home[action.stage, action.microbatch]
        if rank != owner:
            raise PlanError(f"rank {rank}: {action} belongs to rank {owner}, which holds stage {action.stage}")
        kinds = ("F",) if action.kind.endswith("_F") else ("I", "B")
        around = next(place[Action(k, *action[1:])][1] for k in kinds if Action(k, *action[1:]) in place)
        if action.kind.startswith("SEND") and at < around:
            raise PlanError(f"rank {rank}: {action} stands before the action that makes what it sends; put it behind")
        if action.kind.startswith("RECV") and at > around:
            raise PlanError(f"rank {rank}: {action} stands behind the action that needs it; put it before")
    return True


def _partner(action: Action) -> Action:
    step = {"SEND_F": 1, "RECV_F": -1, "SEND_B": -1, "RECV_B": 1}[action.kind]
    side = "RECV" if action.kind.startswith("SEND") else "SEND"
    return Action(f"{side}_{action.kind[-1]}", action.stage + step, action.microbatch)


def _no_deadlock(plan: Plan, items: Items, home: dict[tuple[int, int], int], lowered: bool) -> None:
    """4: move all pointers until nothing moves; each must have reached its end."""
    at = [0] * len(items)
    done: set[Action] = set()
    rounds = _rounds(plan, items)
    sent: set[tuple[str, int, int]] = set()  # (direction, receiving stage, micro-batch)

    def waits_for(rank: int, action: Action) -> str | None:
        kind, stage, i = action
        for other in rounds.get((rank, action), ()):
            if other not in done:
                return f"{other} on rank {home[other.stage, other.microbatch]}, whose gradient its round needs"
        if kind.startswith("SEND"):
            other = _partner(action)
            return None if other in done else f"{other} on rank {home[other.stage, i]}, the receive that its send needs"
        if kind in ("I", "B") and Action("F", stage, i) not in done:
            return f"{stage}F{i}"
        source = stage - 1 if kind in ("F", "RECOMPUTE") else stage + 1 if kind in ("I", "B") else -1
        if not 0 <= source < plan.stages:
            return None
        direction = "F" if kind in ("F", "RECOMPUTE") else "B"
        if lowered and home[source, i] != rank:
            return None if (direction, stage, i) in sent else f"{source}SEND_{direction}{i} on rank {home[source, i]}"
        names = ("F",) if direction == "F" else ("I", "B")
        if any(Action(name, source, i) in done for name in names):
            return None
        return f"{source}{direction}{i} on rank {home[source, i]}"

    ready = list(range(len(items)))
    while ready:
        again: list[int] = []
        for rank in ready:
            start = at[rank]
            while at[rank] < len(items[rank]) and all(waits_for(rank, a) is None for a in items[rank][at[rank]]):
                for action in items[rank][at[rank]]:
                    done.add(action)
                    if action.kind.startswith("SEND"):
                        sent.add((action.kind[-1], _partner(action).stage, action.microbatch))
                at[rank] += 1
            if at[rank] > start:
                again.append(rank)
        ready = list(range(len(items))) if again else []
    blocked = [rank for rank, order in enumerate(items) if at[rank] < len(order)]
    if blocked:
        reasons = []
        for rank in blocked:
            action, reason = next((a, r) for a in items[rank][at[rank]] if (r := waits_for(rank, a)) is not None)
            reasons.append(f"rank {rank} at {action} waits for {reason}")
        raise PlanError(
            f"deadlock{' with synchronous sends' if lowered else ''}: {'; '.join(reasons)}; reorder one of them"
        )


def _rounds(plan: Plan, items: Items) -> dict[tuple[int, Action], list[Action]]:
    """(rank, action) -> the backwards of other replicas of its stage that are added up before it.

    With an update after every backward the n-th backwards of a stage's ranks are one update, made before the next F or
    B.
    """
    if plan.updates not in ("stash", "no-stash"):
        return {}
    backwards = [[a for item in order for a in item if a.kind in ("B", "W")] for order in items]
    ranks: dict[int, list[int]] = {}
    for rank, row in enumerate(backwards):
        for stage in {a.stage for a in row}:
            ranks.setdefault(stage, []).append(rank)
    result: dict[tuple[int, Action], list[Action]] = {}
    for together in (group for group in ranks.values() if len(group) > 1):
        for rank in together:
            finished = 0
            for action in (a for item in items[rank] for a in item):
                if action.kind in ("F", "B", "I") and finished:
                    result[rank, action] = [
                        backwards[other][finished - 1] for other in together if finished <= len(backwards[other])
                    ]
                finished += action.kind in ("B", "W")
    return result


def _peaks(items: Items) -> list[int]:
    peaks = []
    for order in items:
        alive = peak = 0
        for item in order:
            alive += sum(a.kind == "F" for a in item)
            peak = max(peak, alive)
            alive -= sum(a.kind in ("B", "W") for a in item)
        peaks.append(peak)
    return peaks


def _versions(plan: Plan, items: Items, allow_wrong_gradients: bool) -> list[int]:
    """5: for each rank the most versions of a stage's weights that are needed at once."""
    if plan.updates in ("flush", "none"):
        return [1] * len(items)
    if plan.updates == "2bw":
        _two_versions_suffice(plan, items)
        return [2] * len(items)
    result, delay = [], len(items) - 1
    for rank, order in enumerate(items):
        updates, used, most = 0, {}, 1
        for action in (a for item in order for a in item):
            i = action.microbatch
            if action.kind == "F":
                used[i] = max(0, i - delay) if plan.updates == "vertical-sync" else updates
                if used[i] > updates:
                    raise PlanError(
                        f"rank {rank}: {action} needs version {used[i]} of the weights, and only {updates} updates were"
                        " made"
                    )
            elif (
                action.kind in ("B", "I")
                and plan.updates == "no-stash"
                and used[i] != updates
                and not allow_wrong_gradients
            ):
                raise PlanError(
                    f"rank {rank}: {action} would see version {updates} of the weights and its forward saw version"
                    f" {used[i]}: a wrong gradient; stash the weights (stashing=True)"
                )
            if action.kind in ("B", "W"):
                used.pop(i)
                updates += 1
            if plan.updates == "vertical-sync":
                last = updates == plan.microbatches
                upcoming = updates + len(used)  # next micro-batch to enter, or past the end
                oldest = min(
                    [*used.values(), *([max(0, upcoming - delay)] if upcoming < plan.microbatches else [updates])]
                )
                most = max(most, 1 if last else updates - oldest + 1)
            elif plan.updates == "stash":
                most = max(most, len({*used.values(), updates}))
        result.append(most)
    return result


def _two_versions_suffice(plan: Plan, items: Items) -> None:
    m = plan.batch
    for rank, order in enumerate(items):
        finished = 0
        for action in (a for item in order for a in item):
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
