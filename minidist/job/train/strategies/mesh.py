"""Training on a device mesh without a pipeline: each data-parallel rank runs its own micro-batches through the model.

    micro-batch i    forward, backward     while i is not the last: gradients are added on this rank (`no_sync`)
    the last one     forward, backward     buckets are reduced over the data axis while backward runs

Tensor, context and expert parallelism are inside the model and send by themselves; what is left to do here is what
concerns all axes together: one gradient norm, and whole tensors for comparisons.

Proved by: tests/train/test_axes.py, tests/train/test_sharded.py
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from typing import Any, Self

from minidist.autograd import Parameter
from minidist.base import arrays as xp
from minidist.base.arrays import Array
from minidist.base.trace import purpose
from minidist.collectives import all_reduce
from minidist.comm import Comm
from minidist.job.checkpoint.buffers import Buffer
from minidist.job.checkpoint.directory import ReplicaId
from minidist.job.train.job import Job
from minidist.job.train.strategies.data_axis import DataAxis, Tensors
from minidist.job.train.strategies.strategy import Strategy
from minidist.parallel.dims import Axes
from minidist.parallel.tensor import full_tensor


class MeshStrategy(Strategy):
    """This rank's data axes on a device mesh. model: what the forward pass calls, wrapped by all data axes."""

    def __init__(self, job: Job, axes: Axes, data_axes: Sequence[DataAxis]) -> None:
        super().__init__(job, data_axes)
        self.axes = axes
        self.model: Any = self.data_axes[-1].model if self.data_axes else job.model

    # --- the phases of a step -----------------------------------------------------------------------------------------

    def forward_backward(self, step: int) -> list[float]:
        job, comm, k = self.job, self.axes.comm, self.job.batch.shares.accumulation
        losses = []
        for i in range(k):
            number = self.axes.dp.rank * k + i
            # Gradients are sent while the last backward runs, or each of them with --synchronize-each.
            synchronize = i == k - 1 or job.config.synchronize_each
            with job.coordinates(step, number), nullcontext() if synchronize else self.no_sync():
                loss = job.loss(step, number, self.model)
                comm.advance_clock("forward")

                job.scaled(loss).backward()
                comm.advance_clock("backward")
            losses.append(loss.item())
        return losses

    def data_copy(self) -> int | None:
        # Data-parallel ranks share the samples; every coordinate on the other axes has all of them.
        axes = self.axes
        return (axes.pp.rank * axes.cp.size + axes.cp.rank) * axes.tp.size + axes.tp.rank

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which the gradients of a pass stay on this rank."""
        stack = ExitStack()
        for axis in self.data_axes:
            stack.enter_context(axis.no_sync())
        return stack

    def square_sums(self) -> Array:
        return xp.concatenate([self.square_sums_of(axis) for axis in self.data_axes])

    def square_sums_of(self, axis: DataAxis, skip: Collection[Parameter] = ()) -> Array:
        """Return one data axis's part of `square_sums`: shards of tp and ep are summed, and replicas count once."""
        # A parameter that several ranks off the data axis hold counts on the first of them.
        repeated = [p for p in axis.parameters if self.replica_of(axis, p).number]
        blocks = axis.square_sums({*skip, *repeated})

        # Added in rank order, so that every rank has the same bits.
        for comm in (self.axes.tp, *([self.axes.ep] if axis.experts else [])):
            if comm.size > 1:
                with purpose("clip_norm"):
                    all_reduce(comm, blocks, algorithm="ordered")
        return blocks

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def held_out_losses(self, job: Job) -> list[float]:
        k = job.batch.shares.accumulation
        return [job.loss(0, self.axes.dp.rank * k + i).item() for i in range(k)]

    # --- what this rank holds -----------------------------------------------------------------------------------------

    def seen_from(self, comm: Comm) -> Self:
        """Return this strategy with what rank `comm.rank` has in a checkpoint: the shapes, and no values."""
        # The rank's place on every axis decides which part of a tensor it has.
        other = copy(self)
        other.axes = self.axes.dims.axes(comm)
        other.data_axes = [
            axis.seen_from(other.axes.expert_data if axis.experts else other.axes.data) for axis in self.data_axes
        ]
        return other

    def replica_of(self, axis: DataAxis, parameter: Parameter) -> ReplicaId:
        """Return this rank's number among the ranks off the data axis that hold the same tensor-parallel shard."""
        number, count = 0, 1
        for name in ("tp", "ep") if axis.experts else ("tp",):
            comm, layout = self.axes[name], parameter.layout
            # Of the ranks of an axis, those that hold one shard: `copies`, where the axis cuts the parameter, or all.
            same = layout.copies if layout is not None and name in layout.axes else comm.size
            number, count = number * same + comm.rank % same, count * same
        return ReplicaId(number, count)

    def owns(self, axis: DataAxis, parameter: Parameter) -> bool:
        """Return whether this is the parameter itself, and not a replica that a pipeline holds in another place."""
        return True

    def buffers(self) -> list[Buffer]:
        """Return what the modules of this rank keep beside parameters: running statistics of batch normalisation."""
        replica = ReplicaId(self.axes.comm.rank, self.axes.comm.size)
        return [(name, array, replica) for name, array in self.job.model.named_buffers()]

    def tensors(self) -> Tensors:
        result: Tensors = {"gradients": {}, "weights": {}, "optimizer": {}}
        for axis in self.data_axes:
            by_name = {p.name: p for p in axis.parameters}
            for kind, table in axis.tensors().items():
                for key, array in table.items():
                    # Optimizer state is named PARAMETER.KEY and is flat.
                    name = key.rpartition(".")[0] if kind == "optimizer" else key
                    whole = full_tensor(array, by_name[name].layout, self.axes)
                    result[kind].setdefault(key, whole.reshape(-1) if kind == "optimizer" else whole)
        return result
