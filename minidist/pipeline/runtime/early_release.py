"""When what was sent to another rank has arrived, so that its array need not stay to the end of the step.

    this rank    1B0 1SEND_B0 ..              1F2        behind 1F2 the array of 1SEND_B0 is released
                       │                       ▲
                       ▼                       │
    other rank        0B0  ..  0F2 0SEND_F2 ───┘         sent after 0B0 has used the gradient

The plan says it, so no rank asks another one, and the wait takes no time. In an evaluation no gradient says that an
activation has arrived: at most two are on their way, and a rank waits for the older one before it sends the next.

Proved by: tests/pipeline/test_messages.py
"""

from collections.abc import Mapping, Sequence

from minidist.core.pipeline.plan import Action
from minidist.core.pipeline.runtime.messages import Message, Messages


def arrived_messages(messages: Messages) -> dict[int, list[Message]]:
    """Return item of this rank's order -> what was sent and has arrived when it is done."""
    plan = messages.plan
    # With several stages on a rank the receiver may be busy with another one for long: no wait before the end then.
    if plan.updates == "none":
        return _all_but_two(messages) if plan.stages == plan.ranks else {}
    return _used_gradients(messages)


def _all_but_two(messages: Messages) -> dict[int, list[Message]]:
    """Release an activation when two others are on their way, before the next one is sent."""
    order = messages.orders[messages.comm.rank]
    sends = [(at, a) for at, item in enumerate(order) for a in item if a.kind == "SEND_F"]
    return {
        at - 1: [("F", action.stage + 1, action.microbatch)]
        for (_, action), (at, _) in zip(sends, sends[2:], strict=False)
    }


def _used_gradients(messages: Messages) -> dict[int, list[Message]]:
    """Release gradients that the receiver has used.

    The gradient of (stage, i) is used by its receiver's B; the first message that this receiver sends here after it
    says so.
    """
    me = messages.comm.rank
    mine, others = _places(messages.orders[me]), dict[int, dict[Action, int]]()
    told: dict[int, list[int]] = {}  # rank -> see `_told_by`
    result: dict[int, list[Message]] = {}
    for direction, stage, i in messages.routes:
        rank = messages.rank_of[stage, i]
        if direction == "F" or rank == me:
            continue
        if rank not in told:
            others[rank], told[rank] = _places(messages.orders[rank]), _told_by(messages, rank, mine)
        backward = (Action.of(kind, stage, i) for kind in "BI")
        used = next((others[rank][action] for action in backward if action in others[rank]), None)
        item = None if used is None else told[rank][used + 1]
        if item is not None and item < len(messages.orders[me]):
            result.setdefault(item, []).append((direction, stage, i))
    return result


def _told_by(messages: Messages, rank: int, mine: Mapping[Action, int]) -> list[int]:
    """Return, for each place in the order of `rank`, the item here that waits for what it sends next."""
    me = messages.comm.rank
    order, never = messages.orders[rank], len(messages.orders[me])
    earliest = [never] * (len(order) + 1)
    for at in range(len(order) - 1, -1, -1):
        earliest[at] = earliest[at + 1]
        for action in order[at]:
            kind, stage, i = action.kind, action.stage, action.microbatch
            if kind in ("SEND_F", "SEND_B"):
                target = stage + (1 if kind == "SEND_F" else -1)
                if messages.rank_of[target, i] == me:
                    waits = "F" if kind == "SEND_F" else "B" if Action.of("B", target, i) in mine else "I"
                    earliest[at] = min(earliest[at], mine[Action.of(waits, target, i)])
    return earliest


def _places(order: Sequence[Sequence[Action]]) -> dict[Action, int]:
    """Return action -> its place in the order."""
    return {action: at for at, item in enumerate(order) for action in item}
