"""Batch normalisation as GPipe treats it: statistics of each micro-batch, moving averages of the whole batch.

Batch normalisation looks at all rows of its input, so a step in micro-batches is not the step of the whole batch. GPipe
(Huang et al., 2019, section 3.2) takes each micro-batch's own statistics in training, and for evaluation moving
averages over whole mini-batches. So the gradients of a pipeline equal one device's with the same micro-batches; the
running statistics are not part of that equality.

Proved by: tests/nn/test_convolution.py
"""

from typing import Any

from minidist.autograd import Parameter, Tensor, is_grad_enabled
from minidist.autograd.batch_norm import batch_norm, channel_statistics
from minidist.base import arrays as xp
from minidist.base.half import upcast
from minidist.base.random import current_coordinates
from minidist.nn.module import Module


class BatchNorm(Module):
    """Normalises each channel, the second dim: weight and bias (channels,).

    In training by the statistics of the rows it is given. `running`: (mean, variance) for evaluation: one step of the
    moving average (`momentum`) per mini-batch, from the statistics of all its micro-batches. Micro-batches are
    identified by the batch coordinates (step, first sample), so that a replay in backward counts once.
    """

    def __init__(
        self, channels: int, momentum: float = 0.1, eps: float = 1e-5, dtype: Any = xp.float32, seed: int | None = 0
    ) -> None:
        self.eps, self.momentum = eps, momentum
        self.weight = Parameter(xp.ones(channels, dtype), init=("constant", 1.0))
        self.bias = Parameter(xp.zeros(channels, dtype), init=("constant", 0.0))
        self.average, self.spread = xp.zeros(channels, xp.float64), xp.ones(channels, xp.float64)
        self._step = 0
        self._seen: dict[int, tuple[xp.Array, xp.Array, int]] = {}  # first sample -> statistics of its micro-batch
        if seed is not None:
            self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, ...) -> the same shape."""
        if not self.training:
            mean, variance = self.running
            return batch_norm(
                x,
                self.weight,
                self.bias,
                self.eps,
                (xp.as_array(mean, self.weight.dtype), xp.as_array(variance, self.weight.dtype)),
            )

        # A recorded forward counts once per micro-batch; a new step first folds the mini-batch before into the
        # averages.
        if is_grad_enabled():
            place = current_coordinates()
            if place.step != self._step:
                self._fold()
                self._step = place.step
            self._seen[place.sample_offset] = channel_statistics(xp.as_array(upcast(x.data), xp.float64))

        # Normalise by the statistics of these rows alone, as GPipe does.
        return batch_norm(x, self.weight, self.bias, self.eps)

    @property
    def running(self) -> tuple[xp.Array, xp.Array]:
        """(mean, variance) for evaluation, of all mini-batches so far; each of shape (channels,)."""
        self._fold()
        return self.average, self.spread

    def _fold(self) -> None:
        """Do one step of the moving average with the micro-batches seen; the variance is unbiased, as in PyTorch."""
        if not self._seen:
            return
        parts = [self._seen[offset] for offset in sorted(self._seen)]
        self._seen = {}

        # The statistics of the union, from those of the parts: Chan et al., 1979.
        rows = sum(count for _, _, count in parts)
        mean = sum(average * count for average, _, count in parts) / rows
        variance = sum((spread + (average - mean) ** 2) * count for average, spread, count in parts) / max(rows - 1, 1)
        self.average = (1 - self.momentum) * self.average + self.momentum * mean
        self.spread = (1 - self.momentum) * self.spread + self.momentum * variance
