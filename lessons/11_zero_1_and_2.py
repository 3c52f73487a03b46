# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 ZeRO 1 and 2
#
# *35 minutes. Before it: 02, 04, 06, 09 and 10.*
#
# ## 1 The case
#
# A model of 7.5 billion parameters trains with Adam in mixed precision. A parameter costs 2 B for
# itself, 2 B for its gradient and 12 B for the optimizer (a float32 copy and two averages): 120 GB,
# on every one of 8 ranks, and all of them make the same update. So let each rank keep the
# optimizer's state of a part of the parameters only, step that part, and then gather the new
# parameters of the others (*ZeRO stage 1*).
#
# Now four ranks and a small network in float32, in which a rank has a quarter of the optimizer's state. A gather
# of the parameters has been added: how many bytes does a rank send in a step, compared with data parallelism?
#
# In stage 2 a rank also keeps the summed gradient of its part only. So no rank has a whole gradient in which
# micro-batches (lesson 10) could be added up, and every one of them is summed over the ranks at once. With four
# micro-batches, how many times the bytes of stage 1 does a rank send in a step?

# %% [markdown]
# ## 2 Predict
#
# In the first answer 1 means: as many bytes as in data parallelism. Think of what an all-reduce consists of (lesson
# 04).

# %%
from minidist.course.lesson import check, predict, reveal, solution

bytes_guess = predict("bytes that a rank sends, over data parallelism's", example=1.5)
stage_2_guess = predict(
    "bytes of stage 2 with four micro-batches, over those of stage 1", example=4
)

# %%
import numpy as np

from minidist import (
    MLP,
    Adam,
    FlatParameters,
    SimWorld,
    Tensor,
    ZeroOptimizer,
    all_gather,
    all_reduce,
    cross_entropy,
    reduce_scatter,
    report,
)
from minidist.course.story import spent, story
from minidist.planning.zero_stages import model_states
from minidist.report import show
from minidist.report.zero_bars import zero_bars

# %% [markdown]
# ## 3 The idea and its picture
#
# ZeRO lets **each rank keep the state, and make the step, of 1/n of the parameters**, and then
# gathers the new parameters on every rank. 12 of 16 bytes per parameter become 12/n (stage 1);
# stage 2 divides the gradient too (Rajbhandari et al. 2020). Stage 1 sends **nothing more, but for padding**, as an
# all-reduce is a reduce-scatter and an all-gather anyway; **stage 2 costs a reduction of every micro-batch**.
#
# What one rank of 8 holds of the 7.5 billion parameters. Stage 3 is lesson 12.

# %%
figure = zero_bars(
    model_states(7_500_000_000, 8),
    command="minidist memory --params 7.5e9 --dp 8 --format svg -o zero.svg",
)
show(figure)

# %% [markdown]
# The messages of one step on 4 ranks, with 8 weights in place of a model: the gradients are reduced
# and scattered, so that each rank holds the sum of its part; each rank updates that part, and the
# parts are gathered. The rows of a rank are `weights`, `gradients`, and two buffers without a name, in which the
# reduce-scatter adds up. In steps 1 to 12 sums go round. When a rank has the sum of its part, it subtracts it from
# its two weights, and in steps 13 to 24 the new weights go round. A cell that is only received into is empty until
# then.


# %%
def one_step(comm):
    weights, gradients = np.full(8, 100.0), np.arange(8.0) + 10 * comm.rank
    part = np.full(2, np.nan)
    reduce_scatter(comm, gradients, out=part, algorithm="ring")
    mine = slice(2 * comm.rank, 2 * comm.rank + 2)
    all_gather(comm, weights[mine] - part, out=weights, algorithm="ring")


show(report.step(one_step, 4), "ZeRO 1: 8 gradients become 8 weights, each updated on one rank.")

# %% [markdown]
# ## 4 The code
#
# Where data parallelism calls `all_reduce`, a reduce-scatter of the gradients and a gather of the
# parameters do half of it each. Several steps with momentum, the optimizer's state of this toy. Zeros
# are added at the end until all shards are equal (padding):


# %%
def toy_zero(comm, weights, gradients, lr=0.1):
    padding = np.zeros(-weights.size % comm.size)
    own = np.split(np.concatenate([weights, padding]), comm.size)[comm.rank]
    momentum = np.zeros_like(own)  # 1/n of the optimizer's state
    for gradient in gradients[comm.rank]:
        # The sum over the ranks of this part, a step of this part, and all parts.
        momentum = 0.9 * momentum + reduce_scatter(comm, np.concatenate([gradient, padding]))
        own -= lr * momentum
        whole = all_gather(comm, own)
    return whole[: weights.size]


# %% [markdown]
# Three steps of ten weights on four ranks, and the same on one device, with the sums of their gradients:

# %%
start, each = np.arange(10.0), np.random.default_rng(0).normal(size=(4, 3, 10))  # ranks, steps
single, momentum = start.copy(), np.zeros(10)
for gradient in each.sum(axis=0):
    momentum = 0.9 * momentum + gradient
    single -= 0.1 * momentum
off = max(np.abs(weights - single).max() for weights in SimWorld(4).run(toy_zero, start, each))
print(f"each rank with a quarter of the momentum: max |toy - single| = {off:.0e}")
assert off < 1e-12

# %% [markdown]
# The library cuts the flat parameters into n equal shards, with no regard to where a parameter ends. The gradients
# travel in *buckets*, each of a given number of elements, as soon as backward has computed them
# ([zero.py](../minidist/core/parallel/zero.py)).

# %% [markdown]
# ## 5 Check
#
# A network on several ranks. Stage 0 is plain data parallelism; in stages 1 and 2 the optimizer has a
# shard. `algorithm="ordered"` adds in the order of the ranks, so that the stages can be compared bit for bit:

# %%
from minidist import DistributedDataParallel

rng = np.random.default_rng(0)
rows, targets = rng.normal(size=(24, 64)), rng.integers(0, 10, 24)


def prepared(comm, model, stage):
    """Returns the flat parameters, what runs forward, the optimizer, and its `zero_grad`."""
    options = {"reduction": "sum", "algorithm": "ordered"}
    if stage == 0:
        flat = FlatParameters(model.parameters())
        forward = DistributedDataParallel(model, comm, flat=flat, **options)
        return flat, forward, Adam(flat, lr=1e-2), flat.zero_grad
    optimizer = ZeroOptimizer(model, Adam, lr=1e-2, comm=comm, stage=stage, **options)
    return optimizer.flat, model, optimizer, optimizer.zero_grad


# %% [markdown]
# The training is the same for all stages. The seed is another one on each rank, so rank 0's weights are
# sent to all others before the first step. (`account_memory` counts the bytes that are alive, lesson 02.)

# %%
from minidist.base.memory import account_memory


def train(comm, stage, steps=3, dtype=np.float32):
    """Returns weights, and the live bytes by purpose after the last step."""
    mine = slice(comm.rank * 24 // comm.size, (comm.rank + 1) * 24 // comm.size)
    with account_memory() as account:
        model = MLP([64, 256, 256, 10], dtype=dtype, seed=comm.rank)
        flat, forward, optimizer, zero_grad = prepared(comm, model, stage)
        for _ in range(steps):
            zero_grad()
            outputs = forward(Tensor(rows[mine].astype(dtype)))
            cross_entropy(outputs, targets[mine], divisor=24).backward()
            optimizer.step()
    return flat.data[: flat.numel].copy(), dict(account.by_purpose)


# %% [markdown]
# Bytes alive on rank 0 of 4 between two steps, and bytes that it has sent in one:

# %%
RANKS = 4
held, sent = {}, {}
for stage in (0, 1, 2):
    world = SimWorld(RANKS)
    (_, held[stage]), *_ = world.run(train, stage)
    purposes = world.traces[0].bytes_by_purpose()
    sent[stage] = {k: n // 3 for k, n in purposes.items() if k != "startup"}
    kinds = ("parameter", "gradient", "optimizer")
    print(f"stage {stage} holds", ", ".join(f"{k} {held[stage][k]:,} B" for k in kinds))
    print("        sends", ", ".join(f"{k} {n:,} B" for k, n in sent[stage].items()))
bytes_guess.judge(sum(sent[1].values()) / sum(sent[0].values()), within=0.05)

# %% [markdown]
# The reduce-scatter and the gather each send half of what the all-reduce sends. Stage 1 holds a whole gradient and the
# sum of its shard; stage 2 frees a bucket as soon as it has been sent. Why is it not exactly 1/4, and as many bytes?
# The library pads to a multiple of 1,024 n, because the norm of a gradient is summed in blocks of 1,024 numbers, each
# whole on one rank. Here that is 1 %, in a large model nothing. With Ψ padded parameters of 4 B:

# %%
numel = sum(parameter.size for parameter in MLP([64, 256, 256, 10]).parameters())
unit = 1024 * RANKS  # a block of the norm on each rank
psi = unit * -(-numel // unit)
state, traffic = 4 * 2 * psi // RANKS, 4 * 2 * (RANKS - 1) * psi // RANKS
print(f"Ψ = {psi:,}, without padding {numel:,}: {psi / numel - 1:.1%} more")
print(f"Adam's 2 Ψ/n numbers are {state:,} B; the 2 (n-1)/n Ψ numbers sent are {traffic:,} B")
assert held[1]["optimizer"] == held[2]["optimizer"] == state
assert sum(sent[1].values()) == sum(sent[2].values()) == traffic

# %% [markdown]
# Is it the same training? On one device with all rows, and against data parallelism, for numbers of ranks that
# do not divide the rows or the parameters:

# %%
single, _ = SimWorld(1).run(train, 0, dtype=np.float64)[0]
for ranks in (2, 3, 5):
    runs = [SimWorld(ranks).run(train, stage, dtype=np.float64) for stage in (0, 1, 2)]
    weights = runs[0][0][0]
    same = all(np.array_equal(own, weights) for results in runs for own, _ in results)
    off = np.abs(weights - single).max()
    print(f"{ranks} ranks: max |w_parallel - w_single| = {off:.1e}; stages 0, 1, 2 equal: {same}")
    assert same
    assert off < 1e-9  # where a gradient is nearly 0, Adam's step depends on its last digits

# %% [markdown]
# And with micro-batches? In stage 1 all but the last backward pass stand in `no_sync`, which adds up and
# sends nothing. Stage 2 has no whole gradient to add up in: it refuses `no_sync`, and reduces every one:

# %%
from contextlib import nullcontext


def accumulated(comm, stage):
    """One step whose gradient is that of four micro-batches of one row each."""
    model = MLP([64, 256, 256, 10])
    zero = ZeroOptimizer(model, Adam, comm=comm, stage=stage, reduction="sum")
    for row in range(4 * comm.rank, 4 * comm.rank + 4):
        is_last = row % 4 == 3
        with zero.no_sync() if stage == 1 and not is_last else nullcontext():
            outputs = model(Tensor(rows[row : row + 1].astype(np.float32)))
            cross_entropy(outputs, targets[row : row + 1], divisor=16).backward()
    zero.step()


# %% [markdown]
# With k micro-batches stage 2 sends k reduce-scatters and one gather, where stage 1 sends one of each, so (k + 1) / 2
# times as much:

# %%
total = {}
for stage in (1, 2):
    world = SimWorld(4)
    world.run(accumulated, stage)
    purposes = world.traces[0].bytes_by_purpose()
    total[stage] = purposes["gradient_reduce"] + purposes["parameter_gather"]
    print(f"4 micro-batches, stage {stage}: {total[stage]:,} B")
stage_2_guess.judge(total[2] / total[1])
assert total[2] == 5 * total[1] // 2

# %% [markdown]
# ## 6 Break it
#
# Clipping needs the norm of the *whole* gradient, and a rank has a shard. When each rank takes the
# norm of its shard, every shard is scaled by another factor: the direction of the step changes,
# silently. The right way sums the squares of each shard's entries, adds these sums over the ranks,
# and scales every shard by 0.1 / the root of the total when that root is larger than 0.1:

# %%
from minidist import SGD


def clipped(comm, right):
    mine = slice(comm.rank * 24 // comm.size, (comm.rank + 1) * 24 // comm.size)
    model = MLP([64, 256, 256, 10])
    zero = ZeroOptimizer(model, SGD, comm=comm, stage=2, reduction="sum", lr=1.0)
    outputs = model(Tensor(rows[mine].astype(np.float32)))
    cross_entropy(outputs, targets[mine], divisor=24).backward()
    if right:
        zero.clip_grad_norm_(0.1)
    else:  # the shard's own norm
        zero.shard.grad[...] *= min(1.0, 0.1 / np.linalg.norm(zero.shard.grad))
    return zero.shard.grad.copy()


# %% [markdown]
# The shards of four ranks, put together after clipping to 0.1. The cosine compares the direction with the
# right one, for which it is 1:

# %%
right, wrong = (np.concatenate(SimWorld(4).run(clipped, way)) for way in (True, False))
for name, gradient in (("the whole norm", right), ("the norm of the shard", wrong)):
    norm = np.linalg.norm(gradient)
    cosine = gradient @ right / (norm * np.linalg.norm(right))
    print(f"clipped to 0.1 by {name:21}: norm {norm:.3f}, cosine {cosine:.3f}")
assert norm > 0.11
assert cosine < 0.99

# %% [markdown]
# Each of the four shards has the length 0.1, so together they have √4 × 0.1 = 0.2.

# %% [markdown]
# ## 7 Exercise: a step on a flat partition
#
# `weights` and `gradients` are lists of arrays, the same shapes on every rank; the gradients are
# this rank's own. The lists may be empty, and the number of elements need not be a multiple of the
# ranks. Change the weights in place, on every rank, to what `update(weights, summed_gradient)` makes
# of them; `update` works in place on 1-D arrays. What is judged: the weights, that each rank updates at most
# 1/n of the elements (rounded up), and that it sends no more than a reduce-scatter and an all-gather do.


# %%
def zero_step(comm, weights, gradients, update):
    for array, gradient in zip(weights, gradients, strict=True):
        flat = array.reshape(-1)
        update(flat, all_reduce(comm, gradient.reshape(-1).copy()))


check("11.zero_step", zero_step)

# %%
reveal("11.zero_step")
check("11.zero_step", solution("11.zero_step"))

# %% [markdown]
# ## 8 Takeaway
#
# - **reduce-scatter gradients, step 1/n, all-gather parameters**: stage 1 sends the 2 (n-1)/n Ψ numbers
#   of data parallelism, and **stage 2 with k micro-batches (k + 1) (n-1)/n Ψ**.
# - A parameter costs 2 + 2 + 12 B; with **stage 1: 4 + 12/n, with stage 2: 2 + 14/n**. (minidist also
#   keeps the sum of a rank's shard in stage 1, one n-th of the gradient.) Activations are not touched.

# %% [markdown]
# The job of the course so far, a model of 7 billion parameters on cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with parameters of 2 B, gradients
# added up in float32 (4 B) and 12 B for Adam in every row. Row 11 is stage 1, which fits, and is faster than row 10
# because it computes no activations again. Stage 2 would take less memory and more time, because it reduces each of
# 64 micro-batches (2^20 tokens, by texts of 2,048 on 8 cards):

# %%
story("11")
spent("11")
spent("11", dp=8, zero=2)

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --dp 4 --zero 1 --steps 5
#     mpiexec -n 4 minidist compare --dp 4 --zero 2 --steps 3
#     mpiexec -n 4 python mpi_examples/3_sharding/zero.py
#     mpiexec -n 4 minidist train --dp 4 --deepspeed mpi_examples/ds_config.json --steps 4
#     mpiexec -n 2 python mpi_examples/7_more/deepspeed_file.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `ZeroOptimizer(stage=1)`, `--zero 1` | DeepSpeed `"zero_optimization": {"stage": 1}`; PyTorch `ZeroRedundancyOptimizer`; Megatron-LM `--use-distributed-optimizer` |
# | `ZeroOptimizer(stage=2)`, `--zero 2` | DeepSpeed `"stage": 2`; PyTorch FSDP `ShardingStrategy.SHARD_GRAD_OP`, which keeps the parameters whole between forward and backward (`reshard_after_forward=False`) |
# | `reduce_bucket_size` | DeepSpeed `reduce_bucket_size`, `allgather_bucket_size` |
# | padding of the flat array | PyTorch `FlatParameter`; DeepSpeed aligns its flat buffers too |
# | `clip_grad_norm_` over shards | PyTorch FSDP `model.clip_grad_norm_`; DeepSpeed `gradient_clipping` |
#
# 59.7 GB fit. But every card still has all the weights, and a model whose weights are larger than a card does not
# fit on any number of cards.
#
# Next: [12 ZeRO 3 / FSDP](12_zero_3_fsdp.ipynb). Side rooms: [11b Trust
# ratios](11b_trust_ratios.ipynb), [11c Muon: whole matrices](11c_muon.ipynb). All lessons are in the
# [index](README.md).
