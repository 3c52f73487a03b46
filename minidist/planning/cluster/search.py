"""Tries every layout of a job on a cluster, and ranks those that fit by the seconds of a step.

Values that are given are fixed, and all others are searched: degrees that divide the GPUs, powers of two for
micro-batches, ZeRO stages 0 to 3, and recomputation. Tensor parallelism stays inside a node, because its messages do
not overlap with computing.

Proved by: tests/planning/test_cluster.py
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from minidist.base.errors import UsageError
from minidist.planning.cluster.calibration import CALIBRATION, Calibration
from minidist.planning.cluster.gpus import Machine
from minidist.planning.cluster.layout import RECOMPUTE, ClusterLayout, Job, refusal, stage_layers
from minidist.planning.cluster.memory import RankMemory, memory_by_rank, rank_memory
from minidist.planning.cluster.shared import shared
from minidist.planning.cluster.step_time import StepModel, StepTime

MAX_GPUS = 1_000_000
# The largest values that are searched; a larger one may be given.
MAX_TP = 8
MAX_CP = 64
MAX_PP = 128
MAX_VP = 16
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Plan:
    """A layout of a job on a machine. Memory and time are computed when they are read."""

    layout: ClusterLayout
    job: Job
    machine: Machine
    calibration: Calibration = CALIBRATION

    @cached_property
    def memory(self) -> list[RankMemory]:
        """Return the memory of each pipeline rank."""
        return memory_by_rank(self.layout, self.job, self.calibration)

    @cached_property
    def time(self) -> StepTime:
        """Return the time of a step."""
        return StepModel(self.layout, self.job, self.machine, self.calibration).step()

    @property
    def fullest_rank(self) -> int:
        """Return the number of the fullest pipeline rank."""
        return self._fullest[0]

    @property
    def fullest(self) -> RankMemory:
        """Return the memory of the fullest pipeline rank."""
        return self._fullest[1]

    @cached_property
    def _fullest(self) -> tuple[int, RankMemory]:
        stages = stage_layers(self.layout, self.job.model.layers)
        ranks = _deciding_ranks(self.layout, self.job)
        fullest = [(rank, rank_memory(self.layout, self.job, rank, stages[rank], self.calibration)) for rank in ranks]
        return max(fullest, key=lambda pair: pair[1].peak)

    @cached_property
    def needed(self) -> float:
        """Return the bytes that a GPU must have: the peak and what the device and the libraries hold."""
        return self.fullest.peak + self.calibration.reserved_bytes

    @property
    def fits(self) -> bool:
        """Return whether the fullest rank fits."""
        return self.needed <= self.machine.memory

    @property
    def shortage(self) -> str:
        """Return how much memory the fullest rank needs and has, as a sentence for a plan that does not fit."""
        return (
            f"pipeline rank {self.fullest_rank} needs {self.needed / 1e9:,.1f} GB, and"
            f" {self.machine.name} has {self.machine.memory / 1e9:,.0f} GB"
        )

    @property
    def time_range(self) -> tuple[float, float]:
        """Return between which multiples of the prediction a step takes."""
        c = self.calibration
        return c.sparse_time_range if self.job.model.experts else c.time_range

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all GPUs."""
        return self.job.global_batch * self.job.length / self.time.seconds

    @property
    def model_flops(self) -> int:
        """Return the model FLOPs of a step."""
        return self.job.model.step_flops(self.job.global_batch, self.job.length)

    @property
    def hardware_flops(self) -> int:
        """Return the FLOPs of a step with what is computed again (Korthikanti et al., 2022, appendix A)."""
        job, model = self.job, self.job.model
        tokens = job.global_batch * job.length
        if self.layout.recompute == "full":
            again = model.forward_flops(job.length) - 2 * model.width * model.vocabulary
        elif self.layout.recompute == "selective" and not job.fused_attention:
            # The paper counts the core's forward and backward once more: s / 3h in place of s / 6h.
            again = 6 * job.length * (model.query_size + model.value_size) * model.layers
        else:
            again = 0
        return self.model_flops + tokens * again

    def utilization(self, flops: float) -> float:
        """Return the share of the peak that so many FLOPs per step are."""
        return flops / (self.time.seconds * self.job.gpus * self.machine.peak(self.job.precision))

    def as_dict(self) -> dict[str, Any]:
        """Return what `minidist plan --json` prints of a layout."""
        low, high = self.calibration.memory_range
        short, long = self.time_range
        peak, seconds = self.fullest.peak, self.time.seconds
        return {
            **self.layout.as_dict(),
            "fits": self.fits,
            "memory": {
                "peak_bytes": peak,
                "low_bytes": int(low * peak),
                "high_bytes": int(high * peak),
                "by_kind": self.fullest.by_kind,
                "states_bytes_by_pipeline_rank": [rank.states for rank in self.memory],
                "peak_bytes_by_pipeline_rank": [rank.peak for rank in self.memory],
            },
            "time": {
                "step_seconds": seconds,
                "low_seconds": short * seconds,
                "high_seconds": long * seconds,
                "compute_seconds": self.time.compute,
                "exposed_seconds": self.time.exposed,
                "bubble_fraction": self.time.bubble,
            },
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.utilization(self.model_flops),
            "hfu": self.utilization(self.hardware_flops),
            "model_flops_per_step": self.model_flops,
        }


@dataclass(frozen=True)
class Search:
    """The result of a search.

    plans: the layouts that fit, the fastest first. too_large: the layouts that do not fit. impossible: the layouts that
    the job or the cluster rules out, each with the reason.
    """

    plans: list[Plan]
    too_large: list[Plan]
    impossible: list[tuple[ClusterLayout, str]]

    @property
    def refused(self) -> list[tuple[ClusterLayout, str]]:
        """Return all layouts that cannot be used, each with the reason; first those that do not fit."""
        return [(plan.layout, plan.shortage) for plan in self.too_large] + self.impossible


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number up to `most`."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return [d for d in sorted({*small, *(number // d for d in small)}) if most is None or d <= most]


@shared(lambda layout, job: (job,), lambda layout, job: (layout.pp, layout.vp))
def _deciding_ranks(layout: ClusterLayout, job: Job) -> list[int]:
    """Return the pipeline ranks of which one is the fullest.

    Of ranks with equally many layers of each kind, the first one keeps the most micro-batches; the last rank of all
    also has the output projection.
    """
    first: dict[tuple[int, ...], int] = {}
    for rank, layers in enumerate(stage_layers(layout, job.model.layers)):
        sparse = sum(job.model.is_sparse(layer) for layer in layers)
        first.setdefault((len(layers), sparse), rank)
    return sorted({*first.values(), layout.pp - 1})


def plan_layout(layout: ClusterLayout, job: Job, machine: Machine, calibration: Calibration = CALIBRATION) -> Plan:
    """Return the plan of one layout, which must be possible."""
    return Plan(layout, job, machine, calibration)


def candidates(job: Job, machine: Machine, fixed: Mapping[str, Any]) -> Iterator[ClusterLayout]:
    """Yield the layouts that are tried: every combination of what is not fixed."""
    model, gpus = job.model, job.gpus

    def choices(axis: str, values: list[Any]) -> list[Any]:
        return [fixed[axis]] if axis in fixed else values

    for tp, cp in product(
        choices("tp", divisors(gpus, min(machine.gpus_per_node, MAX_TP))),
        choices(
            "cp",
            [c for c in divisors(gpus, MAX_CP) if c == 1 or (job.length // c >= 2048 and job.length % (2 * c) == 0)],
        ),
    ):
        if gpus % (tp * cp) and not {"dp", "pp"} <= set(fixed):
            continue
        for pp in choices("pp", divisors(gpus // (tp * cp) or 1, min(model.layers, MAX_PP))):
            dp = fixed.get("dp", gpus // (tp * cp * pp))
            rest = job.global_batch // dp if dp else 0
            for vp, ep, zero, sequence, micro, recompute in product(
                choices("vp", divisors(model.layers // pp or 1, MAX_VP) if pp > 1 else [1]),
                choices("ep", divisors(model.experts, min(dp * cp * tp, model.experts)) if model.experts else [1]),
                choices("zero", [0, 1, 2, 3] if dp * cp > 1 and pp == 1 else [0, 1] if dp * cp > 1 else [0]),
                choices("sequence_parallel", [tp > 1]),
                choices("micro_batch", [m for m in MICRO_BATCHES if m <= rest] or [1]),
                choices("recompute", list(RECOMPUTE)),
            ):
                yield ClusterLayout(dp, tp, pp, cp, ep, vp, zero, sequence, micro, max(1, rest // micro), recompute)


def search(job: Job, machine: Machine, fixed: Mapping[str, Any], calibration: Calibration = CALIBRATION) -> Search:
    """Return the layouts that fit, the fastest first, those that do not fit, and those that are impossible.

    fixed: values by the name of `ClusterLayout`'s fields. Raises UsageError with the reason when every layout that has
    these values is impossible, but not when layouts are possible and none of them fits.
    """
    if not 1 <= job.gpus <= MAX_GPUS:
        raise UsageError(f"--gpus {job.gpus} is out of range; give 1 to {MAX_GPUS:,}")
    found = Search([], [], [])
    for layout in candidates(job, machine, fixed):
        reason = refusal(layout, job)
        if reason:
            found.impossible.append((layout, reason))
            continue
        plan = plan_layout(layout, job, machine, calibration)
        (found.plans if plan.fits else found.too_large).append(plan)

    # Without a possible layout the search is an error, with the reason of the first one.
    if not found.plans and not found.too_large:
        if not found.impossible:
            raise UsageError(f"no layout of {job.gpus:,} GPUs has {_described(fixed)}; change one of them")
        raise UsageError(f"{found.impossible[0][1]}; change one of them")

    # Predictions differ from measurements by more than a percent, so of nearly equal layouts the one with fewer axes
    # comes first.
    found.plans.sort(key=lambda plan: plan.time.seconds * 1.01**plan.layout.axes)
    return found


def _described(fixed: Mapping[str, Any]) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in fixed.items()) or "these settings"


def reason_for(best: Plan, plans: list[Plan], fixed: Collection[str] = ()) -> str:
    """Return one sentence: what each axis of the best layout is for, compared with the best layout without it.

    fixed: the axes that were given, about which the search says nothing.
    """
    layout, parts = best.layout, []
    for axis, off, words in (
        ("tp", 1, f"tensor parallelism {layout.tp}"),
        ("pp", 1, f"pipeline parallelism {layout.pp}"),
        ("cp", 1, f"context parallelism {layout.cp}"),
        ("ep", 1, f"expert parallelism {layout.ep}"),
        ("zero", 0, f"ZeRO {layout.zero}"),
        ("recompute", "none", f"{layout.recompute} recomputation"),
    ):
        if getattr(layout, axis) == off or axis in fixed:
            continue
        without = [plan for plan in plans if getattr(plan.layout, axis) == off]
        if not without:
            parts.append(f"without {words} no layout that was tried fits")
        else:
            ratio = without[0].time.seconds / best.time.seconds
            parts.append(f"without {words} the best takes {ratio:.2f} times as long")
    room = best.machine.memory - best.needed
    if not parts and any(axis in fixed for axis in ("tp", "pp", "cp", "ep", "zero", "recompute")):
        return f"it is the fastest with what is given; {room / 1e9:,.0f} GB are free"
    if not parts:
        return (
            f"data parallelism alone fits with {room / 1e9:,.0f} GB to spare, and every other axis adds messages or a"
            " bubble"
        )
    return "; ".join(parts)
