"""How long a plan takes, where it idles and what it keeps alive, before anything is trained.

A rank goes through its order; an action starts when the rank is free and what it needs has arrived:

    start = max(end of the rank's action before, end of F(s-1,i) or of B(s+1,i), + T_comm between ranks)

A rank that must wait is put aside and woken by the action that it waits for (worklist), so each action is visited once: some
millions of actions a second, 1,024 ranks with 4,096 micro-batches in seconds. A message adds latency and does not occupy the
rank; with receives="blocking" a RECV in the plan stops the rank where it stands, as some runtimes do.
"""

import json
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, nearest
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

FIELDS = ("F", "I", "W", "FB", "bytes_until_b", "bytes_until_w", "input_bytes", "parameters")


@dataclass(frozen=True)
class Times:
    """Costs of each stage (lists of one number a stage), in any unit of time, and bytes held by one micro-batch.

    FB: of an overlapped pair (default F + I + W). comm[s]: latency between stage s and s+1 when they are on different ranks.
    until_b, until_w: bytes freed by I and by W (both by B); inputs: bytes kept instead when the stage recomputes.
    """

    F: list[float]
    I: list[float]
    W: list[float]
    comm: list[float]
    FB: list[float] | None = None
    until_b: list[float] = field(default_factory=list)
    until_w: list[float] = field(default_factory=list)
    inputs: list[float] = field(default_factory=list)
    parameters: list[float] = field(default_factory=list)

    @property
    def has_bytes(self) -> bool:
        """Was it said how many bytes a micro-batch holds?"""
        return bool(self.until_b or self.until_w)


def uniform(stages: int, F: float = 1.0, I: float = 1.0, W: float = 1.0, comm: float = 0.0, FB: float | None = None) -> Times:
    """Every stage alike."""
    return Times([F] * stages, [I] * stages, [W] * stages, [comm] * (stages - 1), None if FB is None else [FB] * stages)


def parse_times(text: str, stages: int) -> Times:
    """`F=1,I=1,W=1,comm=0`, any of them left out; FB is the overlapped pair. UsageError names the wrong part."""
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        name = name.strip()
        if name not in ("F", "I", "W", "comm", "FB"):
            raise UsageError(f"--times has no {name!r}{nearest(name, ('F', 'I', 'W', 'comm', 'FB'))}; write F=1,I=1,W=1,comm=0")
        values[name] = _number(number, f"--times {part}")
    return uniform(stages, **values)


def read_profile(path: str | Path, stages: int) -> Times:
    """{"stages": [{"F": 1, "I": 1, "W": 1, "bytes_until_b": 0, "bytes_until_w": 0, "parameters": 0}, ...], "edges": [0, ...]}."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the profile {str(path)!r} ({error}); give a JSON file with stages and edges") from None
    rows = data.get("stages") if isinstance(data, dict) else None
    if not isinstance(rows, list) or len(rows) != stages:
        count = len(rows) if isinstance(rows, list) else "no list of"
        raise UsageError(f"profile {str(path)!r} has {count} stages and the plan has {stages}; give one entry a stage")
    columns: dict[str, list[float]] = {name: [] for name in FIELDS}
    for number, row in enumerate(rows):
        where = f"profile {str(path)!r}, stage {number}"
        if not isinstance(row, dict):
            raise UsageError(f"{where} is {row!r}; it must be an object with F, I and W")
        for name in row:
            if name not in FIELDS:
                raise UsageError(f"{where} has an unknown {name!r}{nearest(name, FIELDS)}; it may have {', '.join(FIELDS)}")
        for name in FIELDS:
            if name in row or name in ("F", "I", "W"):
                columns[name].append(_number(row.get(name), f"{where}, {name}"))
            elif name != "FB":
                columns[name].append(0.0)
    edges = data.get("edges", [0.0] * (stages - 1))
    if not isinstance(edges, list) or len(edges) != stages - 1:
        raise UsageError(f"profile {str(path)!r} needs {stages - 1} edges, one between each two stages")
    comm = [_number(value, f"profile {str(path)!r}, edge {i}") for i, value in enumerate(edges)]
    if columns["FB"] and len(columns["FB"]) != stages:
        raise UsageError(f"profile {str(path)!r} gives FB for {len(columns['FB'])} of {stages} stages; give it for all or none")
    return Times(
        columns["F"], columns["I"], columns["W"], comm, columns["FB"] or None, columns["bytes_until_b"], columns["bytes_until_w"],
        columns["input_bytes"], columns["parameters"],
    )  # fmt: skip


def _number(value: Any, where: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{where}: {value!r} is not a number; give a time or a size of at least 0") from None
    if not 0 <= number < float("inf"):
        raise UsageError(f"{where}: {value!r} must be a finite number of at least 0")
    return number


@dataclass
class Timing:
    """The times of a plan. Lists have one entry a rank; idle is inside a rank's own window, first start to last end.

    cost: the longest window; makespan: from time 0 to the last end. bubble_of_ideal = (cost - work) / work and bubble_of_total =
    (cost - work) / cost, work being the busiest rank's. peak: micro-batch activations alive; peak_bytes the same in bytes (empty
    without sizes). lower_bound: no plan with these stages on these ranks has a shorter makespan. spans: for each rank (item,
    start, end), when asked for.
    """

    plan: Plan
    first_start: list[float]
    last_end: list[float]
    busy: list[float]
    peak: list[int]
    peak_bytes: list[float]
    lower_bound: float
    spans: list[list[tuple[Item, float, float]]] | None = None

    @property
    def makespan(self) -> float:
        """Time of the last end."""
        return max(self.last_end)

    @property
    def windows(self) -> list[float]:
        """Last end minus first start of each rank."""
        return [end - start for start, end in zip(self.first_start, self.last_end, strict=True)]

    @property
    def cost(self) -> float:
        """The longest window."""
        return max(self.windows)

    @property
    def idle(self) -> list[float]:
        """Time without work in each rank's own window."""
        return [window - busy for window, busy in zip(self.windows, self.busy, strict=True)]

    @property
    def bubble_of_ideal(self) -> float:
        """(p-1)/m for GPipe and 1F1B."""
        work = max(self.busy)
        return (self.cost - work) / work if work else 0.0

    @property
    def bubble_of_total(self) -> float:
        """(p-1)/(m+p-1) for GPipe and 1F1B."""
        return (self.cost - max(self.busy)) / self.cost if self.cost else 0.0


def time_plan(plan: Plan, times: Times | None = None, *, spans: bool = False, receives: str = "latency") -> Timing:
    """Run `plan` on paper. receives: "latency", or "blocking" (of a lowered plan). UsageError when it cannot finish."""
    times = times or uniform(plan.stages)
    if len(times.F) != plan.stages:
        raise UsageError(f"times are for {len(times.F)} stages and plan {plan.name!r} has {plan.stages}; give one a stage")
    if receives not in ("latency", "blocking"):
        raise UsageError(f"receives={receives!r}; it must be 'latency' or 'blocking'")
    if receives == "blocking" and not plan.is_lowered:
        raise UsageError("blocking receives are a property of a lowered plan; lower it first (minidist.pipeline.passes.lower_blocking)")
    costs = _Costs(plan, times)
    if not (spans or costs.pairs or costs.rounds or receives == "blocking"):
        first, last, busy = _relax(plan, costs)
        recorded = None
    else:
        first, last, busy, recorded = _walk(plan, costs, receives == "blocking")
    peak, peak_bytes = zip(*(_peaks(flat, times, plan.updates == "none") for flat in costs.flat), strict=True)
    return Timing(plan, first, last, busy, list(peak), list(peak_bytes) if times.has_bytes else [], costs.lower_bound(busy), recorded if spans else None)


class _Costs:
    """Durations by kind and stage; latency into each stage; the slots in which ends of actions are noted."""

    def __init__(self, plan: Plan, times: Times) -> None:
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
        """Latency into (stage, micro-batch) forward and backward: 0 within a rank; None, None when there is none at all."""
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
    """With an update after every backward, a replica's next action waits for the other replicas' backwards of the round.

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


def _relax(plan: Plan, costs: _Costs) -> tuple[list[float], list[float], list[float]]:
    """The fast walk: for each rank four columns (needs, makes, duration, latency), and one loop over them."""
    S, M, nothing, dump = costs.S, costs.M, costs.nothing, costs.dump
    forward_latency = backward_latency = None
    if any(costs.times.comm):
        forward_latency, backward_latency = costs.latency()
    rows, busy = [], []
    small = np.int32 if dump < 1 << 31 else np.int64
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
        busy.append(float(duration.sum()))
        latency = np.zeros(len(actions))
        if forward_latency is not None and backward_latency is not None:
            latency = np.where(is_forward, forward_latency[stage, i], np.where(is_input, backward_latency[stage, i], 0.0))
        rows.append(_rows(needs.astype(small), makes.astype(small), duration, latency))
    end = array("d", [-1.0]) * (dump + 1)
    end[nothing] = 0.0
    clock, first = [0.0] * plan.ranks, [-1.0] * plan.ranks
    held: list[Any] = [None] * plan.ranks
    waiting: dict[int, list[int]] = {}
    queue = deque(range(plan.ranks))
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
    if finished < plan.ranks:
        _stuck(plan, [(rank, item[0]) for rank, item in enumerate(held) if item is not None], S, M)
    return [max(0.0, f) for f in first], clock, busy


def _rows(*columns: np.ndarray) -> Any:
    """The columns row by row, turned into Python numbers a few at a time, so that waiting ranks stay small in memory."""
    pieces = (zip(*(c[k : k + 256].tolist() for c in columns), strict=True) for k in range(0, len(columns[0]), 256))
    return chain.from_iterable(pieces)


def _stuck(plan: Plan, blocked: list[tuple[int, int]], S: int, M: int) -> None:
    rank, slot = blocked[0]
    backward, here = divmod(slot, S * M)
    stage, i = divmod(here, M)
    raise UsageError(
        f"plan {plan.name!r} cannot finish: {len(blocked)} ranks wait for ever, rank {rank} for {stage}{'B' if backward else 'F'}{i}; "
        "minidist schedule checks a plan and says why"
    )


def _walk(
    plan: Plan, costs: _Costs, blocking: bool
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


def _peaks(flat: np.ndarray, times: Times, evaluation: bool) -> tuple[int, float]:
    """Most micro-batch activations alive at once, and most bytes."""
    kinds, stage, _ = split(flat)
    if evaluation:  # a micro-batch leaves the rank as soon as it has been passed on
        whole = np.array(times.until_b)[stage] + np.array(times.until_w)[stage] if times.has_bytes else np.zeros(1)
        return min(1, len(flat)), float(whole.max(initial=0.0))
    change = (kinds == FORWARD).astype(np.int64) - ((kinds == BACKWARD) | (kinds == WEIGHT))
    peak = int(np.cumsum(change).max(initial=0))
    if not times.has_bytes:
        return peak, 0.0
    until_b, until_w, inputs = (np.array(c or [0.0] * len(times.F))[stage] for c in (times.until_b, times.until_w, times.inputs))
    kept = np.where(np.isin(stage, stage[kinds == RECOMPUTE]), inputs, 0.0)  # from F on, when the stage recomputes
    held = np.zeros(len(flat))
    held += np.where(kinds == FORWARD, np.where(np.isin(stage, stage[kinds == RECOMPUTE]), kept, until_b + until_w), 0.0)
    held += np.where(kinds == RECOMPUTE, until_b + until_w, 0.0)
    held -= np.where((kinds == INPUT) | (kinds == BACKWARD), until_b, 0.0)
    held -= np.where((kinds == WEIGHT) | (kinds == BACKWARD), until_w + kept, 0.0)
    return peak, float(np.cumsum(held).max(initial=0.0))


def over_limit(timing: Timing, limit: float) -> str | None:
    """The sentence for the first rank that needs more than `limit` (bytes when sizes are known, else micro-batches); or None."""
    needs: Sequence[float] = timing.peak_bytes or timing.peak
    unit = "bytes of activations" if timing.peak_bytes else "micro-batches of activations"
    for rank, need in enumerate(needs):
        if need > limit:
            return f"rank {rank} needs {need:g} {unit}, more than the limit of {limit:g}; take a schedule with a lower peak, or recompute"
    return None
