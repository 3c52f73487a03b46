"""What a job asks of data axes on which ranks share the optimizer, the gradients or the parameters (ZeRO 1 to 3).

Proved by: tests/train/test_sharded.py, tests/train/test_pipelines.py, tests/techniques/test_offload.py
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Self

from minidist.core.autograd import Parameter
from minidist.core.base.arrays import Array
from minidist.core.comm import Comm
from minidist.core.comm.mesh import Mesh
from minidist.core.nn import Module
from minidist.core.optim import Optimizer
from minidist.core.parallel.zero import Shard
from minidist.core.train import data_axis
from minidist.core.train.data_axis import Group, unit_modules
from minidist.job.checkpoint.held import SINGLE, LocalShard, ReplicaId
from minidist.job.train.job import Job, mesh_of, shard_comm
from minidist.job.train.strategies.data_axis import AxisSizes, DataAxis, Replicas, Tensors
from minidist.optim.runs import empty_state
from minidist.parallel import gather_tensors, reduced_elements
from minidist.parallel.shards import ranges, seen_from, shard_square_sums, state_ranges


class Sharded(DataAxis):
    """What ZeRO 1 to 3 have in common in a job: this rank holds shards."""

    def gradient_holders(self) -> Sequence[Shard]:
        return self.shards

    def square_sums(self, skip: Collection[Parameter] = ()) -> Array:
        return shard_square_sums(self.shards[0].comm, self.shards, skip)

    def gradients(self) -> list[Array]:
        return [shard.grad for shard in self.shards if shard.grad is not None]

    def gradient_shards(self) -> list[LocalShard]:
        return local_shards([shard for shard in self.shards if shard.grad is not None], self.gradients())

    def tensors(self) -> Tensors:
        return gather_tensors(self.shards, self.optimizer)

    def state_ranges(self) -> list[tuple[Parameter, int, int]]:
        return [held for shard in self.shards for held in state_ranges(shard)]

    def shards_on(self, comm: Comm) -> Comm:
        """Return the communicator of the ranks that share one sharded copy."""
        return comm

    def seen_from(self, comm: Comm) -> Self:
        other, ranks = super().seen_from(comm), self.shards_on(comm)
        # Its shards, and the optimizer state of their elements.
        other.shards = [seen_from(shard, ranks) for shard in self.shards]
        other.optimizer = _EmptyOptimizer(self.optimizer, other.shards)
        return other


class _EmptyOptimizer:
    """A stand-in for the optimizer of another rank's shards: its state has the right shapes and no values."""

    def __init__(self, optimizer: Optimizer, shards: Sequence[Shard]) -> None:
        # Before the first step there is no state.
        self.state = {
            p.name: empty_state(optimizer, p.name, shard.data[place])
            for shard in (shards if optimizer.step_count else ())
            for p, place, _, _ in ranges(shard)
            if p.requires_grad
        }


class ShardedOptimizer(data_axis.ShardedOptimizer, Sharded):
    """ZeRO 1 and 2 in a job: the class of this name in `core/train/data_axis.py`, and its part of a checkpoint."""

    def replicas_on(self, comm: Comm) -> Replicas:
        return Replicas(ReplicaId(comm.rank, comm.size))


class FullySharded(data_axis.FullySharded, Sharded):
    """ZeRO 3 in a job: the class of this name in `core/train/data_axis.py`, with the copies of --dp-replicate."""

    def __init__(self, job: Job, group: Group) -> None:
        super().__init__(job, group)
        self.copies, self.mesh, self.algorithm = job.config.dp_replicate, group.mesh, group.reduction
        # Units of small parameters stay gathered between steps, so they are counted apart.
        self.resident = sum(unit.flat.padded_numel for unit in self.units if getattr(unit, "persistent", False))

    @property
    def replicas(self) -> Replicas:
        # Which of the copies of a shard, and so of its optimizer state, this rank has.
        copies = self.mesh["replicate"] if isinstance(self.mesh, Mesh) else None
        replica = SINGLE if copies is None else ReplicaId(copies.rank, copies.size)
        return Replicas(replica, replica)

    def seen_from(self, comm: Comm) -> Self:
        other = super().seen_from(comm)
        other.mesh = mesh_of(comm, self.copies)
        return other

    def shards_on(self, comm: Comm) -> Comm:
        return shard_comm(mesh_of(comm, self.copies))

    def weights(self) -> list[LocalShard]:
        return local_shards(self.shards, self.local_arrays())

    def local_arrays(self) -> list[Array]:
        return [shard.data for shard in self.shards]

    def updated(self) -> None:
        for shard in self.shards:
            shard.updated()

    def sizes(self) -> AxisSizes:
        sizes = super().sizes()
        reduced = None
        if self.algorithm not in ("ring", "ordered"):
            reduced = sum(map(reduced_elements.of_unit, self.units))
        return replace(sizes, buckets=sizes.units, resident=self.resident, reduced=reduced)


def local_shards(shards: Iterable[Shard], arrays: Iterable[Array]) -> list[LocalShard]:
    """Return the parts of parameters that the arrays of these shards are, as 1-D views."""
    return [
        LocalShard(p, values[place], start, stop)
        for shard, values in zip(shards, arrays, strict=True)
        for p, place, start, stop in ranges(shard)
    ]


def unit_parameters(
    module: Module, persistence_threshold: int = 0, tied: Collection[str] = ()
) -> list[list[Parameter]]:
    """Return the parameters of each unit, the module's own first; a parameter belongs to the first unit that has it.

    A unit's parameters of fewer than `persistence_threshold` elements are a separate unit, after the others.
    """
    units: list[list[Parameter]] = []
    seen: set[Parameter] = set()
    for part in unit_modules(module, tied):
        units.append([p for p in part.parameters() if p not in seen])
        seen.update(units[-1])

    # The module's own unit comes first; the small parameters of a unit follow its large ones.
    parts = [
        [p for p in unit if (p.size < persistence_threshold) is small]
        for unit in (units[-1], *units[:-1])
        for small in (False, True)
    ]
    return [part for part in parts if part]
