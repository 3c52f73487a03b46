"""A plan run on paper: when each action ends. Two walks with one rule, a fast one and one that notes every start.

    start = max(end of the rank's action before, end of F(s-1,i) or of B(s+1,i), + T_comm between ranks)

Each action is visited once. With many ranks the fast walk moves all that can move at once, as arrays; where few can (a
naive pipeline) or few are there, it follows one rank until that has to wait: it is put aside and woken by the action
that it waits for.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.pipeline.plan.action import (
    BACKWARD,
    FORWARD,
    INPUT,
    KIND_BITS,
    MICROBATCH_BITS,
    RECOMPUTE,
    RECV_B,
    RECV_F,
    WEIGHT,
    Item,
    kind_of,
    microbatch_of,
    parts,
    show,
    stage_of,
)
from minidist.pipeline.plan.plan import Plan

if TYPE_CHECKING:
    from minidist.pipeline.timing import Times


class Costs:
    """Durations by kind and stage; latency into each stage; the slots in which ends of actions are noted."""

    def __init__(self, plan: Plan, times: "Times") -> None:
        self.plan, self.times, self.S, self.M = plan, times, plan.stages, plan.microbatches
        table = np.zeros((16, self.S))
        table[FORWARD] = table[RECOMPUTE] = times.F
        table[INPUT], table[WEIGHT] = times.I, times.W
        table[BACKWARD] = table[INPUT] + table[WEIGHT]
        self.duration = table
        self.flat, self.pairs = [], False
        for order in plan.orders:
            try:
                self.flat.append(np.fromiter(order, np.int64, len(order)))
            except TypeError:  # a tuple: an overlapped pair, of which the forward comes first
                self.pairs = True
                self.flat.append(np.array([a for item in order for a in sorted(parts(item), key=kind_of)], np.int64))
        self.rounds = _rounds(plan)
        self.pair = np.array(times.FB) if times.FB is not None else None
        self.nothing, self.dump = 2 * self.S * self.M, 2 * self.S * self.M + 1  # always there; never asked for

    def _home(self) -> np.ndarray:
        """home[s, i]: rank of stage s for micro-batch i."""
        home = np.zeros((self.S, self.M), np.int32)
        for rank, flat in enumerate(self.flat):
            kinds, stage, i = split(flat)
            chosen = kinds == FORWARD
            home[stage[chosen], i[chosen]] = rank
        return home

    def latency(self) -> tuple[np.ndarray, np.ndarray]:
        """Latency into (stage, micro-batch) forward and backward: 0 within a rank; None, None when there is none at
        all.
        """
        forward, backward = np.zeros((self.S, self.M)), np.zeros((self.S, self.M))
        if any(self.times.comm):
            home = self._home()
            between = np.array(self.times.comm)[:, None] * (home[1:] != home[:-1])
            forward[1:], backward[:-1] = between, between
        return forward, backward

    def lower_bound(self, busy: Sequence[float]) -> float:
        """Longest of: one micro-batch through all stages and back; a rank's first possible start plus its work."""
        forward, times = np.array(self.times.F), self.times
        ahead = np.concatenate([[0.0], np.cumsum(forward[:-1])])
        heads = [ahead[split(flat)[1].min()] if len(flat) else 0.0 for flat in self.flat]
        bound = max(head + work for head, work in zip(heads, busy, strict=True))
        through = sum(times.F) + (sum(times.I) + times.W[0] if self.plan.updates != "none" else 0.0)
        return float(max(bound, through))


def _rounds(plan: Plan) -> dict[int, list[int]]:
    """With an update after every backward, a replica's next action waits for the other replicas' backwards of the
    round.

    Action -> those backwards. The exchange of gradients itself takes no time here.
    """
    if plan.updates not in ("stash", "no-stash"):
        return {}
    backwards: dict[int, list[list[int]]] = {}  # stage -> of each replica
    for order in plan.orders:
        mine = [a for item in order for a in parts(item) if kind_of(a) in (BACKWARD, WEIGHT)]
        backwards.setdefault(stage_of(mine[0]), []).append(mine) if mine else None
    result: dict[int, list[int]] = {}
    for order in plan.orders:
        finished = 0
        for action in (a for item in order for a in parts(item)):
            replicas = backwards.get(stage_of(action), [])
            if len(replicas) > 1 and finished and kind_of(action) in (FORWARD, INPUT, BACKWARD):
                result[action] = [mine[finished - 1] for mine in replicas if finished <= len(mine)]
            finished += kind_of(action) in (BACKWARD, WEIGHT)
    return result


def split(actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Kinds, stages and micro-batches of an array of actions."""
    kinds = actions & (1 << KIND_BITS) - 1
    return kinds, actions >> KIND_BITS + MICROBATCH_BITS, actions >> KIND_BITS & (1 << MICROBATCH_BITS) - 1


def relax(plan: Plan, costs: Costs) -> tuple[list[float], list[float], list[float]]:
    """The fast walk: first start, last end and busy time of each rank. All ranks at once while many can move, then one
    by one.
    """
    columns = _Columns(plan, costs)
    if plan.ranks >= FEW:
        _sweep(columns)
    _one_by_one(plan, columns)
    return [max(0.0, first) for first in columns.first.tolist()], columns.clock.tolist(), columns.busy


class _Columns:
    """All actions, rank after rank, as columns: the slot that each needs, the slot that it makes, duration, latency;
    and where each rank stands. `end`: the time in each slot, -1 before it is known.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        S, M, nothing, dump = costs.S, costs.M, costs.nothing, costs.dump
        forward_latency = backward_latency = None
        if any(costs.times.comm):
            forward_latency, backward_latency = costs.latency()
        small = np.int32 if dump < 1 << 31 else np.int64
        self.S, self.M = S, M
        self.busy: list[float] = []
        pieces: list[tuple[np.ndarray, ...]] = []
        for actions in costs.flat:
            kinds, stage, i = split(actions)
            if (kinds > RECOMPUTE).any():
                keep = kinds <= RECOMPUTE
                actions, kinds, stage, i = actions[keep], kinds[keep], stage[keep], i[keep]
            is_forward, is_input = kinds == FORWARD, (kinds == INPUT) | (kinds == BACKWARD)
            here = stage * M + i
            needs = np.full(len(actions), nothing, np.int64)
            needs[is_forward] = np.where(stage[is_forward] > 0, here[is_forward] - M, nothing)
            last = stage == S - 1
            needs[is_input] = np.where(last[is_input], here[is_input], S * M + here[is_input] + M)
            makes = np.where(is_forward, here, np.where(is_input, S * M + here, dump))
            duration = costs.duration[kinds, stage]
            self.busy.append(float(duration.sum()))
            latency = np.zeros(len(actions) if forward_latency is not None else 0)
            if forward_latency is not None and backward_latency is not None:
                latency = np.where(
                    is_forward, forward_latency[stage, i], np.where(is_input, backward_latency[stage, i], 0.0)
                )
            pieces.append((needs.astype(small), makes.astype(small), duration, latency))
        counts = [len(piece[0]) for piece in pieces]
        self.at = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)  # the next action of each rank
        self.stop = self.at + counts
        self.begin = self.at.copy()
        self.needs, self.makes, self.duration, latency = (
            np.concatenate(column) for column in zip(*pieces, strict=True)
        )
        self.latency = latency if len(latency) else None
        self.end = np.full(dump + 1, -1.0)
        self.end[nothing] = 0.0
        self.clock, self.first = np.zeros(plan.ranks), np.full(plan.ranks, -1.0)


FEW = 48  # ranks, below which looking at all of them at once does not pay
# sweeps after which it is looked at whether enough ranks move: one sweep costs as much as about FEW / 2 single actions
BLOCK = 256


def _sweep(columns: _Columns) -> None:
    """One action of every rank that can move, again and again: a dozen array operations for a thousand ranks."""
    end, clock, at = columns.end, columns.clock, columns.at
    ranks = np.flatnonzero(at < columns.stop)
    moved = 0
    for number in count(1):
        places = at[ranks]
        ready = end[columns.needs[places]]
        can = ready >= 0.0
        if not can.all():
            movers, places, ready = ranks[can], places[can], ready[can]
        else:
            movers = ranks
        if columns.latency is not None:
            ready = ready + columns.latency[places]
        begin = np.maximum(ready, clock[movers])
        starting = places == columns.begin[movers]
        if starting.any():
            columns.first[movers[starting]] = begin[starting]
        now = begin + columns.duration[places]
        end[columns.makes[places]] = now
        clock[movers] = now
        at[movers] = places + 1
        moved += len(movers)
        if (places + 1 == columns.stop[movers]).any():
            ranks = np.flatnonzero(at < columns.stop)
        if not len(movers) or not len(ranks):
            return
        if number % BLOCK == 0:
            if moved < BLOCK * FEW // 2:
                return
            moved = 0


def _one_by_one(plan: Plan, columns: _Columns) -> None:
    """A rank goes as far as it can and is put aside; the action that it waits for wakes it."""
    left = np.flatnonzero(columns.at < columns.stop).tolist()
    if not left:
        return
    end, clock, first = array("d", columns.end), columns.clock.tolist(), columns.first.tolist()
    rows = {rank: _rows(columns, int(columns.at[rank]), int(columns.stop[rank])) for rank in left}
    held: dict[int, Any] = dict.fromkeys(left)
    waiting: dict[int, list[int]] = {}
    queue = deque(left)
    finished = 0
    while queue:
        rank = queue.popleft()
        now, row = clock[rank], rows[rank]
        item = held[rank] or next(row, None)
        if item is not None and first[rank] < 0 and end[item[0]] >= 0:
            first[rank] = max(now, end[item[0]] + item[3])
        while item is not None:
            need, make, duration, latency = item
            ready = end[need]
            if ready < 0.0:
                waiting.setdefault(need, []).append(rank)
                break
            ready += latency
            now = (ready if ready > now else now) + duration
            end[make] = now
            if make in waiting:
                queue.extend(waiting.pop(make))
            for need, make, duration, latency in row:
                ready = end[need]
                if ready < 0.0:
                    item = (need, make, duration, latency)
                    break
                ready += latency
                now = (ready if ready > now else now) + duration
                end[make] = now
                if make in waiting:
                    queue.extend(waiting.pop(make))
            else:
                item = None
        held[rank], clock[rank] = item, now
        finished += item is None
    columns.clock, columns.first = np.array(clock), np.array(first)
    if finished < len(left):
        _stuck(plan, [(rank, item[0]) for rank, item in held.items() if item is not None], columns.S, columns.M)


def _rows(columns: _Columns, first: int, last: int) -> Any:
    """The columns row by row, turned into Python numbers a few at a time, so that waiting ranks stay small in memory."""
    latency = columns.latency

    def piece(start: int) -> Any:
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


def walk(
    plan: Plan, costs: Costs, blocking: bool
) -> tuple[list[float], list[float], list[float], list[list[tuple[Item, float, float]]]]:
    """The full walk: overlapped pairs, blocking receives, and every start and end noted."""
    S = costs.S
    forward_latency, backward_latency = (table.tolist() for table in costs.latency())
    ends: dict[tuple[str, int, int], float] = {}
    arrived: dict[tuple[str, int, int], float] = {}
    spans: list[list[tuple[Item, float, float]]] = [[] for _ in plan.orders]
    position, clock = [0] * plan.ranks, [0.0] * plan.ranks
    waiting: dict[tuple[str, int, int], list[int]] = {}
    queue = deque(range(plan.ranks))

    def need(action: int) -> tuple[tuple[str, int, int], float] | None:
        """What has to be there, and its latency."""
        kind, stage, i = kind_of(action), stage_of(action), microbatch_of(action)
        if kind in (FORWARD, RECV_F):
            if blocking and kind == FORWARD and forward_received(stage, i):
                return None
            return (("F", stage - 1, i), forward_latency[stage][i]) if stage else None
        if kind in (INPUT, BACKWARD, RECV_B):
            if blocking and kind != RECV_B and ("B", stage, i) in arrived:
                return None
            return (("B", stage + 1, i), backward_latency[stage][i]) if stage + 1 < S else (("F", stage, i), 0.0)
        return None

    def forward_received(stage: int, i: int) -> bool:
        return ("F", stage, i) in arrived

    while queue:
        rank = queue.popleft()
        order = plan.orders[rank]
        while position[rank] < len(order):
            item = order[position[rank]]
            actions = parts(item)
            if not blocking and kind_of(actions[0]) > RECOMPUTE:
                position[rank] += 1
                continue
            begin, missing = clock[rank], None
            for action in actions:
                wanted = need(action)
                if wanted is not None:
                    if wanted[0] not in ends:
                        missing = wanted[0]
                        break
                    begin = max(begin, ends[wanted[0]] + wanted[1])
                for other in costs.rounds.get(action, ()):
                    backward = "B", stage_of(other), microbatch_of(other)
                    if backward not in ends:
                        missing = backward
                        break
                    begin = max(begin, ends[backward])
                if missing is not None:
                    break
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            duration = sum(float(costs.duration[kind_of(a), stage_of(a)]) for a in actions)
            if len(actions) == 2 and costs.pair is not None:
                duration = float(max(costs.pair[stage_of(a)] for a in actions))
            clock[rank] = begin + duration
            position[rank] += 1
            for action in actions:
                kind, key = kind_of(action), (stage_of(action), microbatch_of(action))
                if kind in (RECV_F, RECV_B):
                    arrived["F" if kind == RECV_F else "B", *key] = clock[rank]
                name = "F" if kind == FORWARD else "B" if kind in (INPUT, BACKWARD) else ""
                if name:
                    ends[name, *key] = clock[rank]
                    queue.extend(waiting.pop((name, *key), []))
            if kind_of(actions[0]) <= RECOMPUTE:
                spans[rank].append((item, begin, clock[rank]))
    blocked = [rank for rank, order in enumerate(plan.orders) if position[rank] < len(order)]
    if blocked:
        rank = blocked[0]
        raise UsageError(
            f"plan {plan.name!r} cannot finish: {len(blocked)} ranks wait for ever, rank {rank} at "
            f"{show(plan.orders[rank][position[rank]])}; minidist schedule checks a plan and says why"
        )
    busy = [sum(end - start for _, start, end in row) for row in spans]
    return [row[0][1] if row else 0.0 for row in spans], [row[-1][2] if row else 0.0 for row in spans], busy, spans
