# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11b Trust ratios
#
# *25 minutes. Before it: 11.*
#
# ## 1 The case
#
# A GPT with two layers makes its first step with Adam, which moves every weight by about lr. As in GPT-2, the
# entries of most matrices begin with a standard deviation of 0.02. Those of the projections before a residual sum
# begin with 0.02 / sqrt(2 x 2 layers) = 0.01. So one matrix moves by a larger part of its norm than another, and
# the largest part decides how large the rate may be.
#
# An optimizer that gives each layer a step in proportion to its norm needs two norms: that of the layer's weights
# and that of its update. On four ranks each has a part of every layer, of its weights and of its update. How many
# numbers per layer do the ranks have to sum in a step, so that each can step its part?

# %% [markdown]
# ## 2 Predict
#
# What can a rank compute of a norm from its part of a layer, and what has it to know of the others? And how far
# apart are the two kinds of matrices? Adam moves every entry by about lr: divide that by the entries' standard
# deviation, for both kinds. 15 % off is good enough.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, small_job, solution

numbers_guess = predict("numbers per layer that the ranks sum", example=1)
spread_guess = predict("largest move of a matrix over the smallest, Adam", example=1.0)

# %%
import numpy as np

from minidist import GPT, SGD, Adam, FlatParameters, GPTConfig, LinkModel, SimWorld, all_reduce
from minidist.base.trace_file import only_steps
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.optim import LAMB

# %% [markdown]
# ## 3 The idea and its picture
#
# **Give each layer a step in proportion to the length of its weights** (LAMB). So no layer limits the learning rate of
# the others. It was made for very large batches (You et al. 2020); a well-tuned Adam can do as well there (Nado et al.
# 2021), and this lesson is about what such a step costs on shards. The step of an element depends on two norms of its
# whole layer, so where ranks have parts of a layer every step has one reduction more.
#
# Rank 0 in the second step of ZeRO 1 on four ranks with LAMB. After the gradients it sends the small messages of the
# loss ("metrics") and of the norms ("trust_ratio"), then parameters:


# %%
def lamb_job(**settings):
    """The settings of a job with LAMB on a GPT of two layers."""
    return small_job(layers=2, width=32, micro_batch=2, optimizer="lamb", lr=0.02, **settings)


world = SimWorld(4, links=LinkModel(alpha=2e-5, beta=1e-8, flops=3e9, memory_bandwidth=6e9))
world.run(train, lamb_job(dp=4, zero=1, steps=2))
second = only_steps(world.traces, 1, 2)
picture("lanes", second, "part 3 of lesson 11b", title="rank 0: a step of ZeRO 1 with LAMB")
for purpose, nbytes in second[0].bytes_by_purpose().items():
    print(f"{purpose:12} {nbytes:7,} B")

# %% [markdown]
# ## 4 The code
#
# LAMB makes the step of a layer as long as `lr` times the layer's weights, whatever the length
# of Adam's update u: p -= lr |p| / |u| u. The quotient is the *trust ratio* of the layer. (With a weight decay of
# w the paper adds w p to u; here w is 0. The older LARS takes the gradient g in place of u, and a factor eta:
# p -= lr eta |p| / |g| g.)
# A layer lies on several ranks, so no rank knows its lengths: a step has two passes, the squares of
# every layer, which are summed over the ranks by one all-reduce, and then the update with `lr` times
# the ratio. On one device:


# %%
def toy_lamb(weights, updates, lr=0.01):
    for w, u in zip(weights, updates, strict=True):
        ratio = np.linalg.norm(w) / np.linalg.norm(u)
        w -= lr * ratio * u


layers = [np.full(4, 1.0), np.full(4, 100.0)]
toy_lamb(layers, [np.full(4, 3.0), np.full(4, -0.5)])
print("1 and 100 after a step of 1 %:", layers[0][0], layers[1][0])

# %% [markdown]
# The library's version is [layerwise.py](../minidist/optim/layerwise.py), and the message is that of
# [layer_sums.py](../minidist/parallel/layer_sums.py).

# %% [markdown]
# ## 5 Check
#
# First the steps: |update| / |weights| of each matrix, after one step from the same gradient.


# %%
def moved(make, steps=1):
    """The part of its norm by which each matrix moves in the last of the steps."""
    model = GPT(GPTConfig(vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2), seed=0)
    tokens = np.random.default_rng(0).integers(0, 16, (4, 9))
    flat = FlatParameters(model.parameters())
    matrices = [p for p in flat.parameters if p.data.ndim == 2]
    optimizer = make(flat)
    for _ in range(steps):
        before = [p.data.copy() for p in matrices]
        flat.zero_grad()
        model(tokens[:, :-1], tokens[:, 1:], 32.0).backward()
        optimizer.step()
    moves = [p.data - old for p, old in zip(matrices, before, strict=True)]
    return [
        float(np.linalg.norm(m) / np.linalg.norm(old)) for m, old in zip(moves, before, strict=True)
    ]


# %% [markdown]
# With SGD, Adam and LAMB:

# %%
spread = {}
for name, make in {
    "SGD": lambda flat: SGD(flat, lr=0.1),
    "Adam": lambda flat: Adam(flat, lr=0.01),
    "LAMB": lambda flat: LAMB(flat, lr=0.01),
}.items():
    parts = moved(make)
    spread[name] = max(parts) / min(parts)
    later = moved(make, steps=20)
    print(f"{name:4} a matrix moves by {min(parts):.4f} to {max(parts):.4f} of its norm, ", end="")
    print(f"in the twentieth step by {min(later):.4f} to {max(later):.4f}")
spread_guess.judge(spread["Adam"], within=0.15)
assert spread["LAMB"] < 1.001 < spread["Adam"] < spread["SGD"]

# %% [markdown]
# Adam moves every entry by about lr, so a matrix moves by lr over the size of its entries: 0.01 / 0.02 =
# 0.5 of its norm, or 0.01 / 0.01 = 1. For SGD the gradients' lengths count too.
#
# Now the bytes. With ZeRO 1 (lesson 11) a rank steps a part of every layer. It adds up the squares of the part's
# weights and of its update, and the ranks sum both. The solution of part 7 makes the step of `toy_lamb` on shards,
# with float64 sums. What it sends on four ranks, each with one element of both layers:

# %%
step_on_shards = solution("11b.trust_ratio_step")
world = SimWorld(4)
world.run(lambda comm: step_on_shards(comm, [1, 1], np.array([1.0, 100.0]), np.ones(2)))
sent = sum(world.traces[0].bytes_by_purpose().values()) / len(layers)
print(f"{sent:g} B per layer leave a rank; 2 (n-1)/n of two numbers of 8 B is {2 * 3 / 4 * 16:g} B")
numbers_guess.judge(sent / (2 * 3 / 4) / 8)

# %% [markdown]
# But a float64 sum depends on where a layer is cut (lesson 04b), so the ratio would, and with it every weight.
# minidist sums squares exactly, as whole numbers of 18 x 32 bits, each 32 bits in a number of 8 B
# (`optim/exact_sums.py`). Two sums are 2 x 18 x 8 = 288 B per layer instead of 16:

# %%
world = SimWorld(4)
results = world.run(train, lamb_job(dp=4, zero=1, steps=1))
count = len(results[0].sizes[0].parameters)
sent = sum(trace.bytes_by_purpose()["trust_ratio"] for trace in world.traces) / 4 / count
print(f"{sent:.0f} B per layer leave a rank; 2 (n-1)/n of 288 B is {2 * 3 / 4 * 288:.0f} B")
assert sent == 2 * 3 / 4 * 288

# %% [markdown]
# Three steps of four ranks against one device. `compare_rank` trains the job of `small_job` on these ranks and on
# one device, and compares every gradient, weight and optimizer state of each step. The one device computes the
# micro-batches of the ranks one after the other and adds them in the order of the ranks (lesson 04b); as one matrix
# product over all rows it would have other last bits:


# %%
for zero in (0, 1, 2):
    verdict = SimWorld(4).run(compare_rank, lamb_job(steps=3, dp=4, zero=zero))[0]
    print(f"ZeRO {zero}: max |w_parallel - w_single| = {verdict.max_difference['weights']:g}")
    assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# Each rank takes the ratio of what it has. Here two ranks have a half of one layer each; with `whole` they first
# add the squares, and without it they do not:


# %%
def step_of_half(comm, weights, updates, whole):
    w, u = np.split(weights, 2)[comm.rank], np.split(updates, 2)[comm.rank]
    squares = np.array([np.square(w).sum(), np.square(u).sum()])
    if whole:
        all_reduce(comm, squares)
    return -0.01 * np.sqrt(squares[0] / squares[1]) * u


w, u = np.array([1.0, 1, 3, 3]), np.array([1.0, 2, 2, 1])
cosine = {}
for whole in (True, False):
    step = np.concatenate(SimWorld(2).run(step_of_half, w, u, whole))
    part = np.linalg.norm(step) / np.linalg.norm(w)
    cosine[whole] = -step @ u / (np.linalg.norm(step) * np.linalg.norm(u))
    name = "whole layer" if whole else "halves"
    print(f"ratio of the {name}: a step of {part:.2%} of |w|, cosine with u {cosine[whole]:.3f}")
assert cosine[False] < 0.95 < cosine[True]

# %% [markdown]
# Each half moves by 1 % of its own norm, so the whole moves by 1 % of its norm, too, as it should. But the direction is
# another one: a cosine of 1 means the direction of u. Nothing fails.

# %% [markdown]
# In your own training loop minidist refuses it. (`fully_shard`, of lesson 12, gives each rank a part of every layer.)

# %%
from minidist import MLP, UsageError, fully_shard, sharded_parameters


def forgets(comm):
    model = MLP([6, 8, 3])
    fully_shard(model, mesh=comm)
    LAMB(sharded_parameters(model), lr=0.01)


with expect(UsageError):
    SimWorld(2).run(forgets)

# %% [markdown]
# ## 7 Exercise: a step with trust ratios, on shards
#
# All layers lie one after the other in one array, which is cut over the ranks. A rank has
# `sizes[i]` elements of layer i (0 where it has none), their `weights`, and their `update`. Return
# this rank's new weights: weights - ratio * update, where a layer's ratio is the norm of its
# weights by the norm of its update, both of the whole layer, and 1 where either is 0. The numbers
# are small and whole, so float64 sums will do. What is judged: the weights, and one all-reduce of two numbers
# per layer.


# %%
def trust_ratio_step(comm, sizes, weights, update):
    return weights - np.linalg.norm(weights) / max(np.linalg.norm(update), 1e-9) * update


check("11b.trust_ratio_step", trust_ratio_step)

# %%
reveal("11b.trust_ratio_step")
check("11b.trust_ratio_step", solution("11b.trust_ratio_step"))

# %% [markdown]
# ## 8 Takeaway
#
# - LAMB: **p -= lr |p| / |u| u** with Adam's u. Norms are of whole layers, so a step on shards has one
#   all-reduce of two numbers per layer, whatever the layers' sizes.
# - A sum that is the same for every cut has to be exact, here 18 numbers in place of one: then equal weights stay
#   equal, bit for bit.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --optimizer lamb --lr 0.02 --dp 4 --zero 3 --steps 20
#     mpiexec -n 4 minidist compare --optimizer lars --lr 2 --momentum 0.9 --dp 4 --zero 1 --steps 3 --reduction ordered
#     mpiexec -n 4 python mpi_examples/7_more/trust_ratios.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `LAMB` | You et al. 2020, algorithm 2; NVIDIA Apex `FusedLAMB`, DeepSpeed `FusedLamb` (with `max_coeff`, `min_coeff`: bounds of the ratio) |
# | `LARS(trust_coefficient=)` | You et al. 2017, eta; Apex `LARC(trust_coefficient)`, TensorFlow `eeta` |
# | `LayerSums` | Apex `DistributedFusedLAMB` |
#
# Next: [11c Muon: whole matrices](11c_muon.ipynb). All lessons are in the [index](README.md).
