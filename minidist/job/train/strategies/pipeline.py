"""What a job asks of a pipeline that drains: its settings' plan and cut, evaluations, and whole tensors.

Proved by: tests/train/test_pipelines.py, tests/planning/test_profiler.py
"""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np

from minidist.comm.communicator import recv_object, send_object
from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.core.base.layout import offsets
from minidist.core.base.trace import purpose
from minidist.core.comm import Comm
from minidist.core.nn import Module
from minidist.core.pipeline.plan import Plan
from minidist.core.train import strategy
from minidist.core.train.task import ParallelLayout
from minidist.data.sampler import SIDES
from minidist.job.checkpoint.held import Buffer, ReplicaId
from minidist.job.config.pipeline_plan import cut_sizes, cut_stages, make_plan
from minidist.job.config.train_config import Batches
from minidist.job.train.job import Job
from minidist.job.train.strategies.data_axis import DataAxis, Tensors
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.job.train.strategies.replicas_alone import mesh_of_replicas
from minidist.nn.buffers import own_buffers
from minidist.pipeline.runtime.clip import gather_blocks
from minidist.pipeline.runtime.evaluation import Evaluation
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.techniques import trains_alone
from minidist.techniques.meeting import replicas_of


class PipelineParallel(strategy.PipelineStrategy, MeshStrategy):
    """This rank's stages of a job's pipeline."""

    pipe: Pipeline
    forward_pipe: Evaluation | None = None
    watching: Sequence[Any] | None = None  # of every pipe
    pipes: dict[int, tuple[Pipeline, Evaluation | None]]  # by the number of micro-batches, where that changes

    # --- what the settings choose -------------------------------------------------------------------------------------

    def make_pipe(self, plan: Plan) -> Pipeline:
        if self.axes.comm.world.folds:
            from minidist.pipeline.runtime.repeated import RepeatedPipeline

            self.runtime = RepeatedPipeline
        config, data = self.job.config, self.axes.data
        if trains_alone(config):
            # The ranks of the data axis that update a stage together with this one.
            self.data = mesh_of_replicas(data, replicas_of(config, data.size))["shard"]
        pipe = cast(Pipeline, super().make_pipe(plan))
        if self.watching is None:
            self.watching = self.observers(plan.stages, pipe.stages)
        pipe.observers = self.watching
        return pipe

    def make_plan(self, task: Any, layout: ParallelLayout) -> Plan:
        return make_plan(task.config, task.batches.accumulation)

    def cut(self, task: Any, stages: int) -> tuple[Sequence[Module], Sequence[str]]:
        return cut_stages(task.config, task.model, stages)

    def observers(self, stages: int, own: Collection[int]) -> Sequence[Any]:
        """Return what watches the pipeline. own: the numbers of this rank's stages."""
        # A profile puts hooks on the layers of this rank, by their number in the model.
        job, profile = self.job, self.job.profile
        if profile is None:
            return []
        blocks = list(job.model.blocks)
        bounds = offsets(cut_sizes(job.config, job.model, stages))
        layers = {n: {i: blocks[i] for i in range(bounds[n], bounds[n + 1])} for n in own}
        profile.watch(self.axes.comm, layers, len(blocks), stages - 1)
        return [profile]

    # --- the phases of a step -----------------------------------------------------------------------------------------

    def forward_backward(self, step: int) -> list[float]:
        losses = super().forward_backward(step)
        # Backward started from scaled losses; those that are reported are not scaled.
        scale = self.job.scale
        return losses if scale == 1 else [loss / scale for loss in losses]

    def held_out_losses(self, job: Job) -> list[float]:
        if self.forward_pipe is None:
            # Made once: the forward passes of the plan, without their backwards.
            self.forward_pipe = Evaluation(self.pipe, job.loss_of)
        return self.forward_pipe.step(*self.batches(job, 0))

    def cut_batches(self, batches: Batches) -> None:
        """Cut the next steps into other micro-batches, and run them by the plan for their number (startup).

        Raises UsageError where the schedule has none.
        """
        plan = make_plan(self.job.config, batches.accumulation)
        pipes = vars(self).setdefault("pipes", {})
        pipes[self.job.batches.accumulation] = self.pipe, self.forward_pipe
        super().cut_batches(batches)
        made = pipes.get(batches.accumulation)
        self.pipe, self.forward_pipe = made or (self.make_pipe(plan), None)

    def _more(self, axis: DataAxis) -> dict[str, Any]:
        plans = {*vars(self).get("pipes", ()), self.job.batches.accumulation}
        return {**super()._more(axis), "plans": plans}

    # --- the norm of the gradient -------------------------------------------------------------------------------------

    def square_sums(self) -> Array:
        """Return the blocks stage after stage, shared parameters once. Two all-reduces (purpose clip_norm)."""
        rank = self.axes.pp.rank
        local: dict[int, list[Array]] = {}
        for axis in self.data_axes:
            replicas = [p for p in axis.parameters if not self.owns(axis, p)]
            local.setdefault(axis.stage, []).append(self.square_sums_of(axis, replicas))

        # In the order of the stages, and for each stage of the ranks that hold it: this rank's blocks, others empty.
        places = [(stage, at) for stage, ranks in self.holders.items() for at in ranks]
        nothing = xp.zeros(0, np.float64)
        own = [xp.concatenate([nothing, *local.get(stage, [])]) if at == rank else nothing for stage, at in places]
        return gather_blocks(self.axes.pp, own)  # type: ignore[no-any-return]

    def owns(self, axis: DataAxis, parameter: Parameter) -> bool:
        """Return whether this is the parameter itself, and not a replica that the pipeline holds in another place."""
        return (axis.stage, self.axes.pp.rank, parameter.name) not in self.pipe.reduce.shared.copies

    # --- what this rank holds -----------------------------------------------------------------------------------------

    @cached_property
    def holders(self) -> dict[int, list[int]]:
        """The ranks of the pipeline that hold each stage."""
        held: dict[int, list[int]] = self.pipe.plan.holders()
        return held

    def stage_sizes(self) -> list[int]:
        """Return the layers of each stage of the pipeline."""
        return cut_sizes(self.job.config, self.job.model, len(self.holders))

    def buffers(self) -> list[Buffer]:
        data, result = self.axes.data, []
        for number, stage in self.pipe.stages.items():
            # The ranks of this pipeline that hold the stage, times the pipelines.
            ranks = self.holders[number]
            place, count = ranks.index(self.axes.pp.rank), len(ranks)
            replica = ReplicaId(data.rank * count + place, data.size * count)
            for module in stage.module.modules():
                result += [(f"{module.name}.{key}", array, replica) for key, array in own_buffers(module).items()]
        return result

    def tensors(self) -> Tensors:
        return gather_tensors(self.axes.pp, super().tensors())


def input_arrays(
    job: Job, microbatches: list[tuple[int, int]], sides: Iterable[str] = SIDES
) -> tuple[list[Any], list[Any]]:
    """Return the inputs, as arrays of the model's dtype, and the targets of micro-batches (step, number).

    sides: which of the two the rank uses.
    """
    batches = [job.micro_batch(step, number, sides) for step, number in microbatches]
    inputs = [xp.as_array(x, job.dtype) if x.dtype.kind == "f" else x for x, _ in batches]
    return inputs, [targets for _, targets in batches]


def gather_tensors(comm: Comm, local: Tensors) -> Tensors:
    """Return the tensors of all ranks of a pipeline, by name; of equal names the first rank's.

    Each rank sends its own to every other (purpose checkpoint).
    """
    result: Tensors = {kind: {} for kind in local}
    with purpose("checkpoint"):
        # One sender after the other, so that of equal names the first rank's tensor is kept.
        for rank in range(comm.size):
            for other in range(comm.size):
                if comm.rank == rank != other:
                    send_object(comm, local, other)
            tensors = local if rank == comm.rank else recv_object(comm, rank)
            for kind, table in tensors.items():
                for name, array in table.items():
                    result[kind].setdefault(name, array)
    return result
