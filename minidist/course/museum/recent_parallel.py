"""Bugs of split layers, experts and sequences, from public threads of 2024 to 2026: a sum over ranks that is missing,
or one too many.

Proved by: tests/museum/test_recent.py
"""

from typing import Any

import numpy as np

from minidist.core.autograd import Tensor, reshape, softmax
from minidist.core.base.arrays import Array
from minidist.core.comm import Comm
from minidist.core.nn import experts
from minidist.core.nn.experts import MixtureOfExperts
from minidist.core.parallel import tensor_parallel
from minidist.core.parallel.context_parallel import RingAttention
from minidist.course.museum import jobs, split_jobs
from minidist.course.museum.exhibit import Patch, replaces
from minidist.job.train import recipe, trainer
from minidist.job.train.job import build
from minidist.job.train.strategies.data_axis import DataAxis
from minidist.job.train.strategies.mesh import MeshStrategy
from minidist.nn import Function
from minidist.parallel.expert import tensor_parallel as expert_tensor_parallel
from minidist.parallel.tensor.gathering import own_part


def summands(group: Comm, all_ranks: Comm) -> int:
    """Return of how many means over a rank's rows an expert's gradient is the sum: one of every rank.

    group: the ranks that hold the expert. Its tokens come from all of them.
    """
    return all_ranks.size


@jobs.on_ranks(2)
def means_of_experts(comm: Comm) -> Any:
    """Train four experts on two ranks; every rank's loss is a mean over its rows, and gradients are averaged."""
    mesh, parallel, loss_of, whole = split_jobs.four_experts(comm, 2 * jobs.LENGTH, capacity_factor=4.0)
    shared, own = parallel.flats

    def average() -> None:
        for flat, count in ((shared, comm.size), (own, summands(mesh["dp"], comm))):
            for parameter in flat.parameters:
                gradient: Any = parameter.grad
                gradient /= count

    total = jobs.summed(comm)
    mean = lambda value: total(value) / comm.size  # noqa: E731
    both = jobs.EveryFlat(parallel.flats)
    return jobs.loop(parallel, loss_of, both, whole=whole, total=mean, before_step=average, lr=0.3, steps=4)


class OwnRows(Function):
    """This rank's rows of x (batch, T, width); backward has zeros where the other ranks' rows are."""

    @staticmethod
    def forward(ctx: Any, x: Array, comm: Comm) -> Array:
        ctx.comm, ctx.shape = comm, x.shape
        return own_part(comm, x, 1)

    @staticmethod
    def backward(ctx: Any, grad: Array) -> Array:
        whole, rows = np.zeros(ctx.shape, grad.dtype), grad.shape[1]
        whole[:, ctx.comm.rank * rows : (ctx.comm.rank + 1) * rows] = grad
        return whole


def partial_after_the_head(patch: Patch) -> None:
    """the gradient that the split head returns is a summand, and is used as if it were the sum"""
    patch.setattr(tensor_parallel.VocabParallelHead, "enter", lambda self, x: x)


def partial_before_experts(patch: Patch) -> None:
    """the gradient of what goes into split experts is each rank's summand; the sum over them is left out"""
    patch.setattr(expert_tensor_parallel, "copy_to_tensor_parallel_region", lambda x, comm: x)


def router_of_own_tokens(patch: Patch) -> None:
    """each rank's router gets the gradient of its tokens alone, and no sum over ranks follows"""
    patch.setattr(expert_tensor_parallel, "scatter_to_sequence_parallel_region", OwnRows.apply)


def divided_by_the_group(patch: Patch) -> None:
    """an expert's gradient is divided by the number of ranks that hold it"""
    patch.setitem(globals(), "summands", lambda group, all_ranks: group.size)


@replaces(MeshStrategy, "square_sums_of")
def norm_without_other_experts(right: Any, self: Any, axis: Any, skip: Any = ()) -> Array:
    """the norm has the experts of this rank, and not those of the others"""
    return np.asarray(axis.square_sums(set(skip)) if axis.experts else right(self, axis, skip))


@replaces(experts, "reshape")
def router_detached(_: Any, x: Tensor, shape: Any) -> Tensor:
    """the gates are copied in a way that the tape does not record"""
    # The gates of a choice are (tokens,), and become a column.
    return reshape(x.detach() if x.ndim == 1 else x, shape)


@replaces(DataAxis, "step")
def idle_experts_left_out(right: Any, self: Any) -> None:
    """an expert that no token was sent to has no gradient, and the optimizer leaves it out"""
    before = []
    for parameter in self.parameters if self.experts else ():
        idle = ~parameter.grad.reshape(len(parameter.grad), -1).any(axis=1)
        state = self.optimizer.state.get(parameter.name, {}).values()
        arrays = [parameter.data, *(array.reshape(parameter.shape) for array in state)]
        before += [(array, idle, array[idle].copy()) for array in arrays]
    right(self)
    for array, idle, values in before:
        array[idle] = values


def scores_of_own_experts(patch: Patch) -> None:
    """a rank's router gets the gradient of the scores of the experts on this rank, and of no others"""
    forward = MixtureOfExperts.forward
    own: list[Any] = [None]

    def note(self: Any, x: Tensor) -> Tensor:
        comm, count = getattr(self.dispatch, "comm", None), self.num_experts
        own[0] = None if comm is None else np.arange(count) * comm.size // count == comm.rank
        return forward(self, x)

    def partial(x: Tensor) -> Tensor:
        scores = softmax(x)
        if own[0] is None:
            return scores
        mine = own[0].astype(scores.dtype)
        return scores * Tensor(mine) + scores.detach() * Tensor(1 - mine)

    patch.setattr(MixtureOfExperts, "forward", note)
    patch.setattr(experts, "softmax", partial)


def gradient_of_unserved_slots(patch: Patch) -> None:
    """a token without a slot gets a row that is not zero, and a weight that is, with a gradient all the same"""
    right, slots = experts.take_rows, [np.zeros(0)]

    def served_rows(name: str, rows: Tensor, slot: Array, back: Any) -> Tensor:
        taken = right(name, rows, slot, back)
        if name != "from_slots":
            return taken
        slots[0] = slot
        return taken + Tensor((slot < 0)[:, None] * rows.data[0])

    def weights(x: Tensor, shape: Any) -> Tensor:
        # The gates of a choice are (tokens,), and become a column.
        if x.ndim == 1:
            served = (slots[0] >= 0).astype(x.dtype)
            x = x * Tensor(served) + (x - x.detach()) * Tensor(1 - served)
        return reshape(x, shape)

    patch.setattr(experts, "take_rows", served_rows)
    patch.setattr(experts, "reshape", weights)


@replaces(trainer, "build")
def own_initial_values(_: Any, config: Any, batches: Any, comm: Comm) -> Any:
    """the position embedding, which every rank holds whole, has initial values that each rank draws for itself"""
    made = build(config, batches, comm)
    weight = made.model.transformer.wpe.weight
    weight.data[...] = 0.02 * np.random.default_rng(comm.rank).standard_normal(weight.shape)
    return made


@replaces(trainer, "parallelize")
def noise_by_rank(_: Any, made: Any, comm: Comm, *rest: Any) -> Any:
    """dropout is seeded with the rank, also on ranks that split a layer"""
    strategy = recipe.parallelize(made, comm, *rest)
    made.seed = comm.rank
    return strategy


@replaces(RingAttention, "_round")
def first_keys_in_backward(right: Any, self: Any, k: Array, v: Array, why: str) -> Any:
    """in backward every step of the ring computes with the keys and values of the first one"""
    for owner, *here in right(self, k, v, why):
        yield owner, *((k, v) if why == "tensor_backward" else here)
