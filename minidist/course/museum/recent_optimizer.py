"""Bugs of what happens between backward and the update, from public threads of 2024 to 2026: accumulated gradients,
their norm, the learning rate, and the optimizer's state in a checkpoint.

Proved by: tests/museum/test_recent_optimizer.py
"""

from tempfile import TemporaryDirectory
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base.arrays import Array
from minidist.core.comm import Comm
from minidist.core.parallel.fsdp_unit import FSDPUnit
from minidist.core.parallel.zero import ShardReducer
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Patch, Recording
from minidist.job.checkpoint import resume
from minidist.job.train import recipe, run
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.job.train.strategies.sharded import FullySharded
from minidist.optim.schedule import WarmupLinear
from minidist.techniques.local_sgd.averaging import OuterOptimizer

TINY: dict[str, Any] = {"width": 8, "layers": 1, "context": 4, "precision": "fp64"}


def every_pass_is_the_last(patch: Patch) -> None:
    """every backward pass is taken for the last one before the update, and the next one begins with an empty sum"""
    right = ShardReducer.started

    def started(self: Any) -> None:
        right(self)
        self.shard.filled = self.shard.filled and self.keep_whole

    patch.setattr(ShardReducer, "started", started)


def first_use_alone(patch: Patch) -> None:
    """of a weight that is used twice, the gradient of one use is reduced, and that of the other is lost"""
    right = Parameter.accumulate

    def accumulate(self: Any, compute: Any) -> None:
        sharded = any(isinstance(o, ShardReducer) and not o.keep_whole for o in self.observers)
        if not (sharded and self.gradient.local is not None):
            right(self, compute)

    patch.setattr(Parameter, "accumulate", accumulate)


def doubled_by_a_group_of_one(patch: Patch) -> None:
    """with one rank in the group, the sum of earlier micro-batches is doubled before the next gradient is added"""
    right = FSDPUnit.add_reduced

    def add_reduced(self: Any, piece: Array) -> None:
        if self.shard.filled and self.shard.comm.size == 1:
            self.shard.grad_buffer()[...] *= 2
        right(self, piece)

    patch.setattr(FSDPUnit, "add_reduced", add_reduced)


def overwritten_by_a_group_of_one(patch: Patch) -> None:
    """with one rank in the group, the gradient of a micro-batch is copied over the sum of the earlier ones"""
    right = FSDPUnit.add_reduced

    def add_reduced(self: Any, piece: Array) -> None:
        self.shard.filled = self.shard.filled and self.shard.comm.size > 1
        right(self, piece)

    patch.setattr(FSDPUnit, "add_reduced", add_reduced)


def sum_divided_again(patch: Patch) -> None:
    """in place of the new gradient, what is accumulated so far is divided by the number of ranks"""
    right = FSDPUnit.add_reduced

    def add_reduced(self: Any, piece: Array) -> None:
        if self.shard.filled:
            self.shard.grad_buffer()[...] /= self.shard.comm.size
        piece *= self.shard.comm.size  # not divided: here the loss's divisor has the rows of all ranks
        right(self, piece)

    patch.setattr(FSDPUnit, "add_reduced", add_reduced)


def loss_not_scaled(patch: Patch) -> None:
    """backward begins with the loss itself, and the gradient is divided by the loss scale"""

    def parallelize(made: Any, comm: Comm, *rest: Any) -> Any:
        for extension in made.extensions:
            extension.scaled = lambda loss: loss
        return recipe.parallelize(made, comm, *rest)

    patch.setattr(run, "parallelize", parallelize)


def one_step_too_many(patch: Patch) -> None:
    """a step that made the optimizer's state, before training, is counted"""

    def parallelize(made: Any, comm: Comm, *rest: Any) -> Any:
        strategy = recipe.parallelize(made, comm, *rest)
        for axis in strategy.data_axes:
            axis.optimizer.step_count += 1
            for counted in axis.optimizer._runs:
                counted.count += 1
        return strategy

    patch.setattr(run, "parallelize", parallelize)


def masters_alone(patch: Patch) -> None:
    """a step updates the float32 masters, and the 16-bit weights of forward stay as they are"""
    right = FullySharded.step

    def step(self: Any) -> None:
        before = [shard.data.copy() for shard in self.shards]
        right(self)
        for shard, values in zip(self.shards, before, strict=True):
            shard.data[...] = values

    patch.setattr(FullySharded, "step", step)


def norm_over_replicas(patch: Patch) -> None:
    """the squares of the shards are summed over all ranks, also over those that hold copies of a shard"""
    right = MeshStrategy.square_sums_of

    def summed(self: Any, axis: Any, skip: Any = ()) -> Any:
        return right(self, axis, skip) * self.job.config.dp_replicate

    patch.setattr(MeshStrategy, "square_sums_of", summed)


def mean_of_expert_norms(patch: Patch) -> None:
    """the squares of experts on different ranks are averaged, and not summed"""
    right = MeshStrategy.square_sums_of

    def averaged(self: Any, axis: Any, skip: Any = ()) -> Any:
        return right(self, axis, skip) / (self.axes.ep.size if axis.experts else 1)

    patch.setattr(MeshStrategy, "square_sums_of", averaged)


def warmup_subtracted_twice(patch: Patch) -> None:
    """the schedule is told the steps of the decay where it expects the step in which the decay ends"""
    right = WarmupLinear.__call__

    def ends_early(self: Any, step: int) -> float:
        if step < self.warmup_steps:
            return right(self, step)
        decay = self.total_steps - self.warmup_steps
        return float(self.at(min(1.0, (step - self.warmup_steps) / (decay - self.warmup_steps))))

    patch.setattr(WarmupLinear, "__call__", ends_early)


def moments_dropped(patch: Patch) -> None:
    """a resumed job has the weights of the checkpoint, and an optimizer whose moments begin with zeros"""
    right = resume._state

    def zeros(*place: Any) -> dict[str, Array]:
        return {name: array * 0 for name, array in right(*place).items()}

    patch.setattr(resume, "_state", zeros)


def opposite_sign(patch: Patch) -> None:
    """the outer optimizer's gradient is the average less the common weights, and its step leads away from it"""

    def outer_step(self: Any) -> None:
        self.common.grad = self.flat.data - self.common.data
        self.outer.step()
        self.flat.data[...] = self.common.data
        self.flat.updated()

    patch.setattr(OuterOptimizer, "outer_step", outer_step)


def resumed() -> Recording:
    """Train two steps, save a checkpoint, and train two more from it."""
    with TemporaryDirectory() as folder:
        jobs.train_job(1, 2, save=folder, **TINY)()
        return jobs.train_job(1, 4, save=folder, resume=True, **TINY)()
