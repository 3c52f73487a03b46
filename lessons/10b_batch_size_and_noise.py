# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10b Batch size and noise
#
# *30 minutes. Before it: 06 and 10.*
#
# ## 1 The case
#
# A training step may have 4 samples or 4,000. The gradient of few samples is mostly noise; that of
# many is nearly the true one, and then still more samples change nothing. Somewhere between lies the
# batch that a gradient is worth.
#
# A data-parallel job can tell it from two numbers. Four ranks have 4 samples each. The squared length
# of a rank's gradient is 3.0 on average; that of their mean, a gradient of 16 samples, is 1.5. Noise
# adds to the squared length, and that of B samples adds 1/B of what the noise of one sample adds.
#
# At which batch N do the noise and the true gradient have the same length? And by the theory of
# McCandlish et al. 2018 a step of B samples, with the best rate for B, gains a part 1 / (1 + N/B) of
# what a step along the true gradient would gain. Of a small GPT with N = 10: how many times as many
# samples does the same progress take with a batch of 256 in place of 4?

# %%
import numpy as np

from minidist import SimWorld
from minidist.course.lesson import check, expect, picture, predict, reveal, small_job, solution
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.job.train.update import NonFiniteError
from minidist.techniques.adaptive_batch.noise_scale import estimate, estimate_of_shares

# %% [markdown]
# ## 2 Predict
#
# The first is two equations with two unknowns. The second is what the formula predicts, not the
# time of a run; a tenth off is good enough.

# %%
batch_guess = predict("batch at which noise and gradient are equally long", example=16)
samples_guess = predict("by the formula, times as many samples with a batch of 256", example=64)

# %% [markdown]
# ## 3 The idea and its picture
#
# **A batch is as large as its gradient is noisy.** What it saves: samples, where the batch is larger
# than the noise asks for, and steps, where it is smaller. What it costs to know: one number per step.
#
# The same GPT with 4 samples per step and a learning rate of 0.2, and with 64 samples and a rate
# three times as large. Sixteen times the samples buy a smoother curve and little else:


# %%
def losses(batch, lr):
    job = small_job(optimizer="sgd", global_batch=batch, lr=lr, steps=60)
    return SimWorld(1).run(train, job)[0].losses


picture(
    "loss",
    [],
    "part 3 of lesson 10b",
    losses=losses(64, 0.6),
    reference_losses=losses(4, 0.2),
    title="16 times the samples, 3 times the rate",
    names=("4 samples", "64 samples"),
)

# %% [markdown]
# ## 4 The code
#
# The gradient g of B samples is the true one, G, plus noise. On average |g|^2 = |G|^2 + tr(Sigma)/B,
# where tr(Sigma) is the mean squared distance of one sample's gradient from G (the trace of their
# covariance matrix Sigma). Two batch sizes give both numbers, and data parallelism has two at hand: a
# rank's share and the whole batch. The *noise scale* N = tr(Sigma)/|G|^2 is the batch at which noise
# and gradient have the same length.

# %%
squares = {4: 3.0, 16: 1.5}  # mean |g|^2 of 4 samples, and of 16
G_squared, trace = np.linalg.solve([[1, 1 / batch] for batch in squares], list(squares.values()))
worth = trace / G_squared
print(f"|G|^2 = {G_squared:g}, tr(Sigma) = {trace:g}")

# %% [markdown]
# ## 5 Check
#
# **How large a batch, and which rate?** McCandlish et al. 2018 answer both with the noise scale: the
# gain of a step with B samples is 1 / (1 + N/B) of the true gradient's, at the best rate, and that
# rate is lr_max / (1 + N/B). So there are two regimes:
#
# - **B below N**: the best rate and the gain are nearly proportional to B. Twice the batch in half
#   of the steps: `--lr-scaling linear` (for Adam, which divides by the size of the noise, `sqrt`).
# - **B above N**: rate and gain hardly grow. More samples per step are mostly wasted, and a linear
#   rule overshoots.
#
# A job measures N while it trains. The other columns are the formula's prediction for that N:

# %%
batch_guess.judge(worth)
job = small_job(optimizer="sgd", dp=2, global_batch=16, noise_scale=True, lr=0.2, steps=40)
N = SimWorld(2).run(train, job)[0].measured["noise_scale"]["samples"]
print(f"noise scale, measured: N = {N:.1f} samples")
gains = {}
print("batch  gain of a step  best rate  linear rule  samples for the same progress")
for batch in (4, 8, 16, 32, 64, 256):
    gains[batch] = 1 / (1 + N / batch)
    rate = gains[batch] / gains[4]
    print(f"{batch:5} {gains[batch]:15.0%} {rate:10.1f} {batch / 4:12.0f} {batch / 4 / rate:30.1f}")
samples_guess.judge(256 / gains[256] * gains[4] / 4, within=0.1)
assert N > 0
assert gains[256] / gains[4] < 256 / 4

# %% [markdown]
# The formula is about one step, from weights at which N is 10. Over a run N changes, and the best rate
# must be found. In runs of this job to a loss of 1.8 and of 1.7, each batch with the best of three or
# four rates, a batch of 64 takes 5 to 7 times the samples of a batch of 4, and one of 256 takes 24 to 28
# times: the largest batch wastes more than the formula says.
#
# The largest batch gains a little more per step, and most of its samples change nothing. A batch of N
# samples costs twice the samples of the smallest batch and twice the steps of the largest. That is where
# `--adaptive-batch` goes: the batch grows with the measured N by more micro-batches
# ([batch_plan.py](../minidist/data/batch_plan.py)). With `--lr-scaling linear:2` the learning rate follows over two
# steps (Goyal et al. 2017: as many times larger as the batch, with a gradual warm-up). One device
# that is told these batches trains the same weights:

# %%
growing = {"adaptive_batch": 16, "lr_scaling": "linear:2", "lr": 0.5, "steps": 6}
job = small_job(optimizer="sgd", dp=2, global_batch=2, **growing)
for shares, steps in SimWorld(2).run(train, job)[0].runs:
    print(
        f"{shares.samples} samples, {shares.accumulation} micro-batches per rank, for {steps} steps"
    )
verdict = SimWorld(2).run(compare_rank, job)[0]
print(verdict.sentence())
assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# The linear rule above the noise scale: sixteen times the samples, so sixteen times the rate.

# %%
with expect(NonFiniteError):
    losses(64, 16 * 0.2)

# %% [markdown]
# A quieter bug: ranks with unequal shares (lesson 10c), and the formula for equal ones. Rank 0 has three
# rows and rank 1 has one. Three of the four gradients are 1 and one is 5, at any of the four places. Their
# variance is 4, and a right formula gives it as the mean of its estimates:

# %%
right, wrong = [], []
for place in range(4):
    batch = [5.0 if i == place else 1.0 for i in range(4)]
    squares = (sum(batch[:3]) / 4) ** 2 + (batch[3] / 4) ** 2
    right.append(estimate_of_shares([3, 1], squares, 2.0**2).noise)
    wrong.append(estimate(2, squares * 2, 4, 2.0**2).noise)
print(
    f"noise {sum(right) / 4:.3f} with the rows of each rank, {sum(wrong) / 4:.3f} as if they "
    "were equal"
)
assert abs(sum(right) / 4 - 4) < 1e-12
assert abs(sum(wrong) / 4 - 4) > 1

# %% [markdown]
# ## 7 Exercise: the gradient and its noise, from one all-reduce
#
# Rank r has b_r = `shares[r]` rows; `rows` are the gradients of yours, one per line. Return an array:
# the mean gradient of the whole batch of B rows, then |G|^2, then tr(Sigma).
#
# Part 4 needs |g|^2 at two batch sizes. One is that of the whole batch. The other comes from the ranks:
# rank r's part of the gradient is the sum of its rows, divided by B. Add up the squares of all parts,
# and divide by s = (the sum of b_r^2) / B^2: that is an estimate of |g|^2 for a batch of s B rows. With
# two ranks of 2 rows each s is 1/2, and s B is 2, the rows of one rank. One all-reduce can carry the
# gradient and the square together. Both results are right on average only: from one batch the estimate
# of |G|^2 can be negative. A job therefore averages each over many steps before it divides.


# %%
def gradient_and_noise(comm, shares, rows):
    return np.append(rows.mean(axis=0), [0.0, 0.0])


check("10b.gradient_and_noise", gradient_and_noise)

# %%
reveal("10b.gradient_and_noise")
check("10b.gradient_and_noise", solution("10b.gradient_and_noise"))

# %% [markdown]
# ## 8 Takeaway
#
# - mean |g|^2 = |G|^2 + tr(Sigma)/B: two batch sizes give both, and **tr(Sigma)/|G|^2** is the batch that
#   the gradient is worth. It grows as the loss falls.
# - A step with B samples gains **1 / (1 + N/B)** of the most that a step can gain. Below N take twice
#   the rate for twice the batch; above N neither the rate nor the batch is worth it.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --dp 4 --micro-batch 2 --adaptive-batch 64 --lr-scaling sqrt:5 --steps 20
#     mpiexec -n 4 python mpi_examples/2_data_parallel/lr_scaling.py
#     mpiexec -n 4 python mpi_examples/7_more/adaptive_batch.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | noise scale | McCandlish et al. 2018, *simple* noise scale; GPT-NeoX `gradient_noise_scale` |
# | `--adaptive-batch` | "batch size warm-up" of GPT-3 and Megatron-LM (`--rampup-batch-size`), there by a fixed plan |
# | `--lr-scaling linear:STEPS` | linear scaling rule with gradual warm-up, Goyal et al. 2017 |
#
# Next: [10c Uneven ranks](10c_uneven_ranks.ipynb). All of them are in the [index](README.md).
