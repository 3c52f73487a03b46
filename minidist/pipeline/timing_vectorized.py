"""The times of `simulate` without an object per action, for plans of millions of actions.

Only plans of single actions whose receives do not block: an action needs one other one and makes one, so both are slots
of an array of end times, and array operations find the slots of a whole rank. Then each rank is followed until it has
to wait: it is put aside and woken by the action that it waits for. Tested equal to the simulation.

Proved by: tests/pipeline/test_plans.py
"""

from array import array
from dataclasses import dataclass
from itertools import chain

import numpy as np

from minidist.core.base.errors import UsageError
from minidist.core.pipeline.plan import (
    BACKWARD,
    FORWARD,
    INPUT,
    KIND_BITS,
    MICROBATCH_BITS,
    RECOMPUTE,
    WEIGHT,
    Plan,
    actions_of,
)
from minidist.pipeline.times import Times

Row = tuple[int, int, float, float]  # the slot that an action needs, the slot that it makes, duration, latency


@dataclass(frozen=True)
class Flat:
    """The actions of a plan as one array per rank; of an overlapped pair the forward comes first."""

    ranks: list[np.ndarray]
    has_pairs: bool


def flatten(plan: Plan) -> Flat:
    """Return the plan's actions as arrays."""
    ranks, has_pairs = [], False
    for order in plan.orders:
        try:
            ranks.append(np.fromiter(order, np.int64, len(order)))
        except TypeError:  # a tuple: an overlapped pair
            has_pairs = True
            by_kind = (sorted(actions_of(item), key=lambda action: action.kind != "F") for item in order)
            ranks.append(np.array([action for actions in by_kind for action in actions], np.int64))
    return Flat(ranks, has_pairs)


def split(actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return kinds, stages and micro-batches of an array of actions."""
    kinds = actions & (1 << KIND_BITS) - 1
    return kinds, actions >> KIND_BITS + MICROBATCH_BITS, actions >> KIND_BITS & (1 << MICROBATCH_BITS) - 1


def seconds_by_kind(times: Times) -> np.ndarray:
    """Return [kind, stage]: the duration of a single action; 0 of transfers and reductions."""
    table = np.zeros((16, len(times.F)))
    table[FORWARD] = table[RECOMPUTE] = times.F
    table[INPUT], table[WEIGHT] = times.I, times.W
    table[BACKWARD] = table[INPUT] + table[WEIGHT]
    return table


def sweep(plan: Plan, flat: Flat, times: Times) -> tuple[list[float], list[float], list[float]]:
    """Return first start, last end and busy time of each rank. Raises UsageError when the plan cannot finish."""
    columns = _columns(plan, flat, times)
    rows = [zip(*(array(column.dtype.char, column.tobytes()) for column in own), strict=True) for own in columns]
    slots = plan.stages * plan.microbatches
    end = array("d", [-1.0]) * (2 * slots + 2)  # the time in each slot, -1 before it is known
    end[2 * slots] = 0.0
    first, clock = [-1.0] * plan.ranks, [0.0] * plan.ranks

    # Advance one rank as far as it goes and put it aside; the action that it waits for wakes it. The one that was woken
    # last goes on first, because what it needs is still in the caches.
    held: dict[int, Row] = {}
    waiting: dict[int, list[int]] = {}
    awake = list(reversed(range(plan.ranks)))
    while awake:
        rank = awake.pop()
        now = clock[rank]
        left_over = (held.pop(rank),) if rank in held else ()
        for need, make, duration, latency in chain(left_over, rows[rank]):
            ready = end[need]
            if ready < 0.0:
                held[rank] = (need, make, duration, latency)
                waiting.setdefault(need, []).append(rank)
                break
            ready += latency
            start = ready if ready > now else now
            if first[rank] < 0.0:
                first[rank] = start
            end[make] = now = start + duration
            if make in waiting:
                awake += waiting.pop(make)
        clock[rank] = now
    if held:
        rank = min(held)
        raise _stuck(plan, len(held), rank, held[rank][0])
    return [max(0.0, start) for start in first], clock, [float(duration.sum()) for _, _, duration, _ in columns]


def _latencies(plan: Plan, flat: Flat, times: Times) -> tuple[np.ndarray, np.ndarray] | None:
    """Return [stage, micro-batch]: latency of what arrives there forward and backward; None when all are 0."""
    if not any(times.comm):
        return None
    rank_of_stage = np.zeros((plan.stages, plan.microbatches), np.int32)
    for rank, actions in enumerate(flat.ranks):
        kinds, stage, i = split(actions)
        chosen = kinds == FORWARD
        rank_of_stage[stage[chosen], i[chosen]] = rank
    forward, backward = (np.zeros((plan.stages, plan.microbatches)) for _ in range(2))
    forward[1:] = backward[:-1] = np.array(times.comm)[:, None] * (rank_of_stage[1:] != rank_of_stage[:-1])
    return forward, backward


def _columns(plan: Plan, flat: Flat, times: Times) -> list[tuple[np.ndarray, ...]]:
    """Return of each rank its actions as columns: the slot that each needs, the slot that it makes, duration, latency.

    Slots: the forwards, the input gradients, one that is always there, and one that nothing asks for.
    """
    S, M = plan.stages, plan.microbatches
    nothing, unread = 2 * S * M, 2 * S * M + 1
    latencies, seconds = _latencies(plan, flat, times), seconds_by_kind(times)
    columns: list[tuple[np.ndarray, ...]] = []
    for actions in flat.ranks:
        kinds, stage, i = split(actions)
        if (kinds > RECOMPUTE).any():  # transfers and reductions take no time here
            keep = kinds <= RECOMPUTE
            kinds, stage, i = kinds[keep], stage[keep], i[keep]
        is_forward, is_input = kinds == FORWARD, (kinds == INPUT) | (kinds == BACKWARD)

        # F needs F of the stage before; I and B need I or B of the stage after, on the last stage their own F.
        here = stage * M + i
        before = np.where(stage > 0, here - M, nothing)
        after = np.where(stage == S - 1, here, S * M + here + M)
        needs = np.where(is_forward, before, np.where(is_input, after, nothing))
        makes = np.where(is_forward, here, np.where(is_input, S * M + here, unread))

        latency = np.zeros(len(kinds))
        if latencies is not None:
            forward, backward = latencies
            latency = np.where(is_forward, forward[stage, i], np.where(is_input, backward[stage, i], 0.0))
        columns.append((needs, makes, seconds[kinds, stage], latency))
    return columns


def _stuck(plan: Plan, ranks: int, rank: int, slot: int) -> UsageError:
    """Return the error of a plan in which `rank`, the first of `ranks` ranks, waits for `slot` for ever."""
    backward, here = divmod(slot, plan.stages * plan.microbatches)
    stage, i = divmod(here, plan.microbatches)
    return UsageError(
        f"plan {plan.name!r} cannot finish: {ranks} ranks wait for ever, rank {rank} for"
        f" {stage}{'B' if backward else 'F'}{i}; minidist schedule checks a plan and says why"
    )
