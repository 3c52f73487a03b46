"""Bugs of what happens between backward and the update, from public threads of 2024 to 2026: accumulated gradients,
their norm, the learning rate, and the optimizer's state in a checkpoint.

Proved by: tests/museum/test_recent_optimizer.py
"""

from tempfile import TemporaryDirectory
from typing import Any

from minidist.core.autograd import Parameter
from minidist.core.base.arrays import Array
from minidist.core.comm import Comm
from minidist.core.parallel.fsdp import FSDPUnit
from minidist.core.parallel.zero import ShardReducer
from minidist.course.museum import jobs
from minidist.course.museum.exhibit import Patch, Recording, replaces
from minidist.job.checkpoint import resume
from minidist.job.train import recipe, trainer
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.job.train.strategies.sharded import FullySharded
from minidist.optim.schedule import WarmupLinear

TINY: dict[str, Any] = {"width": 8, "layers": 1, "context": 4, "precision": "fp64"}


@replaces(ShardReducer, "started")
def every_pass_is_the_last(right: Any, self: Any) -> None:
    """every backward pass is taken for the last one before the update, and the next one begins with an empty sum"""
    right(self)
    self.shard.filled = self.shard.filled and self.keep_whole


@replaces(Parameter, "accumulate")
def first_use_alone(right: Any, self: Any, compute: Any) -> None:
    """of a weight that is used twice, the gradient of one use is reduced, and that of the other is lost"""
    sharded = any(isinstance(o, ShardReducer) and not o.keep_whole for o in self.observers)
    if not (sharded and self.gradient.local is not None):
        right(self, compute)


@replaces(FSDPUnit, "deliver")
def doubled_by_a_group_of_one(right: Any, self: Any, piece: Array) -> None:
    """with one rank in the group, the sum of earlier micro-batches is doubled before the next gradient is added"""
    if self.shard.filled and self.shard.comm.size == 1:
        self.shard.grad_buffer()[...] *= 2
    right(self, piece)


@replaces(FSDPUnit, "deliver")
def overwritten_by_a_group_of_one(right: Any, self: Any, piece: Array) -> None:
    """with one rank in the group, the gradient of a micro-batch is copied over the sum of the earlier ones"""
    self.shard.filled = self.shard.filled and self.shard.comm.size > 1
    right(self, piece)


@replaces(FSDPUnit, "deliver")
def sum_divided_again(right: Any, self: Any, piece: Array) -> None:
    """in place of the new gradient, what is accumulated so far is divided by the number of ranks"""
    if self.shard.filled:
        self.shard.grad_buffer()[...] /= self.shard.comm.size
    piece *= self.shard.comm.size  # not divided: here the loss's divisor has the rows of all ranks
    right(self, piece)


@replaces(trainer, "parallelize")
def loss_not_scaled(_: Any, made: Any, comm: Comm, *rest: Any) -> Any:
    """backward begins with the loss itself, and the gradient is divided by the loss scale"""
    for extension in made.extensions:
        extension.scaled = lambda loss: loss
    return recipe.parallelize(made, comm, *rest)


@replaces(trainer, "parallelize")
def one_step_too_many(_: Any, made: Any, comm: Comm, *rest: Any) -> Any:
    """a step that made the optimizer's state, before training, is counted"""
    strategy = recipe.parallelize(made, comm, *rest)
    for axis in strategy.data_axes:
        axis.optimizer.step_count += 1
        for counted in axis.optimizer._runs:
            counted.count += 1
    return strategy


@replaces(FullySharded, "step")
def masters_alone(right: Any, self: Any) -> None:
    """a step updates the float32 masters, and the 16-bit weights of forward stay as they are"""
    before = [shard.data.copy() for shard in self.shards]
    right(self)
    for shard, values in zip(self.shards, before, strict=True):
        shard.data[...] = values


@replaces(MeshStrategy, "square_sums_of")
def norm_over_replicas(right: Any, self: Any, axis: Any, skip: Any = ()) -> Any:
    """the squares of the shards are summed over all ranks, also over those that hold copies of a shard"""
    return right(self, axis, skip) * self.job.config.dp_replicate


@replaces(MeshStrategy, "square_sums_of")
def mean_of_expert_norms(right: Any, self: Any, axis: Any, skip: Any = ()) -> Any:
    """the squares of experts on different ranks are averaged, and not summed"""
    return right(self, axis, skip) / (self.axes.ep.size if axis.experts else 1)


@replaces(WarmupLinear, "__call__")
def warmup_subtracted_twice(right: Any, self: Any, step: int) -> Any:
    """the schedule is told the steps of the decay where it expects the step in which the decay ends"""
    if step < self.warmup_steps:
        return right(self, step)
    decay = self.total_steps - self.warmup_steps
    return float(self.at(min(1.0, (step - self.warmup_steps) / (decay - self.warmup_steps))))


@replaces(resume, "_state")
def moments_dropped(right: Any, *place: Any) -> dict[str, Array]:
    """a resumed job has the weights of the checkpoint, and an optimizer whose moments begin with zeros"""
    return {name: array * 0 for name, array in right(*place).items()}


def opposite_sign(patch: Patch) -> None:
    """the outer optimizer's gradient is the average less the common weights, and its step leads away from it"""
    # Here, so that the other exhibits run in a package without this technique.
    from minidist.techniques.local_sgd.averaging import OuterOptimizer

    def outer_step(self: Any) -> None:
        (weights,), (common,) = self.parts, self.common
        common.grad = weights.data - common.data
        self.outer.step()
        weights.data[...] = common.data
        weights.updated()

    patch.setattr(OuterOptimizer, "outer_step", outer_step)


def resumed() -> Recording:
    """Train two steps, save a checkpoint, and train two more from it."""
    with TemporaryDirectory() as folder:
        jobs.train_job(1, 2, save=folder, **TINY)()
        return jobs.train_job(1, 4, save=folder, resume=True, **TINY)()
