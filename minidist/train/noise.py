"""`--noise-scale`: how large a batch would be worth its samples, measured beside training (parallel/noise_scale.py).

The squares of a rank's own gradient are summed before it is reduced, those of the whole gradient afterwards; per step
one number of 8 B is all-reduced. The weights do not change.

Proved by: tests/train/test_noise_scale.py
"""

from math import isfinite

from minidist.parallel.noise_scale import LocalGradient, NoiseScale, step_estimate
from minidist.train.strategies.mesh import MeshStrategy


class NoiseMeter:
    """Measures every step of data parallelism without other axes."""

    def __init__(self, strategy: MeshStrategy) -> None:
        # Without other axes there is one data axis, with one flat array and one reducer.
        (axis,) = strategy.data_axes
        (self.flat,), (reducer,) = axis.flats, axis.reducers
        self.comm, self.batch = strategy.axes.data, strategy.job.batches.global_batch
        self.local, self.scale = LocalGradient(reducer), NoiseScale()

    def measure(self) -> None:
        """Add a step's estimate; called between backward and clipping, when the gradients are summed."""
        self.scale.add(step_estimate(self.comm, self.local.take(), self.flat.grad, self.batch))

    def result(self) -> dict[str, float | None]:
        """Return averages over steps: |G|^2, tr(Sigma), and their ratio in samples (None: |G|^2 is lost in noise)."""
        simple = self.scale.simple
        return {
            "samples": simple if isfinite(simple) else None,
            "gradient_square": self.scale.gradient,
            "noise": self.scale.noise,
        }
