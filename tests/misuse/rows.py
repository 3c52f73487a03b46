"""The table: what goes wrong in programs of people who use minidist as a library, one function each.

A row is a function of a communicator. `refused(pattern)`: it raises one of our errors, whose sentence matches.
`equal()`: it yields pairs (what ranks computed, what one device computes), which are compared. Rows with mpi=True run
under mpiexec as well; their errors are raised on all ranks, with no message on its way.
"""

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from minidist.base.coordinates import batch_coordinates
from minidist.core.autograd import Tensor, backward_hook, cross_entropy, no_grad
from minidist.core.collectives import all_reduce
from minidist.core.comm import init_device_mesh
from minidist.core.nn import GPT, MLP, FlatParameters, GPTConfig, Linear, Module, Sequential
from minidist.core.nn.gpt import with_own_weight
from minidist.core.optim import AdamW
from minidist.core.parallel.context_parallel import RingAttention
from minidist.core.parallel.fsdp import fully_shard, sharded_parameters, shards_of
from minidist.core.parallel.model_parallel import apply_context_parallel, apply_expert_parallel, apply_tensor_parallel
from minidist.core.pipeline.runtime import PipelineStage, Reduction, split_model
from minidist.nn import BatchNorm, ModuleDict, mse_loss
from minidist.optim import SGD, DynamicLossScaler, clip_grad_norm_
from minidist.parallel import HostPool, MixedPrecisionPolicy, gather_tensors, scaled_step
from minidist.parallel.context import AllGatherAttention, UlyssesRingAttention
from minidist.parallel.context.ulysses import UlyssesAttention
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.parallel.shards import clip_shards_
from minidist.parallel.zero import ZeroOptimizer
from minidist.pipeline.runtime.pipeline import Pipeline
from minidist.pipeline.schedules import get_schedule
from minidist.techniques.compression import QSGD, TopK, compress
from minidist.techniques.local_sgd.averaging import PeriodicModelAverager
from minidist.techniques.offload.optimizer import OffloadedOptimizer

ROWS_OF_A_RANK, LR, STEPS = 4, 0.5, 2


@dataclass
class Row:
    name: str
    function: Callable[..., Any]
    pattern: str | None
    ranks: int
    mpi: bool


TABLE: list[Row] = []


def refused(pattern, ranks=2, mpi=False):
    def add(function):
        TABLE.append(Row(function.__name__, function, pattern, ranks, mpi))
        return function

    return add


def equal(ranks=2, mpi=False):
    def add(function):
        TABLE.append(Row(function.__name__, function, None, ranks, mpi))
        return function

    return add


# --- the program that the rows vary: a small model, its rows, and training on one device ---


def mlp(seed=0):
    return MLP([6, 5, 3], dtype=np.float64, seed=seed)


def rows(rank, step=0, count=ROWS_OF_A_RANK):
    rng = np.random.default_rng([step, rank])
    return Tensor(rng.standard_normal((count, 6))), rng.integers(0, 3, count)


def loss_of(model, comm, step=0, divisor=True, count=ROWS_OF_A_RANK):
    x, targets = rows(comm.rank, step, count)
    return cross_entropy(model(x), targets, float(comm.size * ROWS_OF_A_RANK) if divisor else None)


def one_device(ranks, make=mlp, forward=None, counts=None, steps=STEPS, total=None):
    """The weights after training on all ranks' rows."""
    model = make()
    optimizer = SGD(model.parameters(), lr=LR)
    counts = counts or [ROWS_OF_A_RANK] * ranks
    for step in range(steps):
        model.zero_grad()
        for rank, count in enumerate(counts):
            x, targets = rows(rank, step, count)
            output = forward(model, x, rank) if forward else model(x)
            cross_entropy(output, targets, float(total or sum(counts))).backward()
        optimizer.step()
    return {p.name: p.data for p in model.parameters()}


def weights(model):
    return {p.name: p.data for p in model.parameters()}


def whole(model, optimizer):
    return gather_tensors(shards_of(model), optimizer)["weights"]


def one_step(model, optimizer, comm):
    loss_of(model, comm).backward()
    optimizer.step()


def train(model, optimizer, comm, divisor=True):
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, comm, step, divisor).backward()
        optimizer.step()


def wrapping(name, model, comm, **settings):
    """(what is called, what steps)"""
    if name == "ddp":
        wrapped = DistributedDataParallel(model, comm, **settings)
        return wrapped, SGD(wrapped.flat, lr=LR)
    if name == "zero":
        return model, ZeroOptimizer(model, SGD, comm=comm, lr=LR, **{"stage": 2, **settings})
    fully_shard(model, mesh=comm, **settings)
    return model, SGD(sharded_parameters(model), lr=LR)


def each_wrapper(comm, make=mlp, **settings):
    """Yield the model, what is called, what steps, and a function that returns the trained weights, three times."""
    for name in ("ddp", "zero", "fsdp"):
        model = make()
        wrapped, optimizer = wrapping(name, model, comm, reduction="sum", **settings)
        yield model, wrapped, optimizer, partial(whole, model, optimizer) if name == "fsdp" else partial(weights, model)


# --- wrappers and optimizers in the wrong order ---


@refused(r"'layers.0.weight' belongs to a FlatParameters .* call fully_shard first", mpi=True)
def flat_parameters_before_fully_shard(comm):
    model = mlp()
    SGD(FlatParameters(model.parameters()), lr=LR)
    fully_shard(model, mesh=comm)


@refused(r"'layers.0.weight' was sharded after this optimizer was made.*sharded_parameters\(model\)", mpi=True)
def an_optimizer_before_fully_shard(comm):
    model = mlp()
    optimizer = SGD(model.parameters(), lr=LR)
    fully_shard(model, mesh=comm)
    one_step(model, optimizer, comm)


@refused(r"was sharded after this optimizer was made.*use ZeroOptimizer alone")
def another_optimizer_beside_zero(comm):
    model = mlp()
    other = SGD(model.parameters(), lr=LR)
    ZeroOptimizer(model, SGD, comm=comm, lr=LR)
    one_step(model, other, comm)


@equal(mpi=True)
def an_optimizer_before_data_parallelism(comm):
    model = mlp(seed=comm.rank)
    optimizer = SGD(model.parameters(), lr=LR)
    wrapped = DistributedDataParallel(model, comm)
    train(wrapped, optimizer, comm, divisor=False)
    yield weights(model), one_device(comm.size)


@refused(r"belongs to another FlatParameters, wrapper or sharded module already")
def data_parallelism_twice(comm):
    DistributedDataParallel(DistributedDataParallel(mlp(), comm), comm)


@refused(r"belongs to a FlatParameters or another wrapper already")
def fully_shard_of_a_wrapped_model(comm):
    fully_shard(DistributedDataParallel(mlp(), comm).module, mesh=comm)


@refused(r"belongs to another FlatParameters, wrapper or sharded module already")
def zero_after_fully_shard(comm):
    ZeroOptimizer(fully_shard(mlp(), mesh=comm), SGD, comm=comm, lr=LR)


@refused(
    r"rank \d: fully_shard of 'MLP' over ranks \[0, 1, 2, 3\], and of 'layers.0' inside it over ranks \[\d, \d\]; pass"
    r" the same mesh= to every fully_shard of a model",
    ranks=4,
)
def units_on_other_ranks(comm):
    model = mlp()
    fully_shard(model.layers[0], mesh=init_device_mesh(comm, (2, 2), ("row", "column"))["row"])
    fully_shard(model, mesh=comm)


@refused(r"of 'layers.0' inside it over ranks \[\d, \d\] with equal copies on ranks \[\d, \d\]; pass", ranks=4)
def units_of_which_some_have_copies(comm):
    model = mlp()
    fully_shard(model.layers[0], mesh=init_device_mesh(comm, (2, 2), ("replicate", "shard")))
    fully_shard(model, mesh=comm)


@equal(ranks=2)
def units_on_a_duplicate_of_the_communicator(comm):
    model = mlp()
    fully_shard(model.layers[0], mesh=comm.dup())
    optimizer = SGD(sharded_parameters(fully_shard(model, mesh=comm)), lr=LR)
    train(model, optimizer, comm, divisor=False)
    yield whole(model, optimizer), one_device(comm.size)


@refused(
    r"the norm is taken over ranks \[0, 1, 2, 3\], but the unit of 'layers.0.weight' has its shards on ranks"
    r" \[\d, \d\]; pass the communicator over which it is sharded",
    ranks=4,
)
def a_norm_over_the_ranks_that_have_copies(comm):
    """Every block would count twice."""
    model = fully_shard(mlp(), mesh=init_device_mesh(comm, (2, 2), ("replicate", "shard")))
    loss_of(model, comm, divisor=False).backward()
    clip_shards_(comm, shards_of(model), 1.0)


@refused(r"every parameter of 'layers.0' belongs to a module that is sharded already.*inner modules first")
def the_outer_module_before_the_inner_one(comm):
    model = fully_shard(mlp(), mesh=comm)
    fully_shard(model.layers[0], mesh=comm)


@refused(r"belongs to a FlatParameters already; shard the model first")
def tensor_parallelism_after_flat_parameters(comm):
    model = MLP([6, 4, 2])
    FlatParameters(model.parameters())
    apply_tensor_parallel(model, comm)


@refused(r"fully_shard takes a mesh of 1 axis, or of 2")
def a_mesh_of_three_axes(comm):
    fully_shard(mlp(), mesh=init_device_mesh(comm, (1, 1, 2), ("pp", "dp", "tp")))


# --- ranks over which gradients must not be summed, or must; a mesh or an optimizer in the wrong place ---


def split_over(comm, names=("dp", "tp"), shape=(1, 2)):
    mesh = init_device_mesh(comm, shape, names)
    return mesh, apply_tensor_parallel(MLP([6, 4, 2], seed=2), mesh["tp"])


OVER_TP = (
    r"rank \d: {} over ranks \[0, 1\] would sum parameter 'layers.0.weight' with other shards of axis 'tp' \(ranks"
    r" \[0, 1\]\), .*pass the data-parallel axis instead, such as mesh\['dp'\]"
)


@refused(OVER_TP.format("DistributedDataParallel"), mpi=True)
def data_parallelism_over_the_tensor_parallel_ranks(comm):
    mesh, model = split_over(comm)
    DistributedDataParallel(model, mesh["tp"])


@refused(OVER_TP.format("ZeroOptimizer"), mpi=True)
def zero_over_the_tensor_parallel_ranks(comm):
    mesh, model = split_over(comm)
    ZeroOptimizer(model, SGD, comm=mesh["dp", "tp"], lr=LR)


@refused(OVER_TP.format("fully_shard"), mpi=True)
def fully_shard_over_the_tensor_parallel_ranks(comm):
    _, model = split_over(comm)
    fully_shard(model, mesh=comm)


@refused(OVER_TP.format("PeriodicModelAverager"))
def averages_of_models_over_the_tensor_parallel_ranks(comm):
    _, model = split_over(comm)
    PeriodicModelAverager(FlatParameters(model.parameters()), comm, 1)


@refused(r"DistributedDataParallel over ranks .* with other shards of axis 'ep'")
def data_parallelism_of_experts_over_their_ranks(comm):
    model = apply_expert_parallel(GPT(GPTConfig(7, 4, 8, 1, 2, n_experts=2)), comm)
    DistributedDataParallel(model, comm)


def language_model(attention_fn=None):
    return GPT(GPTConfig(7, 4, 8, 1, 2), attention_fn=attention_fn)


@refused(
    r"DistributedDataParallel over ranks \[\d, \d\] of a model with context parallelism over ranks \[\d, \d\]: .*axis"
    r" 'cp'.*would never be added; pass both axes: mesh\['dp', 'cp'\]",
    ranks=4,
)
def data_parallelism_beside_the_context_parallel_ranks(comm):
    mesh, model = init_device_mesh(comm, (2, 2), ("dp", "cp")), language_model()
    apply_context_parallel(model, mesh["cp"], 4)
    DistributedDataParallel(model, mesh["dp"])


@refused(r"of a model with context parallelism over ranks \[\d, \d\]: .*axis 'cp'.*would never be added", ranks=4)
def data_parallelism_beside_ranks_that_gather_the_sequence(comm):
    mesh = init_device_mesh(comm, (2, 2), ("dp", "cp"))
    DistributedDataParallel(language_model(AllGatherAttention(mesh["cp"], 4)), mesh["dp"])


@refused(r"of a model with context parallelism over ranks \[\d, \d\]: .*axis 'cp'.*would never be added", ranks=4)
def data_parallelism_beside_ranks_with_heads_and_rings(comm):
    mesh = init_device_mesh(comm, (2, 2), ("dp", "cp"))
    DistributedDataParallel(language_model(UlyssesRingAttention(mesh["cp"], 4, 2)), mesh["dp"])


@refused(r"{} over ranks \[\d, \d\] of a model with context.*gradient_axes\(mesh\)".format("ZeroOptimizer"), ranks=4)
def zero_beside_the_context_parallel_ranks(comm):
    mesh = init_device_mesh(comm, (2, 2), ("dp", "cp"))
    model = language_model(RingAttention(mesh["cp"], 4))
    ZeroOptimizer(model, SGD, comm=mesh["dp"], lr=LR)


@refused(r"{} over ranks \[\d, \d\] of a model with context.*gradient_axes\(mesh\)".format("fully_shard"), ranks=4)
def fully_shard_beside_the_context_parallel_ranks(comm):
    mesh = init_device_mesh(comm, (2, 2), ("dp", "cp"))
    model = language_model(UlyssesAttention(mesh["cp"], 4))
    fully_shard(model, mesh=mesh["dp"])


A_MESH = r"{} needs a communicator, and got a value of type Mesh; .*: pass mesh\['dp'\] or mesh\['tp'\]"


@refused(A_MESH.format("DistributedDataParallel"), mpi=True)
def data_parallelism_over_a_mesh(comm):
    DistributedDataParallel(mlp(), init_device_mesh(comm, (2, 1), ("dp", "tp")))


@refused(A_MESH.format("ZeroOptimizer"))
def zero_over_a_mesh(comm):
    ZeroOptimizer(mlp(), SGD, comm=init_device_mesh(comm, (2, 1), ("dp", "tp")), lr=LR)


@refused(A_MESH.format("parallelize_module"))
def tensor_parallelism_over_a_mesh(comm):
    apply_tensor_parallel(MLP([6, 4, 2]), init_device_mesh(comm, (1, 2), ("dp", "tp")))


@refused(A_MESH.format("all_reduce"))
def a_collective_over_a_mesh(comm):
    all_reduce(init_device_mesh(comm, (1, 2), ("dp", "tp")), np.ones(3))


@refused(r"fully_shard needs a communicator, and got a value of type int; pass the communicator that the program")
def fully_shard_over_a_number(comm):
    fully_shard(mlp(), mesh=2)


@refused(r"got a value of type list as its module; pass the model.*DistributedDataParallel\(model, comm\)")
def data_parallelism_of_a_list(comm):
    DistributedDataParallel(list(mlp().parameters()), comm)


@refused(r"ZeroOptimizer got a value of type SGD where .*: ZeroOptimizer\(model, SGD, comm=comm, lr=...\)", mpi=True)
def zero_of_an_optimizer(comm):
    model = mlp()
    ZeroOptimizer(model, SGD(model.parameters(), lr=LR), comm=comm)


@refused(r"got a value of type AdamW where .*: OffloadedOptimizer\(parameters, AdamW, pool, lr=...\)")
def an_offloaded_optimizer_of_an_optimizer(comm):
    model = DistributedDataParallel(mlp(), comm)
    OffloadedOptimizer(model.flat, AdamW(model.flat), HostPool(comm))


# --- reductions and divisors ---


@refused(r"reduction='sum' here and 'mean' for the unit of 'layers.0.weight' inside; pass the same", mpi=True)
def units_with_two_reductions(comm):
    model = mlp()
    fully_shard(model.layers[0], mesh=comm)
    fully_shard(model, mesh=comm, reduction="sum")


@refused(r"reduction='sum' adds the losses of 2 ranks.*2 times too large.*divisor=", mpi=True)
def a_mean_over_one_ranks_rows_with_the_sum(comm):
    loss_of(DistributedDataParallel(mlp(), comm, reduction="sum"), comm, divisor=False).backward()


@refused(r"2 times too large.*divisor=", mpi=True)
def a_mean_over_one_ranks_rows_with_zero_and_the_sum(comm):
    model = mlp()
    ZeroOptimizer(model, SGD, comm=comm, reduction="sum", lr=LR)
    (model(rows(comm.rank)[0]) ** 2).mean().backward()


@refused(r"2 times too large.*divisor=", mpi=True)
def a_mean_over_one_ranks_rows_with_fully_shard_and_the_sum(comm):
    model = fully_shard(mlp(), mesh=comm, reduction="sum")
    mse_loss(model(rows(comm.rank)[0]), np.zeros((ROWS_OF_A_RANK, 3))).backward()


@refused(r"2 times too large.*divisor=", mpi=True)
def a_language_models_own_mean_with_the_sum(comm):
    model = DistributedDataParallel(GPT(GPTConfig(7, 4, 8, 1, 2)), comm, reduction="sum")
    model(np.zeros((1, 4), int), np.zeros((1, 4), int)).backward()


@equal(mpi=True)
def an_empty_batch_on_one_rank(comm):
    for _, wrapped, optimizer, trained in each_wrapper(comm):
        for step in range(STEPS):
            wrapped.zero_grad()
            x, targets = rows(comm.rank, step, 4 if comm.rank == 0 else 0)
            cross_entropy(wrapped(x), targets, 4.0).backward()
            optimizer.step()
        yield trained(), one_device(2, counts=[4, 0])


@equal()
def a_mean_over_one_ranks_rows_that_backward_scales(comm):
    model, optimizer = wrapping("ddp", mlp(), comm, reduction="sum")
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, comm, step, divisor=False).backward(np.array(1 / comm.size))
        optimizer.step()
    yield weights(model.module), one_device(2)


@equal()
def gradients_of_ones_own_after_zero_grad_of_a_local_pass(comm):
    model = DistributedDataParallel(mlp(), comm)
    with model.no_sync():
        loss = loss_of(model, comm)
    loss.backward()
    model.zero_grad()
    before = {p.name: p.data - LR for p in model.flat.parameters}
    model.flat.grad[...] = 1
    SGD(model.flat, lr=LR).step()
    yield weights(model.module), before


# --- means over unlike numbers of rows, whose mean is not the mean over all rows ---


def over(rank_0, rank_1, operation="", what="rows"):
    """The sentence, whichever of the two ranks sees it first."""
    mean = [
        rf"the mean over {counts} {what}" if counts is not None else "no mean over rows" for counts in (rank_0, rank_1)
    ]
    first, second = (
        rf"rank 0 is {mean[0]}, and that of rank 1 {mean[1]}",
        rf"rank 1 is {mean[1]}, and that of rank 0 {mean[0]}",
    )
    return rf"ranks differ in {operation}.*: the loss of ({first}|{second}), at .*divisor=.*reduction='sum'"


def unlike(comm, wrap="ddp", counts=(4, 3, 4, 3), loss=cross_entropy, **settings):
    """One step; counts: the rows of each rank; loss(output, targets)."""
    model = mlp()
    wrapped, optimizer = wrapping(wrap, model, comm, **settings)
    x, targets = rows(comm.rank, count=counts[comm.rank])
    loss(wrapped(x), targets).backward()
    optimizer.step()
    return model


@refused(over(4, 3, "all_reduce/ring"))
def unlike_rows_of_data_parallelism(comm):
    unlike(comm)


@refused(over(4, 3, "reduce_scatter/ring"))
def unlike_rows_of_zero_1(comm):
    unlike(comm, "zero", stage=1)


@refused(over(4, 3, "all_gather/ring"))
def unlike_rows_of_fully_shard(comm):
    unlike(comm, "fsdp")


@refused(r"ranks differ in all_reduce.* the mean over \d rows, and that of rank \d the mean over \d rows", ranks=4)
def unlike_rows_of_the_copies_of_a_shard(comm):
    model = fully_shard(mlp(), mesh=init_device_mesh(comm, (2, 2), ("replicate", "shard")))
    x, targets = rows(comm.rank, count=4 if comm.rank < 2 else 3)
    cross_entropy(model(x), targets).backward()


@refused(over(4, 0))
def a_mean_over_no_rows_on_one_rank(comm):
    unlike(comm, counts=(4, 0))


@refused(over(4, None))
def zeros_for_the_loss_of_a_rank_without_rows(comm):
    unlike(comm, loss=lambda y, t: cross_entropy(y, t) if comm.rank == 0 else (y * 0.0).sum())


@refused(over(4, 2))
def unlike_numbers_of_targets_that_count(comm):
    def masked(logits, targets):
        return cross_entropy(logits, np.where(np.arange(4) < (4 - 2 * comm.rank), targets, -100))

    unlike(comm, counts=(4, 4), loss=masked)


@refused(over("12", "9", what="elements"))
def unlike_rows_of_a_mean_of_ones_own(comm):
    unlike(comm, loss=lambda y, t: (y * y).mean())


@refused(over(r"4 rows \+ 12", r"3 rows \+ 9", what="elements"))
def unlike_rows_of_two_losses(comm):
    unlike(comm, loss=lambda y, t: cross_entropy(y, t) + 0.5 - -(y * y).mean() / 8)


@refused(over(4, 3))
def unlike_rows_of_a_scaled_loss(comm):
    unlike(comm, loss=lambda y, t: DynamicLossScaler(8.0).scale_loss(cross_entropy(y, t)))


@refused(over(4, 3))
def unlike_rows_of_a_loss_behind_a_hook(comm):
    unlike(comm, loss=lambda y, t: backward_hook(cross_entropy(y, t), lambda running: None))


@refused(over(4, 3, "compress/TopK"))
def unlike_rows_of_compressed_gradients(comm):
    model = DistributedDataParallel(mlp(), comm)
    model.register_comm_hook(TopK(comm, 0.5), compress)
    x, targets = rows(comm.rank, count=4 - comm.rank)
    cross_entropy(model(x), targets).backward()


@refused(over(r"4 rows \+ 4", r"3 rows \+ 4"))
def unlike_rows_in_a_local_pass(comm):
    model = DistributedDataParallel(mlp(), comm)
    with model.no_sync():
        loss = loss_of(model, comm, divisor=False, count=4 - comm.rank) / 2
    loss.backward()
    (loss_of(model, comm, divisor=False) / 2).backward()


@refused(r"2 times too large.*divisor=")
def a_mean_among_two_losses_with_the_sum(comm):
    unlike(comm, counts=(4, 4), loss=lambda y, t: cross_entropy(y, t, 8.0) + (y * y).mean(), reduction="sum")


@equal()
def means_that_each_rank_multiplies_by_its_part_of_all_rows(comm):
    for wrap in ("ddp", "zero", "fsdp"):
        part = 2 * (4 - comm.rank) / 7
        model = unlike(comm, wrap, loss=lambda y, t, part=part: cross_entropy(y, t) * part)
        got = whole(model, SGD(sharded_parameters(model), lr=LR)) if wrap == "fsdp" else weights(model)
        yield got, one_device(2, counts=[4, 3], steps=1)


@equal()
def means_over_unlike_rows_on_purpose(comm):
    """A divisor says that the rows of a rank are to count as they do."""
    first, second = (
        unlike(comm, loss=lambda y, t, d=d: cross_entropy(y, t, d)) for d in (4 - comm.rank, 4.0 - comm.rank)
    )
    yield weights(first), weights(second)


@equal()
def unlike_rows_of_a_local_pass_that_is_thrown_away(comm):
    model, optimizer = wrapping("ddp", mlp(), comm)
    for step in range(STEPS):
        with model.no_sync():
            loss_of(model, comm, divisor=False, count=4 - comm.rank).backward()
        model.zero_grad()
        loss_of(model, comm, step, divisor=False).backward()
        optimizer.step()
        model.zero_grad()
    yield weights(model.module), one_device(2)


@equal(mpi=True)
def equal_rows_in_local_passes(comm):
    model, optimizer = wrapping("ddp", mlp(), comm)
    for step in range(STEPS):
        model.zero_grad()
        for first in (0, 2):
            x, targets = rows(comm.rank, step)
            with model.no_sync() if first == 0 else nullcontext():
                loss = cross_entropy(model(Tensor(x.data[first : first + 2])), targets[first : first + 2]) / 2
            loss.backward()
        optimizer.step()
    yield weights(model.module), one_device(2)


# --- what is not the same on all ranks ---


UNLIKE = r"ranks differ in {}.*every rank must run its models in the same order, step their optimizers as often"


def train_twice(wrap, comm, rate=0.1, after=lambda model: None):
    model = mlp()
    wrapped, optimizer = wrapping(wrap, model, comm)
    getattr(optimizer, "optimizer", optimizer).lr = rate
    for step in range(STEPS):
        model.zero_grad()
        loss_of(wrapped, comm, step, divisor=False).backward()
        optimizer.step()
        after(model)


@refused(UNLIKE.format(r"all_reduce.* with lr 0\.\d"))
def another_learning_rate_on_one_rank(comm):
    train_twice("ddp", comm, 0.1 * (1 + comm.rank))


@refused(UNLIKE.format(r"all_gather.* layers.0.weight of fully_shard 1 after 1 update with lr 0\.\d"))
def another_learning_rate_on_one_rank_of_fully_shard(comm):
    train_twice("fsdp", comm, 0.1 * (1 + comm.rank))


@refused(UNLIKE.format(r"all_reduce.*0 updates"))
def an_optimizer_that_steps_on_one_rank(comm):
    model, optimizer = wrapping("ddp", mlp(), comm)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, comm, step, divisor=False).backward()
        if comm.rank == 0:
            optimizer.step()


def write_on_one_rank(wrap, comm):
    def scale(model):
        if comm.rank == 1:
            model.layers[1].weight.data *= 1.01

    train_twice(wrap, comm, after=scale)


@refused(UNLIKE.format("all_reduce.* checksum of the weights"))
def weights_that_one_rank_writes_to(comm):
    write_on_one_rank("ddp", comm)


@refused(UNLIKE.format("all_reduce.* checksum of the weights"), ranks=4)
def a_copy_of_a_shard_that_one_rank_writes_to(comm):
    mesh = init_device_mesh(comm, (2, 2), ("replicate", "shard"))
    model = fully_shard(mlp(), mesh=mesh)
    if comm.rank == 3:
        shards_of(model)[0].data[...] = 1
    loss_of(model, comm, divisor=False).backward()


@refused(UNLIKE.format("all_reduce.* (model 1 after .* model 2 after|model 2 after .* model 1 after)"))
def two_wrapped_models_whose_backward_passes_run_in_another_order(comm):
    models = [DistributedDataParallel(mlp(), comm) for _ in range(2)]
    losses = [loss_of(model, comm, divisor=False) for model in models]
    for loss in losses if comm.rank == 0 else losses[::-1]:
        loss.backward()


@refused(UNLIKE.format("all_gather.* of fully_shard [12] after 0 updates, .* of fully_shard [12] after 0 updates"))
def two_sharded_models_that_run_in_another_order(comm):
    models = [fully_shard(mlp(), mesh=comm) for _ in range(2)]
    for model in models if comm.rank == 0 else models[::-1]:
        loss_of(model, comm, divisor=False).backward()


WEIGHTS_DIFFER = (
    r"weights differ: call 0 of .* is parallelize_module weights \w{8} on rank 0 and parallelize_module weights \w{8}"
    r" on rank 1, at .*rows.py:.*; every rank must build the whole model from the same seed, or load the same weights"
)


@refused(WEIGHTS_DIFFER)
def tensor_parallelism_of_models_of_other_seeds(comm):
    model = apply_tensor_parallel(MLP([6, 4, 2], seed=comm.rank), comm)
    model(Tensor(np.ones((2, 6), np.float32)))


@refused(WEIGHTS_DIFFER.replace("parallelize_module", "apply_context_parallel"))
def context_parallelism_of_models_of_other_seeds(comm):
    apply_context_parallel(GPT(GPTConfig(7, 4, 8, 1, 2), seed=comm.rank), comm, 4)


IN_EVALUATION = (
    r"ranks differ in {}: .* after . updates?[^;]*, {} of {} modules in evaluation.*the same of train\(\) and eval\(\)"
)


def left_in_evaluation(wrap, comm, part=lambda model: model):
    def evaluate(model):
        if comm.rank == 1:
            part(model).eval()

    train_twice(wrap, comm, after=evaluate)


@refused(IN_EVALUATION.format("all_reduce/ring", 3, 3))
def evaluation_left_on_on_one_rank(comm):
    left_in_evaluation("ddp", comm)


@refused(IN_EVALUATION.format("all_gather/ring", 1, 3))
def evaluation_of_one_layer_left_on_on_one_rank_of_fully_shard(comm):
    left_in_evaluation("fsdp", comm, lambda model: model.layers[1])


@equal()
def evaluation_of_one_layer_on_all_ranks(comm):
    for model, wrapped, optimizer, trained in each_wrapper(comm):
        model.layers[0].eval()
        train(wrapped, optimizer, comm)
        yield trained(), one_device(2)


OTHER_SETTINGS = (
    r"rank 1: its {} has other settings than rank 0's; here they are .*{}.*; pass the same settings on every rank"
)


@refused(OTHER_SETTINGS.format("DistributedDataParallel", "find_unused_parameters=True"))
def unused_parameters_found_on_one_rank(comm):
    DistributedDataParallel(mlp(), comm, find_unused_parameters=comm.rank == 1)


@refused(OTHER_SETTINGS.format("DistributedDataParallel", "reduction=sum, bucket_cap_mb=1, "))
def another_reduction_and_bucket_size_on_one_rank(comm):
    DistributedDataParallel(
        mlp(), comm, bucket_cap_mb=25 if comm.rank == 0 else 1, reduction=("mean", "sum")[comm.rank]
    )


@refused(OTHER_SETTINGS.format("ZeroOptimizer", "stage=2"))
def another_stage_of_zero_on_one_rank(comm):
    ZeroOptimizer(mlp(), SGD, comm=comm, stage=1 + comm.rank, lr=LR)


@refused(OTHER_SETTINGS.format("ZeroOptimizer", "stage=1"))
def zero_beside_data_parallelism_on_another_rank(comm):
    if comm.rank == 0:
        DistributedDataParallel(MLP([6, 682]), comm)  # without padding
    else:
        ZeroOptimizer(MLP([6, 682]), SGD, comm=comm, lr=LR)


@refused(OTHER_SETTINGS.format("fully_shard", "reshard_after_forward=False"))
def parameters_kept_after_forward_on_one_rank(comm):
    fully_shard(mlp(), mesh=comm, reshard_after_forward=comm.rank == 0)


@refused(OTHER_SETTINGS.format("fully_shard", "reduce_dtype=float32"))
def another_dtype_of_reductions_on_one_rank(comm):
    policy = MixedPrecisionPolicy(np.float16, (None, np.float32)[comm.rank])
    fully_shard(MLP([6, 5, 3]), mesh=comm, mp_policy=policy)


@equal()
def one_policy_that_ranks_write_in_other_ways(comm):
    policy = MixedPrecisionPolicy(output_dtype=(np.float64, np.dtype("float64"))[comm.rank])
    model = fully_shard(mlp(), mesh=comm, mp_policy=policy)
    yield {"shape": model(rows(0)[0]).shape}, {"shape": (ROWS_OF_A_RANK, 3)}


@refused(r"ranks differ in compress/QSGD: .* levels (4|7).* levels (4|7).*with the same settings")
def another_number_of_levels_on_one_rank(comm):
    model = DistributedDataParallel(mlp(), comm)
    model.register_comm_hook(QSGD(comm, levels=(4, 7)[comm.rank]), compress)
    loss_of(model, comm, divisor=False).backward()


@refused(UNLIKE.format(r"all_reduce.* after 2 updates with .* after 1 update with"))
def averages_of_models_after_another_number_of_steps(comm):
    model = mlp()
    flat = FlatParameters(model.parameters())
    optimizer, averager = SGD(flat, lr=LR), PeriodicModelAverager(flat, comm, 2 - comm.rank)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, comm, step).backward()
        optimizer.step()
        averager.step()


@refused(r"argument mismatch: .*loss_scale (1024|2048) .*loss_scale (1024|2048) ")
def another_loss_scale_on_one_rank(comm):
    model, optimizer = wrapping("ddp", mlp(), comm)
    loss_of(model, comm, divisor=False).backward()
    scaled_step(comm, DynamicLossScaler(1024.0 * (1 + comm.rank)), optimizer, [model.flat.grad])


@refused(IN_EVALUATION.format("all_reduce/ring", 1, 1), ranks=4)
def evaluation_of_a_stage_left_on_in_one_replica_of_a_pipeline(comm):
    mesh = init_device_mesh(comm, (2, 2), ("dp", "pp"))
    pp, stage = mesh["pp"], Linear(6, (6, 3)[mesh["pp"].rank], dtype=np.float64)
    plan, data = get_schedule("gpipe").plan(2, 2), [rows(i) for i in range(2)]
    stages = [PipelineStage(stage, pp.rank)]
    pipe = Pipeline(pp, plan, stages, lambda y, t: cross_entropy(y, t, 16.0), reduce=Reduction(mesh["dp"]))
    optimizer = SGD(stages[0].parameters, lr=LR)
    for _ in range(STEPS):
        pipe.step([x.data for x, _ in data], [targets for _, targets in data])
        optimizer.step()
        if comm.rank == 3:
            stage.eval()


TIED_APART = (
    r"ranks differ in tied: rank \d has front.weight of a pipeline after 1 update with lr 0\.\d, .*and rank \d"
    r" front.weight of a pipeline after 1 update with lr 0\.\d, .*with the same settings"
)


@refused(TIED_APART)
def another_learning_rate_for_the_other_copy_of_a_tied_weight(comm):
    stages, tied = split_model(Embedded(), comm.size, [comm.rank])
    pipe = Pipeline(comm, get_schedule("1f1b").plan(2, 2), stages, lambda y, t: cross_entropy(y, t, 8.0), tied=tied)
    optimizer = SGD(stages[0].parameters, lr=0.1 * (1 + comm.rank))
    data = [rows(i) for i in range(2)]
    for _ in range(STEPS):
        pipe.step([x.data for x, _ in data], [targets for _, targets in data])
        optimizer.step()


@refused("argument mismatch: .*max_norm 1 .*max_norm 2 |argument mismatch: .*max_norm 2 .*max_norm 1 ")
def another_norm_to_clip_by_on_one_rank(comm):
    model = mlp()
    zero = ZeroOptimizer(model, SGD, comm=comm, lr=LR)
    loss_of(model, comm, divisor=False).backward()
    zero.clip_grad_norm_(1.0 + comm.rank)


# --- numbers that are accepted nowhere ---


@refused(r"lr_factor=-0.5; it must be a finite number of at least 0")
def a_schedule_that_becomes_negative(comm):
    zero = ZeroOptimizer(mlp(), SGD, comm=comm, lr=LR)
    zero.lr_factor = -0.5


@refused(r"max_norm=0; it must be a finite number above 0")
def clipping_shards_by_zero(comm):
    model = fully_shard(mlp(), mesh=comm)
    loss_of(model, comm, divisor=False).backward()
    clip_shards_(comm, shards_of(model), 0)


IN_SHARDS = r"clip_grad_norm_ of 'layers.0.weight', whose summed gradient lies in shards on 2 ranks; call clip_shards_"


@refused(IN_SHARDS)
def clipping_the_slices_of_a_sharded_model_by_their_own_norm(comm):
    model = fully_shard(mlp(), mesh=comm)
    loss_of(model, comm, divisor=False).backward()
    clip_grad_norm_(sharded_parameters(model), 1.0)


@refused(IN_SHARDS)
def clipping_the_parameters_of_zero(comm):
    model = mlp()
    ZeroOptimizer(model, SGD, comm=comm, lr=LR)
    loss_of(model, comm, divisor=False).backward()
    clip_grad_norm_(model.parameters(), 1.0)


@refused(
    r"clip_grad_norm_ of 'layers.0.weight', and this rank has only a shard, on axis 'tp'; call parallel.tensor.clip"
)
def clipping_a_split_model_by_this_ranks_norm(comm):
    model = apply_tensor_parallel(MLP([6, 4, 2]), comm)
    model(Tensor(np.ones((2, 6), np.float32))).sum().backward()
    clip_grad_norm_(FlatParameters(model.parameters()), 1.0)


@refused(r"has reduction='sum', and the hook's state op='mean'.*make it with op='sum'")
def a_compressor_of_another_reduction(comm):
    model = DistributedDataParallel(mlp(), comm, reduction="sum")
    model.register_comm_hook(TopK(comm, 0.5), compress)


@refused(r"step=-3; it must be a whole number of at least 0")
def an_optimizer_state_of_negative_steps(comm):
    SGD(mlp().parameters(), lr=LR).load_state_dict({"step": -3, "state": {}})


@refused(r"scaled_step got 4 gradients, all of them None.*pass the `grad` of this rank's shards")
def a_scaled_step_that_looks_for_an_overflow_in_no_gradient(comm):
    model = mlp()
    zero = ZeroOptimizer(model, SGD, comm=comm, lr=LR)
    loss_of(model, comm, divisor=False).backward()
    scaled_step(comm, DynamicLossScaler(), zero, [p.grad for p in model.parameters()])


# --- what changes between forward and backward ---


@refused(r"changed between forward and backward: it has version \d.*call backward before optimizer.step\(\)", mpi=True)
def a_step_between_forward_and_backward(comm):
    model, optimizer = wrapping("ddp", mlp(), comm)
    first, second = loss_of(model, comm), loss_of(model, comm, 1)
    first.backward()
    optimizer.step()
    second.backward()


@refused(r"was changed between forward and backward")
def load_state_dict_between_forward_and_backward(comm):
    model = mlp()
    loss = loss_of(model, comm)
    model.load_state_dict(mlp(seed=1).state_dict())
    loss.backward()


@refused(r"was written to between forward and backward")
def an_average_of_models_between_forward_and_backward(comm):
    model = mlp()
    flat = FlatParameters(model.parameters())
    averager = PeriodicModelAverager(flat, comm, 1)
    flat.data[...] += comm.rank
    loss = loss_of(model, comm)
    flat.data[...] -= comm.rank
    averager.steps += 1
    loss.backward()


# --- no_sync ---


@refused(r"parts that no other rank has seen.*outside no_sync", mpi=True)
def a_step_after_no_sync_alone(comm):
    model = DistributedDataParallel(mlp(), comm)
    optimizer = SGD(model.parameters(), lr=LR)
    with model.no_sync():
        loss = loss_of(model, comm)
    loss.backward()
    optimizer.step()


@refused(r"parts that no other rank has seen.*outside no_sync", mpi=True)
def a_step_of_zero_after_no_sync_alone(comm):
    model = mlp()
    zero = ZeroOptimizer(model, SGD, comm=comm, lr=LR)
    with zero.no_sync():
        loss_of(model, comm).backward()
    zero.step()


@refused(r"parts that no other rank has seen.*outside no_sync")
def an_offloaded_step_after_no_sync_alone(comm):
    model = DistributedDataParallel(mlp(), comm)
    optimizer = OffloadedOptimizer(model.flat, SGD, HostPool(comm), lr=LR)
    with model.no_sync():
        loss = loss_of(model, comm)
    loss.backward()
    optimizer.step()


@equal()
def settings_of_a_wrapped_optimizer_that_are_set_later(comm):
    expected = one_device(comm.size)
    for wrap in (partial(OffloadedOptimizer, pool=HostPool(comm)), None):
        model = mlp()
        if wrap is None:
            model_, optimizer = model, ZeroOptimizer(model, SGD, comm=comm, reduction="sum", lr=7.0)
        else:
            model_ = DistributedDataParallel(model, comm, reduction="sum")
            optimizer = wrap(model_.flat, SGD, lr=7.0)
        optimizer.lr, optimizer.lr_factor = LR * 2, 0.5
        train(model_, optimizer, comm)
        yield weights(model), expected


# --- unused, frozen, added ---


class Branch(Module):
    def __init__(self):
        self.used, self.other = (Linear(6, 3, dtype=np.float64) for _ in range(2))
        self.initialize(5)

    def forward(self, x, other=False):
        return self.used(x) + (self.other(x) if other else 0.0)


@refused(r"'other.bias' got no gradient.*find_unused_parameters=True", mpi=True)
def an_unused_parameter(comm):
    loss_of(DistributedDataParallel(Branch(), comm), comm).backward()


@equal(mpi=True)
def a_parameter_that_one_rank_uses(comm):
    expected = one_device(2, Branch, lambda model, x, rank: model(x, rank == 0))
    for _, wrapped, optimizer, trained in each_wrapper(comm, Branch, find_unused_parameters=True):
        for step in range(STEPS):
            wrapped.zero_grad()
            x, targets = rows(comm.rank, step)
            cross_entropy(wrapped(x, comm.rank == 0), targets, 8.0).backward()
            optimizer.step()
        yield trained(), expected


@equal()
def frozen_parameters(comm):
    def frozen():
        model = mlp()
        model.layers[0].bias.requires_grad = False
        return model

    for _, wrapped, optimizer, trained in each_wrapper(comm, frozen):
        train(wrapped, optimizer, comm)
        yield trained(), one_device(2, frozen)


@refused(r"'layers.0.bias' was frozen when its module was sharded.*set requires_grad before fully_shard")
def a_parameter_unfrozen_after_sharding(comm):
    model = mlp()
    model.layers[0].bias.requires_grad = False
    fully_shard(model, mesh=comm)
    model.layers[0].bias.requires_grad = True
    loss_of(model, comm).backward()


@refused(r"'layers.0.weight' got no gradient")
def a_parameter_frozen_after_wrapping(comm):
    wrapped = DistributedDataParallel(mlp(), comm)
    wrapped.module.layers[0].weight.requires_grad = False
    loss_of(wrapped, comm).backward()


def with_another_layer(model):
    model.layers.append(Linear(3, 3, dtype=np.float64))
    model.layers[-1].initialize(3, "layers.2")
    return model


ADDED = r"'layers.2.\w+' was added to the model after it was wrapped.*build the whole model before"


@refused(ADDED, mpi=True)
def a_layer_added_after_wrapping(comm):
    wrapped = DistributedDataParallel(mlp(), comm)
    with_another_layer(wrapped.module)
    loss_of(wrapped, comm).backward()


@refused(ADDED, mpi=True)
def a_layer_added_after_zero(comm):
    model = mlp()
    ZeroOptimizer(model, SGD, comm=comm, lr=LR)
    loss_of(with_another_layer(model), comm).backward()


@refused(ADDED, mpi=True)
def a_layer_added_after_sharding(comm):
    model = fully_shard(mlp(), mesh=comm)
    loss_of(with_another_layer(model), comm).backward()


@refused(r"'layers.1.\w+' was added to the model after it was wrapped", mpi=True)
def a_layer_replaced_after_wrapping(comm):
    wrapped = DistributedDataParallel(mlp(), comm)
    wrapped.module.layers[1] = Linear(5, 3, dtype=np.float64)
    loss_of(wrapped, comm).backward()


UNREDUCED = (
    r"no wrapper sums the gradients of parameters 'layers.1.weight', 'layers.1.bias' over the 2 ranks.*"
    r"fully_shard on the whole model last.*DistributedDataParallel.*ignored_params="
)


@refused(UNREDUCED, mpi=True)
def fully_shard_of_some_layers(comm):
    model = mlp()
    fully_shard(model.layers[0], mesh=comm)
    SGD([*sharded_parameters(model), *model.layers[1].parameters()], lr=LR)
    loss_of(model, comm, divisor=False).backward()


@refused(UNREDUCED)
def data_parallelism_of_some_layers(comm):
    model = mlp()
    model.layers[0] = DistributedDataParallel(model.layers[0], comm)
    SGD(model.parameters(), lr=LR)
    loss_of(model, comm, divisor=False).backward()


@refused(UNREDUCED)
def zero_of_some_layers(comm):
    model = mlp()
    ZeroOptimizer(model.layers[0].parameters(), SGD, comm=comm, lr=LR)
    loss_of(model, comm, divisor=False).backward()


@equal(mpi=True)
def the_rest_of_a_sharded_model_in_another_wrapper(comm):
    model = mlp()
    fully_shard(model.layers[0], mesh=comm, reduction="sum")
    model.layers[1] = DistributedDataParallel(model.layers[1], comm, reduction="sum")
    optimizer = SGD([*sharded_parameters(model), model.layers[1].flat], lr=LR)
    train(model, optimizer, comm)
    yield weights(model.layers[1].module), {n: one_device(2)[n] for n in ("layers.1.weight", "layers.1.bias")}


@equal(mpi=True)
def ignored_parameters_that_the_user_sums(comm):
    expected = one_device(2)
    for wrap in ("ddp", "zero", "fsdp"):
        model = mlp()
        rest = FlatParameters(model.layers[1].parameters())
        wrapped, optimizer = wrapping(wrap, model, comm, reduction="sum", ignored_params=set(rest.parameters))
        other = SGD(rest, lr=LR)
        for step in range(STEPS):
            model.zero_grad()
            loss_of(wrapped, comm, step).backward()
            all_reduce(comm, rest.grad)
            optimizer.step()
            other.step()
        yield weights(model.layers[1]), {p.name: expected[p.name] for p in rest.parameters}


@equal()
def a_loss_of_two_wrapped_models(comm):
    def both():
        return Sequential(mlp(), mlp(seed=1))

    first, second = (DistributedDataParallel(model, comm, reduction="sum") for model in (mlp(), mlp(seed=1)))
    x, targets = rows(comm.rank)
    cross_entropy(first(x) + second(x), targets, 8.0).backward()
    for model in (first, second):
        SGD(model.flat, lr=LR).step()
    models = Sequential(*(model.module for model in (first, second)))
    other = both()
    for rank in range(2):
        x, targets = rows(rank)
        cross_entropy(other.layers[0](x) + other.layers[1](x), targets, 8.0).backward()
    for model in other.layers:
        SGD(model.parameters(), lr=LR).step()
    yield dict(enumerate(p.data for p in models.parameters())), dict(enumerate(p.data for p in other.parameters()))


# --- where parameters are found; buffers; dtypes ---


class Heads(Module):
    def __init__(self, kind=dict):
        self.heads = kind({"a": Linear(6, 3, dtype=np.float64), "b": Linear(6, 3, dtype=np.float64)})
        self.initialize(5)

    def forward(self, x):
        return self.heads["a"](x) + self.heads["b"](x)


@equal(mpi=True)
def modules_in_a_dict(comm):
    for kind in (dict, ModuleDict):
        model, optimizer = wrapping("ddp", Heads(kind), comm, reduction="sum")
        train(model, optimizer, comm)
        yield weights(model.module), one_device(2, Heads)


class Hidden(Module):
    def __init__(self):
        self.make = lambda: Linear(6, 3)


@refused(r"Hidden has no parameters, so there is no gradient to sum; set its layers as attributes")
def data_parallelism_without_parameters(comm):
    DistributedDataParallel(Hidden(), comm)


def normed():
    return Sequential(Linear(6, 4, dtype=np.float64), BatchNorm(4, dtype=np.float64), Linear(4, 3, dtype=np.float64))


@equal(mpi=True)
def every_rank_evaluates_one_model_after_batch_norm(comm):
    x = rows(9)[0]

    def trained(model, loss, optimizer):
        for step in range(STEPS):
            model.zero_grad()
            with batch_coordinates(step):
                loss(step)
            optimizer.step()
        return {"y": model.eval()(x).data, "mean": model.layers[1].running[0], "var": model.layers[1].running[1]}

    def all_rows(step):
        for rank in range(comm.size):
            y, targets = rows(rank, step)
            with batch_coordinates(step, 4 * rank):
                cross_entropy(other(y), targets, 8.0).backward()

    model, other = normed().initialize(1), normed().initialize(1)
    wrapped = DistributedDataParallel(model, comm, reduction="sum")
    mine = trained(model, lambda step: loss_of(wrapped, comm, step).backward(), SGD(wrapped.flat, lr=LR))
    yield mine, trained(other, all_rows, SGD(other.parameters(), lr=LR))


# --- pipelines ---


def pipeline(comm, module, loss=None, tied=(), m=2, give=None):
    plan = get_schedule("gpipe").plan(2, m)
    loss = loss or (lambda output, target: cross_entropy(output, target, 4.0 * comm.size))
    pipe = Pipeline(comm, plan, [PipelineStage(module, comm.rank)], loss, tied=tied)
    data = [rows(i) for i in range(m if give is None else give)]
    pipe.step([x.data for x, _ in data], [targets for _, targets in data])
    return pipe


class Ends(Module):
    """A stage with the shared matrix: the first stage applies it, the last one applies it again."""

    def __init__(self, stage, shared=None):
        self.shared = shared or Linear(6, 6, bias=False, dtype=np.float64, seed=None)
        self.own = Linear(6, 6 if stage == 0 else 3, dtype=np.float64, seed=None)
        self.own.initialize(4, f"own.{stage}")
        if shared is None:
            self.shared.initialize(4, "shared")

    def forward(self, x):
        return self.own(self.shared(x))


@refused(
    r"'shared.weight' is on stage 0 and, with the same values, on stage 1.*pass tied=\['shared.weight'\]", mpi=True
)
def a_tied_parameter_that_a_cut_unties(comm):
    pipeline(comm, Ends(comm.rank))


@equal(mpi=True)
def a_tied_parameter_on_two_stages(comm):
    model = Ends(comm.rank)
    pipe = pipeline(comm, model, tied=["shared.weight"])
    for flat in pipe.flats:
        SGD(flat, lr=LR).step()
    first = Ends(0)
    second = Ends(1, first.shared)
    for i in range(2):
        x, targets = rows(i)
        cross_entropy(second(first(x)), targets, 8.0).backward()
    SGD({p: None for m in (first, second) for p in m.parameters()}, lr=LR).step()
    yield weights(model), weights((first, second)[comm.rank])


class Returns(Module):
    def __init__(self, make):
        self.layer, self.make = Linear(6, 6, dtype=np.float64, seed=None), make
        self.initialize(3, f"stages.{id(make) % 2}")

    def forward(self, x):
        return self.make(self.layer(x))


@refused(r"stage 0 .* returned a value of type dict where a Tensor is needed")
def a_stage_that_returns_a_dict(comm):
    pipeline(comm, Returns(lambda y: {"y": y}) if comm.rank == 0 else Linear(6, 3, dtype=np.float64))


@refused(r"stage 1 \(or the loss after it\) returned a value of type float")
def a_loss_that_returns_a_number(comm):
    pipeline(comm, Linear(6, (6, 3)[comm.rank], dtype=np.float64), loss=lambda y, t: float(y.data.sum()))


@refused(r"the loss of micro-batch 0 is the mean over its own rows.*divide by the rows")
def a_mean_over_a_micro_batchs_rows(comm):
    pipeline(comm, Linear(6, (6, 3)[comm.rank], dtype=np.float64), loss=cross_entropy)


@refused(r"is for 2 micro-batches and got 3; give 2", mpi=True)
def too_many_micro_batches(comm):
    pipeline(comm, Linear(6, (6, 3)[comm.rank], dtype=np.float64), give=3)


@refused(r"gives it stages \[\d\] and it was built with \[\d\]", mpi=True)
def the_stages_of_another_rank(comm):
    stages, _ = split_model(mlp(), 2, [1 - comm.rank])
    Pipeline(comm, get_schedule("gpipe").plan(2, 2), stages, cross_entropy)


class Embedded(Module):
    """A model of one's own that a pipeline can cut: something in front of its blocks, and a head that is tied to it."""

    def __init__(self, seed=4):
        self.front = Linear(6, 6, bias=False, dtype=np.float64, seed=None)
        self.blocks = [Linear(6, 6, activation="relu", dtype=np.float64, seed=None) for _ in range(3)]
        self.norm = Linear(6, 6, dtype=np.float64, seed=None)
        self.initialize(seed)

    def stage(self, first, last, is_first, is_last):
        front, back = [self.front] * is_first, [self.norm, with_own_weight(self.front)] * is_last
        return Sequential(*front, *self.blocks[first:last], *back)

    def forward(self, x):
        return Sequential(self.front, *self.blocks, self.norm, self.front)(x)


@equal(mpi=True)
def a_model_of_ones_own_cut_into_stages(comm):
    stages, tied = split_model(Embedded(), comm.size, [comm.rank])
    assert tied == ["front.weight"]
    plan = get_schedule("1f1b").plan(comm.size, 4)
    pipe = Pipeline(comm, plan, stages, lambda y, t: cross_entropy(y, t, 16.0), tied=tied)
    data = [rows(i) for i in range(4)]
    losses = pipe.step([x.data for x, _ in data], [targets for _, targets in data])
    model = Embedded()
    alone = [cross_entropy(model(x), targets, 16.0) for x, targets in data]
    for loss in alone:
        loss.backward()
    yield dict(enumerate(losses)), {i: loss.item() for i, loss in enumerate(alone)}
    expected = {p.name: p.grad for p in model.parameters()}
    yield {p.name: p.grad for p in stages[0].parameters}, {p.name: expected[p.name] for p in stages[0].parameters}


class Forgets(Embedded):
    def stage(self, first, last, is_first, is_last):
        return Sequential(*[self.front] * is_first, *self.blocks[first:last])


@refused(r"parameter 'norm.weight' of Forgets is in none of the 2 stages; let its method stage put .*\(is_first\)")
def a_cut_that_leaves_a_layer_out(comm):
    split_model(Forgets(), 2, [comm.rank])


@refused(r"2 parameters of Sequential are called 'weight'.*call initialize\(seed\)")
def a_cut_of_a_model_without_names(comm):
    split_model(Sequential(Linear(6, 6), Linear(6, 6)), 2, [comm.rank])


@refused(r"two parameters of stage 0 are called 'weight'.*initialize", ranks=1)
def two_layers_of_one_name_in_a_stage(comm):
    stage = PipelineStage(Sequential(Linear(6, 5), Linear(5, 3)), 0)
    Pipeline(comm, get_schedule("gpipe").plan(1, 2), [stage], cross_entropy)


# --- copies ---


@equal()
def copies_of_a_model_and_of_a_wrapped_models_module(comm):
    x = rows(comm.rank)[0]
    model = mlp()
    wrapped = DistributedDataParallel(mlp(), comm)
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(wrapped.module)):
        yield {"y": one(x).data}, {"y": model(x).data}
        again = DistributedDataParallel(one, comm)
        loss_of(again, comm, divisor=False).backward()


COPIED = r"cannot be copied or pickled"


@refused(rf"a DistributedDataParallel {COPIED}; copy the model before it is wrapped")
def a_copy_of_a_wrapped_model(comm):
    copy.deepcopy(DistributedDataParallel(mlp(), comm))


@refused(rf"of a sharded module {COPIED}.*copy the model before fully_shard")
def a_copy_of_a_sharded_model(comm):
    copy.deepcopy(fully_shard(mlp(), mesh=comm))


@refused(rf"a ZeroOptimizer {COPIED}")
def a_copy_of_zero(comm):
    copy.deepcopy(ZeroOptimizer(mlp(), SGD, comm=comm, lr=LR))


@refused(rf"the communicator '.*' {COPIED}.*copy the model before that")
def a_copy_of_a_split_model(comm):
    copy.deepcopy(apply_tensor_parallel(MLP([6, 4, 2]), comm))


# --- sharded values, other models, outputs, threads ---


@refused(r"'layers.0.weight' .* is released.*gather_tensors\(shards_of\(model\), optimizer\)", mpi=True)
def the_values_of_a_sharded_parameter(comm):
    _ = fully_shard(mlp(), mesh=comm).layers[0].weight.data


@refused(r"is released.*call that module itself")
def a_part_of_a_sharded_module_called_alone(comm):
    fully_shard(mlp(), mesh=comm).layers[0](rows(0)[0])


@refused(r"is sharded, and a change of the gathered copy would be lost; set the values before fully_shard")
def a_sharded_parameter_set_while_it_is_whole(comm):
    model = fully_shard(mlp(), mesh=comm, persistence_threshold=1000)
    model(rows(0)[0])
    model.layers[0].weight.data = np.zeros((5, 6))


SHARDED_STATE = (
    r"load_state_dict: 'layers.0.weight' is sharded, .*load the state before fully_shard, or set this rank's part"
)


@refused(SHARDED_STATE)
def load_state_dict_of_a_sharded_model_on_one_rank(comm):
    model = fully_shard(mlp(), mesh=comm)
    if comm.rank == 0:
        model.load_state_dict(mlp(seed=1).state_dict())
    comm.barrier()


@refused(SHARDED_STATE, mpi=True)
def load_state_dict_of_a_sharded_model_while_it_is_whole(comm):
    model = fully_shard(mlp(), mesh=comm, persistence_threshold=1000)
    model(rows(0)[0])
    model.load_state_dict(mlp(seed=1).state_dict())


@equal()
def a_write_into_a_gathered_copy_is_not_lost_in_silence(comm):
    model = fully_shard(mlp(), mesh=comm, reshard_after_forward=False)
    before = model(rows(0)[0]).data
    with pytest.raises(ValueError, match="read-only"):
        model.layers[0].weight.data[...] = 0
    yield {"y": model(rows(0)[0]).data}, {"y": before}


@refused(r"its model differs from rank 0's.*build the same model on every rank")
def another_model_on_one_rank(comm):
    DistributedDataParallel(MLP([6, 5 + comm.rank, 3]), comm)


@refused(r"its model differs from rank 0's in a parameter's name, shape, dtype or requires_grad")
def other_frozen_parameters_on_one_rank(comm):
    model = mlp()
    model.layers[0].bias.requires_grad = comm.rank == 0
    fully_shard(model, mesh=comm)


class EitherWay(Module):
    def __init__(self):
        self.first, self.second = (Linear(3, 3, dtype=np.float64) for _ in range(2))
        self.initialize(5)

    def forward(self, x, turned):
        one, two = (self.second, self.first) if turned else (self.first, self.second)
        return two(one(x))


@refused(r"'?all_gather.* second.weight.* first.weight|all_gather.* first.weight.* second.weight")
def ranks_that_run_their_modules_in_another_order(comm):
    model = EitherWay()
    for part in (model.first, model.second, model):
        fully_shard(part, mesh=comm)
    model(Tensor(np.ones((2, 3))), comm.rank == 1)


@dataclass
class Output:
    logits: Any
    note: str = ""


class PlainOutput:
    def __init__(self, logits):
        self.logits = logits


class DictOutput(dict):
    @property
    def logits(self):
        return self["logits"]


class Answers(Module):
    def __init__(self, kind=Output):
        self.net, self.kind = MLP([6, 5, 3], dtype=np.float64), kind
        self.initialize(0)

    def forward(self, x):
        return self.kind(self.net(x))


@equal(mpi=True)
def outputs_of_a_users_class(comm):
    expected = one_device(2, Answers, lambda model, x, rank: model(x).logits)
    for wrap in ("ddp", "fsdp"):
        for kind in (Output, PlainOutput, lambda y: DictOutput(logits=y)):
            model = Answers(kind)
            wrapped, optimizer = wrapping(wrap, model, comm, reduction="sum")
            for step in range(STEPS):
                wrapped.zero_grad()
                x, targets = rows(comm.rank, step)
                output = wrapped(x)
                assert isinstance(output, Output | PlainOutput | DictOutput)
                cross_entropy(output.logits, targets, 8.0).backward()
                optimizer.step()
            yield whole(model, optimizer) if wrap == "fsdp" else weights(model), expected


@equal(ranks=1)
def two_threads_that_train_two_models(comm):
    results = {}

    def train(name):
        results[name] = one_device(3, partial(mlp, seed=name))

    threads = [threading.Thread(target=train, args=(name,)) for name in range(2)]
    with no_grad():  # of this thread alone
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for name in range(2):
        yield results[name], one_device(3, partial(mlp, seed=name))


@equal()
def an_error_in_a_hook_that_the_program_survives(comm):
    model = mlp()
    wrapped, optimizer = wrapping("fsdp", model, comm, reduction="sum")

    def stop(parameter):
        raise RuntimeError

    remove = model.layers[0].weight.register_post_accumulate_grad_hook(stop)
    try:
        loss_of(wrapped, comm, 5).backward()
    except RuntimeError:
        remove()
    train(wrapped, optimizer, comm)
    yield whole(model, optimizer), one_device(2)
