"""How long a plan takes, where it idles and what it keeps alive, before anything is trained.

A rank goes through its order; an action starts when the rank is free and what it needs has arrived:

    start = max(end of the rank's action before, end of F(s-1,i) or of B(s+1,i), + T_comm between ranks)

Each action is visited once (relaxation.py): 1,024 ranks with 4,096 micro-batches take seconds. A message adds latency
and does not occupy the rank; with receives="blocking" a RECV in the plan stops the rank where it stands, as some
runtimes do.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, nearest
from minidist.pipeline.plan.action import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT, Item
from minidist.pipeline.plan.plan import Plan
from minidist.pipeline.relaxation import Costs, relax, split, walk

FIELDS = ("F", "I", "W", "FB", "bytes_until_b", "bytes_until_w", "input_bytes", "parameters")


@dataclass(frozen=True)
class Times:
    """Costs of each stage (lists of one number a stage), in any unit of time, and bytes held by one micro-batch.

    FB: of an overlapped pair (default F + I + W). comm[s]: latency between stage s and s+1 when they are on different
    ranks.
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


def uniform(
    stages: int, F: float = 1.0, I: float = 1.0, W: float = 1.0, comm: float = 0.0, FB: float | None = None
) -> Times:
    """Every stage alike."""
    return Times([F] * stages, [I] * stages, [W] * stages, [comm] * (stages - 1), None if FB is None else [FB] * stages)


def parse_times(text: str, stages: int) -> Times:
    """`F=1,I=1,W=1,comm=0`, any of them left out; FB is the overlapped pair. UsageError names the wrong part."""
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        name = name.strip()
        if name in values:
            raise UsageError(f"--times gives {name} twice; leave one of them out")
        if name not in ("F", "I", "W", "comm", "FB"):
            raise UsageError(
                f"--times has no {name!r}{nearest(name, ('F', 'I', 'W', 'comm', 'FB'))}; write F=1,I=1,W=1,comm=0"
            )
        values[name] = _number(number, f"--times {part}")
    return uniform(stages, **values)


def read_profile(path: str | Path, stages: int) -> Times:
    """{"stages": [{"F": 1, "I": 1, "W": 1, "bytes_until_b": 0, "bytes_until_w": 0, "parameters": 0}, ...], "edges": [0,
    ...]}.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the profile {str(path)!r} ({error}); give a JSON file with stages and edges"
        ) from None
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
                raise UsageError(
                    f"{where} has an unknown {name!r}{nearest(name, FIELDS)}; it may have {', '.join(FIELDS)}"
                )
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
        raise UsageError(
            f"profile {str(path)!r} gives FB for {len(columns['FB'])} of {stages} stages; give it for all or none"
        )
    return Times(
        columns["F"],
        columns["I"],
        columns["W"],
        comm,
        columns["FB"] or None,
        columns["bytes_until_b"],
        columns["bytes_until_w"],
        columns["input_bytes"],
        columns["parameters"],
    )


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

    cost: the longest window; makespan: from time 0 to the last end. bubble_of_ideal = (cost - work) / work and
    bubble_of_total = (cost - work) / cost, work being the busiest rank's. peak: micro-batch activations alive;
    peak_bytes the same in bytes (empty without sizes). lower_bound: no plan with these stages on these ranks has a
    shorter makespan. spans: for each rank (item, start, end), when asked for.
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
        raise UsageError(
            f"times are for {len(times.F)} stages and plan {plan.name!r} has {plan.stages}; give one a stage"
        )
    if receives not in ("latency", "blocking"):
        raise UsageError(f"receives={receives!r}; it must be 'latency' or 'blocking'")
    if receives == "blocking" and not plan.is_lowered:
        raise UsageError(
            "blocking receives are a property of a lowered plan; lower it first"
            " (minidist.pipeline.passes.lower_blocking)"
        )
    costs = Costs(plan, times)
    if not (spans or costs.pairs or costs.rounds or receives == "blocking"):
        first, last, busy = relax(plan, costs)
        recorded = None
    else:
        first, last, busy, recorded = walk(plan, costs, receives == "blocking")
    peak, peak_bytes = zip(*(_peaks(flat, times, plan.updates == "none") for flat in costs.flat), strict=True)
    return Timing(
        plan,
        first,
        last,
        busy,
        list(peak),
        list(peak_bytes) if times.has_bytes else [],
        costs.lower_bound(busy),
        recorded if spans else None,
    )


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
    until_b, until_w, inputs = (
        np.array(c or [0.0] * len(times.F))[stage] for c in (times.until_b, times.until_w, times.inputs)
    )
    kept = np.where(np.isin(stage, stage[kinds == RECOMPUTE]), inputs, 0.0)  # from F on, when the stage recomputes
    held = np.zeros(len(flat))
    held += np.where(
        kinds == FORWARD, np.where(np.isin(stage, stage[kinds == RECOMPUTE]), kept, until_b + until_w), 0.0
    )
    held += np.where(kinds == RECOMPUTE, until_b + until_w, 0.0)
    held -= np.where((kinds == INPUT) | (kinds == BACKWARD), until_b, 0.0)
    held -= np.where((kinds == WEIGHT) | (kinds == BACKWARD), until_w + kept, 0.0)
    return peak, float(np.cumsum(held).max(initial=0.0))


def over_limit(timing: Timing, limit: float) -> str | None:
    """The sentence for the first rank that needs more than `limit` (bytes when sizes are known, else micro-batches); or
    None.
    """
    needs: Sequence[float] = timing.peak_bytes or timing.peak
    unit = "bytes of activations" if timing.peak_bytes else "micro-batches of activations"
    for rank, need in enumerate(needs):
        if need > limit:
            return (
                f"rank {rank} needs {need:g} {unit}, more than the limit of {limit:g}; take a schedule with a lower"
                " peak, or recompute"
            )
    return None
