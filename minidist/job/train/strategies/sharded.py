"""Data axes on which ranks share the optimizer, the gradients or the parameters (ZeRO), and the units of ZeRO 3.

                      parameters    gradients     optimizer
    ShardedOptimizer  everywhere    everywhere    1/n             ZeRO 1
                      everywhere    1/n           1/n             ZeRO 2
    FullySharded      1/n           1/n           1/n             ZeRO 3, FSDP

A unit of ZeRO 3 is a set of parameters that are gathered and released together, and so lie in one flat array:

    a stage   | wte | wpe  h.0  h.1  h.2 |    each block is a unit; the rest of the stage is one, gathered throughout
              | tied| rest |   |    |    |    a weight that another stage has too is one: both are cut the same way

Proved by: tests/train/test_sharded.py, tests/train/test_pipelines.py, tests/techniques/test_offload.py
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Self

from minidist.autograd import Parameter
from minidist.base.arrays import Array
from minidist.comm import Comm, init_device_mesh
from minidist.comm.mesh import Mesh
from minidist.job.checkpoint.directory import SINGLE, ReplicaId
from minidist.job.checkpoint.parameter_shards import LocalShard
from minidist.job.train.job import Job, make_optimizer, optimizer_class
from minidist.job.train.strategies.data_axis import AxisSizes, DataAxis, Group, Replicas, Tensors
from minidist.nn import Module
from minidist.optim import Optimizer
from minidist.parallel import Shard, ZeroOptimizer, fully_shard, gather_tensors, reduced_elements
from minidist.parallel.flat_shards import shard_square_sums
from minidist.parallel.fsdp_state import param_groups_of


class Sharded(DataAxis):
    """What ZeRO 1 to 3 have in common: each rank updates the elements of its shards."""

    def gradients(self) -> list[Array]:
        return [shard.grad for shard in self.shards if shard.grad is not None]

    def gradient_shards(self) -> list[LocalShard]:
        return [
            LocalShard(p, shard.grad[place], start, stop)
            for shard in self.shards
            if shard.grad is not None
            for p, place, start, stop in shard.ranges()
        ]

    def gradient_holders(self) -> list[Shard]:
        return self.shards

    def square_sums(self, skip: Collection[Parameter] = ()) -> Array:
        return shard_square_sums(self.shards[0].comm, self.shards, skip)

    def tensors(self) -> Tensors:
        return gather_tensors(self.shards, self.optimizer)

    def state_ranges(self) -> list[tuple[Parameter, int, int]]:
        return [held for shard in self.shards for held in shard.state_ranges()]

    def shards_on(self, comm: Comm) -> Comm:
        """Return the communicator of the ranks that share one sharded copy."""
        return comm

    def seen_from(self, comm: Comm) -> Self:
        other, ranks = super().seen_from(comm), self.shards_on(comm)
        # Its shards, and the optimizer state of their elements.
        other.shards = [shard.seen_from(ranks) for shard in self.shards]
        other.optimizer = _EmptyOptimizer(self.optimizer, other.shards)
        return other


class _EmptyOptimizer:
    """A stand-in for the optimizer of another rank's shards: its state has the right shapes and no values."""

    def __init__(self, optimizer: Optimizer, shards: Sequence[Shard]) -> None:
        # Before the first step there is no state.
        self.state = {
            p.name: optimizer.empty_state(p.name, shard.data[place])
            for shard in (shards if optimizer.step_count else ())
            for p, place, _, _ in shard.ranges()
            if p.requires_grad
        }


class ShardedOptimizer(Sharded):
    """ZeRO 1 and 2: whole parameters, sharded optimizer state; with stage 2 the gradients are sharded too."""

    def __init__(self, job: Job, group: Group) -> None:
        config = job.config
        kind, settings = optimizer_class(job, group.exchange(config, group.comm))
        # The module, for the running statistics of its batch norms; experts have theirs on other ranks.
        others = set(group.module.parameters()) - set(group.parameters)
        self.zero = ZeroOptimizer(
            group.parameters if group.experts else group.module,
            kind,
            comm=group.comm,
            stage=config.zero,
            reduction="sum",
            algorithm=group.reduction,
            reduce_bucket_size=config.reduce_bucket_size,
            ignored_params=others,
            **settings,
        )
        # ZeRO 2 frees a bucket's memory while backward runs, so backward itself must start its reduction.
        if group.manual_sync and config.zero == 1:
            self.zero.reducer.synchronize_manually()
        super().__init__(
            [self.zero.flat],
            self.zero.optimizer,
            model=group.module,
            stage=group.stage,
            experts=group.experts,
            reducers=[self.zero.reducer],
            shards=[self.zero.shard],
            replicas=self.replicas_on(group.comm),
        )

    def replicas_on(self, comm: Comm) -> Replicas:
        return Replicas(ReplicaId(comm.rank, comm.size))

    def no_sync(self) -> AbstractContextManager[None]:
        return self.zero.no_sync() if self.zero.stage == 1 else nullcontext()

    def step(self) -> None:
        self.zero.step()


class FullySharded(Sharded):
    """ZeRO 3: each block is a unit, and the rest of the stage is one; units are reduced when backward leaves them."""

    def __init__(self, job: Job, group: Group) -> None:
        config = job.config
        self.copies = config.dp_replicate
        mesh = _mesh(group.comm, self.copies)
        expert_mesh = None if group.expert_comm is None else _mesh(group.expert_comm, self.copies)

        # Bottom up: the blocks first, then the module for what they leave. It may leave nothing. The data axis of the
        # experts comes second, and finds them sharded with the units that they are in.
        if not group.experts:
            _shard_units(job, group, mesh, expert_mesh)

        mine = set(group.parameters)
        units = [unit for unit in param_groups_of(group.module) if mine.issuperset(unit.flat.parameters)]
        shards = [unit.shard for unit in units]
        exchange = group.exchange(config, _shard_comm(mesh))
        optimizer = make_optimizer(job, [piece for shard in shards for piece in shard.slices()], exchange)

        # Units of small parameters stay gathered between steps, so they are counted apart.
        self.units, self.algorithm = units, group.reduction
        self.resident = sum(unit.flat.padded_numel for unit in units if unit.reshard.persistent)
        super().__init__(
            [shard.flat for shard in shards],
            optimizer,
            model=group.module,
            stage=group.stage,
            experts=group.experts,
            shards=shards,
            replicas=_replicas(mesh),
        )

    def replicas_on(self, comm: Comm) -> Replicas:
        return _replicas(_mesh(comm, self.copies))

    def shards_on(self, comm: Comm) -> Comm:
        return _shard_comm(_mesh(comm, self.copies))

    def weights(self) -> list[LocalShard]:
        return [
            LocalShard(p, shard.data[place], start, stop)
            for shard in self.shards
            for p, place, start, stop in shard.ranges()
        ]

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


def _shard_units(job: Job, group: Group, mesh: Comm | Mesh, expert_mesh: Comm | Mesh | None) -> None:
    """Shard the units of the group's module, as the job's settings say."""
    config = job.config
    policy = next((found for extension in job.extensions if (found := extension.offload_policy())), None)
    for part in unit_modules(group.module, group.tied):
        if part is group.module or any(parameter.flat is None for parameter in part.parameters()):
            fully_shard(
                part,
                mesh=mesh,
                prefetch=config.prefetch,
                reduction="sum",
                algorithm=group.reduction,
                reshard_after_forward=config.reshard,
                persistence_threshold=config.persistence_threshold,
                offload_policy=policy,
                expert_mesh=expert_mesh,
            )


def _mesh(comm: Comm, copies: int) -> Comm | Mesh:
    """Return over what to shard: with several copies, over neighbours (hybrid)."""
    return comm if copies == 1 else init_device_mesh(comm, (copies, comm.size // copies), ("replicate", "shard"))


def _shard_comm(mesh: Comm | Mesh) -> Comm:
    """Return the ranks whose shards together are one copy."""
    return mesh["shard"] if isinstance(mesh, Mesh) else mesh


def _replicas(mesh: Comm | Mesh) -> Replicas:
    """Return which of the copies of a shard, and so of its optimizer state, this rank has."""
    replica = ReplicaId(mesh["replicate"].rank, mesh["replicate"].size) if isinstance(mesh, Mesh) else SINGLE
    return Replicas(replica, replica)


# --- the units of ZeRO 3 ----------------------------------------------------------------------------------------------


def unit_modules(module: Any, tied: Collection[str] = ()) -> list[Module]:
    """Return the modules that ZeRO 3 shards as units, bottom up: what holds a tied weight, the blocks, the rest."""
    apart = [
        part
        for part in module.modules()
        if part is not module and any(p.name in tied for p in vars(part).values() if isinstance(p, Parameter))
    ]
    # The blocks of a GPT, of a Llama, and of their pipeline stages. In a user's own model such a name may be anything.
    for owner, name in (("transformer", "h"), ("model", "layers"), ("", "h"), ("", "layers")):
        inner = getattr(module, owner, None) if owner else module
        blocks = getattr(inner, name, None)
        if isinstance(blocks, Iterable) and all(isinstance(block, Module) for block in blocks):
            return [*apart, *blocks, module]
    return [*apart, module]


def unit_parameters(
    module: Module, persistence_threshold: int = 0, tied: Collection[str] = ()
) -> list[list[Parameter]]:
    """Return the parameters of each unit, the module's own first; a parameter belongs to the first unit that has it.

    A unit's parameters of fewer than `persistence_threshold` elements are a unit of their own, after the others.
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
