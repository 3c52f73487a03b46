"""A pipeline as a strategy of the training loop: this rank's stages, each with a data axis of its own."""

from typing import Any

import numpy as np

from minidist.autograd import Parameter
from minidist.base.arrays import Array
from minidist.base.trace import purpose
from minidist.comm import Comm
from minidist.config.pipeline_plan import cut_stages, make_plan
from minidist.parallel.dims import Axes
from minidist.pipeline.runtime import Pipeline, PipelineStage
from minidist.pipeline.runtime.norm import gather_blocks
from minidist.train.job import Job, as_input
from minidist.train.strategies.base import Strategy
from minidist.train.strategies.data_axes import data_axes
from minidist.train.strategies.data_axis import DataAxis, Tensors
from minidist.train.strategies.shared_shards import SharedShards


class PipelineParallel(Strategy):
    """This rank's stages in a pipeline of `config.pp` ranks; other pipelines, with other rows, on the data axis."""

    def __init__(self, job: Job, axes: Axes) -> None:
        plan = make_plan(job.config, job.batches.accumulation)
        modules, tied = cut_stages(job.config, job.model, plan.stages)
        stages, reducers, everything = [], {}, []
        for number in plan.stages_of(axes.pp.rank):
            module = modules[number]
            # The copies of a tied weight lie in other places of other arrays: only this order gives both the same bits.
            ordered = "ordered" if any(p.name in tied for p in module.parameters()) else None
            own = data_axes(job, module, axes, number, ordered, tied)
            for axis in own if job.config.zero != 2 else ():  # ZeRO 2 gives a bucket's memory back while backward runs
                axis.by_hand()
            stages.append(PipelineStage(module, number, [flat for axis in own for flat in axis.flats]))
            reducers[number] = [reducer for axis in own for reducer in axis.reducers]
            everything += own
        super().__init__(job, axes, everything)
        self.now = 0
        self.pipe = Pipeline(
            axes.pp,
            plan,
            stages,
            self._loss,
            tied=tied,
            reducers=reducers if axes.data.size > 1 or job.config.zero else None,
            reduce_each=job.config.zero == 2,
            coordinates=lambda i: job.coordinates(self.now, self._number(i)),
        )
        self.forwards: Pipeline | None = None  # of an evaluation
        if job.config.zero >= 2:
            shards = {
                n: [shard for axis in everything if axis.stage == n for shard in axis.shards] for n in self.pipe.stages
            }
            self.pipe.shared = SharedShards(self.pipe.shared, shards)  # type: ignore[assignment]

    def _number(self, i: int) -> int:
        """Global number of micro-batch i of this pipeline."""
        return self.axes.dp.rank * self.job.batches.accumulation + i

    def forward_backward(self, step: int) -> list[float]:
        """The plan, once."""
        self.now, job = step, self.job
        losses = self.pipe.step(*self._batches(job, step))
        return losses if job.scaler is None else [loss / job.scaler.scale for loss in losses]

    def held_out_losses(self, job: Job) -> list[float]:
        """The plan's forward passes alone."""
        if self.forwards is None:
            self.forwards = self.pipe.forwards(self.job.loss_of)
        return self.forwards.step(*self._batches(job, 0))

    def _batches(self, job: Job, step: int) -> tuple[list[Any], list[Any]]:
        """Inputs and targets of this pipeline's micro-batches."""
        batches = [job.micro_batch(step, self._number(i)) for i in range(job.batches.accumulation)]
        inputs = [
            getattr(x := as_input(inputs, job.dtype), "data", x) if inputs.dtype.kind == "f" else inputs
            for inputs, _ in batches
        ]
        return inputs, [targets for _, targets in batches]

    def _loss(self, outputs: Any, targets: Any) -> Any:
        return self.job.scaled(self.job.loss_of(outputs, targets))

    def square_sums(self) -> Array:
        """Stage after stage; a parameter on several places counts on the first. Two all-reduces (purpose clip_norm)."""
        rank = self.axes.pp.rank
        mine: dict[int, list[Array]] = {}
        for axis in self.data_axes:
            skip = [p for p in axis.parameters if not self.counts(axis, p)]
            mine.setdefault(axis.stage, []).append(self.squares_of(axis, skip))
        places = [(stage, at) for stage, ranks in self.pipe.plan.holders().items() for at in ranks]
        own = [
            np.concatenate([np.zeros(0), *mine.get(stage, [])]) if at == rank else np.zeros(0) for stage, at in places
        ]
        return gather_blocks(self.axes.pp, own)

    def counts(self, axis: DataAxis, parameter: Parameter) -> bool:
        return (axis.stage, self.axes.pp.rank, parameter.name) not in self.pipe.shared.copies

    def tensors(self) -> Tensors:
        """Everything of all stages, on every rank of the pipeline (purpose checkpoint)."""
        return everybodys(self.axes.pp, super().tensors())


def everybodys(comm: Comm, mine: Tensors) -> Tensors:
    """The tensors of all ranks; of one name the first rank's. Each rank sends its own to every other (purpose
    checkpoint).
    """
    everybody: Tensors = {kind: {} for kind in mine}
    with purpose("checkpoint"):
        for rank in range(comm.size):
            for other in range(comm.size):
                if comm.rank == rank != other:
                    comm.send_object(mine, other)
            theirs = mine if rank == comm.rank else comm.recv_object(rank)
            for kind, table in theirs.items():
                for name, array in table.items():
                    everybody[kind].setdefault(name, array)
    return everybody


class PipelineOrder:
    """In which order a pipeline adds the contributions to a parameter: data for the reference."""

    def __init__(self, job: Job) -> None:
        plan = make_plan(job.config, job.batches.accumulation)
        modules, self.tied = cut_stages(job.config, job.model, plan.stages)
        self.groups = job.config.dp_replicate if job.config.zero == 3 else 1
        self.each = job.config.zero >= 2  # are replicas summed in every micro-batch?
        self.replicas, self.additions, self.last = job.batches.dp, plan.additions(), plan.stages - 1
        self.stage_of = {
            p.name: stage for stage, module in reversed(list(enumerate(modules))) for p in module.parameters()
        }

    def sites(self, name: str) -> list[tuple[int, slice]]:
        """(stage, which of a micro-batch's contributions): backward meets the head's use of tied weights first."""
        if name in self.tied:
            return [(0, slice(1, None)), (self.last, slice(0, 1))]
        return [(self.stage_of[name], slice(None))]
