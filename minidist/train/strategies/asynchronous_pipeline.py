"""Asynchronous pipelines as a strategy: the whole job is one stream of mini-batches, and the pipeline never drains.

    pipedream, pipedream-vertical-sync   a step is one mini-batch of one micro-batch, and one update of every stage
    pipedream-2bw                        a step is a batch of m micro-batches, and one update

The training loop asks for one step after the other. Here the first call runs the whole stream, and every call returns
the losses of its step. Where an observer reads tensors the stream keeps a record, as large as its number of steps: the
weights, gradients and optimizer state after each step. `minidist compare` does, and sets beside it a replay on one
device (equality/delayed_replay.py), which computes each micro-batch with the weight versions that the schedule's
version rule names. Otherwise memory is that of the versions in use, and a micro-batch is read when it is needed.

Proved by: tests/train/test_asynchronous.py
"""

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from minidist.base.arrays import Array
from minidist.base.random import batch_coordinates
from minidist.config.pipeline_plan import cut_stages, make_plan
from minidist.nn.flat import FlatParameters
from minidist.parallel.dims import Axes
from minidist.pipeline.runtime import Pipeline, PipelineStage, WeightVersions
from minidist.pipeline.runtime.shapes import MicroBatches
from minidist.pipeline.runtime.versions import UnitVersions
from minidist.train.job import Job, make_optimizer
from minidist.train.strategies.data_axis import AxisSizes, Tensors
from minidist.train.strategies.mesh import MeshStrategy
from minidist.train.strategies.pipeline import gather_tensors, input_arrays


class ScheduledOptimizer:
    """An optimizer whose learning rate follows the job's schedule by the number of its own updates."""

    def __init__(self, job: Job, flat: FlatParameters) -> None:
        self.schedule, self.optimizer = job.schedule, make_optimizer(job, flat)

    def step(self) -> None:
        """Make one update."""
        self.optimizer.lr_factor = self.schedule(self.optimizer.step_count)
        self.optimizer.step()

    @property
    def state(self) -> dict[str, dict[str, Array]]:
        """The optimizer's state."""
        return self.optimizer.state


class AsynchronousPipeline(MeshStrategy):
    """This rank's stage of an asynchronous pipeline; sends what `Pipeline` and `WeightVersions` send."""

    def __init__(self, job: Job, axes: Axes) -> None:
        super().__init__(job, axes, [])
        plan = make_plan(job.config, job.batches.accumulation)
        modules, tied = cut_stages(job.config, job.model, plan.stages)
        stages = [PipelineStage(modules[number], number) for number in plan.stages_of(axes.pp.rank)]
        self.versions = WeightVersions(
            axes.pp,
            plan,
            stages,
            lambda flat: ScheduledOptimizer(job, flat),
            tied=tied,
            reduction=job.config.reduction,
            keep_history=job.keep_steps,
        )
        self.pipe = Pipeline(axes.pp, plan, stages, job.loss_of, versions=self.versions, coordinates=self._coordinates)
        self.units = [unit for units in self.versions.units.values() for unit in units]
        self.losses: list[float] = []
        self.shown = 0  # the step whose record `tensors` returns

    def _coordinates(self, i: int) -> AbstractContextManager[Any]:
        # Micro-batch i of the stream is micro-batch `number` of step `step`.
        step, number = divmod(i, self.job.batches.accumulation)
        return batch_coordinates(step, self.job.batch.shares.place(number)[0], self.job.config.seed)

    # --- the phases of a step -----------------------------------------------------------------------------------------

    def forward_backward(self, step: int) -> list[float]:
        job, k = self.job, self.job.batches.accumulation
        # The first call runs the whole stream.
        if step == 0:
            self.losses = self.pipe.step(*stream_of(job, k * job.config.steps))
        return self.losses[step * k : (step + 1) * k]

    def step(self, lr_factor: float) -> None:
        """Show the record of the next step: the stream has made all updates."""
        self.shown += 1

    # --- what this rank holds -----------------------------------------------------------------------------------------

    @property
    def step_count(self) -> int:
        return self.shown

    def optimizer_state(self) -> dict[str, dict[str, Array]]:
        return {name: arrays for unit in self.units for name, arrays in unit.optimizer.state.items()}

    def local_arrays(self) -> list[Array]:
        return [unit.flat.data for unit in self.units]

    def sizes(self) -> list[AxisSizes]:
        return [_sizes(stage, units) for stage, units in self.versions.units.items()]

    def tensors(self) -> Tensors:
        """Return gradients, weights and optimizer state of the step that is shown, of all stages.

        Without a record: the latest weights and state, and no gradients.
        """
        result: Tensors = {"gradients": {}, "weights": {}, "optimizer": {}}
        if not self.versions.keep_history:
            for unit in self.units:
                add_record(result, unit.flat, unit.flat.data, None, unit.optimizer.state)
            return gather_tensors(self.axes.pp, result)
        for stage, units in self.versions.units.items():
            # A stage on r ranks updates once in r mini-batches, and at the end of the stream.
            replicas = len(self.versions.replicas.get(stage, [0]))
            number = self.shown // replicas if self.shown < self.job.config.steps else -(-self.shown // replicas)
            for versions in units:
                # Version 0 is the initial one, to which no gradient belongs.
                weights = versions.history[number]
                if number:
                    gradient, state = versions.gradients[number - 1], versions.states[number - 1]
                else:
                    gradient, state = np.zeros_like(versions.history[0]), {}
                add_record(result, versions.flat, weights, gradient, state)
        return gather_tensors(self.axes.pp, result)


def stream_of(job: Job, microbatches: int) -> tuple[MicroBatches, MicroBatches]:
    """Return the inputs and the targets of a stream, each micro-batch read when a stage needs it."""

    def part(index: int) -> MicroBatches:
        def read(i: int) -> Any:
            return input_arrays(job, [divmod(i, job.batches.accumulation)])[index][0]

        return MicroBatches(read, microbatches, [read(i) for i in range(min(job.batches.accumulation, microbatches))])

    return part(0), part(1)


def _sizes(stage: int, units: list[UnitVersions]) -> AxisSizes:
    """Return the element counts of a stage; no part of it lies on a data axis."""
    trainable = {p.name: p.size for versions in units for p in versions.flat.parameters if p.requires_grad}
    return AxisSizes(stage, False, [versions.flat.padded_numel for versions in units], [], trainable)


def add_record(
    tensors: Tensors, flat: FlatParameters, weights: Array, gradient: Array | None, state: dict[str, dict[str, Array]]
) -> None:
    """Add a unit's parameters to `tensors` by name; of a shared parameter's replicas the first is kept."""
    for parameter in flat.parameters:
        place = flat.slice_of(parameter)
        tensors["weights"].setdefault(parameter.name, weights[place].reshape(parameter.shape))
        if parameter.requires_grad and gradient is not None:
            tensors["gradients"].setdefault(parameter.name, gradient[place].reshape(parameter.shape))
    for name, arrays in state.items():
        for key, array in arrays.items():
            tensors["optimizer"].setdefault(f"{name}.{key}", np.array(array))
