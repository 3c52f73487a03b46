"""How one stage's parameters lie on the ranks that compute with other rows.

                      parameters    gradients     optimizer
    Replicated        everywhere    everywhere    everywhere      data parallelism
    LocalSteps        everywhere    its own       its own         local SGD
    ShardedOptimizer  everywhere    everywhere    1/n             ZeRO 1
                      everywhere    1/n           1/n             ZeRO 2
    FullySharded      1/n           1/n           1/n             ZeRO 3, FSDP

Each answers what a `DataAxis` is asked. `data_axes` makes those of a stage, as `--zero` says.
"""

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from minidist.autograd import Parameter
from minidist.base.arrays import Array
from minidist.comm import Comm, init_device_mesh
from minidist.nn import Module
from minidist.parallel import (
    CPUOffloadPolicy,
    DistributedDataParallel,
    HostOptimizer,
    ZeroOptimizer,
    fully_shard,
    gather_tensors,
    sharded_parameters,
    shards_of,
)
from minidist.parallel.compression import Compressor, compress, make_compressor
from minidist.parallel.data_parallel import check_same_model
from minidist.parallel.dims import Axes
from minidist.parallel.flat_shards import shard_square_sums
from minidist.parallel.fsdp_state import param_groups_of
from minidist.parallel.local_sgd import PeriodicModelAverager
from minidist.planning.volumes import AxisSizes
from minidist.train.job import Job, make_optimizer, optimizer_class
from minidist.train.strategies.data_axis import DataAxis, Held, Tensors
from minidist.train.strategies.units import shard_modules


class Replicated(DataAxis):
    """Data parallelism: everything on every rank; gradients are all-reduced."""

    def __init__(self, job: Job, module: Module, parameters: Iterable[Parameter], comm: Comm, reduction: str) -> None:
        super().__init__(job, parameters)
        self.copies = self.state_copies = (comm.rank, comm.size)
        self.parallel = DistributedDataParallel(
            module,
            comm,
            reduction="sum",
            flat=self.flats[0],
            algorithm=reduction,
            bucket_cap_mb=job.config.bucket_cap_mb,
        )
        self.reducers = [self.parallel.reducer]
        self.compressor: Compressor | None = None
        if job.config.compression != "none":
            self.compressor = make_compressor(job.config.compression, comm, "sum", job.config.seed)
            self.parallel.register_comm_hook(self.compressor, compress)

    def wrap(self, model: Any) -> Any:
        self.parallel.module = model
        return self.parallel

    def by_hand(self) -> None:
        self.parallel.reducer.synchronizing = False

    def no_sync(self) -> AbstractContextManager[None]:
        return self.parallel.no_sync()

    def sizes(self) -> AxisSizes:
        if self.compressor is None:
            return super().sizes()
        group = range(self.parallel.comm.size)
        return replace(
            super().sizes(),
            compressed=sum(
                self.compressor.sent_bytes(b, rank) for b in self.parallel.reducer.buckets for rank in group
            ),
        )


class LocalSteps(DataAxis):
    """Local SGD: everything on every rank, with a gradient of its own rows; weights are averaged every H steps and at
    the end.
    """

    def __init__(self, job: Job, parameters: Iterable[Parameter], comm: Comm, reduction: str) -> None:
        super().__init__(job, parameters)
        self.comm, self.last = comm, job.config.steps
        check_same_model(self.flats[0], comm)
        self.average = PeriodicModelAverager(self.flats[0], comm, job.config.local_steps, algorithm=reduction)

    def step(self) -> None:
        (flat,) = self.flats
        flat.grad[...] *= flat.dtype.type(self.comm.size)  # the loss was divided by everybody's rows
        self.optimizer.step()
        if not self.average.step() and self.average.steps == self.last:
            self.average.average()


class ShardedOptimizer(DataAxis):
    """ZeRO 1 and 2."""

    def __init__(self, job: Job, parameters: Iterable[Parameter], comm: Comm, reduction: str) -> None:
        config = job.config
        kind, settings = optimizer_class(job)
        self.copies = comm.rank, comm.size
        self.zero = ZeroOptimizer(
            parameters,
            kind,
            comm=comm,
            stage=config.zero,
            reduction="sum",
            algorithm=reduction,
            reduce_bucket_size=config.reduce_bucket_size,
            **settings,
        )
        self.flats, self.shards, self.optimizer = [self.zero.flat], [self.zero.shard], self.zero.optimizer
        self.reducers = [self.zero.reducer]

    def by_hand(self) -> None:
        self.zero.reducer.synchronizing = False

    def no_sync(self) -> AbstractContextManager[None]:
        return self.zero.no_sync() if self.zero.stage == 1 else nullcontext()

    def square_sums(self, skip: Collection[Parameter] = ()) -> Array:
        return shard_square_sums(self.shards[0].comm, self.shards, skip)

    def gradients(self) -> list[Array]:
        return [shard.grad for shard in self.shards if shard.grad is not None]

    def gradient_holders(self) -> Any:
        return self.shards

    def step(self) -> None:
        self.zero.step()

    def tensors(self) -> Tensors:
        return gather_tensors(self.shards, self.optimizer)

    def state_ranges(self) -> list[tuple[Parameter, int, int]]:
        return [held for shard in self.shards for held in shard.state_ranges()]


class FullySharded(ShardedOptimizer):
    """ZeRO 3: every block is a unit, and what is left of the stage is one."""

    def __init__(self, job: Job, module: Module, comm: Comm, reduction: str, tied: Collection[str] = ()) -> None:
        config = job.config
        mesh: Any = comm
        if config.dp_replicate > 1:  # hybrid: shards over neighbours, copies of them over the groups
            mesh = init_device_mesh(
                comm, (config.dp_replicate, comm.size // config.dp_replicate), ("replicate", "shard")
            )
            self.copies = self.state_copies = (mesh["replicate"].rank, mesh["replicate"].size)
        policy = CPUOffloadPolicy(job.pool) if job.pool is not None and config.offload == "parameters" else None
        for part in shard_modules(module, tied):
            if part is module or any(
                parameter.flat is None for parameter in part.parameters()
            ):  # the whole is what its units share
                fully_shard(
                    part,
                    mesh=mesh,
                    prefetch=config.prefetch,
                    reduction="sum",
                    algorithm=reduction,
                    reshard_after_forward=config.reshard,
                    persistence_threshold=config.persistence_threshold,
                    offload_policy=policy,
                )
        self.shards = shards_of(module)
        self.flats = [shard.flat for shard in self.shards]
        self.resident = sum(group.flat.padded_numel for group in param_groups_of(module) if group.persistent)
        with nullcontext() if policy is None else policy.pool.on_host():
            optimizer: Any = make_optimizer(job, sharded_parameters(module))
        if policy is not None:
            optimizer = HostOptimizer(optimizer, policy.pool)
        self.optimizer = optimizer
        self.reducers = []

    def by_hand(self) -> None:
        """Units are reduced when backward leaves them, in a pipeline too."""

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step(self) -> None:
        self.optimizer.step()

    def weights(self) -> list[Held]:
        return [
            (p, shard.data[place], start, stop) for shard in self.shards for p, place, start, stop in shard.ranges()
        ]

    def updated(self) -> None:
        for shard in self.shards:
            shard.updated()

    def local_arrays(self) -> list[Array]:
        return [shard.data for shard in self.shards]

    def sizes(self) -> AxisSizes:
        sizes = super().sizes()
        return replace(sizes, buckets=sizes.units, resident=self.resident)


def spread(
    job: Job,
    module: Module,
    parameters: Iterable[Parameter],
    comm: Comm,
    reduction: str | None = None,
    tied: Collection[str] = (),
) -> DataAxis:
    """The data axis that `--zero` asks for, of some parameters of a module. reduction: another algorithm than the
    job's.
    """
    reduction = reduction or job.config.reduction
    match job.config.zero:
        case 0 if job.config.local_steps:
            return LocalSteps(job, parameters, comm, reduction)
        case 0:
            return Replicated(job, module, parameters, comm, reduction)
        case 1 | 2:
            return ShardedOptimizer(job, parameters, comm, reduction)
        case _:
            return FullySharded(job, module, comm, reduction, tied)


def data_axes(
    job: Job, module: Module, axes: Axes, stage: int = 0, reduction: str | None = None, tied: Collection[str] = ()
) -> list[DataAxis]:
    """All data axes of a stage: one, with dealt-out experts two. Sends the weights of rank 0 to everybody (startup).

    tied: names of parameters that other stages have too; where gradients are sharded they are cut apart from the
    others.
    """
    groups: dict[str, list[Parameter]] = {"shared": [], "tied": [], "dealt": []}
    for parameter in module.parameters():
        dealt = parameter.layout is not None and "ep" in parameter.layout.axes
        apart = job.config.zero == 2 and parameter.name in tied
        groups["dealt" if dealt else "tied" if apart else "shared"].append(parameter)
    result = []
    for kind, parameters in groups.items():
        if parameters:
            comm = axes.expert_data if kind == "dealt" else axes.data
            axis = spread(job, module, parameters, comm.dup() if job.config.pp > 1 else comm, reduction, tied)
            axis.stage, axis.experts = stage, kind == "dealt"
            result.append(axis)
    return result
