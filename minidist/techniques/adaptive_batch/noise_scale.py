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
and these are added over the ranks (`sharded_estimate`). `NoiseMeter` measures the steps of a job: the squares of a
replica's own gradient are summed before it is reduced, those of the whole gradient afterwards, and per step one number
of 8 B is all-reduced, or two over all ranks where gradients are sharded. The weights do not change.

Source: McCandlish et al., An empirical model of large-batch training, 2018, section 2.2 and appendix A.1.
Proved by: tests/techniques/test_noise_estimate.py, tests/techniques/test_noise_scale.py
"""

from collections.abc import Collection, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np

from minidist.base.limits import check_number
from minidist.core.autograd import Parameter
from minidist.core.base.arrays import Array
from minidist.core.base.errors import UsageError
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.core.parallel.data_parallel import Bucket, GradientReducer
from minidist.core.parallel.dims import ParallelDims


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
    """An exponential moving average of the estimates: at each step the older ones count `decay` times as much."""

    def __init__(self, decay: float = 0.95) -> None:
        self.decay = check_number("decay", decay, below=1)
        self.weight = self._gradient = self._noise = 0.0

    def add(self, step: Estimate) -> None:
        """Add the estimates of a step to the averages."""
        # The weights 1, decay, decay^2, ... are summed, too, so that the first averages are not too small.
        self.weight = self.decay * self.weight + 1
        self._gradient = self.decay * self._gradient + step.gradient
        self._noise = self.decay * self._noise + step.noise

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


def step_estimate(
    comm: Comm,
    local_square: float,
    gradient: Array,
    batch: int,
    reduction: str = "sum",
    shares: Sequence[int] | None = None,
) -> Estimate:
    """Return the estimate of a data parallel step on `batch` samples, the same on every rank.

    local_square: `LocalGradient.take()`. gradient: the reduced one. reduction: as in `DistributedDataParallel`; with
    "sum" a rank's gradient is its share of the whole, of b_r of B rows b_r / B of that of its rows. shares: the rows of
    each rank, where they are not equal (reduction "sum"). Sends an all-reduce of one number (8 B, purpose metrics).
    Raises UsageError on one rank, where there is only one batch size, and when equal shares do not divide the batch.
    """
    n = comm.size
    if n == 1 or (shares is None and batch % n):
        raise UsageError(
            f"the noise scale compares a rank's batch with the whole one; {batch} samples on {n} ranks have no two such"
            " sizes"
        )

    # |g|^2 of every rank's own rows, summed over the ranks.
    with purpose("metrics"):
        total = all_reduce(comm, np.array([local_square]), algorithm="ordered")

    if shares is not None:
        return estimate_of_shares(shares, float(total[0]), square(gradient))

    # The mean over ranks of |g|^2 of a rank's own rows; with "sum" its gradient was divided by n already.
    mean = float(total[0]) / n * (n * n if reduction == "sum" else 1)
    return estimate(batch // n, mean, batch, square(gradient))


def estimate_of_shares(shares: Sequence[int], squares: float, big_square: float) -> Estimate:
    """Return the estimate where rank r has shares[r] of the B rows. squares: the sum over ranks, with reduction "sum".

    A rank's gradient is then b_r / B of that of its rows, so the sum of squares has the mean s |G|^2 + tr(Sigma) / B,
    with s = sum b_r^2 / B^2. Divided by s it is that of a batch of s B samples.
    """
    batch = sum(shares)
    s = sum(rows * rows for rows in shares) / batch**2
    return estimate(s * batch, squares / s, batch, big_square)


def sharded_estimate(
    comm: Comm, replicas: int, local_square: float, shard_square: float, batch: int, shares: Sequence[int] | None = None
) -> Estimate:
    """Return the estimate where gradients are sharded: squares of shards add up to that of the whole gradient.

    comm: all ranks of all replicas. local_square: of the shards of its replica's own gradient that this rank counts;
    shard_square: of the shards of the reduced gradient. Each element of a gradient is counted on one rank. Sends an
    all-reduce of two numbers (`sharded_estimate_volume`, purpose metrics). shares: as in `step_estimate`.
    """
    with purpose("metrics"):
        small, big = all_reduce(comm, np.array([local_square, shard_square]), algorithm="ordered").tolist()
    if shares is not None:
        return estimate_of_shares(shares, small, big)
    return estimate(batch // replicas, small / replicas * replicas**2, batch, big)


def sharded_estimate_volume(ranks: int) -> int:
    """Return the numbers that all ranks together send for one `sharded_estimate`."""
    return 2 * 2 * (ranks - 1)


class AdaptiveBatch:
    """Chooses the samples of the next step: the noise scale, as a multiple of `unit` from `smallest` to `largest`.

    unit: samples of one micro-batch on all ranks. The batch grows by at most a factor of 2 per step and never shrinks:
    the noise scale grows as the loss falls, and what looks like shrinking is mostly noise of the estimate.
    """

    def __init__(self, unit: int, smallest: int, largest: int) -> None:
        if not 0 < unit <= smallest <= largest or smallest % unit or largest % unit:
            raise UsageError(
                f"batches of {smallest} to {largest} samples in units of {unit}; both must be multiples of the unit,"
                " smallest first"
            )
        self.unit, self.largest, self.samples = unit, largest, smallest

    def next(self, noise_scale: float) -> int:
        """Return the number of samples of the next step."""
        # At most doubled, rounded to whole micro-batches, and never smaller than before.
        wanted = min(noise_scale, 2 * self.samples, self.largest)
        self.samples = max(self.samples, round(wanted / self.unit) * self.unit)
        return self.samples


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
