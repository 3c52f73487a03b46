"""The batch of every step, where it changes while the job trains: whose rows, how many, and the learning rate for them.

    --weights measured:K    every K steps the ranks exchange their compute seconds per row, and a replica's share of the
                            next batches is in proportion to its speed
    --adaptive-batch N      after every step the batch may grow, by more micro-batches, up to the noise scale of the
                            gradient and to N samples
    --lr-scaling linear:W   the learning rate follows the batch: its factor is the mean of B / B_0 over the last W
                            steps, so that it climbs for W steps after each growth

Every rank takes the same decision from the same numbers. The decisions are in checkpoints, and `compare` tells one
device the same batches.

Sources: McCandlish et al., An empirical model of large-batch training, 2018, for the noise scale; Goyal et al.,
Accurate, large minibatch SGD, 2017, sections 2.1 and 2.2, for linear scaling and gradual warm-up.

Proved by: tests/train/test_batch_plan.py
"""

from collections.abc import Iterable
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from minidist.base.trace import purpose
from minidist.collectives import all_gather
from minidist.config.train_config import Batches, TrainConfig
from minidist.data import Shares, cut_batch, measured_every, weighted_shards
from minidist.optim.schedule import lr_scaling
from minidist.parallel.dims import Axes
from minidist.parallel.noise_scale import AdaptiveBatch, NoiseScale


class StepBatch(NamedTuple):
    """What a step trains on.

    start: samples of all steps before it; None: as many steps as it, of as many samples. lr_scale: of its learning
    rate.
    """

    shares: Shares
    start: int | None = None
    lr_scale: float = 1.0


class BatchPlan:
    """Chooses the batch of each step. samples: of each step so far, where they vary."""

    def __init__(self, config: TrainConfig, batches: Batches) -> None:
        self.config, self.batches, self.weights = config, batches, batches.weights
        self.every = measured_every(config.weights)
        self.exponent, self.ramp = lr_scaling(config.lr_scaling)
        self.samples: list[int] = []
        self.start = 0  # their sum
        self.adaptive: AdaptiveBatch | None = None
        if config.adaptive_batch is not None:
            smallest = batches.global_batch
            self.adaptive = AdaptiveBatch(smallest // batches.accumulation, smallest, config.adaptive_batch)
        self.noise = NoiseScale()
        self.seconds: list[float] = []  # of this rank per row, in the steps since they were exchanged
        self.runs: list[tuple[Shares, int]] = []  # what was trained on, and for how many steps, for the closed forms

    @property
    def changes(self) -> bool:
        """Whether the batch or its shares change while the job trains."""
        return changes_batches(self.config)

    def next(self) -> StepBatch:
        """Return the batch of the next step."""
        first, start, lr_scale = self.batches, None, 1.0
        samples, accumulation = first.global_batch, first.accumulation
        if self.adaptive is not None:
            # More samples are more micro-batches, of as many rows.
            samples, start = self.adaptive.samples, self.start
            accumulation = samples * first.accumulation // first.global_batch
            self.samples.append(samples)
            self.start += samples
            # The mean over the last steps; those before the first one had the first batch.
            recent = self.samples[-self.ramp :]
            factors = [(count / first.global_batch) ** self.exponent for count in recent]
            lr_scale = (sum(factors) + self.ramp - len(recent)) / self.ramp

        shares = cut_batch(samples, first.dp, accumulation, self.weights)
        if self.runs and self.runs[-1][0] == shares:
            self.runs[-1] = shares, self.runs[-1][1] + 1
        else:
            self.runs.append((shares, 1))
        return StepBatch(shares, start, lr_scale)

    def measured(self, axes: Axes, seconds: float, rows: int, done: int) -> None:
        """Take this rank's compute seconds of a step; after every K steps all ranks take new shares.

        They send 8 B to each other (`load_balance_volume`, purpose load_balance).
        """
        if not self.every:
            return
        self.seconds.append(seconds / rows)
        if done % self.every:
            return
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
        """Let the next batch grow to the noise scale, of which a step's estimate has been added."""
        if self.adaptive is not None:
            self.adaptive.next(self.noise.simple)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps. Saving begins a new measurement, so that a resumed job measures the same."""
        self.seconds = []
        if not self.changes:
            return {}
        return {
            "weights": None if self.weights is None else list(self.weights),
            "samples": self.samples,
            "next": None if self.adaptive is None else self.adaptive.samples,
            "noise": self.noise.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue with the `state` of a checkpoint; shares that were measured on other ranks are not taken over."""
        if not state:
            return
        if self.every and state["weights"] is not None and len(state["weights"]) == self.batches.dp:
            self.weights = tuple(state["weights"])
        self.samples, self.start = list(state["samples"]), sum(state["samples"])
        if self.adaptive is not None:
            self.adaptive.samples = state["next"]
        self.noise.load(state["noise"])


def changes_batches(config: TrainConfig) -> bool:
    """Return whether a job's ranks choose their batches, or the shares of them, while they train."""
    return config.adaptive_batch is not None or measured_every(config.weights) > 0


class ToldPlan(BatchPlan):
    """The batches of another run, one after the other: what one device is told."""

    def __init__(self, config: TrainConfig, batches: Batches, told: Iterable[StepBatch]) -> None:
        super().__init__(config, batches)
        self.told = iter(told)

    def next(self) -> StepBatch:
        """Return the batch of the next step."""
        return next(self.told)


def load_balance_volume(ranks: int) -> int:
    """Return the numbers that all ranks together send for one exchange of their compute seconds."""
    return ranks * (ranks - 1)
