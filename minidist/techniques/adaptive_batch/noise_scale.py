"""The gradient noise scale: how large a batch should be, measured from the gradients of two batch sizes.

The gradient of a batch of B samples is the true one, G, plus noise of covariance Sigma / B. So its squared length is,
on average, |G|^2 + tr(Sigma) / B: a line in 1/B, and two batches of different size give both of its numbers.

    small batch   a rank's own rows           E |g|^2 = |G|^2 + tr(Sigma) / small
    big batch     all ranks' rows together    E |g|^2 = |G|^2 + tr(Sigma) / big

Data parallelism has both at hand: a rank's gradient before the all-reduce, and the whole one after it. The simple
noise scale tr(Sigma) / |G|^2 is the batch size at which noise and gradient are of equal length: below it, more samples
per step pay; above it, they are mostly wasted. Both estimates are unbiased but their ratio is not, so numerator and
denominator are averaged separately.

Where a replica is cut by tensor parallelism or a pipeline, or the sum by ZeRO 1, a rank has the squares of its shards,
and these are added over the ranks; each element of a gradient is counted on one rank. `NoiseMeter` measures the steps
of a job: the squares of a replica's own gradient are summed before it is reduced, those of the whole gradient
afterwards, and per step one number of 8 B is all-reduced, or two over all ranks where gradients are sharded. The
weights do not change.

Source: McCandlish et al., An empirical model of large-batch training, 2018, section 2.2 and appendix A.1.
Proved by: tests/techniques/test_noise_estimate.py, tests/techniques/test_noise_scale.py
"""

from collections.abc import Collection, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.base.arrays import Array
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.parallel.data_parallel import Bucket, GradientReducer
from minidist.core.parallel.dims import ParallelDims
from minidist.data import Shares

DECAY = 0.95


class Estimate(NamedTuple):
    """Unbiased estimates of |G|^2 and tr(Sigma) from one step; a single one can be negative."""

    gradient: float
    noise: float


def estimate(small: float, small_square: float, big: int, big_square: float) -> Estimate:
    """Return the estimate from |g|^2 of a batch of `small` samples (or the mean over several) and of one of `big`."""
    if not 0 < small < big:
        raise UsageError(
            f"the noise scale needs two batch sizes, the first one smaller; got {small:g} and {big} samples"
        )
    # The line E |g|^2 = gradient + noise / B through the two points.
    return Estimate(
        (big * big_square - small * small_square) / (big - small), (small_square - big_square) / (1 / small - 1 / big)
    )


class NoiseScale:
    """An exponential moving average of the estimates: at each step the older ones count `DECAY` times as much."""

    def __init__(self) -> None:
        self.weight = self._gradient = self._noise = 0.0

    def add(self, step: Estimate) -> None:
        """Add the estimates of a step to the averages."""
        # The weights 1, DECAY, DECAY^2, ... are summed, too, so that the first averages are not too small.
        self.weight = DECAY * self.weight + 1
        self._gradient = DECAY * self._gradient + step.gradient
        self._noise = DECAY * self._noise + step.noise

    def state(self) -> list[float]:
        """Return what `load` takes."""
        return [self.weight, self._gradient, self._noise]

    def load(self, state: Sequence[float]) -> None:
        """Continue with the averages of another one."""
        self.weight, self._gradient, self._noise = state

    @property
    def gradient(self) -> float:
        """The average estimate of |G|^2."""
        return self._gradient / self.weight if self.weight else 0.0

    @property
    def noise(self) -> float:
        """The average estimate of tr(Sigma)."""
        return self._noise / self.weight if self.weight else 0.0

    @property
    def simple(self) -> float:
        """tr(Sigma) / |G|^2 in samples; infinite while no gradient can be told from the noise."""
        return max(0.0, self._noise) / self._gradient if self._gradient > 0 else inf


class LocalGradient:
    """Adds up the squares of each bucket before it is reduced: |g|^2 of a rank's own rows, without a message.

    `LocalGradient(ddp.reducer)` wraps the reducer's communication; construct it after registering a hook. skip:
    parameters that another rank counts, because both hold the same values.
    """

    def __init__(self, reducer: GradientReducer, skip: Collection[Parameter] = ()) -> None:
        self.square, self.skip = 0.0, set(skip)
        self._send, reducer.send = reducer.send, self._square_and_send  # type: ignore[method-assign]

    def _square_and_send(self, bucket: Bucket) -> Any:
        if self.skip.isdisjoint(bucket.parameters):
            self.square += square(bucket.buffer)
        else:
            start, flat = bucket.slice.start, bucket.flat
            for place in (flat.slice_of(p) for p in bucket.parameters if p not in self.skip):
                self.square += square(bucket.buffer[place.start - start : place.stop - start])
        return self._send(bucket)

    def take(self) -> float:
        """Return the sum since the last call."""
        result, self.square = self.square, 0.0
        return result


def square(array: Array) -> float:
    """Return the sum of squares, in float64."""
    # float64, because the estimates are small differences of large sums.
    upcast = array.reshape(-1).astype("float64")
    return float(upcast @ upcast)


def step_estimate(squares: float, big_square: float, shares: Shares) -> Estimate:
    """Return the estimate of a step in which replica r had b_r = sum(shares.rows[r]) of the batch's B rows.

    squares: the sum over the replicas of |g|^2 of their own gradients, each of which is b_r / B of that of its rows. So
    it has the mean s |G|^2 + tr(Sigma) / B, with s = sum b_r^2 / B^2; divided by s it is that of a batch of s B
    samples. big_square: |g|^2 of the whole batch.
    """
    batch, n = shares.samples, len(shares.rows)
    if shares.is_even:
        # The mean over the replicas of |g|^2 of a replica's own rows.
        return estimate(batch // n, squares / n * n**2, batch, big_square)
    s = sum(sum(rows) ** 2 for rows in shares.rows) / batch**2
    return estimate(s * batch, squares / s, batch, big_square)


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
        strategy, axes = self.strategy, self.strategy.axes
        squares, comm = [float(sum(part.take() for part in self.locals))], axes.data
        if self.sharded:
            # Replicas of the sum count on the first of them; ZeRO 1 has none.
            mine = sum(
                square(shard.values)
                for axis in strategy.data_axes
                for shard in axis.gradient_shards()
                if (axis.shards or axes.data.rank == 0) and self._counts(axis, shard.parameter)
            )
            squares, comm = [*squares, float(mine)], axes.comm
        with purpose("metrics"):
            squares = all_reduce(comm, np.array(squares), algorithm="ordered").tolist()
        if not self.sharded:
            # One data axis, with one flat array that every rank has whole.
            ((flat,),) = (axis.flats for axis in strategy.data_axes)
            squares.append(square(flat.grad))
        own, whole = squares
        self.scale.add(step_estimate(own, whole, strategy.job.batch.shares))

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
