"""Asynchronous pipelines in the training loop: the whole job is one stream of mini-batches, and it never drains.

    pipedream, pipedream-vertical-sync   a step is one mini-batch of one micro-batch, and one update of every stage
    pipedream-2bw                        a step is a batch of m micro-batches, and one update

The loop asks for one step after the other; here the first question runs the stream, and the answers are read from its
record: the loss of each step, and the weights, gradients and optimizer state after it. `compare` sets beside it a
replay on one device (replay.py), which computes each micro-batch with the versions that the schedule's law names.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.base.arrays import Array
from minidist.base.random import batch_coordinates
from minidist.config.pipeline_plan import cut_stages, make_plan
from minidist.nn.flat import FlatParameters
from minidist.parallel.dims import Axes
from minidist.pipeline.pipedream import PipeDream
from minidist.pipeline.runtime import PipelineStage
from minidist.pipeline.versions import Versions
from minidist.planning.volumes import AxisSizes
from minidist.train.job import Job, as_input, make_optimizer
from minidist.train.strategies.base import Strategy
from minidist.train.strategies.data_axis import Tensors
from minidist.train.strategies.pipelines import everybodys


class Scheduled:
    """An optimizer whose learning rate follows the job's schedule by the number of its own updates."""

    def __init__(self, job: Job, flat: FlatParameters) -> None:
        self.schedule, self.optimizer = job.schedule, make_optimizer(job, flat)

    def step(self) -> None:
        """One update."""
        self.optimizer.lr_factor = self.schedule(self.optimizer.step_count)
        self.optimizer.step()

    @property
    def state(self) -> dict[str, dict[str, Array]]:
        """Of the optimizer."""
        return self.optimizer.state


class Recorded:
    """What the loop sees of the optimizers: the steps of the job so far, and the latest state."""

    def __init__(self, each: Sequence[Scheduled]) -> None:
        self.each, self.step_count = each, 0

    @property
    def state(self) -> dict[str, dict[str, Array]]:
        """Parameter name -> state arrays."""
        return {name: arrays for optimizer in self.each for name, arrays in optimizer.state.items()}


class Sizes:
    """One stage, for the closed form of its volumes."""

    def __init__(self, stage: int, units: Sequence[Versions]) -> None:
        self.stage, self.units = stage, units

    def sizes(self) -> AxisSizes:
        """Nothing of it lies on a data axis."""
        trainable = {p.name: p.size for versions in self.units for p in versions.flat.parameters if p.requires_grad}
        return AxisSizes(self.stage, False, [versions.flat.padded_numel for versions in self.units], [], trainable)


class AsynchronousPipeline(Strategy):
    """This rank's stage of an asynchronous pipeline; sends what `PipeDream` sends."""

    def __init__(self, job: Job, axes: Axes) -> None:
        self.job, self.axes = job, axes
        plan = make_plan(job.config, job.batches.accumulation)
        modules, tied = cut_stages(job.config, job.model, plan.stages)
        stages = [PipelineStage(modules[number], number) for number in plan.stages_of(axes.pp.rank)]
        self.pipe = PipeDream(
            axes.pp,
            plan,
            stages,
            job.loss_of,
            lambda flat: Scheduled(job, flat),
            tied=tied,
            reduction=job.config.reduction,
            coordinates=self._coordinates,
            keep_history=True,
        )
        self.units = [versions for units in self.pipe.units.values() for versions in units]
        self.data_axes: Any = [Sizes(number, units) for number, units in self.pipe.units.items()]
        self.optimizer: Any = Recorded([versions.optimizer for versions in self.units])
        self.losses: list[float] = []

    def _coordinates(self, i: int) -> Any:
        step, number = divmod(i, self.job.batches.accumulation)
        return batch_coordinates(step, number * self.job.batches.micro_batch, self.job.config.seed)

    def forward_backward(self, step: int) -> list[float]:
        """The losses of a step; the first one runs the stream."""
        job, k = self.job, self.job.batches.accumulation
        if step == 0:
            batches = [job.micro_batch(i // k, i % k) for i in range(k * job.config.steps)]
            inputs = [
                getattr(x := as_input(inputs, job.dtype), "data", x) if inputs.dtype.kind == "f" else inputs
                for inputs, _ in batches
            ]
            self.losses = self.pipe.step(inputs, [targets for _, targets in batches])
        return self.losses[step * k : (step + 1) * k]

    def zero_grad(self) -> None:
        """The stream does it."""

    def gradients(self) -> list[Array]:
        """None: every update has used its own."""
        return []

    def step(self, lr_factor: float) -> None:
        """The updates were made in the stream; from now on the record of the next one is shown."""
        self.optimizer.step_count += 1

    def tensors(self) -> Tensors:
        """Gradients, weights and state of the step that is shown, of all stages."""
        mine: Tensors = {"gradients": {}, "weights": {}, "optimizer": {}}
        shown = self.optimizer.step_count
        for stage, units in self.pipe.units.items():
            replicas = len(self.pipe.replicas.get(stage, [0]))
            updates = shown // replicas if shown < self.job.config.steps else -(-shown // replicas)
            for versions in units:
                add_record(mine, versions.flat, versions.history[updates], *_update(versions, updates))
        return everybodys(self.axes.pp, mine)

    def local_arrays(self) -> list[Array]:
        """The latest versions."""
        return [versions.flat.data for versions in self.units]


def _update(versions: Versions, number: int) -> tuple[Array, dict[str, dict[str, Array]]]:
    return (
        (versions.gradients[number - 1], versions.states[number - 1])
        if number
        else (np.zeros_like(versions.history[0]), {})
    )


def add_record(
    tensors: Tensors, flat: FlatParameters, weights: Array, gradient: Array, state: dict[str, dict[str, Array]]
) -> None:
    """Add a unit's parameters by name; of a shared parameter's copies the first one counts."""
    for parameter in flat.parameters:
        place = flat.slice_of(parameter)
        tensors["weights"].setdefault(parameter.name, weights[place].reshape(parameter.shape))
        if parameter.requires_grad:
            tensors["gradients"].setdefault(parameter.name, gradient[place].reshape(parameter.shape))
    for name, arrays in state.items():
        for key, array in arrays.items():
            tensors["optimizer"].setdefault(f"{name}.{key}", np.array(array))
