# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14c Experts
#
# *25 minutes. Before it: 06 and 14.*
#
# ## 1 The case
#
# A layer has eight MLPs, the *experts*, and a router sends every token to one of them. So the layer has eight times
# the parameters of one MLP for the work of one. The result of an expert is multiplied by the probability that the
# router gave it: only through this factor does the router get a gradient. Four ranks have two experts and 64 tokens
# each. In an *all-to-all* every rank has a part for every other rank, and sends it there.
#
# For messages of a fixed size an expert gets a fixed number of *slots*: 8 per rank, exactly as many
# as it needs if all experts are used equally (capacity factor 1.0). A token that finds its expert full is
# *dropped*. If every expert is equally likely for every token, what part of the tokens is dropped on
# average? And if there are twice as many slots, how many times as many bytes travel?

# %% [markdown]
# ## 2 Predict
#
# On average 8 of a rank's tokens choose an expert, with a standard deviation of the root of 64 x 1/8 x
# 7/8. A normal variable exceeds its mean by 0.4 standard deviations on average, counting 0 where it is
# below. For the second: does an empty slot travel?

# %%
from minidist.course.lesson import check, predict, reveal, small_job, solution

dropped_guess = predict("tokens dropped at capacity factor 1.0, in percent", example=1, unit="%")
bytes_guess = predict("bytes with twice the slots, over those before", example=1.0)

# %%
from contextlib import nullcontext
from math import comb
from unittest.mock import patch

import numpy as np

from minidist import (
    GPT,
    Adam,
    ExpertParallel,
    FlatParameters,
    GPTConfig,
    MixtureOfExperts,
    SimWorld,
    Tensor,
    all_to_all,
    expert_capacity,
    parallelize_module,
    report,
)
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.report import show
from minidist.report.frame import new_figure

# %% [markdown]
# ## 3 The idea and its picture
#
# Have many MLPs, and let each token use one or two of them: many times the parameters for the same work per token.
# **The experts are distributed over ranks, and an all-to-all moves tokens, not weights.** Then n ranks hold n times
# as many experts. It costs four all-to-alls per layer and micro-batch, and slots: some tokens find their expert full.
#
# One layer on four ranks, forward and backward. Router, attention and embeddings are on all ranks;
# each expert is whole and on one rank:

# %%
RANKS, EXPERTS, WIDTH, TOKENS = 4, 8, 16, 64
COLOURS = ("#4477AA", "#228833", "#CCBB44", "#AA3377")


def one_layer(comm, factor=1.0):
    """Forward and backward of a mixture; returns which expert and slot each token got."""
    # Each token uses one expert. scale: of the weights that are drawn, so large that the router chooses.
    layer = MixtureOfExperts(WIDTH, 4 * WIDTH, EXPERTS, 1, factor, np.float64, scale=0.3, seed=0)
    layer = parallelize_module(layer, comm, {"": ExpertParallel()}, axis="ep")
    x = np.random.default_rng(comm.rank).normal(size=(1, TOKENS, WIDTH))
    y = layer(Tensor(x, requires_grad=True))
    y.backward(np.ones_like(y.data))
    return layer.assignment


# %% [markdown]
# The slots of each expert, eight per rank. A colour is the rank that a token comes from, white is an empty slot, and a
# cross on the right is a token that was dropped. All slots travel, full or empty:

# %%
axes = (figure := new_figure(9, 2.9)).add_subplot()
for rank, assignment in enumerate(SimWorld(RANKS).run(one_layer)):
    ((experts, slots),) = assignment.choices
    counts = np.bincount(experts[slots >= 0], minlength=EXPERTS)
    left = 8 * rank
    axes.barh(range(EXPERTS), counts, left=left, height=0.7, color=COLOURS[rank])
    axes.barh(range(EXPERTS), 8, left=left, height=0.7, fill=False, edgecolor="#888888")
    crosses = experts[slots < 0]
    places = [33 + 7 * rank + (crosses[:i] == e).sum() * 0.7 for i, e in enumerate(crosses)]
    axes.plot(places, crosses, "x", color=COLOURS[rank], markersize=4)
axes.set_yticks(range(EXPERTS), [f"expert {e}, rank {e // 2}" for e in range(EXPERTS)])
axes.set_xticks([4, 12, 20, 28, 46], [*(f"slots of rank {r}" for r in range(RANKS)), "dropped"])
axes.invert_yaxis()
axes.set_title("tokens of four ranks in the slots of eight experts", fontsize=10, loc="left")
show(figure)

# %% [markdown]
# Tokens on their way to experts: each rank has one token for each expert, and the all-to-all puts
# the token for expert e on rank e. The tens are the rank that a token comes from.


# %%
def one_token_each(comm):
    all_to_all(comm, 10.0 * comm.rank + np.arange(4.0))


show(report.step(one_token_each, 4), "All-to-all of 4 tokens on each of 4 ranks.")

# %% [markdown]
# ## 4 The code
#
# First the slots. 64 tokens of one rank, the expert that each of them draws, and 8 slots per expert; x is
# a token that finds its expert full:

# %%
rng = np.random.default_rng(0)
for expert, tokens in enumerate(np.bincount(rng.integers(EXPERTS, size=TOKENS))):
    print(f"expert {expert} {('o' * 8)[:tokens]:8}|{'x' * (tokens - 8)}")

# %% [markdown]
# How many tokens choose an expert is binomial, which gives the share that is dropped on average. By the
# normal variable of part 2 it is 0.4 x 2.65 / 8 = 0.13 for 8 slots:

# %%
dropped_share = {}
for slots in (8, 10, 16):
    ways = {n: comb(TOKENS, n) * (EXPERTS - 1) ** (TOKENS - n) for n in range(slots, TOKENS + 1)}
    too_many = sum((n - slots) * count for n, count in ways.items()) / EXPERTS**TOKENS
    dropped_share[slots] = EXPERTS * too_many / TOKENS
    print(f"{slots:2} slots: a share of {dropped_share[slots]:.3f} is dropped on average")
dropped_guess.judge(100 * dropped_share[8], within=0.2)

# %% [markdown]
# Then the messages. The layer computes on *slots*, (experts, capacity, width), whatever fills them.
# On one device nothing happens before and after the experts' MLPs. On n ranks an all-to-all comes
# before and after: each rank sends the slots of expert e to the rank that has e, and gets them back
# computed ([experts.py](../minidist/core/nn/experts.py),
# [expert_parallel.py](../minidist/core/parallel/expert_parallel.py)).


# %%
def toy_dispatch(comm):
    """One expert per rank; each rank has two slots for it, with a number: 10 from + to."""
    slots = np.array([10 * comm.rank + to for to in range(comm.size) for _ in range(2)])
    arrived = all_to_all(comm, slots)  # pieces of equal size
    back = all_to_all(comm, arrived + 100)  # the expert adds 100
    return arrived.tolist(), back.tolist()


for rank, (arrived, back) in enumerate(SimWorld(3).run(toy_dispatch)):
    print(f"expert {rank} computes {arrived}; rank {rank} gets back {back}")

# %% [markdown]
# All messages have the same size, whatever the router chooses, so no rank has to ask how much will come. And no
# weight travels: the gradient of an expert is complete where it lives, because it has seen the tokens of all ranks.
# (A program that sums it over the ranks all the same adds gradients of different experts. The shapes fit.)

# %% [markdown]
# ## 5 Check
#
# The dropped tokens of the real layer, a few more because its router, just initialised, prefers some
# experts, and bytes next to a formula: four all-to-alls of (n-1)/n x tokens x k x factor x width numbers,
# where each token uses k experts, here one.

# %%
dropped, sent = {}, {}
for factor in (1.0, 1.25, 2.0, 8.0):
    world = SimWorld(RANKS)
    assignments = world.run(one_layer, factor)
    dropped[factor] = sum(each.dropped for each in assignments) / (RANKS * TOKENS)
    sent[factor] = world.traces[0].bytes_by_purpose()["dispatch"]
    formula = 4 * (RANKS - 1) / RANKS * TOKENS * factor * WIDTH * 8
    slots = expert_capacity(TOKENS, EXPERTS, 1, factor)
    print(
        f"factor {factor:4}: {slots:2} slots, a share of {dropped[factor]:.3f} dropped, "
        f"{sent[factor]:,} B sent; formula {formula:,.0f} B"
    )
    assert sent[factor] == formula
bytes_guess.judge(sent[2.0] / sent[1.0])

# %% [markdown]
# Every slot travels, also an empty one, so twice the slots are twice the bytes. A dropped token is not
# lost: the block adds nothing to it, and the residual stream carries it on.
#
# Does training drop fewer? The router sends every token to the expert that is best so far, so that one learns most. An
# *auxiliary loss* is least when all experts are used equally, and is added to the loss with a weight. A small GPT, whose
# texts have a few frequent words and many rare ones. The share of dropped tokens in 100 steps, 20 at a time:

# %%
words = 1 / np.arange(1, 33)  # how frequent each of 32 words is, before the next line
words /= words.sum()
for weight in (0.0, 0.01, 0.1):
    shape = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    mixture = {"n_experts": EXPERTS, "capacity_factor": 1.0, "aux_loss_weight": weight}
    model = GPT(GPTConfig(**shape, **mixture), seed=0)
    (layer,) = (module for module in model.modules() if isinstance(module, MixtureOfExperts))
    flat = FlatParameters(model.parameters())
    optimizer, draw, shares = Adam(flat, lr=0.01), np.random.default_rng(1), []
    for _ in range(100):
        text = draw.choice(32, size=(4, 33), p=words)
        flat.zero_grad()
        model(text[:, :-1], text[:, 1:], 128.0).backward()
        optimizer.step()
        shares.append(layer.assignment.dropped / 128)
    print(f"weight {weight:4}: dropped", np.reshape(shares, (5, 20)).mean(axis=1).round(2))

# %% [markdown]
# Without it most tokens go to a few experts. They do so from the beginning: equal words choose alike, and the most
# frequent word is a quarter of all tokens, where the slots of an expert are an eighth. With the auxiliary loss the
# experts share the work, and the router has less choice, so the weight is small.

# %% [markdown]
# Is it the same training? Slots belong to a *group*, what one rank sees. So
# one device routes rank by rank, and then equals all ranks together, with dropped tokens too:

# %%
JOB = small_job(experts=4, dp=2, ep=2, precision="fp64", steps=3)
right = SimWorld(2).run(compare_rank, JOB)[0]
print(f"max |w_parallel - w_single| = {right.max_difference['weights']:.1e}")
assert right.equal

# %% [markdown]
# ## 6 Break it
#
# An expert's rank has its results by expert, then by the rank that the tokens came from. On the way back
# that rank must come first. Forget to swap the two, and tokens get other tokens' results; shapes fit. In small, with two
# ranks that have two experts each, and one slot per expert. Tens are the rank, ones the expert:


# %%
def there_and_back(comm, swapped):
    arrived = all_to_all(comm, 10 * comm.rank + np.arange(4))
    arrived = arrived.reshape(2, 2)  # by source, then expert
    done = arrived.T  # an expert computes the slots of all ranks together
    return all_to_all(comm, (done.T if swapped else done).ravel())


for swapped in (True, False):
    print(f"swapped: {swapped!s:5} {SimWorld(2).run(there_and_back, swapped)}")

# %% [markdown]
# Plant it into the library. Which loss is lower after 40 steps, and by how much?

# %%
from minidist.core.parallel.expert_parallel import Exchange

original = Exchange.exchange


def not_swapped(self, comm, slots, why):
    if self.to_experts == (why == "tensor_forward"):  # backward goes the other way
        return original(self, comm, slots, why)
    return all_to_all(comm, slots.reshape(-1)).reshape(JOB.experts, -1, slots.shape[-1])


long = JOB.model_copy(update={"steps": 40, "lr": 0.01})
for name, during in (
    ("swapped", nullcontext()),
    ("not swapped", patch.object(Exchange, "exchange", not_swapped)),
):
    with during:
        losses = SimWorld(2).run(train, long)[0].losses
        verdict = SimWorld(2).run(compare_rank, JOB)[0]
    print(f"{name:11}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after 40 steps", end="; ")
    print(f"max |w_parallel - w_single| = {verdict.max_difference['weights']:.0e} after 3")
assert not verdict.equal

# %% [markdown]
# The loss is higher by less than 0.01, which would pass for noise. Only the comparison with one device finds the bug.

# %% [markdown]
# ## 7 Exercise: dispatch and combine
#
# `slots` is (experts, capacity, width) of this rank's tokens; rank r has the experts r x E/n to (r+1) x E/n - 1
# of E, and `run_expert(e, rows)` computes one of *yours*; e is its number among all E. Return the slots,
# computed. `all_to_all` sends the j-th part of a flat array to rank j and returns what came, by source rank: as
# (ranks, own experts, capacity, width), here.
#
# Judged: the slots, and the bytes of two all-to-alls.


# %%
def dispatch_tokens(comm, slots, run_expert):
    experts, capacity, width = slots.shape
    here = experts // comm.size
    arrived = all_to_all(comm, slots.reshape(-1)).reshape(comm.size, here, capacity, width)
    done = [run_expert(comm.rank * here + e, arrived[:, e].reshape(-1, width)) for e in range(here)]
    return np.stack(done).reshape(slots.shape)


check("14c.dispatch", dispatch_tokens)

# %%
reveal("14c.dispatch")
check("14c.dispatch", solution("14c.dispatch"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Tokens move, weights stay**: four all-to-alls per layer and micro-batch, (n-1)/n x tokens x k
#   x factor x width numbers each.
# - Every slot is paid in bytes and in computing, full or empty, and with too few slots tokens are dropped.
# - A rank keeps E/n experts: two of the eight here, where one device keeps eight, for the work of one per token.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/5_context_and_experts/expert_parallel_gpt.py
#     mpiexec -n 2 minidist compare --experts 4 --dp 2 --ep 2 --precision fp64 --steps 3
#     mpiexec -n 2 minidist compare --model llama --experts 4 --top-k 2 --dp 2 --ep 2 --precision fp64 --steps 3

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `n_experts`, `--experts` | Megatron-LM `--num-experts`; DeepSpeed-MoE `num_experts`; Mixtral `num_local_experts` |
# | `ExpertParallel`, `--ep` | Megatron-LM `--expert-model-parallel-size`; DeepSpeed `ep_size` |
# | `expert_top_k` | Megatron-LM `--moe-router-topk`; Mixtral `num_experts_per_tok` |
# | `capacity_factor` | Megatron-LM `--moe-expert-capacity-factor`; DeepSpeed `capacity_factor`; Switch Transformers the same |
# | `RaggedExpertParallel`: no slots, and no token is dropped | MegaBlocks, "dropless" |
# | `aux_loss_weight` | Megatron-LM `--moe-aux-loss-coeff`; Switch alpha = 0.01 |
# | `ExpertTensorParallel` | Megatron-LM `--expert-tensor-parallel-size`; DeepSpeed-MoE expert slicing |
#
# All cuts so far are inside layers, and ranks wait for each other in each layer. The next one is between layers.
#
# Next: [16 Naive pipeline and GPipe](16_naive_pipeline_and_gpipe.ipynb). All lessons are in the
# [index](README.md).
