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

from minidist.core.base import arrays as xp
from minidist.core.base.arrays import Array
from minidist.job.config.pipeline_plan import cut_stages, make_plan
from minidist.job.train.job import Job
from minidist.pipeline.passes import additions
from minidist.techniques import reduces_each

Sites = Sequence[list[Array]]  # [micro-batch number] -> the contributions to one parameter, in backward order
Parts = list[list[Array | None]]  # [reduction of the step][replica] -> what the replica contributes
Add = Callable[[str, Sites], Array | None]  # (parameter name, its contributions) -> their sum


class GradientOrder:
    """The declared order in which the contributions to a parameter are added, in a layout without a pipeline.

    A contribution is the gradient of one use site in one micro-batch, computed whole. A replica adds its contributions
    one after the other: micro-batch by micro-batch, and inside a micro-batch its sites in backward order. The replicas'
    sums are added last, in rank order. With `synchronize_each` the replicas are added after every micro-batch, and
    these sums are then added up in micro-batch order (ZeRO-2 and -3, DDP without `no_sync`). groups: the number of
    groups of neighbours; the replicas of each group are added, and then the groups' sums (hybrid sharding).
    """

    def __init__(self, replicas: int = 1, synchronize_each: bool = False, groups: int = 1) -> None:
        self.replicas, self.synchronize_each, self.groups = replicas, synchronize_each, groups

    def parts(self, name: str, contributions: Sites) -> Parts:
        """Return what each replica contributes to each reduction of a step: one per step, or one per micro-batch."""
        local = len(contributions) // self.replicas
        reductions = [[i] for i in range(local)] if self.synchronize_each else [list(range(local))]
        return [
            [fold(site for i in numbers for site in contributions[r * local + i]) for r in range(self.replicas)]
            for numbers in reductions
        ]

    def add(self, name: str, contributions: Sites) -> Array | None:
        """Return the sum of the contributions to a parameter; None when there are none."""
        return fold(fold_replicas(parts, self.groups) for parts in self.parts(name, contributions))


def order_of(job: Job, ranks: int | None = None) -> GradientOrder:
    """Return the order in which the job's layout adds contributions. ranks: of a replica that trains alone."""
    config = job.config
    # ZeRO 2 and 3 reduce in every micro-batch; hybrid sharding adds inside groups of replicas first.
    each = config.zero >= 2 or reduces_each(config)
    groups = config.dp_replicate if config.zero == 3 and ranks is None else 1
    order = GradientOrder(ranks or job.batches.dp, each, groups)
    return order if config.pp == 1 else PipelineOrder(job, order)


class PipelineOrder(GradientOrder):
    """The order of a pipeline: micro-batches as the plan has them, the ranks of a stage, the stages, the replicas."""

    def __init__(self, job: Job, order: GradientOrder) -> None:
        super().__init__(order.replicas, order.synchronize_each, order.groups)
        plan = make_plan(job.config, job.batches.accumulation)
        modules, self.tied = cut_stages(job.config, job.model, plan.stages)
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
        # Without sharded gradients a tied weight is summed over its stages before the data axis; with them, after.
        if not self.synchronize_each:
            return super().add(name, contributions)
        local, replicas = len(contributions) // self.replicas, range(self.replicas)

        # With ZeRO 2 and 3 the replicas come first, in every micro-batch.
        def on_all_replicas(i: int, uses: slice) -> Array | None:
            parts = [fold(contributions[replica * local + i][uses]) for replica in replicas]
            return fold_replicas(parts, self.groups)

        return fold(
            fold(fold(on_all_replicas(i, uses) for i in numbers) for numbers in self.additions[stage])
            for stage, uses in self.places(name)
        )

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
