"""`--noise-scale`: how large a batch would be worth its samples, measured beside training (parallel/noise_scale.py).

A rank's own gradient is looked at before it is summed, everybody's after it; one number of 8 B is all-reduced a step.
The weights do not notice.
"""

from math import isfinite

from minidist.parallel.noise_scale import LocalGradient, NoiseScale, step_estimate
from minidist.train.strategies.base import Strategy
from minidist.train.strategies.data_axes import Replicated


class NoiseMeter:
    """Measures every step of a data-parallel strategy."""

    def __init__(self, strategy: Strategy) -> None:
        (axis,) = strategy.data_axes
        assert isinstance(axis, Replicated)
        self.comm, self.flat, self.batch = axis.parallel.comm, axis.flats[0], strategy.job.batches.global_batch
        self.local, self.scale = LocalGradient(axis.parallel.reducer), NoiseScale()

    def measure(self) -> None:
        """Between backward and the step: the gradients are whole and nobody has clipped them."""
        self.scale.add(step_estimate(self.comm, self.local.take(), self.flat.grad, self.batch))

    def result(self) -> dict[str, float | None]:
        """Averages over the last steps: |G|^2, tr(Sigma), and their ratio in samples (None: |G|^2 is lost in the
        noise).
        """
        simple = self.scale.simple
        return {
            "samples": simple if isfinite(simple) else None,
            "gradient_square": self.scale.gradient,
            "noise": self.scale.noise,
        }
