"""Data axes of replicas that train alone, and meet when a technique lets them (`techniques/meeting.py`).

                          parameters    gradients     optimizer
    ReplicaAlone          its own       its own       its own         a replica is one rank
    ZeroReplicaAlone      its own       1/s           1/s             ... is s neighbours: ZeRO 2 (1: whole gradients)
    ShardedReplicaAlone   1/s           1/s           1/s             ... ZeRO 3, FSDP

Inside a replica of several ranks, ZeRO works as over all data-parallel ranks of another job. A rank updates its shard,
combines it with the same shard of the other replicas ("meet"), and then (ZeRO 1, 2) the replica gathers the weights:

    replica 0    ranks 0 1    reduce-scatter ─▶ step ─▶ meet ─▶ gather            ranks 0 and 2 meet,
    replica 1    ranks 2 3    reduce-scatter ─▶ step ─▶ meet ─▶ gather            and so do ranks 1 and 3

The weights in a checkpoint are the common ones of all replicas; optimizer state is stored by replica.

Proved by: tests/techniques/test_local_steps.py, tests/techniques/test_streaming_diloco.py,
tests/techniques/test_sharded_replicas.py
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.core.comm.mesh import Mesh
from minidist.core.nn.flat import FlatParameters
from minidist.core.train.data_axis import Group
from minidist.job.checkpoint.held import LocalShard, ReplicaId
from minidist.job.train.job import Job, make_optimizer
from minidist.job.train.strategies.data_axis import DataAxis, Replicas, Tensors
from minidist.job.train.strategies.sharded import FullySharded, Sharded, ShardedOptimizer, local_shards
from minidist.techniques.meeting import Meeting, Replica


def meeting_of(job: Job, group: Group, parts: Sequence[Any], comm: Comm, make: Any) -> tuple[Meeting, float]:
    """Return what lets a replica meet the others, and what its gradient is to be multiplied by.

    group: of all data-parallel ranks. parts: the weights of this rank. comm: the ranks with the same parts of the other
    replicas. make: makes the optimizer of `parts`. The loss was divided by the rows of all ranks, and a replica's
    gradient is that of the replica's rows.
    """
    shares, ranks = job.batch.shares, group.comm.size // comm.size
    first = group.comm.rank // ranks * ranks
    rows = sum(sum(own) for own in shares.rows[first : first + ranks])
    share = None if shares.is_even else rows / shares.samples
    replica = Replica(parts, comm, group.module, make, group.reduction, share, job.config.steps)
    meeting = next(each for each in job.extensions if each.trains_alone).meeting(replica)
    return meeting, shares.samples / rows


class ReplicaAlone(DataAxis):
    """A rank that steps its replica with its own rows' gradient."""

    def __init__(self, job: Job, group: Group) -> None:
        flat = FlatParameters(group.parameters)
        self.meeting, self.factor = meeting_of(job, group, [flat], group.comm, lambda: make_optimizer(job, flat, group))
        super().__init__([flat], self.meeting.optimizer, group.module, group)

    def step(self) -> None:
        flat = self.flats[0]
        flat.grad[...] *= flat.dtype.type(self.factor)
        self.meeting.step()

    def replicas_on(self, comm: Comm) -> Replicas:
        # All ranks have the weights of a checkpoint, and each has its own optimizer state.
        return Replicas(ReplicaId(comm.rank, comm.size), prefix=f"replica/{comm.rank:05d}/")

    def weights(self) -> list[LocalShard]:
        flat = self.flats[0]
        if self.meeting.common is None:
            return super().weights()
        (common,) = self.meeting.common
        return [LocalShard(p, common[flat.slice_of(p)], 0, p.size) for p in self.parameters]

    def tensors(self) -> Tensors:
        """Add the common weights to the optimizer state, where the weights are this replica's own."""
        tensors = super().tensors()
        if self.meeting.common is None:
            return tensors
        common = {f"{shard.parameter.name}.common": xp.array(shard.values) for shard in self.weights()}
        return {**tensors, "optimizer": {**tensors["optimizer"], **common}}


class SharedReplica(Sharded):
    """What the replicas of ZeRO 1 to 3 have in common: neighbours are one replica, and share its weights.

    mesh: (replicas, the ranks of each).
    """

    place: Comm

    def __init__(self, job: Job, group: Group) -> None:
        mesh = mesh_of_replicas(group.comm, job.config.dp_replicate)
        super().__init__(job, replace(group, comm=mesh["shard"], mesh=mesh["shard"]))  # type: ignore[arg-type, call-arg]
        # From now on the shards of this rank meet those of the other replicas.
        self.mesh: Any = mesh
        self.place, inner = group.comm, self.optimizer
        self.meeting, self.factor = meeting_of(job, group, self.shards, mesh["replicate"], lambda: inner)
        self.optimizer = self.meeting.optimizer

    def step(self) -> None:
        for shard in self.shards:
            if shard.filled:
                shard.grad_buffer()[...] *= shard.dtype.type(self.factor)
        self.meeting.step()

    @property
    def replicas(self) -> Replicas:
        other = self.mesh["replicate"]
        return Replicas(ReplicaId(other.rank, other.size), prefix=f"replica/{other.rank:05d}/")

    def seen_from(self, comm: Comm) -> Any:
        other = super().seen_from(comm)
        other.mesh = mesh_of_replicas(comm, self.mesh.shape[0])
        return other

    def shards_on(self, comm: Comm) -> Comm:
        return mesh_of_replicas(comm, self.mesh.shape[0])["shard"]

    def weights(self) -> list[LocalShard]:
        if self.meeting.common is None:
            return super().weights()
        return local_shards(self.shards, self.meeting.common)

    def tensors(self) -> Tensors:
        tensors = super().tensors()
        if self.meeting.common is not None:
            for shard, values in zip(self.shards, self.meeting.common, strict=True):
                with purpose("metrics"):
                    whole = all_gather(shard.comm, values)
                for p in shard.flat.parameters:
                    tensors["optimizer"][f"{p.name}.common"] = whole[shard.flat.slice_of(p)]
        return tensors


class ZeroReplicaAlone(SharedReplica, ShardedOptimizer):
    """Replicas of ZeRO 1 and 2."""

    def __init__(self, job: Job, group: Group) -> None:
        super().__init__(job, group)
        # The shards are those of rank 0's replica now.
        self.gather()

    @property
    def replicas(self) -> Replicas:
        # Whole weights lie on every rank; shards of the common ones on one rank of each replica.
        if self.meeting.common is None:
            return super().replicas._replace(weights=ReplicaId(self.place.rank, self.place.size))
        return super().replicas

    def step(self) -> None:
        super().step()
        self.gather()

    def gather(self) -> None:
        """Let every rank of this replica have the shards of all: (s-1)/s of the weights leave each of its s ranks."""
        flat = self.zero.flat
        with purpose("parameter_gather"):
            equal = self.zero.reducer.guard.of_weights(flat)
            all_gather(self.zero.comm, self.zero.shard.data, out=flat.data, equal=equal)

    def updated(self) -> None:
        super().updated()
        # A checkpoint has each replica's own weights as shards.
        if self.meeting.common is not None:
            self.gather()


class ShardedReplicaAlone(SharedReplica, FullySharded):
    """Replicas of ZeRO 3."""


def mesh_of_replicas(comm: Comm, replicas: int) -> Mesh:
    """Return the ranks of a data axis as replicas of neighbours."""
    return Mesh(comm, (replicas, comm.size // replicas), ("replicate", "shard"))
