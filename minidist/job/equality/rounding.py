"""What rounding does to a job: the tolerance where its precision is below float64 and an axis cuts its sums.

A bound such as 1e-12 needs float64. In 16 bits a sum in another order differs in the third digit, and the difference
grows with each step. So the tolerance is measured, tensor by tensor and step by step, as `compare --theirs` does: one
device trains in the job's precision and one in float64, with the same batches, and their distance gets a margin.

    tolerance of a tensor = MARGIN x the largest of its distance, the distances of the tensors of its kind that are
                            more than rounding, and the error of one rounding

A distance is the norm of the difference over the norm of the tensor in float64. The tensors of a kind share a
tolerance, because Adam's first step is the sign of a gradient, and rounding changes this sign where the gradient is
nearly zero. In which tensor that happens is chance, and in the next step it changes the gradients of all other tensors.
For the same reason the tenth of a weight's elements that differ most is left out, or 8 elements of a short vector. A
tensor whose tolerance is 1 or more, such as the gradient of attention's key bias, is nothing but rounding; it is not
judged, and the verdict counts it.

Proved by: tests/equality/test_rounding.py
"""

from collections.abc import Sequence

import numpy as np

from minidist.core.base.errors import UsageError
from minidist.core.optim.optimizer import MASTER
from minidist.core.parallel.dims import ParallelDims
from minidist.job.config.train_config import TrainConfig
from minidist.job.equality.difference_patterns import distance
from minidist.job.equality.snapshot import Snapshot
from minidist.parallel.fitting_dims import splits_sums
from minidist.techniques import sums_buckets

MARGIN = 8.0  # times the distance between two of our own runs
UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}  # the largest relative error of one rounding
TOLERANCES = "tolerances"  # next to the kinds of a snapshot: "kind/name" -> the tolerance


def is_rounded(config: TrainConfig, dims: ParallelDims) -> bool:
    """Return whether a job is compared within measured rounding."""
    return config.precision != "fp64" and splits_sums(dims) and not sums_buckets(config)


def group_of(kind: str, name: str) -> str:
    """Return the name of the tensors that share a scale; an optimizer's means and squares have one each."""
    return name.rsplit(".", 1)[-1] if kind == "optimizer" else kind


def distance_of(kind: str, name: str, values: np.ndarray, twin: np.ndarray) -> float:
    """Return the distance of a tensor from its twin, of weights without the tenth of the elements that differ most."""
    a, b = values.astype(np.float64).reshape(-1), twin.astype(np.float64).reshape(-1)
    if kind == "weights" or name.endswith(f".{MASTER}"):
        turned = max(a.size // 10, min(8, a.size // 2)) if np.isfinite(a).all() else 0
        kept = np.argsort(np.abs(a - b), kind="stable")[: a.size - turned]
        a, b = a[kept], b[kept]
    return distance(a, b)


def add_tolerances(snapshots: Sequence[Snapshot], precise: Sequence[Snapshot], precision: str) -> None:
    """Add TOLERANCES to the snapshots of one device in `precision`, from those of the same job in float64.

    Raises UsageError when float16 has skipped a step, after which the two train apart.
    """
    for step, (own, exact) in enumerate(zip(snapshots, precise, strict=True)):
        if own["optimizer"]["step_count"] != exact["optimizer"]["step_count"]:
            raise UsageError(
                f"one device skips step {step}, because its gradients overflow in float16, so what rounding does cannot"
                " be measured; give a smaller --loss-scale"
            )
        factor = _factor(own["gradients"], exact["gradients"])
        distances: dict[str, dict[str, float]] = {}
        for kind, tensors in own.items():
            for name, values in tensors.items():
                # The float32 copy of a weight has no counterpart in float64 but the weight itself.
                master = kind == "optimizer" and name.endswith(f".{MASTER}")
                twin = exact["weights"][name.removesuffix(f".{MASTER}")].reshape(-1) if master else exact[kind][name]
                twin = twin * factor if kind == "gradients" else twin
                found = distance_of(kind, name, values, twin)
                distances.setdefault(group_of(kind, name), {})[f"{kind}/{name}"] = found
        # Of each kind the largest distance that is rounding. State is made of gradients.
        of_kind = {
            group: max([UNIT[precision], *(found for found in of_group.values() if found < 1 / MARGIN)])
            for group, of_group in distances.items()
        }
        tolerances: dict[str, np.ndarray] = {}
        for group, of_group in distances.items():
            is_state = group not in (*own, MASTER, "step_count")
            typical = max(of_kind[group], of_kind["gradients"] if is_state else 0.0)
            typical = 0.0 if group == "step_count" else typical
            tolerances |= {name: np.array(MARGIN * max(typical, found)) for name, found in of_group.items()}
        own[TOLERANCES] = tolerances


def _factor(own: dict[str, np.ndarray], exact: dict[str, np.ndarray]) -> float:
    """Return the loss scale times the clip coefficient, which gradients in 16 bits have and the step multiplies in."""
    pairs = [(values.astype(np.float64), exact[name].astype(np.float64)) for name, values in own.items()]
    square = sum(float(np.vdot(twin, twin)) for _, twin in pairs)
    return sum(float(np.vdot(values, twin)) for values, twin in pairs) / square if square else 1.0
