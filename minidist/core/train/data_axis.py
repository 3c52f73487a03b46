"""A data axis: one stage's parameters on the ranks that compute with other rows of the batch.

                      parameters    gradients     optimizer     a rank sends in a step, of Psi elements on n ranks
    Replicated        everywhere    everywhere    everywhere    2 (n-1)/n Psi                     DDP
    ShardedOptimizer  everywhere    everywhere    1/n           2 (n-1)/n Psi                     ZeRO 1
                      everywhere    1/n           1/n           (m+1) (n-1)/n Psi                 ZeRO 2
    FullySharded      1/n           1/n           1/n           3 m (n-1)/n Psi                   ZeRO 3, FSDP

with m micro-batches. Each stage of a pipeline has a separate data axis, and so have experts that are distributed over
ranks, because other ranks hold replicas of them. In a job, `minidist/job/train/strategies/sharded.py` extends the two
sharded classes under the same names.

A unit of ZeRO 3 is a set of parameters that are gathered and released together, and so are in one flat array:

    a stage   | wte | wpe  h.0  h.1  h.2 |    each block is a unit; the rest of the stage is one, gathered throughout
              | tied| rest |   |    |    |    a weight that another stage has too is one: both are cut the same way

Proved by: tests/train/test_sharded.py, tests/train/test_pipelines.py, tests/equality/test_equality.py
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.comm import Comm, Mesh
from minidist.core.nn import FlatParameters, Module
from minidist.core.parallel.data_parallel import DistributedDataParallel, GradientReducer
from minidist.core.parallel.dims import Axes
from minidist.core.parallel.fsdp import fully_shard, units_of
from minidist.core.parallel.zero import Shard, ZeroOptimizer
from minidist.core.train.task import Task


@dataclass(frozen=True)
class Group:
    """The parameters of a stage that one data axis is responsible for, and the ranks that share them.

    comm: these ranks; mesh: over what ZeRO 3 shards on them; axes: all axes. zero, reduction: as in `ParallelLayout`.
    experts: whether the parameters are cut over the axis ep. tied: names of parameters that other stages have too.
    options: of the wrapper; with ZeRO 3 also `expert_mesh`: where experts are another group, the ranks that shard them.
    """

    module: Module
    parameters: list[Parameter]
    comm: Comm
    mesh: Comm | Mesh
    axes: Axes
    zero: int
    reduction: str
    stage: int = 0
    experts: bool = False
    tied: Collection[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


class DataAxis:
    """Parameters that lie whole on this rank, with their optimizer: one rank alone. The base class of the others.

    model: what a forward pass calls. group: of the parameters; None where no other rank shares them. place: the
    communicator of the group. reducers, shards: of its units, where gradients are reduced or sharded. each: backward
    reduces gradients in every micro-batch (ZeRO 2 and 3), not once in a step.
    """

    reducers: Sequence[GradientReducer] = ()
    shards: Sequence[Shard] = ()
    each = False

    def __init__(self, flats: list[FlatParameters], optimizer: Any, model: Any, group: Group | None = None) -> None:
        self.flats, self.optimizer, self.model = flats, optimizer, model
        self.stage, self.experts = (0, False) if group is None else (group.stage, group.experts)
        self.place = None if group is None else group.comm

    def zero_grad(self) -> None:
        """Clear the gradients of the previous step."""
        for flat in self.flats:
            flat.zero_grad()

    def step(self) -> None:
        """Update the weights on every rank of the axis."""
        self.optimizer.step()


class Replicated(DataAxis):
    """Data parallelism: gradients are all-reduced, and every rank makes the same update."""

    def __init__(self, task: Task, group: Group) -> None:
        flat = FlatParameters(group.parameters)
        kind, settings = task.optimizer(group)
        optimizer = kind(flat, **settings)
        self.parallel = DistributedDataParallel(
            group.module, group.comm, reduction="sum", flat=flat, algorithm=group.reduction, **group.options
        )
        self.reducers = [self.parallel.reducer]
        super().__init__([flat], optimizer, self.parallel, group)


class ShardedOptimizer(DataAxis):
    """ZeRO 1 and 2: whole parameters, sharded optimizer state; with stage 2 the gradients are sharded too."""

    def __init__(self, task: Task, group: Group) -> None:
        kind, settings = task.optimizer(group)
        self.zero = ZeroOptimizer(
            group.parameters,
            kind,
            comm=group.comm,
            stage=group.zero,
            reduction="sum",
            algorithm=group.reduction,
            # For the running statistics of its batch norms; experts have theirs on other ranks.
            module=None if group.experts else group.module,
            **group.options,
            **settings,
        )
        self.reducers, self.shards, self.each = [self.zero.reducer], [self.zero.shard], group.zero == 2
        super().__init__([self.zero.flat], self.zero.optimizer, group.module, group)

    def step(self) -> None:
        self.zero.step()


class FullySharded(DataAxis):
    """ZeRO 3: each block is a unit, and the rest of the stage is one; units are reduced when backward leaves them."""

    each = True

    def __init__(self, task: Task, group: Group) -> None:
        # Bottom up: the blocks first, then the module for what they leave, which may be nothing. The group of the
        # experts comes second, and finds them sharded with the units that they are in.
        for part in [] if group.experts else unit_modules(group.module, group.tied):
            if part is group.module or any(parameter.flat is None for parameter in part.parameters()):
                fully_shard(part, mesh=group.mesh, reduction="sum", algorithm=group.reduction, **group.options)

        mine = set(group.parameters)
        self.units = [unit for unit in units_of(group.module) if mine.issuperset(unit.flat.parameters)]
        self.shards = [unit.shard for unit in self.units]
        kind, settings = task.optimizer(group)
        optimizer = kind([piece for shard in self.shards for piece in shard.slices()], **settings)
        super().__init__([shard.flat for shard in self.shards], optimizer, group.module, group)


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
