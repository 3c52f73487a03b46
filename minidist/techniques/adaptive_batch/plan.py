"""The batch of every step, where it changes while the job trains: whose rows, and how many.

    --weights measured:K    every K steps the ranks exchange their compute seconds per row, and a replica's share of the
                            next batches is in proportion to its speed
    --adaptive-batch N      after every step the batch may grow, by more micro-batches, up to the noise scale of the
                            gradient and to N samples; in a pipeline to a multiple of the first batch

Every rank takes the same decision from the same numbers. The decisions are in checkpoints.

Source: McCandlish et al., An empirical model of large-batch training, 2018, for the noise scale.

Proved by: tests/techniques/test_batch_plan.py
"""

from typing import Annotated, Any

import numpy as np

from minidist.base.records import Field, Record
from minidist.core.base.trace import new_purpose, purpose
from minidist.core.collectives import all_gather
from minidist.core.parallel.dims import Axes
from minidist.data import measured_every, weighted_shards
from minidist.data.batch_plan import BatchPlan, StepBatch
from minidist.techniques.adaptive_batch.noise_scale import NoiseScale

new_purpose("load_balance")


class PlanState(Record, strict=True):
    """What `VaryingPlan.state` returns."""

    weights: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]] | None
    samples: list[Annotated[int, Field(ge=1)]]
    next: int | None = Field(ge=1)
    noise: list[Annotated[float, Field(allow_inf_nan=False)]] = Field(min_length=3, max_length=3)


class VaryingPlan(BatchPlan):
    """Chooses the batch of each step. samples: of each step so far, where they vary."""

    changes = True

    def __init__(self, config: Any, batches: Any, noise: NoiseScale) -> None:
        super().__init__(config, batches)
        self.noise, self.every = noise, measured_every(config.weights)
        self.samples: list[int] = []
        self.start = 0  # their sum
        # Of a batch that grows: the largest one, the unit by which it grows, and the samples of the next step.
        self.largest, self.unit, self.size = config.adaptive_batch, unit_of(config.pp, batches), batches.global_batch
        self.seconds: list[float] = []  # of this rank per row, in the steps since they were exchanged

    def next(self) -> StepBatch:
        if self.largest is None:
            return super().next()

        # More samples are more micro-batches, of as many rows.
        first, samples, start = self.batches, self.size, self.start
        self.samples.append(samples)
        self.start += samples
        return StepBatch(self.cut(samples, samples * first.accumulation // first.global_batch), start)

    def measured(self, axes: Axes, seconds: float, rows: int, done: int) -> None:
        """Take this rank's compute seconds of a step; after every K steps all ranks take new shares.

        They send 8 B to each other (purpose load_balance).
        """
        if not self.every:
            return
        self.seconds.append(seconds / rows)
        if done % self.every:
            return
        from statistics import median

        with purpose("load_balance"):
            every_rank = all_gather(axes.comm, np.array([median(self.seconds)]))
        self.seconds = []

        # A replica is as slow as the slowest of its ranks; the mesh is pp x dp x cp x tp.
        dims = axes.dims
        slowest = every_rank.reshape(dims.pp, dims.dp, -1).max(axis=(0, 2))
        if (slowest > 0).all():
            self.weights = self._whole_shares((1 / slowest).tolist())

    def _whole_shares(self, speeds: list[float]) -> tuple[float, ...]:
        """Return the rows of each replica in the first batch, by its speed, and at least one per micro-batch."""
        rows = [count for _, count in weighted_shards(self.batches.global_batch, speeds)]
        while min(rows) < self.batches.accumulation:
            rows[rows.index(min(rows))] += 1
            rows[rows.index(max(rows))] -= 1
        return tuple(map(float, rows))

    def grow(self) -> None:
        """Let the next batch grow to the noise scale, to which a step's estimate has been added.

        It grows by at most a factor of 2 per step and never shrinks: the noise scale grows as the loss falls, and what
        looks like shrinking is mostly noise of the estimate.
        """
        if self.largest is not None:
            wanted = min(self.noise.simple, 2 * self.size, self.largest)
            self.size = max(self.size, round(wanted / self.unit) * self.unit)

    def samples_of(self, steps: int) -> int:
        return self.start if self.samples else super().samples_of(steps)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Saving begins a new measurement, so that a resumed job measures the same."""
        self.seconds = []
        return {
            "weights": None if self.weights is None else list(self.weights),
            "samples": self.samples,
            "next": None if self.largest is None else self.size,
            "noise": self.noise.state(),
        }

    def load(self, state: dict[str, Any], steps: int) -> None:
        """Continue with the `state` of a checkpoint; shares that were measured on other ranks are not taken over."""
        if not state:
            return
        saved = PlanState.model_validate(state)
        if len(saved.samples) not in (0, steps):
            raise ValueError(f"it has {len(saved.samples)} batches of {steps} steps")
        if self.every and saved.weights is not None and len(saved.weights) == self.batches.dp:
            self.weights = tuple(saved.weights)
        self.samples, self.start = list(saved.samples), sum(saved.samples)
        if self.largest is not None and saved.next is not None:
            # A pipeline grows by larger units than the layout that has saved it may have had.
            self.size = max(self.batches.global_batch, saved.next // self.unit * self.unit)
        self.noise.load(saved.noise)


def unit_of(pp: int, batches: Any) -> int:
    """Return the samples by which the batch grows: one micro-batch of every rank, or of a pipeline the first batch.

    A schedule that runs a number of micro-batches runs every multiple of it.
    """
    return int(max(1, batches.global_batch // (1 if pp > 1 else batches.accumulation)))
