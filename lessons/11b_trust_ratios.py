# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11b Optimizers: Adam and trust ratios
#
# *40 minutes. Before it: 06 and 11.*
#
# ## 1 The case
#
# Along one weight a loss is a hundred times as steep as along another: (x^2 + 100 y^2) / 2. From
# (1, 1) SGD's first step moves y a hundred times as far as x. How many times as far does Adam's first
# step move it?
#
# The same between layers. A GPT with two layers makes its first step by SGD with one learning rate
# for all matrices. Each matrix moves by a part of its own norm: some by more, some by less. With
# thousands of samples in a batch one wants a large learning rate, and the matrix that moves most
# decides how large it may be. How many times further does it move than the one that moves least, each
# as a part of its norm?

# %% [markdown]
# ## 2 Predict
#
# Adam divides by the root of an average of squares. The second is worth a guess; half as much or
# half as much again is good enough.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, small_job, solution

adam_guess = predict("first step of Adam along y, over that along x", example=100)
spread_guess = predict("largest move of a matrix over the smallest, SGD", example=2.0)

# %%
from unittest.mock import patch

import numpy as np

from minidist import (
    GPT,
    MLP,
    SGD,
    Adam,
    FlatParameters,
    GPTConfig,
    LinkModel,
    Parameter,
    SimWorld,
    UsageError,
    fully_shard,
    sharded_parameters,
)
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.optim import LAMB, RMSProp
from minidist.parallel import LayerSums

# %% [markdown]
# ## 3 The idea and its picture
#
# With thousands of samples in a batch, **give each layer a step as long as its weights**: LARS and
# LAMB. What it saves: one learning rate fits all layers, so fewer and larger steps train as well.
# What it costs: the step of an element depends on two norms of its whole layer, so with ZeRO or
# tensor parallelism every step sends one message more.
#
# A step of ZeRO 1 on four ranks with LAMB: gradients, then the small messages of the norms, then
# parameters.


# %%
def lamb_job(**settings):
    """The settings of a job with LAMB on a GPT of two layers."""
    return small_job(layers=2, width=32, micro_batch=2, optimizer="lamb", lr=0.02, **settings)


world = SimWorld(4, links=LinkModel(alpha=2e-5, beta=1e-8, flops=3e9, memory_bandwidth=6e9))
world.run(train, lamb_job(dp=4, zero=1, steps=1))
picture(
    "lanes",
    world,
    "minidist train --optimizer lamb --dp 4 --zero 1 --steps 1",
    title="ZeRO 1 with LAMB",
)

# %% [markdown]
# ## 4 The code
#
# ### From SGD to Adam
#
# Before ratios of whole layers, the steps of single elements. A gradient says in which direction the
# loss falls, and little about how far to go: along one parameter the loss may be a hundred times as
# steep as along another. Each optimizer keeps arrays of the parameters' shape, its state, and adds
# one idea to the one before:
#
# - **SGD** has no state: p -= lr g. The steepest parameter decides the rate of all.
# - **Momentum** keeps a sum of past gradients. What points the same way adds up, and what turns
#   around at every step cancels.
# - **RMSProp** keeps an average of the squares and divides by its root, so each parameter has a rate
#   of its own: about lr per step, whether its gradients are large or small.
# - **Adam** keeps both averages. They begin at 0, so after t steps they are 1 - beta^t of what they
#   should be; it divides by that, and the first step is as long as any other.


# %%
def sgd(p, g, state, t, lr):
    return p - lr * g


def momentum(p, g, state, t, lr, keep=0.9):
    state["sum"] = keep * state.get("sum", 0.0) + g
    return p - lr * state["sum"]


def rmsprop(p, g, state, t, lr, keep=0.99, eps=1e-8):
    state["square"] = keep * state.get("square", 0.0) + (1 - keep) * g**2
    return p - lr * g / (np.sqrt(state["square"]) + eps)


def adam(p, g, state, t, lr, keep=(0.9, 0.999), eps=1e-8):
    state["mean"] = keep[0] * state.get("mean", 0.0) + (1 - keep[0]) * g
    state["square"] = keep[1] * state.get("square", 0.0) + (1 - keep[1]) * g**2
    mean, square = state["mean"] / (1 - keep[0] ** t), state["square"] / (1 - keep[1] ** t)
    return p - lr * mean / (np.sqrt(square) + eps)


# %% [markdown]
# A valley: the loss is (x^2 + 100 y^2) / 2, and its gradient (x, 100 y). Each optimizer has the rate
# that serves it well. Above 0.02 SGD would jump over the valley further at every step, so with it x
# creeps.

# %%
steep = np.array([1.0, 100.0])
print(
    "optimizer   lr      step 1          step 20         step 60         bytes of state per weight"
)
for toy, lr in ((sgd, 0.019), (momentum, 0.01), (rmsprop, 0.02), (adam, 0.1)):
    p, state, path = np.array([1.0, 1.0]), {}, []
    for t in range(1, 61):
        p = toy(p, steep * p, state, t, lr)
        path.append(p)
    first = np.abs(path[0] - 1)  # how far the first step went along x and along y
    shown = "  ".join(f"{path[t][0]:6.3f} {path[t][1]:6.3f}" for t in (0, 19, 59))
    print(f"{toy.__name__:10} {lr:5}  {shown}   {4 * len(state)} in float32")
adam_guess.judge(first[1] / first[0])

# %% [markdown]
# In the first step SGD moves y a hundred times as far as x; RMSProp and Adam move both equally far.
# The toys are the library's optimizers, and their arithmetic is element by element. So a rank that
# has **a piece of the parameters, of their gradients and of their state steps the piece as if it had
# the whole**: that is all that ZeRO 1 needs. Adam's state is twice the parameters, so it is the
# first thing to shard.

# %%
rng = np.random.default_rng(0)
start, gradients = rng.normal(size=12), rng.normal(size=(5, 12))
kinds = {
    sgd: (SGD, {}),
    momentum: (SGD, {"momentum": 0.9}),
    rmsprop: (RMSProp, {}),
    adam: (Adam, {}),
}
for toy, (kind, settings) in kinds.items():
    whole, state = start, {}
    for t, g in enumerate(gradients, 1):
        whole = toy(whole, g, state, t, 0.01)
    pieces = []
    for piece in (slice(0, 5), slice(5, 12)):  # two ranks' shards
        parameter = Parameter(start[piece].copy())
        optimizer = kind([parameter], lr=0.01, **settings)
        for g in gradients:
            parameter.grad = g[piece]
            optimizer.step()
        pieces.append(parameter.data)
    off = np.abs(np.concatenate(pieces) - whole).max()
    print(f"{toy.__name__:10} two shards by the library, the whole by the toy: {off:.0e}")
    assert off < 1e-14

# %% [markdown]
# ### Ratios of layers
#
# LAMB makes the step of a layer as long as a part `lr` of the layer's weights, whatever the length
# of Adam's update u. A layer lies on several ranks, so its lengths are not known on one of them: a
# step has two passes, the squares of every layer, which are summed over the ranks by one message,
# and then the update with `lr` times the ratio. On one device:


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
# First the steps: |update| / |weights| of each layer, after one step from the same gradient.


# %%
def moved(make):
    """The share of its norm by which each matrix moves in the first step."""
    model = GPT(GPTConfig(vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=2), seed=0)
    tokens = np.random.default_rng(0).integers(0, 16, (4, 9))
    flat = FlatParameters(model.parameters())
    before = [p.data.copy() for p in flat.parameters]
    model(tokens[:, :-1], tokens[:, 1:], 32.0).backward()
    make(flat).step()
    pairs = [
        (p.data, old) for p, old in zip(flat.parameters, before, strict=True) if p.data.ndim == 2
    ]
    return [float(np.linalg.norm(new - old) / np.linalg.norm(old)) for new, old in pairs]


spread = {}
for name, make in {
    "SGD": lambda flat: SGD(flat, lr=0.1),
    "Adam": lambda flat: Adam(flat, lr=0.01),
    "LAMB": lambda flat: LAMB(flat, lr=0.01),
}.items():
    shares = moved(make)
    spread[name] = max(shares) / min(shares)
    print(
        f"{name:5} a matrix moves by {min(shares):.4f} to {max(shares):.4f} of its norm: "
        f"{spread[name]:.1f} times"
    )
spread_guess.judge(spread["SGD"], within=0.5)
assert spread["LAMB"] < 1.001 < spread["Adam"] < spread["SGD"]

# %% [markdown]
# Now the bytes. With ZeRO 1 on four ranks no rank has a whole layer, so the squares of weights and of
# updates are summed over the ranks: 2 numbers of 8 B per layer would do. But a float64 sum depends on
# where a layer is cut, so the ratio would, and with it every weight. minidist sums squares exactly,
# as whole numbers of 18 digits (`optim/exact_sums.py`): 288 B per layer instead of 16, and the
# weights are those of one device, bit for bit.

# %%
world = SimWorld(4)
results = world.run(train, lamb_job(dp=4, zero=1, steps=1))
layers = len(results[0].sizes[0].parameters)
sent = sum(trace.bytes_by_purpose()["trust_ratio"] for trace in world.traces) / 4
print(
    f"{sent / layers:.0f} B per layer leave a rank; 2 (n-1)/n of 288 B is {2 * 3 / 4 * 288:.0f} B"
)
assert sent / layers == 2 * 3 / 4 * 288


def against_one_device(**layout):
    """The verdict on three steps of four ranks: every gradient, weight and optimizer state of
    every step.
    """
    return SimWorld(4).run(compare_rank, lamb_job(steps=3, **layout))[0]


for zero in (0, 1, 2, 3):
    verdict = against_one_device(dp=4, zero=zero)
    print(f"ZeRO {zero}: max |w_parallel - w_single| = {verdict.max_difference['weights']:g}")
    assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# Each rank takes the ratio of what it has. The losses look as good as before, so nothing tells you;
# the weights do:

# %%
with patch.object(LayerSums, "__call__", lambda self, sums: sums):
    wrong = against_one_device(dp=4, zero=1)
print(
    f"losses {', '.join(f'{loss:.3f}' for loss in wrong.losses)}; max |w_parallel - w_single| = "
    f"{wrong.max_difference['weights']:.1e}"
)
assert not wrong.equal

# %% [markdown]
# In a loop of your own minidist does not let that happen in silence:


# %%
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
# are small and whole, so float64 sums will do.


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
# - SGD keeps nothing, momentum and RMSProp 4 B per weight, Adam 8 B: the direction averaged, and **each
#   weight its own rate**. All of it element by element, so shards step without a message.
# - LAMB: **p -= lr |p| / |u| u** with Adam's u; LARS: **lr eta |p| / (|g| + decay |p|)** with SGD's
#   momentum. Norms are of whole layers, so shards must talk: one all-reduce of two numbers per
#   layer, whatever the layers' sizes.
# - A sum that is the same for every cut has to be exact: then equal weights stay equal, bit for
#   bit.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --optimizer lamb --lr 0.02 --dp 4 --zero 3 --steps 20
#     mpiexec -n 4 minidist compare --optimizer lars --lr 2 --momentum 0.9 --dp 4 --zero 1 --steps 3 --reduction ordered
#     mpiexec -n 4 python mpi_examples/3_sharding/optimizers.py
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
# Next: [11c Muon: whole matrices](11c_muon.ipynb). All of them are in the [index](README.md).
