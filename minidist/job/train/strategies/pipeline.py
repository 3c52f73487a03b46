"""A pipeline as a strategy: this rank runs its stages by a plan, and each stage has its data axes.

    stage 0   rank 0   data axis of stage 0 ── other pipelines' stage 0, with other rows
    stage 1   rank 1   data axis of stage 1 ── other pipelines' stage 1

Proved by: tests/train/test_pipelines.py, tests/planning/test_profiler.py
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from minidist.autograd import Parameter
from minidist.base import arrays as xp
from minidist.base.arrays import Array
from minidist.base.layout import offsets
from minidist.base.trace import purpose
from minidist.comm import Comm
from minidist.data.sampler import SIDES
from minidist.job.checkpoint.buffers import Buffer
from minidist.job.checkpoint.directory import ReplicaId
from minidist.job.config.pipeline_plan import cut_sizes, cut_stages, make_plan
from minidist.job.train.job import Job, as_input
from minidist.job.train.strategies.data_axis import DataAxis, Tensors
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.nn import Module
from minidist.parallel import GradientReducer, Shard
from minidist.parallel.context import documents
from minidist.parallel.dims import Axes
from minidist.pipeline.runtime import Pipeline, PipelineStage, Reduction
from minidist.pipeline.runtime.evaluation import Evaluation
from minidist.pipeline.runtime.norm import gather_blocks


class ApplyDataParallel(Protocol):
    """`recipe.apply_data_parallel`: makes the data axes of one stage."""

    def __call__(
        self,
        job: Job,
        module: Module,
        axes: Axes,
        *,
        stage: int,
        reduction: str | None,
        tied: Collection[str],
        manual_sync: bool,
    ) -> list[DataAxis]: ...


def release_other_stages(modules: Sequence[Module], own: Collection[int]) -> None:
    """Let go of the parameters of the stages that other ranks hold. A tied weight of an own stage is kept."""
    kept = {id(parameter) for number in own for parameter in modules[number].parameters()}
    for module in modules:
        for parameter in module.parameters():
            if id(parameter) not in kept:
                parameter.release()


class PipelineParallel(MeshStrategy):
    """This rank's stages in a pipeline of `config.pp` ranks; other pipelines, with other rows, are on the data axis."""

    def __init__(self, job: Job, axes: Axes, apply_data_parallel: ApplyDataParallel) -> None:
        config, profile = job.config, job.profile
        plan = make_plan(config, job.batches.accumulation)
        modules, tied = cut_stages(config, job.model, plan.stages)
        release_other_stages(modules, plan.stages_of(axes.pp.rank))

        # Each of this rank's stages has its data axes; the pipeline gets their reducers and shards, because it
        # knows when a stage's gradients are complete.
        stages: list[PipelineStage] = []
        reducers: dict[int, list[GradientReducer]] = {}
        shards: dict[int, list[Shard]] = {}
        data_axes: list[DataAxis] = []
        for number in plan.stages_of(axes.pp.rank):
            module = modules[number]
            # The replicas of a tied weight lie in other places of other arrays: only this order gives both the same
            # bits.
            reduction = "ordered" if any(p.name in tied for p in module.parameters()) else None
            own = apply_data_parallel(job, module, axes, stage=number, reduction=reduction, tied=tied, manual_sync=True)
            stages.append(PipelineStage(module, number, [flat for axis in own for flat in axis.flats]))
            reducers[number] = [reducer for axis in own for reducer in axis.reducers]
            shards[number] = [shard for axis in own for shard in axis.shards]
            data_axes += own

        # Hooks on the layers of this rank, by their number in the model.
        if profile is not None:
            _watch(job, profile, axes.comm, plan.stages, reducers)

        super().__init__(job, axes, data_axes)
        self.holders = plan.holders()
        self.current_step = 0
        self.document_ids: list[Array | None] = []  # of the micro-batches of a step
        self.pipe = Pipeline(
            axes.pp,
            plan,
            stages,
            self._loss,
            tied=tied,
            reduce=Reduction(
                axes.data,
                reducers=reducers if axes.data.size > 1 or config.zero else {},
                each=config.zero == 2,
                shards=shards if config.zero >= 2 else None,
            ),
            coordinates=self._coordinates,
            observers=[] if profile is None else [profile],
        )
        self.forward_pipe: Evaluation | None = None  # for evaluations

    # --- the phases of a step -----------------------------------------------------------------------------------------

    def forward_backward(self, step: int) -> list[float]:
        self.current_step, job = step, self.job
        losses = self.pipe.step(*self._batches(job, step))
        # Backward started from scaled losses; those that are reported are not scaled.
        return losses if job.scale == 1 else [loss / job.scale for loss in losses]

    def held_out_losses(self, job: Job) -> list[float]:
        if self.forward_pipe is None:
            # Made once: the forward passes of the plan, without their backwards.
            self.forward_pipe = Evaluation(self.pipe, self.job.loss_of)
        return self.forward_pipe.step(*self._batches(job, 0))

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

    # --- what this rank holds -----------------------------------------------------------------------------------------

    def owns(self, axis: DataAxis, parameter: Parameter) -> bool:
        return (axis.stage, self.axes.pp.rank, parameter.name) not in self.pipe.shared.copies

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
                result += [(f"{module.name}.{key}", array, replica) for key, array in module.own_buffers().items()]
        return result

    def tensors(self) -> Tensors:
        return gather_tensors(self.axes.pp, super().tensors())

    # --- the micro-batches --------------------------------------------------------------------------------------------

    def _number(self, i: int) -> int:
        """Return the global number of micro-batch i of this pipeline."""
        return self.axes.dp.rank * self.job.batches.accumulation + i

    @contextmanager
    def _coordinates(self, i: int) -> Iterator[None]:
        """The context of micro-batch i on every stage: where its samples are, and its documents."""
        with self.job.coordinates(self.current_step, self._number(i)), documents(self.document_ids[i]):
            yield

    def _batches(self, job: Job, step: int) -> tuple[list[Any], list[Any]]:
        numbers = [self._number(i) for i in range(job.batches.accumulation)]
        self.document_ids = [job.document_ids(step, number) for number in numbers]
        return input_arrays(job, [(step, number) for number in numbers])

    def _loss(self, outputs: Any, targets: Any) -> Any:
        return self.job.scaled(self.job.loss_of(outputs, targets))


def input_arrays(
    job: Job, microbatches: list[tuple[int, int]], sides: Iterable[str] = SIDES
) -> tuple[list[Any], list[Any]]:
    """Return the inputs, as arrays of the model's dtype, and the targets of micro-batches (step, number).

    sides: which of the two the rank uses.
    """
    batches = [job.micro_batch(step, number, sides) for step, number in microbatches]
    inputs = [as_input(x, job.dtype).data if x.dtype.kind == "f" else x for x, _ in batches]
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
                    comm.send_object(local, other)
            tensors = local if rank == comm.rank else comm.recv_object(rank)
            for kind, table in tensors.items():
                for name, array in table.items():
                    result[kind].setdefault(name, array)
    return result


def _watch(job: Job, profile: Any, comm: Comm, stages: int, mine: Iterable[int]) -> None:
    """Let the profile watch the layers of this rank's stages."""
    blocks = list(job.model.blocks)
    bounds = offsets(cut_sizes(job.config, job.model, stages))
    layers = {n: {i: blocks[i] for i in range(bounds[n], bounds[n + 1])} for n in mine}
    profile.watch(comm, layers, len(blocks), stages - 1)
