"""Data axes on which every rank holds all parameters.

                      parameters    gradients     optimizer
    Replicated        everywhere    everywhere    everywhere      data parallelism
    ReplicaAlone      its own       its own       its own         replicas that meet when a technique lets them

Proved by: tests/equality/test_equality.py, tests/techniques/test_compression.py, tests/techniques/test_local_steps.py,
tests/techniques/test_streaming_diloco.py
"""

from minidist.core.base import arrays as xp
from minidist.core.comm import Comm
from minidist.core.nn.flat import FlatParameters
from minidist.core.train import data_axis
from minidist.core.train.data_axis import Group
from minidist.job.checkpoint.directory import ReplicaId
from minidist.job.checkpoint.parameter_shards import LocalShard
from minidist.job.train.job import Job, make_optimizer
from minidist.job.train.strategies.data_axis import DataAxis, Replicas, Tensors
from minidist.techniques.meeting import Replica


class Replicated(data_axis.Replicated, DataAxis):
    """Data parallelism in a job."""

    def __init__(self, job: Job, group: Group) -> None:
        super().__init__(job, group)
        self.place = group.comm

    def replicas_on(self, comm: Comm) -> Replicas:
        replica = ReplicaId(comm.rank, comm.size)
        return Replicas(replica, replica)


class ReplicaAlone(DataAxis):
    """A rank that steps its replica with its own rows' gradient; a technique lets the replicas meet (`Meeting`).

    The weights in a checkpoint are the common ones of all replicas; optimizer state is stored by replica.
    """

    def __init__(self, job: Job, group: Group) -> None:
        flat, comm, shares = FlatParameters(group.parameters), group.comm, job.batch.shares
        rows = sum(shares.rows[comm.rank])
        self.factor = shares.samples / rows
        replica = Replica(
            flat,
            comm,
            group.module,
            lambda: make_optimizer(job, flat, group),
            group.reduction,
            None if shares.is_even else rows / shares.samples,
            job.config.steps,
        )
        self.meeting = next(each for each in job.extensions if each.trains_alone).meeting(replica)
        super().__init__([flat], self.meeting.optimizer, group.module, group.stage)
        self.place = comm

    def step(self) -> None:
        # The loss was divided by the rows of all ranks, and this gradient is of one rank's rows.
        flat = self.flats[0]
        flat.grad[...] *= flat.dtype.type(self.factor)
        self.meeting.step()

    def replicas_on(self, comm: Comm) -> Replicas:
        # All ranks have the weights of a checkpoint, and each an optimizer state of its own.
        return Replicas(ReplicaId(comm.rank, comm.size), prefix=f"replica/{comm.rank:05d}/")

    def weights(self) -> list[LocalShard]:
        flat, common = self.flats[0], self.meeting.common
        if common is None:
            return super().weights()
        return [LocalShard(p, common[flat.slice_of(p)], 0, p.size) for p in self.parameters]

    def tensors(self) -> Tensors:
        """Add the common weights to the optimizer state, where the weights are this replica's own."""
        tensors = super().tensors()
        if self.meeting.common is None:
            return tensors
        common = {f"{shard.parameter.name}.common": xp.array(shard.values) for shard in self.weights()}
        return {**tensors, "optimizer": {**tensors["optimizer"], **common}}
