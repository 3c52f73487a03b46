"""Does the parallel job equal one device, in every loss, gradient, weight and optimizer state of every step and rank?

Four tiers, always named:
  exact     integer-valued data: no rounding anywhere, so `array_equal` whatever the order (tests only);
  ordered   bit for bit, on any data, with --reduction ordered: the order of additions is declared and the same;
  float     any order of additions (--reduction ring, tensor, context and expert parallelism), float64:
            |a - b| <= 1e-12 max(1, max |b|) for loss and weights, and 1e-12 of the model's largest entry of that kind
            for gradients and optimizer state;
  rounding  tensor, context and expert parallelism in float32, bfloat16 and float16: within 8 times what rounding does
            to the job on one device (rounding.py).

Proved by: tests/equality/test_equality.py, tests/equality/test_rounding.py, tests/train/test_axes.py
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from minidist.comm.communicator import recv_object, send_object
from minidist.core.base.arrays import Array
from minidist.core.base.errors import UsageError
from minidist.core.comm import Comm
from minidist.core.parallel.dims import ParallelDims
from minidist.data.batch_plan import StepBatch
from minidist.job.config.train_config import TrainConfig, resolve_dims
from minidist.job.equality.difference_patterns import not_finite, not_finite_on_both
from minidist.job.equality.expected import expected_snapshots
from minidist.job.equality.rounding import MARGIN, TOLERANCES, distance_of, group_of, is_rounded
from minidist.job.equality.snapshot import KINDS, Snapshot, snapshot
from minidist.job.train.state import Observer, StepState
from minidist.job.train.trainer import train
from minidist.parallel import fitting_dims
from minidist.techniques import changes_batches, joins_replicas, of_job, own_loop, sums_buckets, weight_differences

FLOAT_BOUND = 1e-12
FLOAT_STEPS = 5
ONE_DEVICE = "one device"


@dataclass
class Comparison:
    """The verdict. `max_difference` by kind; `first_difference` names the first tensor beyond its bound, or is None."""

    tier: str
    bound: float
    equal: bool = True
    max_difference: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    first_difference: str | None = None
    tensors: int = 0
    steps: int = 0
    ranks: int = 0
    losses: list[float] = field(default_factory=list)
    reference_losses: list[float] = field(default_factory=list)
    weight_differences: list[float] = field(default_factory=list)  # largest |difference| of a weight, per step
    twin: str = ONE_DEVICE  # what the ranks are compared with
    share: float = 0.0  # in the rounding tier: the largest distance of a tensor, as a share of its tolerance
    unjudged: int = 0  # in the rounding tier: tensors that are nothing but rounding
    not_finite: int = 0  # tensors with infinities or NaN, at the same places on both sides
    first_not_finite: str = ""

    def as_dict(self) -> dict[str, object]:
        """Return the dictionary that `--json` prints."""
        kept = asdict(self)
        if self.tier != "rounding":
            del kept["share"], kept["unjudged"]
        if self.twin == ONE_DEVICE:
            del kept["twin"]
        if not self.not_finite:
            del kept["not_finite"], kept["first_not_finite"]
        return kept

    def sentence(self) -> str:
        """Return the verdict as a sentence."""
        largest = max(self.max_difference.values())
        bound = "bit for bit" if self.bound == 0 else f"within {self.bound:g}"
        limit = f"bound {self.bound:g}"
        after = f"largest difference {largest:g}"
        if self.tier == "rounding":
            bound = "within rounding"
            limit = f"{MARGIN:g} times the distance of one device in this precision from one device in float64"
            after = (
                f"largest distance {self.share:.2g} of the tolerance, which is {limit}; {self.unjudged} tensors that"
                " are nothing but rounding are not judged"
            )
        if self.not_finite:
            after += f"; {not_finite_on_both(self.not_finite, self.first_not_finite)}"
        if self.equal:
            return (
                f"equal: {self.ranks} ranks and {self.twin} agree {bound} ({self.tier} tier) in {self.tensors} tensors"
                f" over {self.steps} steps; {after}"
            )
        to = "" if self.twin == ONE_DEVICE else f" to {self.twin}"
        return f"NOT equal{to} ({self.tier} tier, {limit}): {self.first_difference}; largest difference {largest:g}"


def scales_of(kind: str, expected: dict[str, Array]) -> dict[str, float]:
    """Return the largest entry of each group, which bounds differences; 0 for a counter, which must be equal."""
    scales: dict[str, float] = {}
    for name, values in expected.items():
        group = group_of(kind, name)
        largest = float(np.max(np.abs(values))) if values.size and name != "step_count" else 0.0
        scales[group] = max(scales.get(group, 0.0), largest)
    return scales


def is_of_weights(kind: str, name: str) -> bool:
    """Return whether a tensor is rounded as weights are: the loss, the weights, and what is a difference of weights."""
    return kind in ("loss", "weights") or (kind == "optimizer" and group_of(kind, name) in weight_differences())


class Judge:
    """Compares the states of one rank with the reference's snapshots, step by step; an observer of training.

    twin: what the reference is, in words.
    """

    def __init__(self, expected: list[Snapshot], tier: str, twin: str = ONE_DEVICE) -> None:
        self.expected = expected
        self.verdict = Comparison(tier, FLOAT_BOUND if tier == "float" else 0.0, twin=twin)
        self.tolerances: dict[str, Array] = {}  # of the step, in the rounding tier

    def __call__(self, state: StepState) -> None:
        self.judge(snapshot(state), state.step, state.rank)

    def judge(self, actual: Snapshot, step: int, rank: int) -> None:
        """Compare all tensors of a step with the expected ones."""
        verdict, expected = self.verdict, self.expected[step]
        verdict.steps = step + 1
        verdict.losses.append(float(actual["loss"]["loss"]))
        verdict.reference_losses.append(float(expected["loss"]["loss"]))
        verdict.weight_differences.append(0.0)
        self.compare(actual, expected, step, rank)

    def compare(self, actual: Snapshot, expected: Snapshot, step: int, rank: int) -> None:
        """Compare every tensor of `actual` with the expected one; both must have the same names."""
        self.tolerances = expected.get(TOLERANCES, {})
        for kind, tensors in actual.items():
            wanted = expected[kind]
            # A tensor that one side does not have is a difference, too.
            if set(tensors) != set(wanted):
                name = sorted(set(tensors) ^ set(wanted))[0]
                self.differs(f"{kind}: {name!r} exists on one side only (rank {rank})")
            scales = scales_of(kind, wanted)
            for name, values in tensors.items():
                if name in wanted:
                    self._compare_tensor(kind, name, values, wanted[name], scales[group_of(kind, name)], step, rank)

    def _keep_largest(self, kind: str, difference: float) -> None:
        """Keep a difference if it is the largest of its kind, and of the weights if it is the largest of the step."""
        verdict = self.verdict
        verdict.max_difference[kind] = max(verdict.max_difference[kind], difference)
        if kind == "weights" and verdict.weight_differences:
            verdict.weight_differences[-1] = max(verdict.weight_differences[-1], difference)

    def _compare_tensor(
        self, kind: str, name: str, actual: Array, expected: Array, scale: float, step: int, rank: int
    ) -> None:
        verdict = self.verdict
        verdict.tensors += 1
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            self.differs(
                f"{kind}: {name!r} is {actual.dtype}{list(actual.shape)}, expected"
                f" {expected.dtype}{list(expected.shape)}"
            )
            return

        # Equal bits need no bound; otherwise the largest difference in float64 is judged.
        same = np.array_equal(actual, expected, equal_nan=True)
        place = not_finite(actual, expected) if actual.dtype.kind in "fc" else ""
        if place and same:
            # An overflow of float16, which both runs skip, or a bug that both have: it is said.
            verdict.not_finite += 1
            verdict.first_not_finite = verdict.first_not_finite or f"{kind}: of {name!r} at step {step}, {place}"
        elif place:
            verdict.max_difference[kind] = float("inf")
            self.differs(f"{kind}: of {name!r} at step {step} on rank {rank}, {place}".replace("ours", "one device's"))
            return
        difference = 0.0 if same else float(np.max(np.abs(actual.astype(np.float64) - expected.astype(np.float64))))
        self._keep_largest(kind, difference)
        if verdict.tier == "rounding":
            self._judge_rounding(kind, name, actual, expected, step, rank)
            return

        if not same and is_of_weights(kind, name):
            scale = max(1.0, float(np.max(np.abs(expected))))
        if not same and not difference <= verdict.bound * scale:
            self.differs(f"{kind}: {name!r} at step {step} on rank {rank} differs by {difference:.3g}")

    def _judge_rounding(self, kind: str, name: str, actual: Array, expected: Array, step: int, rank: int) -> None:
        verdict, tolerance = self.verdict, float(self.tolerances[f"{kind}/{name}"])
        if np.array_equal(actual, expected, equal_nan=True):
            return
        if not tolerance < 1 and name != "step_count":
            verdict.unjudged += 1
            return
        found = distance_of(kind, name, actual, expected)
        verdict.bound = max(verdict.bound, tolerance)
        verdict.share = max(verdict.share, found / tolerance if tolerance else 0.0)
        if not found <= tolerance:
            self.differs(
                f"{kind}: {name!r} at step {step} on rank {rank} has the distance {found:.2g}, its tolerance is"
                f" {tolerance:.2g}"
            )

    def differs(self, reason: str) -> None:
        """Make the verdict "not equal"; the first reason is kept."""
        self.verdict.equal = False
        if self.verdict.first_difference is None:
            self.verdict.first_difference = reason


def tier_of(config: TrainConfig, dims: ParallelDims) -> str:
    """Return the tier that applies to a job; raise UsageError when none does."""
    for extension in of_job(config):
        extension.check_comparison(config, dims, _cut(config, dims) if splits_sums(config, dims) else "")
    # A technique that sums buckets itself adds them in a declared order in any case.
    if sums_buckets(config):
        return "ordered"

    # The order of all additions is declared.
    if config.reduction == "ordered" and not splits_sums(config, dims):
        return "ordered"

    # Otherwise rounding differs: float64 leaves room to tell it from a mistake, other precisions need a measure of it,
    # and what jumps with a last bit has none.
    rounded = is_rounded(config, dims)
    _check_rounding(config, dims, rounded)
    if not rounded:
        _check_tiny_squares(config)
    return "rounding" if rounded else "float"


def _check_rounding(config: TrainConfig, dims: ParallelDims, rounded: bool) -> None:
    """Raise UsageError where no bound holds for what rounding does. rounded: the tier that measures it applies."""
    choosing = ["--experts"] * (config.experts > 0)
    choosing += [extension.jumps for extension in of_job(config) if extension.jumps]
    if rounded and choosing:
        raise UsageError(
            f"{_cut(config, dims)}, and {choosing[0]} makes another choice where a number differs in its last bit, so"
            f" that in {config.precision} no tolerance can be measured; compare it in the float tier with"
            " --precision fp64"
        )
    if config.precision != "fp64" and not rounded:
        otherwise = "" if splits_sums(config, dims) else ", or use --reduction ordered"
        raise UsageError(
            f"{_cut(config, dims)}, so bits differ from one device's: compare it in the float tier with --precision"
            f" fp64{otherwise}"
        )
    if config.steps > FLOAT_STEPS:
        raise UsageError(
            f"the {'rounding' if rounded else 'float'} tier holds for at most {FLOAT_STEPS} steps (rounding grows from"
            f" step to step); use --steps {FLOAT_STEPS}"
        )


def _check_tiny_squares(config: TrainConfig) -> None:
    """Raise UsageError for an optimizer that magnifies the rounding of a gradient that is truly zero."""
    # Adagrad's and RMSProp's eps is 1e-10 or smaller, Adam's is 1e-8; L2 decay mixes the rounding into Adam's square.
    eps = config.optional("eps")
    small = eps is not None and eps < 1e-8 and config.optimizer not in ("sgd", "lars")
    magnifies = (
        small or config.optimizer in ("adagrad", "rmsprop") or (config.optimizer == "adam" and config.weight_decay)
    )
    if config.model == "gpt" and magnifies:
        flag = f" with --eps {eps:g}" if small else " with --weight-decay" if config.weight_decay else ""
        raise UsageError(
            f"--optimizer {config.optimizer}{flag} divides by the root of tiny squares, so the rounding of a gradient"
            " that is truly zero (attention's key bias) grows to a visible step: the float tier is stated for sgd,"
            " adamw, and adam without decay, and an --eps of at least 1e-8; take one of them, or --reduction ordered"
            " where no axis cuts sums"
        )


def float_tier_settings(config: TrainConfig, dims: ParallelDims, given: Collection[str]) -> tuple[dict[str, Any], str]:
    """Return what a job of the float tier needs in place of defaults, and why; nothing for a job of another tier.

    given: the settings that the user chose; they stay, and `tier_of` refuses those with which no tier holds.
    """
    if (
        own_loop(config) is not None
        or sums_buckets(config)
        or (config.reduction == "ordered" and not splits_sums(config, dims))
    ):
        return {}, ""
    chosen: dict[str, Any] = {}
    if "precision" not in given and config.precision != "fp64":
        chosen["precision"] = "fp64"
    if "steps" not in given and config.steps > FLOAT_STEPS:
        chosen["steps"] = FLOAT_STEPS
    where = "in float64 " if "precision" in chosen or config.precision == "fp64" else ""
    return chosen, f"{_cut(config, dims)}, and equality to rounding shows {where}over at most {FLOAT_STEPS} steps"


def twin_of(config: TrainConfig, dims: ParallelDims) -> str:
    """Return what a job is compared with: one device, and how it differs from the plain job on one device.

    The capacity of experts is a number of tokens per routed group, and each context-parallel rank routes its own.
    """
    if dims.cp == 1 or not config.experts:
        return ONE_DEVICE
    return f"{ONE_DEVICE} that routes the tokens of each of the {dims.cp} context-parallel ranks by themselves"


def splits_sums(config: TrainConfig, dims: ParallelDims) -> bool:
    """Return whether a sum inside a micro-batch lies on several ranks, so that its order is not one device's."""
    return fitting_dims.splits_sums(dims) or (dims.dp > 1 and bool(joins_replicas(config)))


def _cut(config: TrainConfig, dims: ParallelDims) -> str:
    """Return why additions of a job in the float tier have another order than one device's."""
    if not splits_sums(config, dims):
        order = "the ring's order" if config.reduction == "ring" else "an order that differs from one device's"
        return f"--reduction {config.reduction} adds in {order}"
    if not fitting_dims.splits_sums(dims):
        return f"{joins_replicas(config)} adds the rows of all ranks inside a micro-batch"
    axes = (("tp", dims.tp), ("cp", dims.cp), ("ep", dims.ep))
    return next(f"--{name} {degree} cuts the sums inside a micro-batch" for name, degree in axes if degree > 1)


def compare_rank(
    comm: Comm,
    config: TrainConfig,
    expected: list[Snapshot] | None = None,
    observers: Sequence[Observer] = (),
    of_reference: Sequence[Observer] = (),
) -> Comparison:
    """Train on this rank and compare every step; every rank returns the worst verdict of all ranks.

    Without `expected` each rank computes the reference itself, with the observers `of_reference`. Verdicts (pickled, a
    few hundred bytes) are sent to rank 0 and back.
    """
    dims = resolve_dims(config, comm.size)
    tier, twin = tier_of(config, dims), twin_of(config, dims)
    # Where the ranks choose their batches while they train, one device is told them afterwards.
    if expected is None and changes_batches(config):
        told: list[StepBatch] = []
        kept: list[Snapshot] = []

        def keep(state: StepState) -> None:
            told.append(state.job.batch)
            kept.append(snapshot(state))

        train(comm, config, [keep, *observers])
        judge = Judge(expected_snapshots(config, comm.size, comm.rank, of_reference, told), tier, twin)
        for step, actual in enumerate(kept):
            judge.judge(actual, step, comm.rank)
        return _worst(comm, judge.verdict)

    # The observer compares at the end of every step, while the gradients are still there.
    judge = Judge(
        expected if expected is not None else expected_snapshots(config, comm.size, comm.rank, of_reference), tier, twin
    )
    train(comm, config, [judge, *observers])
    return _worst(comm, judge.verdict)


def _worst(comm: Comm, mine: Comparison) -> Comparison:
    """Return, on every rank, the first verdict that is not equal, with the largest differences of all ranks."""
    if comm.rank == 0:
        verdicts: list[Comparison] = [mine, *(recv_object(comm, rank) for rank in range(1, comm.size))]
        # The first rank that differs gives the verdict, with the largest differences of all.
        differing = [v for v in verdicts if not v.equal]
        worst = differing[0] if differing else verdicts[0]
        worst.max_difference = {kind: max(v.max_difference[kind] for v in verdicts) for kind in KINDS}
        # A rank outside of the layout has no weights to compare.
        trained = [v.weight_differences for v in verdicts if v.steps]
        worst.weight_differences = [max(step) for step in zip(*trained, strict=True)]
        worst.tensors, worst.ranks = sum(v.tensors for v in verdicts), comm.size
        for rank in range(1, comm.size):
            send_object(comm, worst, rank)
        return worst
    send_object(comm, mine, 0)
    worst_of_all: Comparison = recv_object(comm, 0)
    return worst_of_all
