"""`--noise-scale`: how large a batch would be worth its samples, measured in addition to training (noise_scale.py).

The squares of a replica's own gradient are summed before it is reduced, those of the whole gradient afterwards; per
step one number of 8 B is all-reduced, or two over all ranks where gradients are sharded. The weights do not change.

Proved by: tests/techniques/test_noise_scale.py
"""

from math import isfinite
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.parallel.dims import ParallelDims
from minidist.techniques.adaptive_batch.noise_scale import (
    LocalGradient,
    NoiseScale,
    sharded_estimate,
    square,
    step_estimate,
)


class NoiseMeter:
    """Measures every step of data parallelism, also of replicas that are cut over ranks."""

    def __init__(self, strategy: Any, scale: NoiseScale) -> None:
        job, self.strategy, self.scale = strategy.job, strategy, scale
        self.sharded = shards_gradients(job.config.zero, strategy.axes.dims)
        # What tensor-parallel ranks or stages both have is counted once.
        self.locals = [
            LocalGradient(reducer, [p for p in axis.parameters if not self._counts(axis, p)])
            for axis in strategy.data_axes
            for reducer in axis.reducers
        ]

    def _counts(self, axis: Any, parameter: Parameter) -> bool:
        return self.strategy.owns(axis, parameter) and not self.strategy.replica_of(axis, parameter).number

    def measure(self) -> None:
        """Add a step's estimate; called between backward and clipping, when the gradients are summed."""
        axes, local = self.strategy.axes, sum(part.take() for part in self.locals)
        shares = self.strategy.job.batch.shares
        batch, uneven = shares.samples, None if shares.is_even else [sum(rows) for rows in shares.rows]
        if not self.sharded:
            # One data axis, with one flat array that every rank has whole.
            ((flat,),) = (axis.flats for axis in self.strategy.data_axes)
            self.scale.add(step_estimate(axes.data, local, flat.grad, batch, shares=uneven))
            return

        # Replicas of the sum count on the first of them; ZeRO 1 has none.
        mine = sum(
            square(shard.values)
            for axis in self.strategy.data_axes
            for shard in axis.gradient_shards()
            if (axis.shards or axes.data.rank == 0) and self._counts(axis, shard.parameter)
        )
        self.scale.add(sharded_estimate(axes.comm, axes.data.size, local, mine, batch, shares=uneven))

    def result(self) -> dict[str, float | None]:
        """Return averages over steps: |G|^2, tr(Sigma), and their ratio in samples (None: |G|^2 is lost in noise)."""
        simple = self.scale.simple
        return {
            "samples": simple if isfinite(simple) else None,
            "gradient_square": self.scale.gradient,
            "noise": self.scale.noise,
        }


def shards_gradients(zero: int, dims: ParallelDims) -> bool:
    """Return whether a replica's gradient, or the sum of all, is cut over ranks."""
    return zero > 0 or dims.ranks > dims.dp
