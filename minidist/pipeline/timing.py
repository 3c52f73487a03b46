"""How long a plan takes, where it idles and what it keeps alive, before anything is trained.

An action starts when its rank is free and what it needs has arrived (simulate.py). A message adds latency and does not
occupy the rank; with receives="blocking" a RECV of the plan stops the rank where it stands, as in some runtimes. Where
not every start is asked for, timing_vectorized.py finds the same times: millions of actions take seconds.

Proved by: tests/pipeline/test_plans.py
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from minidist.base.errors import UsageError, quoted
from minidist.core.pipeline.plan import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    RECOMPUTE,
    STAGE,
    STEP,
    WEIGHT,
    Action,
    Item,
    Plan,
    actions_of,
)
from minidist.pipeline.passes import computations
from minidist.pipeline.plan_methods import show
from minidist.pipeline.simulate import Dependencies, Simulation, Span, partner, simulate
from minidist.pipeline.times import Times, uniform
from minidist.pipeline.timing_vectorized import Flat, flatten, seconds_by_kind, split, sweep


@dataclass
class Timing:
    """The times of a plan. Lists have one entry per rank; idle is inside a rank's own window, first start to last end.

    cost: the longest window; makespan: from time 0 to the last end. bubble_of_ideal = (cost - work) / work and
    bubble_of_total = (cost - work) / cost, work being the busiest rank's. peak: micro-batch activations alive;
    peak_bytes the same in bytes (empty without sizes). lower_bound: no plan with these stages on these ranks has a
    shorter makespan. spans: for each rank (item, start, end), when asked for. stage_share: the part of its rank's
    model that a stage counts as, 1 unless schedules with different numbers of stages are compared. longest_stop: with
    blocking receives, a sentence about the one that stops a rank for the longest time; "" when none does.
    """

    plan: Plan
    first_start: list[float]
    last_end: list[float]
    busy: list[float]
    peak: list[int]
    peak_bytes: list[float]
    lower_bound: float
    spans: list[list[Span]] | None = None
    stage_share: float = 1.0
    longest_stop: str = ""

    @property
    def activations(self) -> list[float]:
        """Return the peak in micro-batch activations of a rank's whole part of the model."""
        return [self.stage_share * peak for peak in self.peak]

    @property
    def makespan(self) -> float:
        """Return the time of the last end."""
        return max(self.last_end)

    @property
    def windows(self) -> list[float]:
        """Return last end minus first start of each rank."""
        return [end - start for start, end in zip(self.first_start, self.last_end, strict=True)]

    @property
    def cost(self) -> float:
        """Return the longest window."""
        return max(self.windows)

    @property
    def idle(self) -> list[float]:
        """Return the time without work in each rank's own window."""
        return [window - busy for window, busy in zip(self.windows, self.busy, strict=True)]

    @property
    def bubble_of_ideal(self) -> float:
        """Return the bubble over the ideal time: (p-1)/m for GPipe and 1F1B."""
        work = max(self.busy)
        return (self.cost - work) / work if work else 0.0

    @property
    def bubble_of_total(self) -> float:
        """Return the bubble over the whole time: (p-1)/(m+p-1) for GPipe and 1F1B."""
        return (self.cost - max(self.busy)) / self.cost if self.cost else 0.0


def _check_times(plan: Plan, times: Times, receives: str) -> None:
    """Raise UsageError for times of other stages, and for receives that this plan cannot have."""
    if len(times.F) != plan.stages:
        raise UsageError(
            f"times are for {len(times.F)} stages and plan {plan.name!r} has {plan.stages}; give one per stage"
        )
    if receives not in ("latency", "blocking"):
        raise UsageError(f"receives={quoted(receives)}; it must be 'latency' or 'blocking'")
    if receives == "blocking" and not plan.is_lowered:
        raise UsageError(
            "blocking receives are a property of a lowered plan; lower it first"
            " (minidist.pipeline.passes.lower_blocking)"
        )


def time_plan(plan: Plan, times: Times | None = None, *, spans: bool = False, receives: str = "latency") -> Timing:
    """Return the times of `plan` without running anything. Raises UsageError when the plan cannot finish.

    spans: note every start and end. receives: "latency", or "blocking" (of a lowered plan).
    """
    times = times or uniform(plan.stages)
    _check_times(plan, times, receives)
    flat = flatten(plan)
    replicated = plan.updates in ("stash", "no-stash") and any(len(ranks) > 1 for ranks in plan.holders().values())
    recorded: list[list[Span]] | None = None
    longest_stop = ""

    # The sweep over arrays knows single actions; what overlaps or is waited for otherwise takes the simulation.
    if spans or flat.has_pairs or replicated or receives == "blocking":
        run = _simulate(plan if receives == "blocking" else computations(plan), times, receives == "blocking")
        recorded = run.spans
        longest_stop = _longest_stop(run) if receives == "blocking" else ""
        first, last, busy = _windows(recorded)
    else:
        first, last, busy = sweep(plan, flat, times)

    peak, peak_bytes = zip(*(_peaks(actions, times, plan.updates == "none") for actions in flat.ranks), strict=True)
    return Timing(
        plan,
        first,
        last,
        busy,
        list(peak),
        list(peak_bytes) if times.has_bytes else [],
        _lower_bound(plan, flat, times, busy),
        recorded if spans else None,
        longest_stop=longest_stop,
    )


def _windows(recorded: list[list[Span]]) -> tuple[list[float], list[float], list[float]]:
    """Return the first start, the last end and the seconds at work of each rank."""
    first = [row[0][1] if row else 0.0 for row in recorded]
    last = [row[-1][2] if row else 0.0 for row in recorded]
    return first, last, [sum(end - start for _, start, end in row) for row in recorded]


class BlockingReceives(Dependencies):
    """What actions wait for where a RECV waits for its data where it stands, as in some runtimes."""

    def needs(self, action: Action) -> list[Action]:
        """Return the actions that must have ended before `action` starts."""
        if action.kind.startswith("SEND"):
            return []
        if not action.kind.startswith("RECV"):
            return super().needs(action)
        sender = partner(action)
        return [self.produced(sender.kind, sender.stage, action.microbatch)]

    def data(self, send: str, stage: int, i: int) -> Action:
        """Return the computation that makes the data of `stage`: the RECV has waited for it."""
        return self.produced(send, stage, i)


def _simulate(plan: Plan, times: Times, blocking: bool) -> Simulation:
    """Run the plan with `times`; a rank that waits for ever is a UsageError."""
    table, rank_of = seconds_by_kind(times).tolist(), plan.rank_of_stage()

    def seconds(item: Item) -> float:
        actions = actions_of(item)
        if len(actions) == 2 and times.FB is not None:
            return float(max(times.FB[action.stage] for action in actions))
        return float(sum(table[action % STEP][action // STAGE] for action in actions))

    def latency(needed: Action, action: Action) -> float:
        """Return the latency of what travels to `action`: none within a stage or a rank."""
        source, stage, i = needed.stage, action.stage, action.microbatch
        if source == stage or rank_of[source, i] == rank_of[stage, i]:
            return 0.0
        return times.comm[min(source, stage)]

    run = simulate(plan.orders, (BlockingReceives(plan) if blocking else Dependencies(plan)).needs, seconds, latency)
    if run.blocked:
        rank = run.blocked[0]
        raise UsageError(
            f"plan {plan.name!r} cannot finish: {len(run.blocked)} ranks wait for ever, rank {rank} at "
            f"{show(plan.orders[rank][run.position[rank]])}; minidist schedule checks a plan and says why"
        )
    return run


def _longest_stop(run: Simulation) -> str:
    """Return which receive stops a rank for the longest time, for how long, and before what; "" when none does."""
    longest, sentence = 0.0, ""
    for rank, order in enumerate(run.orders):
        clock = 0.0
        for place, item in enumerate(order):
            ended = max(run.ends[action] for action in actions_of(item))
            if show(item).find("RECV") > 0 and ended - clock > longest:
                longest = ended - clock
                later = (one for one in order[place + 1 :] if actions_of(one)[0].kind in COMPUTE)
                following = next(map(show, later), "the end")
                sentence = f"{show(item)} stops rank {rank} for {longest:g} before {following}"
            clock = max(clock, ended)
    return sentence


def _lower_bound(plan: Plan, flat: Flat, times: Times, busy: Sequence[float]) -> float:
    """Return the longest of: one micro-batch through all stages and back; a rank's first possible start + its work."""
    ahead = np.concatenate([[0.0], np.cumsum(np.array(times.F)[:-1])])
    heads = [ahead[split(actions)[1].min()] if len(actions) else 0.0 for actions in flat.ranks]
    through = sum(times.F) + (sum(times.I) + times.W[0] if plan.updates != "none" else 0.0)
    return float(max(max(head + work for head, work in zip(heads, busy, strict=True)), through))


def _peaks(actions: np.ndarray, times: Times, evaluation: bool) -> tuple[int, float]:
    """Return the most micro-batch activations of a rank alive at once, and their most bytes."""
    kinds, stage, _ = split(actions)
    if evaluation:  # a micro-batch leaves the rank as soon as it has been passed on
        whole = np.array(times.until_b)[stage] + np.array(times.until_w)[stage] if times.has_bytes else np.zeros(1)
        return min(1, len(actions)), float(whole.max(initial=0.0))
    change = (kinds == FORWARD).astype(np.int64) - ((kinds == BACKWARD) | (kinds == WEIGHT))
    peak = int(np.cumsum(change).max(initial=0))
    if not times.has_bytes:
        return peak, 0.0
    until_b, until_w, inputs = (
        np.array(c or [0.0] * len(times.F))[stage] for c in (times.until_b, times.until_w, times.inputs)
    )

    # A stage that recomputes keeps its input from F on and the rest from RECOMPUTE on; any other keeps all from F on.
    recomputes = np.isin(stage, stage[kinds == RECOMPUTE])
    kept = np.where(recomputes, inputs, 0.0)
    held = np.where(kinds == FORWARD, np.where(recomputes, kept, until_b + until_w), 0.0)
    held += np.where(kinds == RECOMPUTE, until_b + until_w, 0.0)
    held -= np.where((kinds == INPUT) | (kinds == BACKWARD), until_b, 0.0)
    held -= np.where((kinds == WEIGHT) | (kinds == BACKWARD), until_w + kept, 0.0)
    return peak, float(np.cumsum(held).max(initial=0.0))


def over_limit(timing: Timing, limit: float) -> str | None:
    """Return the sentence for the first rank that needs more than `limit`, or None.

    The limit is in bytes where sizes are known, else in micro-batches.
    """
    needs: Sequence[float] = timing.peak_bytes or timing.activations
    unit = "bytes of activations" if timing.peak_bytes else "micro-batches of activations"
    for rank, need in enumerate(needs):
        if need > limit:
            return (
                f"rank {rank} needs {need:g} {unit}, more than the limit of {limit:g}; take a schedule with a lower"
                " peak, or recompute"
            )
    return None
