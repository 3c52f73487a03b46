"""What a job asks of a strategy, in addition to the phases of a step in `train/strategy.py`.

    steps_read, data_copy        which samples this rank reads
    held_out_losses              an evaluation
    gradients, optimizer_state, local_arrays, sizes    what this rank holds
    tensors()                    gradients, weights and optimizer state by name, however they are sharded
    scalars                      numbers in a checkpoint

Proved by: tests/equality/test_equality.py, tests/train/test_account.py
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from minidist.base.arrays import Array
from minidist.job.train import strategy
from minidist.job.train.job import Job
from minidist.job.train.strategies.data_axis import AxisSizes, DataAxis, Tensors


class Strategy(strategy.Strategy):
    """This rank's part of a job."""

    job: Job
    data_axes: list[DataAxis]  # type: ignore[assignment]  # with what a job asks of them

    def __init__(self, job: Job, data_axes: Sequence[DataAxis]) -> None:
        super().__init__(job, data_axes)
        self.job = job
        self.updates = 0  # made so far; a rank without parameters has no optimizer that counts them
        for axis in self.data_axes:
            for extension in job.extensions:
                extension.axis_made(axis)

    def step(self, lr_factor: float) -> None:
        super().step(lr_factor)
        self.updates += 1

    def steps_read(self, done: int) -> Iterable[int]:
        """Return the steps after the first `done` whose batches this rank reads, in order."""
        return range(done, self.job.config.steps)

    def data_copy(self) -> int | None:
        """Return the number of the copy of the step's data that this rank has read its share of.

        None while batches of later steps are on their way.
        """
        return 0

    # --- evaluation ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def held_out_losses(self, job: Job) -> list[float]:
        """Return the losses of this rank's held-out micro-batches, forward only; job: this one, `evaluating`."""

    # --- what this rank holds -----------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        """Number of updates made so far."""
        return max((axis.optimizer.step_count for axis in self.data_axes), default=self.updates)

    @property
    def counts(self) -> dict[str, int]:
        """The updates of each parameter that has had fewer than the others; usually none."""
        return {name: count for axis in self.data_axes for name, count in axis.optimizer.counts.items()}

    def optimizer_state(self) -> dict[str, dict[str, Array]]:
        """Return {parameter name: state arrays of this rank}; of a shared parameter's equal replicas, the first."""
        result: dict[str, dict[str, Array]] = {}
        for axis in self.data_axes:
            for name, arrays in axis.optimizer.state.items():
                result.setdefault(name, arrays)
        return result

    def gradients(self) -> list[Array]:
        """Return this rank's part of the summed gradient, of a loss that is multiplied by `Job.scale`."""
        return [gradient for axis in self.data_axes for gradient in axis.gradients()]

    def local_arrays(self) -> list[Array]:
        """Return the flat weights that this rank holds."""
        return [array for axis in self.data_axes for array in axis.local_arrays()]

    def sizes(self) -> list[AxisSizes]:
        """Return the element counts from which the closed forms of the volumes follow."""
        return [replace(axis.sizes(), more=self._more(axis)) for axis in self.data_axes]

    def _more(self, axis: DataAxis) -> dict[str, Any]:
        """Return what techniques add to the element counts of an axis."""
        return {name: value for extension in self.job.extensions for name, value in extension.sizes(axis).items()}

    @abstractmethod
    def tensors(self) -> Tensors:
        """Return copies of the whole gradients, weights and optimizer state by name. Every rank calls it."""

    # --- numbers in a checkpoint --------------------------------------------------------------------------------------

    def scalars(self) -> dict[str, float]:
        """Return numbers for a checkpoint, equal on all ranks: those of techniques."""
        return {name: value for extension in self.job.extensions for name, value in extension.scalars().items()}

    def load_scalars(self, scalars: dict[str, float]) -> None:
        """Restore the numbers of `scalars`."""
        for extension in self.job.extensions:
            extension.load_scalars(scalars)
