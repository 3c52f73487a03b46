"""The times of `simulate`, by array operations: every rank's next action at once, for plans of millions of actions.

Only plans of single actions whose receives do not block: an action needs one other one and makes one, so both are slots
of an array of end times. With many ranks a sweep moves all that can move at once, as arrays; where few can (a naive
pipeline), or few ranks are there, it follows one rank until that has to wait: it is put aside and woken by the action
that it waits for. Tested equal to the simulation.

Proved by: tests/pipeline/test_plans.py
"""

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count

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

MIN_RANKS = 48  # below which looking at all ranks at once does not pay
# Sweeps after which it is checked whether enough ranks move: one costs as much as about MIN_RANKS / 2 single actions.
BLOCK = 256

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
    columns = _Columns(plan, flat, times)
    if plan.ranks >= MIN_RANKS:
        _all_at_once(columns)
    _one_by_one(plan, columns)
    return [max(0.0, first) for first in columns.first.tolist()], columns.clock.tolist(), columns.busy


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


class _Columns:
    """All actions, rank after rank, as columns: the slot that each needs, the slot that it makes, duration, latency.

    at, stop: the next action and the end of each rank. end: the time in each slot, -1 before it is known.
    """

    def __init__(self, plan: Plan, flat: Flat, times: Times) -> None:
        # Slots: the forwards, the input gradients, one that is always there, and one that nothing asks for.
        self.S, self.M = S, M = plan.stages, plan.microbatches
        nothing, unread = 2 * S * M, 2 * S * M + 1
        small = np.int32 if unread < 1 << 31 else np.int64
        latencies, seconds = _latencies(plan, flat, times), seconds_by_kind(times)
        self.busy: list[float] = []
        pieces: list[tuple[np.ndarray, ...]] = []
        for actions in flat.ranks:
            kinds, stage, i = split(actions)
            if (kinds > RECOMPUTE).any():  # transfers and reductions take no time here
                keep = kinds <= RECOMPUTE
                kinds, stage, i = kinds[keep], stage[keep], i[keep]
            is_forward, is_input = kinds == FORWARD, (kinds == INPUT) | (kinds == BACKWARD)

            # F needs F of the stage before; I and B need I or B of the stage after, on the last stage their own F.
            here = stage * M + i
            needs = np.full(len(kinds), nothing, np.int64)
            needs[is_forward] = np.where(stage[is_forward] > 0, here[is_forward] - M, nothing)
            last = stage == S - 1
            needs[is_input] = np.where(last[is_input], here[is_input], S * M + here[is_input] + M)
            makes = np.where(is_forward, here, np.where(is_input, S * M + here, unread))

            duration = seconds[kinds, stage]
            self.busy.append(float(duration.sum()))
            latency = np.zeros(0)
            if latencies is not None:
                forward, backward = latencies
                latency = np.where(is_forward, forward[stage, i], np.where(is_input, backward[stage, i], 0.0))
            pieces.append((needs.astype(small), makes.astype(small), duration, latency))
        counts = [len(piece[0]) for piece in pieces]
        self.at = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
        self.stop = self.at + counts
        self.begin = self.at.copy()
        self.needs, self.makes, self.duration, latency = (
            np.concatenate(column) for column in zip(*pieces, strict=True)
        )
        self.latency = latency if len(latency) else None
        self.end = np.full(unread + 1, -1.0)
        self.end[nothing] = 0.0
        self.clock, self.first = np.zeros(plan.ranks), np.full(plan.ranks, -1.0)


def _all_at_once(columns: _Columns) -> None:
    """Advance every rank that can move by one action, again and again: a dozen array operations per sweep."""
    end, clock, at = columns.end, columns.clock, columns.at
    ranks = np.flatnonzero(at < columns.stop)
    moved = 0
    for number in count(1):
        # The ranks whose next action has what it needs.
        places = at[ranks]
        ready = end[columns.needs[places]]
        can = ready >= 0.0
        if not can.all():
            movers, places, ready = ranks[can], places[can], ready[can]
        else:
            movers = ranks
        if columns.latency is not None:
            ready = ready + columns.latency[places]

        # Their actions start and end.
        begin = np.maximum(ready, clock[movers])
        starting = places == columns.begin[movers]
        if starting.any():
            columns.first[movers[starting]] = begin[starting]
        now = begin + columns.duration[places]
        end[columns.makes[places]] = now
        clock[movers] = now
        at[movers] = places + 1
        moved += len(movers)

        # Stop when too few ranks move for array operations to pay.
        if (places + 1 == columns.stop[movers]).any():
            ranks = np.flatnonzero(at < columns.stop)
        if not len(movers) or not len(ranks):
            return
        if number % BLOCK == 0:
            if moved < BLOCK * MIN_RANKS // 2:
                return
            moved = 0


def _one_by_one(plan: Plan, columns: _Columns) -> None:
    """Advance one rank as far as it goes and put it aside; the action that it waits for wakes it."""
    left = np.flatnonzero(columns.at < columns.stop).tolist()
    if not left:
        return
    end, clock, first = array("d", columns.end), columns.clock.tolist(), columns.first.tolist()
    rows = {rank: _rows(columns, int(columns.at[rank]), int(columns.stop[rank])) for rank in left}
    held: dict[int, Row | None] = dict.fromkeys(left)
    waiting: dict[int, list[int]] = {}
    queue = deque(left)
    finished = 0
    while queue:
        rank = queue.popleft()
        now, row = clock[rank], rows[rank]
        item = held[rank] or next(row, None)
        if item is not None and first[rank] < 0 and end[item[0]] >= 0:
            first[rank] = max(now, end[item[0]] + item[3])

        left_over, item = () if item is None else (item,), None
        for need, make, duration, latency in chain(left_over, row):
            ready = end[need]
            if ready < 0.0:
                item = (need, make, duration, latency)
                waiting.setdefault(need, []).append(rank)
                break
            ready += latency
            now = (ready if ready > now else now) + duration
            end[make] = now
            if make in waiting:
                queue.extend(waiting.pop(make))
        held[rank], clock[rank] = item, now
        finished += item is None
    columns.clock, columns.first = np.array(clock), np.array(first)
    if finished < len(left):
        _stuck(plan, [(rank, item[0]) for rank, item in held.items() if item is not None], columns.S, columns.M)


def _rows(columns: _Columns, first: int, last: int) -> Iterator[Row]:
    """Return the columns row by row, as Python numbers, 256 at a time so that waiting ranks need little memory."""
    latency = columns.latency

    def piece(start: int) -> Iterator[Row]:
        stop = min(start + 256, last)
        late = [0.0] * (stop - start) if latency is None else latency[start:stop].tolist()
        return zip(
            *(c[start:stop].tolist() for c in (columns.needs, columns.makes, columns.duration)), late, strict=True
        )

    return chain.from_iterable(piece(start) for start in range(first, last, 256))


def _stuck(plan: Plan, blocked: list[tuple[int, int]], S: int, M: int) -> None:
    rank, slot = blocked[0]
    backward, here = divmod(slot, S * M)
    stage, i = divmod(here, M)
    raise UsageError(
        f"plan {plan.name!r} cannot finish: {len(blocked)} ranks wait for ever, rank {rank} for"
        f" {stage}{'B' if backward else 'F'}{i}; minidist schedule checks a plan and says why"
    )
