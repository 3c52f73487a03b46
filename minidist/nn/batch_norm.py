"""Batch normalisation as GPipe treats it: statistics of each micro-batch, moving averages of the whole batch.

Batch normalisation looks at all rows of its input, so a step in micro-batches is not the step of the whole batch. GPipe
(Huang et al., 2019) takes each micro-batch's own statistics in training, and for evaluation moving
averages over whole mini-batches. So the gradients of a pipeline, and of data parallelism, equal one device's with the
same micro-batches. The running statistics do, too, up to rounding: `DistributedDataParallel`, `ZeroOptimizer`,
`fully_shard` and `Pipeline` combine those of all ranks at the end of a backward pass or a step, so every rank evaluates
the same model.

Proved by: tests/nn/test_convolution.py, tests/parallel/test_running_statistics.py
"""

from collections.abc import Iterable
from typing import Any

from minidist.base.coordinates import current_coordinates
from minidist.base.limits import check_number
from minidist.core.autograd import Parameter, Tensor, is_grad_enabled
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import is_half, upcast
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import current_purpose
from minidist.core.nn.module import Module
from minidist.nn.ops.batch_norm import Statistics, StatisticsGroup, batch_norm, channel_statistics


def merge_statistics(parts: Iterable[Statistics]) -> Statistics:
    """Return the statistics of the union, from those of the parts: Chan et al., 1979."""
    parts = list(parts)
    rows = sum(count for _, _, count in parts)
    mean: Any = sum(average * count for average, _, count in parts) / rows
    variance: Any = sum((spread + (average - mean) ** 2) * count for average, spread, count in parts) / rows
    return mean, variance, rows


class BatchNorm(Module):
    """Normalises each channel, the second dim: weight and bias (channels,).

    In training by the statistics of the rows it is given. `running_mean`, `running_var` (float64, in the `state_dict`)
    are for evaluation: one step of the moving average (`momentum`) per mini-batch, from the statistics of all its
    micro-batches. Micro-batches are identified by the batch coordinates (step, first sample), so that a replay in
    backward counts once.
    """

    def __init__(
        self, channels: int, momentum: float = 0.1, eps: float = 1e-5, dtype: Any = xp.float32, seed: int | None = 0
    ) -> None:
        self.eps, self.momentum = check_number("eps", eps, above=0), check_number("momentum", momentum)
        if momentum > 1:
            raise UsageError(f"momentum={momentum}; the share of the new statistics must be at most 1")
        self.weight = Parameter(xp.full(channels, 1, dtype), init=("constant", 1.0))
        self.bias = Parameter(xp.zeros(channels, dtype), init=("constant", 0.0))

        self.group: StatisticsGroup | None = None  # ranks that normalise together, see `synchronize`

        # The averages before the current mini-batch, its micro-batches by their first sample, and the averages after.
        self._before = xp.zeros(channels, xp.float64), xp.full(channels, 1, xp.float64)
        self._step: int | None = None
        self._seen: dict[int, Statistics] = {}
        self._after: tuple[xp.Array, xp.Array] | None = self._before  # None: to be computed
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, ...) -> the same shape."""
        # When a pipeline learns the shapes of its messages, replicas may make other passes, and must not wait here.
        if not self.training or (self.group is not None and current_purpose() == "startup"):
            return batch_norm(x, self.weight, self.bias, self.eps, self._computable(*self.running))

        # With a group every training forward sends, also one that is not recorded.
        seen = None
        if self.group is not None or is_grad_enabled():
            seen = channel_statistics(xp.as_array(upcast(x.data), xp.float64))
        if self.group is not None and seen is not None:
            seen = self.group.merge(seen)

        # A recorded forward counts once per micro-batch; a new step begins a new mini-batch.
        if seen is not None and is_grad_enabled():
            place = current_coordinates("batch normalisation in training")
            if place.step != self._step:
                self._before, self._seen, self._step = self.running, {}, place.step
            self._seen[place.sample_offset] = seen
            self._after = None

        # Normalise by the statistics of these rows alone, as GPipe does; or by those of the rows of all ranks.
        if self.group is None or seen is None:
            return batch_norm(x, self.weight, self.bias, self.eps)
        return batch_norm(x, self.weight, self.bias, self.eps, self._computable(*seen[:2]), self.group, seen[2])

    def synchronize(self, group: StatisticsGroup) -> None:
        """Normalise in training by the statistics of the rows of all ranks of `group` (SyncBatchNorm)."""
        self.group = group

    def _computable(self, mean: xp.Array, variance: xp.Array) -> tuple[xp.Array, xp.Array]:
        """Return statistics in the dtype in which the node computes: float32 for half precision."""
        dtype = xp.float32 if is_half(self.weight.dtype) else self.weight.dtype
        return xp.as_array(mean, dtype), xp.as_array(variance, dtype)

    @property
    def running(self) -> tuple[xp.Array, xp.Array]:
        """(mean, variance) for evaluation, of all micro-batches so far; each of shape (channels,)."""
        if self._after is None:
            self._after = self._average(merge_statistics(self._seen[offset] for offset in sorted(self._seen)))
        return self._after

    def _average(self, statistics: Statistics) -> tuple[xp.Array, xp.Array]:
        """Return the moving averages after a mini-batch; the variance is unbiased, as in PyTorch."""
        mean, variance, rows = statistics
        old_mean, old_variance = self._before
        return (
            (1 - self.momentum) * old_mean + self.momentum * mean,
            (1 - self.momentum) * old_variance + self.momentum * variance * rows / max(rows - 1, 1),
        )

    # --- what a strategy does with the statistics of several ranks ---

    def mini_batch(self) -> Statistics | None:
        """Return the statistics of this rank's micro-batches of the current step; None without any."""
        return merge_statistics(self._seen[offset] for offset in sorted(self._seen)) if self._seen else None

    def take_mini_batch(self, statistics: Statistics) -> None:
        """Let the current mini-batch be one of these statistics: that of all ranks."""
        self._after = self._average(statistics)

    # --- in the state_dict ---

    def own_buffers(self) -> dict[str, xp.Array]:
        """The running statistics."""
        return dict(zip(("running_mean", "running_var"), self.running, strict=True))

    def load_buffers(self, values: dict[str, xp.Array]) -> None:
        """Begin anew with these running statistics; what was seen since the last step is forgotten."""
        mean, variance = self.running
        self._before = self._after = values.get("running_mean", mean), values.get("running_var", variance)
        self._step, self._seen = None, {}
