"""A strategy: this rank's part of the training, as one method for each phase of a step.

    zero_grad()               clear the gradients of the previous step
    forward_backward(step)    this rank's micro-batches; gradients are summed over all ranks when it returns
    update(step)              let the optimizers step

Without a pipeline each data-parallel rank runs its own micro-batches through the model. Gradients are added on this
rank until the last one, in which buckets are reduced over the data axis; ZeRO 2 and 3 reduce in each.

In a pipeline a rank runs its stages by a plan, and each stage has its data axes, with the replicas of that stage in the
other pipelines. Tensor, context and expert parallelism are inside the model: its layers send their messages.

Proved by: tests/train/test_axes.py, tests/train/test_sharded.py, tests/train/test_pipelines.py
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.nn import Module
from minidist.core.parallel.dims import Axes
from minidist.core.pipeline.plan import Plan
from minidist.core.pipeline.runtime import Pipeline, PipelineStage, Reduction, cut_model
from minidist.core.pipeline.schedules import get_schedule
from minidist.core.train.data_axis import DataAxis
from minidist.core.train.task import ParallelLayout, Task


class Strategy:
    """This rank's data axes: one for each stage, and another for experts that are distributed over ranks.

    axes: this rank's communicators. model: what the forward pass calls, wrapped by all data axes.
    """

    def __init__(self, task: Task, axes: Axes, data_axes: Sequence[DataAxis]) -> None:
        self.task, self.axes, self.data_axes = task, axes, list(data_axes)
        self.model: Any = self.data_axes[-1].model if self.data_axes else task.model

    def zero_grad(self) -> None:
        """Clear the gradients of the previous step."""
        for axis in self.data_axes:
            axis.zero_grad()

    def forward_backward(self, step: int) -> list[float]:
        """Run this rank's micro-batches of a step and return their losses; the gradients are summed over all ranks."""
        task, comm, m = self.task, self.axes.comm, self.task.microbatches
        losses = []
        for i in range(m):
            number = self.axes.dp.rank * m + i
            batch = task.micro_batch(step, number)
            # Gradients are sent while the last backward runs.
            if m > 1:
                self.synchronize(i == m - 1)
            with task.coordinates(step, number):
                loss = task.loss(*batch, self.model)
                comm.advance_clock("forward")

                task.scaled(loss).backward()
                comm.advance_clock("backward")
            losses.append(loss.item())
        return losses

    def synchronize(self, now: bool) -> None:
        """Reduce the gradients of the next pass, or keep them on this rank for now."""
        for axis in self.data_axes:
            # ZeRO 2 and 3 reduce the gradients of every pass.
            for reducer in () if axis.each else axis.reducers:
                reducer.synchronizing = now

    def update(self, step: int) -> None:
        """Update the weights with the gradient of a step."""
        self.step(self.task.lr_factor(step))

    def step(self, lr_factor: float) -> None:
        """Update the weights with `lr_factor` times the learning rate."""
        for axis in self.data_axes:
            axis.optimizer.lr_factor = lr_factor
            axis.step()


class PipelineStrategy(Strategy):
    """This rank's stages in a pipeline of `layout.pp` ranks; other pipelines, with other rows, are on the data axis."""

    runtime: type[Pipeline] | None = None

    def __init__(
        self, task: Task, axes: Axes, layout: ParallelLayout, data_axes_of: Callable[..., list[DataAxis]]
    ) -> None:
        plan = self.make_plan(task, layout)
        modules, self.tied = self.cut(task, plan.stages)
        own = plan.stages_of(axes.pp.rank)
        release_other_stages(modules, own)

        # Each of this rank's stages has its data axes; the pipeline gets their reducers and shards, because it
        # knows when a stage's gradients are complete.
        of_stage = {number: data_axes_of(modules[number], stage=number, tied=self.tied) for number in own}
        super().__init__(task, axes, [axis for made in of_stage.values() for axis in made])

        # It starts the reductions itself, when a stage has its last gradient. ZeRO 2 frees a bucket's memory while
        # backward runs, so there backward must start them.
        for axis in self.data_axes:
            for reducer in () if axis.each else axis.reducers:
                reducer.manually, reducer.synchronizing = True, False

        self.current_step, self.zero, self.data = 0, layout.zero, axes.data
        flats, self.reducers, self.shards = (
            {number: [each for axis in axes for each in getattr(axis, what)] for number, axes in of_stage.items()}
            for what in ("flats", "reducers", "shards")
        )
        self.stages = [PipelineStage(modules[number], number, flats[number]) for number in own]
        self.pipe = self.make_pipe(plan)

    def make_pipe(self, plan: Plan) -> Pipeline:
        """Return what runs this rank's stages by a plan."""
        reducers = self.reducers if self.axes.data.size > 1 or self.zero else {}
        shards = self.shards if self.zero >= 2 else None
        reduce = Reduction(self.data, reducers=reducers, each=self.zero == 2, shards=shards)
        run, coordinates = self.runtime or hooks.pipeline or Pipeline, self.coordinates
        return run(self.axes.pp, plan, self.stages, self._loss, tied=self.tied, reduce=reduce, coordinates=coordinates)

    def make_plan(self, task: Task, layout: ParallelLayout) -> Plan:
        """Return the plan of a step."""
        return get_schedule(layout.schedule).plan(layout.pp, task.microbatches, layout.chunks)

    def cut(self, task: Task, stages: int) -> tuple[Sequence[Module], Sequence[str]]:
        """Return the model's stages, and the names of the parameters that several of them have."""
        return cut_model(task.model, stages)

    def forward_backward(self, step: int) -> list[float]:
        self.current_step = step
        return self.pipe.step(*self.batches(self.task, step))

    def batches(self, task: Task, step: int) -> tuple[list[Any], list[Any]]:
        """Return the inputs, features as arrays of the model's dtype, and the targets of this pipeline's batches."""
        pairs = [task.micro_batch(step, self.number(i, task)) for i in range(task.microbatches)]
        inputs = [xp.as_array(x, task.dtype) if x.dtype.kind == "f" else x for x, _ in pairs]
        return inputs, [targets for _, targets in pairs]

    def number(self, i: int, task: Task) -> int:
        """Return the global number of micro-batch i of this pipeline."""
        return self.axes.dp.rank * task.microbatches + i

    def _loss(self, outputs: Any, targets: Any) -> Any:
        return self.task.scaled(self.task.loss_of(outputs, targets))

    def coordinates(self, i: int) -> AbstractContextManager[Any]:
        """Return the context of micro-batch i on every stage: where its samples are."""
        return self.task.coordinates(self.current_step, self.number(i, self.task))


def release_other_stages(modules: Sequence[Module], own: Collection[int]) -> None:
    """Let go of the parameters of the stages that other ranks hold. A tied weight of an own stage is kept."""
    kept = {id(parameter) for number in own for parameter in modules[number].parameters()}
    for module in modules:
        for parameter in module.parameters():
            if id(parameter) not in kept:
                parameter.release()
