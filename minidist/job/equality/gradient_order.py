"""The order in which a layout adds gradient contributions, for the reference.

Floating-point addition is not associative, so "equal to one device, bit for bit" is a statement about an order. A
contribution is the gradient of one use of a parameter in one micro-batch, computed whole. `GradientOrder` is the
declaration; contributions that were caught on one device are added as it says. With 2 replicas of 2
micro-batches each (replica 0 computes micro-batches 0 and 1):

    DDP, ZeRO 1          (c0 + c1) + (c2 + c3)        each replica adds its own, then the replicas are added
    ZeRO 2, 3            (c0 + c2) + (c1 + c3)        the replicas are added in every micro-batch
    pipeline             micro-batches as the plan runs them, then the ranks of a stage, the stages, the replicas

Proved by: tests/equality/test_equality.py, tests/train/test_pipelines.py
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.data import Shares
from minidist.job.config.pipeline_plan import cut_stages, make_plan
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.job import Job
from minidist.pipeline.passes import additions
from minidist.techniques import reduces_each

Sites = Sequence[list[Array]]  # [micro-batch number] -> the contributions to one parameter, in backward order
Parts = list[list[Array | None]]  # [reduction of the step][replica] -> what the replica contributes
Add = Callable[[str, Sites], Array | None]  # (parameter name, its contributions) -> their sum


@dataclass(frozen=True)
class GradientOrder:
    """The declared order in which one parameter's gradient contributions are added.

    A contribution is the gradient of one use site in one micro-batch, computed whole. A stage adds its contributions
    one after the other: its micro-batches in the order `microbatches[stage]` (numbers local to the replica), and inside
    a micro-batch its sites in backward order. The stages' sums are added in stage order, and the replicas' sums last,
    in rank order. With `synchronize_each` the replicas are added after every micro-batch, and these sums are then added
    up in micro-batch order (ZeRO-2 and -3, DDP without `no_sync`). groups: the number of groups of neighbours; the
    replicas of each group are added, and then the groups' sums (hybrid sharding).
    """

    replicas: int = 1
    microbatches: tuple[tuple[int, ...], ...] = ((0,),)
    synchronize_each: bool = False
    groups: int = 1


def declared_order(config: TrainConfig, shares: Shares) -> GradientOrder:
    """Return the order in which a layout without a pipeline adds contributions."""
    # ZeRO 2 and 3 reduce in every micro-batch; hybrid sharding adds inside groups of replicas first.
    each = reduces_each(config) or config.zero >= 2
    groups = config.dp_replicate if config.zero == 3 else 1
    return GradientOrder(len(shares.rows), (tuple(range(shares.accumulation)),), each, groups)


def addition_of(job: Job) -> Add:
    """Return the function that adds a parameter's contributions in the order of the job's layout."""
    if job.config.pp > 1:
        return PipelineOrder(job).add
    return lambda name, sites: add_in_order(sites, declared_order(job.config, job.batch.shares))


def parts_of(job: Job) -> Callable[[str, Sites], Parts]:
    """Return the function that adds a parameter's contributions within each replica, for what reduces them itself."""
    if job.config.pp > 1:
        return PipelineOrder(job).parts
    return lambda name, sites: replica_parts(sites, declared_order(job.config, job.batch.shares))


def add_in_order(contributions: Sites, order: GradientOrder) -> Array | None:
    """Add the contributions to a parameter of a single stage as `order` declares; None when there are none."""
    # ZeRO 2, 3: the replicas in every micro-batch, then the micro-batches. DDP, ZeRO 1: one reduction per step.
    return fold(fold_replicas(parts, order.groups) for parts in replica_parts(contributions, order))


def replica_parts(contributions: Sites, order: GradientOrder) -> Parts:
    """Return what each replica contributes to each reduction of a step: one per step, or one per micro-batch."""
    local = len(contributions) // order.replicas
    (sequence,) = order.microbatches  # one stage

    def of_replica(replica: int, numbers: Iterable[int]) -> Array | None:
        return fold(site for i in numbers for site in contributions[replica * local + i])

    reductions = [[i] for i in sequence] if order.synchronize_each else [list(sequence)]
    return [[of_replica(replica, numbers) for replica in range(order.replicas)] for numbers in reductions]


class PipelineOrder:
    """The order in which a pipeline adds the contributions to a parameter."""

    def __init__(self, job: Job) -> None:
        config = job.config
        plan = make_plan(config, job.batches.accumulation)
        modules, self.tied = cut_stages(config, job.model, plan.stages)
        self.replicas, self.groups = job.batches.dp, config.dp_replicate if config.zero == 3 else 1
        self.reduce_each = config.zero >= 2  # replicas are summed in every micro-batch
        self.job, self.last_stage = job, plan.stages - 1
        self.orders: dict[int, dict[int, list[list[int]]]] = {}  # by the number of micro-batches
        # Of a tied weight the first stage.
        self.stage_of = {
            p.name: stage for stage, module in reversed(list(enumerate(modules))) for p in module.parameters()
        }

    @property
    def additions(self) -> dict[int, list[list[int]]]:
        """Of each stage, for each of its ranks, the micro-batches that it adds in the current step."""
        count = self.job.batch.shares.accumulation
        if count not in self.orders:
            self.orders[count] = additions(make_plan(self.job.config, count))
        return self.orders[count]

    def places(self, name: str) -> list[tuple[int, slice]]:
        """Return (stage, which contributions of a micro-batch); backward meets the head's use of tied weights first."""
        if name in self.tied:
            return [(0, slice(1, None)), (self.last_stage, slice(0, 1))]
        return [(self.stage_of[name], slice(None))]

    def add(self, name: str, contributions: Sites) -> Array | None:
        """Add micro-batches as the plan has them, then the ranks of a stage, the stages, and the replicas.

        With ZeRO 2 and 3 the replicas come first, in every micro-batch.
        """
        local, replicas = len(contributions) // self.replicas, range(self.replicas)

        def on_all_replicas(stage: int, uses: slice) -> Array | None:
            def of_microbatch(i: int) -> Array | None:
                parts = [fold(contributions[replica * local + i][uses]) for replica in replicas]
                return fold_replicas(parts, self.groups)

            return fold(fold(of_microbatch(i) for i in numbers) for numbers in self.additions[stage])

        # Without sharded gradients a tied weight is summed over its stages before the data axis; with them, after.
        if self.reduce_each:
            return fold(on_all_replicas(stage, uses) for stage, uses in self.places(name))
        return fold(self.parts(name, contributions)[0])

    def parts(self, name: str, contributions: Sites) -> Parts:
        """Return what each replica contributes to the one reduction of a step without sharded gradients."""
        local = len(contributions) // self.replicas

        # A stage's replicas on several ranks (DualPipe) each add their own micro-batches: the outer fold.
        def on_replica(stage: int, uses: slice, replica: int) -> Array | None:
            return fold(
                fold(site for i in numbers for site in contributions[replica * local + i][uses])
                for numbers in self.additions[stage]
            )

        places = self.places(name)
        return [[fold(on_replica(stage, uses, r) for stage, uses in places) for r in range(self.replicas)]]


def fold_replicas(parts: Sequence[Array | None], groups: int) -> Array | None:
    """Add the replicas' parts in rank order, in `groups` groups of neighbours, then the groups (hybrid sharding)."""
    size = len(parts) // groups
    return fold(fold(parts[first : first + size]) for first in range(0, len(parts), size))


def fold(parts: Iterable[Array | None]) -> Array | None:
    """Return ((a + b) + c) + ..., without the parts that are None."""
    total: Array | None = None
    for part in parts:
        if part is not None:
            total = xp.array(part) if total is None else total + part
    return total
