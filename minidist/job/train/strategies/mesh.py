"""What a job asks of a strategy on a mesh: evaluations, places in a checkpoint and whole tensors, over all axes.

Proved by: tests/train/test_axes.py, tests/train/test_sharded.py
"""

from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, Self

from minidist.autograd import Parameter
from minidist.comm import Comm
from minidist.job.checkpoint.buffers import Buffer
from minidist.job.checkpoint.directory import ReplicaId
from minidist.job.train import strategy
from minidist.job.train.job import Job
from minidist.job.train.strategies.data_axis import DataAxis, Tensors
from minidist.job.train.strategies.strategy import Strategy
from minidist.parallel.tensor import full_tensor


class MeshStrategy(strategy.MeshStrategy, Strategy):
    """This rank's data axes on a device mesh, in a job."""

    def no_sync(self) -> AbstractContextManager[Any]:
        # With --synchronize-each every micro-batch's gradients are reduced.
        return nullcontext() if self.job.config.synchronize_each else super().no_sync()

    def data_copy(self) -> int | None:
        # Data-parallel ranks share the samples; every coordinate on the other axes has all of them.
        axes = self.axes
        return (axes.pp.rank * axes.cp.size + axes.cp.rank) * axes.tp.size + axes.tp.rank

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
        return ReplicaId(*self.copy_of(axis, parameter))

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
