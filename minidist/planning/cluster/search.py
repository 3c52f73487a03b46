"""Tries every layout of a job on a cluster, and ranks what fits by the seconds of a step: first what surely does.

Values that are given are fixed, and all others are searched: degrees that divide the GPUs, powers of two for
micro-batches, ZeRO stages 0 to 3, and recomputation. Tensor parallelism stays inside a node, because its messages do
not overlap with computing.

Proved by: tests/planning/test_cluster.py
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice, product
from operator import itemgetter
from typing import Any

from minidist.base.process import infrequent_gc
from minidist.core.base.errors import UsageError
from minidist.planning.cluster.calibration import CALIBRATION
from minidist.planning.cluster.fit import Fit, gigabytes
from minidist.planning.cluster.gpus import MACHINES, Machine
from minidist.planning.cluster.host import CHOICES
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
MAX_TRIED = 50_000  # layouts, to find whether one fits
AXIS_COST = 1.01  # for each kind of parallelism, a layout must be faster by this factor to come first
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Plan:
    """A possible layout of a job on a machine. Memory and time are computed when they are read."""

    layout: ClusterLayout
    job: Job
    machine: Machine

    @cached_property
    def memory(self) -> list[RankMemory]:
        """Return the memory of each pipeline rank."""
        return memory_by_rank(self.layout, self.job)

    @cached_property
    def time(self) -> StepTime:
        """Return the time of a step."""
        return StepModel(self.layout, self.job, self.machine).step()

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
        return max(self._deciding, key=lambda pair: pair[1].likely(self.job))

    @cached_property
    def _deciding(self) -> list[tuple[int, RankMemory]]:
        layout, job = self.layout, self.job
        stages = stage_layers(layout, job.model.layers)
        return [(rank, rank_memory(layout, job, rank, stages[rank])) for rank in _deciding_ranks(layout, job)]

    @cached_property
    def host(self) -> tuple[int, int]:
        """Return which pipeline rank keeps the most bytes on the host, and how many."""
        return max(((rank, memory.host) for rank, memory in self._deciding), key=itemgetter(1))

    @cached_property
    def fit(self) -> Fit:
        """Return what the fullest rank needs next to what a GPU has."""
        return Fit.of_rank(self.machine, self.fullest, self.job)

    @property
    def fits(self) -> bool:
        """Return whether the central estimate fits on the GPU, and what is kept on the host there."""
        return self.fit.fits and self.host[1] <= self.machine.host_memory

    @property
    def shortage(self) -> str:
        """Return how much memory the fullest rank needs and has, as a sentence for a plan that may not fit."""
        needs, (rank, host) = self.fit.needs(f"pipeline rank {self.fullest_rank}"), self.host
        if host <= self.machine.host_memory:
            return needs
        keeps = (
            f"pipeline rank {rank} keeps {gigabytes(host)} on the host, which has"
            f" {gigabytes(self.machine.host_memory)} for each GPU"
        )
        return keeps if self.fit.fits else f"{needs}, and {keeps}"

    @property
    def needed(self) -> float:
        """Return what the fullest rank needs as a multiple of what it has, on the GPU or the host: the larger one."""
        return max(self.fit.central / self.machine.memory, self.host[1] / self.machine.host_memory)

    @property
    def time_range(self) -> tuple[float, float]:
        """Return between which multiples of the prediction a step takes."""
        return CALIBRATION.sparse_time_range if self.job.model.experts else CALIBRATION.time_range

    @property
    def seconds_range(self) -> tuple[float, float]:
        """Return the least and the most seconds that a step may take."""
        short, long = self.time_range
        return short * self.time.seconds, long * self.time.seconds

    @property
    def waiting(self) -> float:
        """Return the share of a step for which GPUs wait for the host."""
        return self.time.exposed.get("host", 0.0) / self.time.seconds

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
        if self.layout.runs_forward_twice:
            again = model.forward_flops(job.length) - 2 * model.width * model.vocabulary
        elif self.layout.recompute == "selective" and not job.fused_attention:
            # The paper counts the core's forward and backward once more: s / 3h in place of s / 6h.
            again = 6 * sum(model.layer_scores(layer, job.length) for layer in range(model.layers))
        else:
            again = 0
        return self.model_flops + tokens * again

    def utilization(self, flops: float) -> float:
        """Return the share of the peak that this number of FLOPs per step is."""
        return flops / (self.time.seconds * self.job.gpus * self.machine.peak(self.job.precision))

    def as_dict(self) -> dict[str, Any]:
        """Return what `minidist plan --json` prints of a layout."""
        short, long = self.seconds_range
        peak, seconds = self.fullest.peak, self.time.seconds
        return {
            **self.layout.as_dict(),
            "fits": self.fits,
            "margin_bytes": int(self.fit.margin),
            "fits_with_range": self.fit.verdict == "yes",
            "memory": {
                "peak_bytes": peak,
                "low_bytes": int(self.fit.low - CALIBRATION.reserved_bytes),
                "high_bytes": int(self.fit.high - CALIBRATION.reserved_bytes),
                "eager_kernels_bytes": self.fullest.eager,
                "by_kind": self.fullest.by_kind,
                "states_bytes_by_pipeline_rank": [rank.states for rank in self.memory],
                "peak_bytes_by_pipeline_rank": [rank.peak for rank in self.memory],
            },
            "time": {
                "step_seconds": seconds,
                "low_seconds": short,
                "high_seconds": long,
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

    plans: the layouts that fit, first those that fit with their whole range, the fastest of each part first. too_large:
    the layouts that do not fit, first those that need least. impossible: the layouts that the job or the cluster rules
    out, each with the reason.
    """

    plans: list[Plan]
    too_large: list[Plan]
    impossible: list[tuple[ClusterLayout, str]]


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number up to `most`."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return [d for d in sorted({*small, *(number // d for d in small)}) if most is None or d <= most]


@shared(lambda layout, job: (job,), lambda layout, job: (layout.pp, layout.vp))
def _deciding_ranks(layout: ClusterLayout, job: Job) -> list[int]:
    """Return the pipeline ranks that are enough to find the highest peak memory.

    Of ranks with equally many layers of each kind, the first one keeps the most micro-batches; the last rank of all
    also has the output projection.
    """
    first: dict[tuple[int, ...], int] = {}
    for rank, layers in enumerate(stage_layers(layout, job.model.layers)):
        first.setdefault(tuple(sorted(map(job.model.kind, layers))), rank)
    return sorted({*first.values(), layout.pp - 1})


def candidates(job: Job, machine: Machine, fixed: Mapping[str, Any]) -> Iterator[ClusterLayout]:
    """Yield the layouts that are tried: every combination of what is not fixed."""
    model, gpus = job.model, job.gpus
    choices = partial(_choices, fixed)
    for tp, cp in _tensor_and_context(job, machine, fixed):
        for pp in choices("pp", divisors(gpus // (tp * cp) or 1, min(model.layers, MAX_PP))):
            dp = fixed.get("dp", gpus // (tp * cp * pp))
            rest = job.global_batch // dp if dp else 0
            for vp, ep, zero, sequence, micro, recompute in product(
                choices("vp", divisors(model.layers // pp or 1, MAX_VP) if pp > 1 else [1]),
                choices("ep", divisors(model.experts, min(dp * cp * tp, model.experts)) if model.experts else [1]),
                choices("zero", _zero_stages(dp * cp, pp, fixed.get("host"))),
                choices("sequence_parallel", [tp > 1]),
                choices("micro_batch", [m for m in MICRO_BATCHES if m <= rest] or [1]),
                choices("recompute", [r for r in RECOMPUTE if r != "sqrt"]),  # as much time as full, and more memory
            ):
                count = max(1, rest // micro)
                yield ClusterLayout(
                    *(dp, tp, pp, cp, ep, vp, zero, sequence, micro, count, recompute),
                    *(fixed.get("etp"), fixed.get("host", "none")),
                )


def _choices(fixed: Mapping[str, Any], axis: str, values: list[Any]) -> list[Any]:
    """Return what is tried of an axis: what is given, or else all values."""
    return [fixed[axis]] if axis in fixed else values


def _tensor_and_context(job: Job, machine: Machine, fixed: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of tp and cp that are tried; context-parallel ranks get two chunks of 1,024 tokens or more."""
    gpus, length = job.gpus, job.length
    tps = divisors(gpus, min(machine.gpus_per_node, MAX_TP))
    cps = [cp for cp in divisors(gpus, MAX_CP) if cp == 1 or (length // cp >= 2048 and length % (2 * cp) == 0)]
    tps = _choices(fixed, "tp", [tp for tp in tps if tp % (fixed.get("etp") or 1) == 0])
    for tp, cp in product(tps, _choices(fixed, "cp", cps)):
        if gpus % (tp * cp) == 0 or {"dp", "pp"} <= set(fixed):
            yield tp, cp


def _zero_stages(ranks: int, pp: int, host: str | None) -> list[int]:
    """Return the ZeRO stages that are tried on `ranks` ranks with equal parameters; shards on the host are ZeRO 3's."""
    if host == "parameters":
        return [3]
    if ranks <= 1:
        return [0]
    return [0, 1, 2, 3] if pp == 1 else [0, 1]


@infrequent_gc()
def search(job: Job, machine: Machine, fixed: Mapping[str, Any]) -> Search:
    """Return the layouts that fit, those that do not fit, and those that are impossible.

    When none fits, those that keep a part in host memory are searched, too. fixed: values by the name of
    `ClusterLayout`'s fields. Raises UsageError with the reason when every layout that has these values is impossible,
    but not when layouts are possible and none of them fits.
    """
    if not 1 <= job.gpus <= MAX_GPUS:
        raise UsageError(f"--gpus {job.gpus} is out of range; give 1 to {MAX_GPUS:,}")
    found = _tried(job, machine, fixed)
    if not found.plans and "host" not in fixed and len(found.too_large) > 1:
        # Where no GPU has enough memory, the host may have it. The only layout that is possible stays what it is.
        # Parameters there need ZeRO 3, and the other parts any of the layouts that were tried.
        others = [
            Plan(replace(plan.layout, host=host), job, machine)
            for host in ("optimizer", "activations")
            for plan in found.too_large
        ]
        with_zero_3 = _tried(job, machine, {**fixed, "host": "parameters"})
        found.plans.extend([plan for plan in others if plan.fits] + with_zero_3.plans)
        if not found.plans:
            found.too_large.extend(others + with_zero_3.too_large)

    # Without a possible layout the search is an error, with the reason of the first one.
    if not found.plans and not found.too_large:
        if not found.impossible:
            given = ", ".join(f"{axis} {value}" for axis, value in fixed.items()) or "these settings"
            raise UsageError(f"no layout of {job.gpus:,} GPUs has {given}; change one of them")
        raise UsageError(f"{found.impossible[0][1]}; change one of them")

    # What surely fits comes first. Predictions differ from measurements by more than a percent, so of nearly equal
    # layouts the one with fewer axes comes first.
    found.too_large.sort(key=lambda plan: plan.needed)
    found.plans.sort(key=lambda plan: (plan.fit.verdict != "yes", plan.time.seconds * AXIS_COST**plan.layout.axes))
    return found


def _tried(job: Job, machine: Machine, fixed: Mapping[str, Any]) -> Search:
    """Return every layout that has the fixed values, in the order in which they are tried."""
    found = Search([], [], [])
    for layout in candidates(job, machine, fixed):
        reason = refusal(layout, job)
        if reason:
            found.impossible.append((layout, reason))
            continue
        plan = Plan(layout, job, machine)
        (found.plans if plan.fits else found.too_large).append(plan)
    return found


def fits_somehow(job: Job, machine: Machine, fixed: Mapping[str, Any]) -> bool:
    """Return whether `search` would find a layout that fits, of the first `MAX_TRIED` for each part on the host."""
    several = len(list(islice(candidates(job, machine, fixed), 2))) > 1
    return any(
        refusal(layout, job) is None and Plan(layout, job, machine).fits
        for host in CHOICES[: None if several and "host" not in fixed else 1]
        for layout in islice(candidates(job, machine, {"host": host, **fixed}), MAX_TRIED)
    )


def remedies(job: Job, machine: Machine, fixed: Mapping[str, Any]) -> list[str]:
    """Return what makes a layout fit when none does, each as flags of `minidist plan`; each one alone is enough."""
    # What was given and need not be.
    found = []
    for axis in fixed:
        rest = {name: value for name, value in fixed.items() if name != axis}
        if fits_somehow(job, machine, rest if axis == "host" else {"host": "none", **rest}):
            flag = "--offload" if axis == "host" else "--" + axis.replace("_", "-")
            found.append(f"{flag} left out")
    # The host's memory, where it was not searched.
    if "host" not in fixed:
        hosts = (host for host in CHOICES[1:] if fits_somehow(job, machine, {**fixed, "host": host}))
        found += [f"--offload {host}" for host in islice(hosts, 1)]
    # More GPUs. Where every degree is given their number follows from them.
    if not {"dp", "tp", "pp", "cp"} <= set(fixed):
        counts = (job.gpus * 2**doubled for doubled in range(1, 11) if job.gpus * 2**doubled <= MAX_GPUS)
        more = (gpus for gpus in counts if fits_somehow(replace(job, gpus=gpus), machine, fixed))
        found += [f"--ranks {gpus}" for gpus in islice(more, 1)]
    enough = (other for other in larger_gpus(job, machine) if fits_somehow(job, other, fixed))
    return found + [f"--gpu {other.name}" for other in islice(enough, 1)]


def larger_gpus(job: Job, machine: Machine) -> list[Machine]:
    """Return the GPUs with more memory that compute in the job's precision, those with the least memory first.

    They are at least as fast, and so are their links but for a few percent.
    """
    larger = sorted(MACHINES.values(), key=lambda other: other.memory)
    return [
        other
        for other in larger
        if other.memory > machine.memory
        and (job.precision != "fp8" or other.fp8)
        and other.fp16 >= machine.fp16
        and other.link >= 0.95 * machine.link
    ]


# The axes whose use a sentence explains: the field, its value when it is not used, and its name.
EXPLAINED = (
    ("tp", 1, "tensor parallelism"),
    ("pp", 1, "pipeline parallelism"),
    ("cp", 1, "context parallelism"),
    ("ep", 1, "expert parallelism"),
    ("zero", 0, "ZeRO"),
    ("recompute", "none", "recomputation"),
)
TIE = 1.005  # up to this ratio two steps are as fast as each other


def reason_for(best: Plan, plans: list[Plan], fixed: Collection[str] = ()) -> str:
    """Return one sentence: what each axis of the best layout is for, compared with the best layout without it.

    fixed: the axes that were given, about which the search says nothing.
    """
    reason = _compared(best, plans, fixed)
    return reason if best.fit.verdict == "yes" else f"{reason}; it may not fit, because {best.shortage}"


def _compared(best: Plan, plans: list[Plan], fixed: Collection[str]) -> str:
    """Return what the best layout gains by each of its axes."""
    parts, ties = [], []
    for axis, off, words in EXPLAINED:
        if getattr(best.layout, axis) == off or axis in fixed:
            continue
        without = [plan for plan in plans if getattr(plan.layout, axis) == off]
        ratio = without[0].time.seconds / best.time.seconds if without else 0.0
        if not without:
            parts.append(f"without {words} no layout that was tried fits")
        elif ratio < TIE:
            ties.append(words)
        else:
            parts.append(f"without {words} the best takes {ratio:.2f} times as long")
    if parts:
        return "; ".join(parts)
    if ties:
        return (
            f"the best layout without {' or without '.join(ties)} is equally fast; layouts are sorted by step time"
            f" multiplied by {AXIS_COST} per kind of parallelism, and ties keep the order in which they were tried"
        )
    if any(axis in fixed for axis, _, _ in EXPLAINED):
        return f"it is the fastest with what is given; {best.fit.room}"
    return f"data parallelism alone fits, {best.fit.room}, and every other axis adds messages or a bubble"
