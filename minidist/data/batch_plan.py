"""The batch of every step: whose rows, and how many.

In a job of fixed batches every step is like the first. A technique that lets batches change while the job trains
gives the job another plan; every rank takes the same decision from the same numbers, and
`compare` tells one device the same batches.

Proved by: tests/techniques/test_batch_plan.py
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from minidist.data.shares import Shares, cut_batch


class StepBatch(NamedTuple):
    """What a step trains on.

    start: samples of all steps before it; None: as many steps as it, of as many samples.
    """

    shares: Shares
    start: int | None = None


class BatchPlan:
    """Chooses the batch of each step: here, always the same. A subclass may change it, and set `changes`.

    config: the `TrainConfig` of the job. batches: its `Batches`, which has the size of the first batch and its cut.
    """

    changes = False

    def __init__(self, config: Any, batches: Any) -> None:
        self.config, self.batches, self.weights = config, batches, batches.weights
        self.runs: list[tuple[Shares, int]] = []  # what was trained on, and for how many steps, for the closed forms

    def next(self) -> StepBatch:
        """Return the batch of the next step."""
        return StepBatch(self.cut(self.batches.global_batch, self.batches.accumulation))

    def cut(self, samples: int, accumulation: int) -> Shares:
        """Return each replica's share of the next batch, and note that it is trained on."""
        shares = cut_batch(samples, self.batches.dp, accumulation, self.weights)
        if self.runs and self.runs[-1][0] == shares:
            self.runs[-1] = shares, self.runs[-1][1] + 1
        else:
            self.runs.append((shares, 1))
        return shares

    def samples_of(self, steps: int) -> int:
        """Return the samples of the first `steps` steps, which are done."""
        return int(steps * self.batches.global_batch)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as values of JSON."""
        return {}

    def load(self, state: dict[str, Any], steps: int) -> None:
        """Continue with the `state` of a checkpoint after `steps` steps. A ValueError says what is wrong with it."""


class ToldPlan(BatchPlan):
    """The batches of another run, one after the other: what one device is told."""

    def __init__(self, config: Any, batches: Any, told: Iterable[StepBatch]) -> None:
        super().__init__(config, batches)
        self.told = iter(told)

    def next(self) -> StepBatch:
        """Return the batch of the next step."""
        return next(self.told)
