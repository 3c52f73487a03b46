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
# *25 minutes. Before it: 06 and 10.*
#
# ## 1 The case
#
# Accumulation and more ranks make any batch possible. How large should it be? The gradient of a few
# samples is mostly noise. That of many samples is nearly the true gradient, the mean over all samples
# that there could be, and still more of them change little.
#
# A job can tell from two numbers. Four ranks have 4 samples each. The squared length of a rank's
# gradient is 3.0 on average; that of the mean of the ranks, a gradient of 16 samples, is 1.5. Noise adds
# to the squared length: that of B samples adds 1/B of what the noise of one sample adds. At which
# batch N do the noise and the true gradient have the same length?
#
# And what does a batch above N cost? By the theory of McCandlish et al. 2018 a step of B samples makes a
# part 1 / (1 + N/B) of the progress of a step along the true gradient. With N = 10, how many times as
# many samples does the same progress take with a batch of 256 as with one of 4?

# %% [markdown]
# ## 2 Predict
#
# The first is two equations with two unknowns. For the second compute the samples of one unit of progress,
# B (1 + N/B), for both batches; a tenth off is good enough.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, small_job, solution

batch_guess = predict("batch at which noise and gradient are equally long", example=16)
samples_guess = predict("by the formula, times as many samples with a batch of 256", example=64)

# %%
from functools import cache

import numpy as np

from minidist import SimWorld
from minidist.job.train.trainer import train
from minidist.job.train.update import NonFiniteError
from minidist.report import show
from minidist.report.frame import finish, line, new_figure, plain_numbers, tidy
from minidist.report.palette import PALETTE

# %% [markdown]
# ## 3 The idea and its picture
#
# **A batch is as large as its gradient is noisy.** Measuring the noise saves samples where the batch is larger than
# the noise asks for, and steps where it is smaller. It costs one number per step.
#
# The same small GPT trains with 4 samples per step and a learning rate of 0.2, and with 64 samples and three times
# the rate (`small_job` returns the settings of a training). Every point is the mean loss of 64 samples, of sixteen
# steps or of one, and of three trainings, which begin with other weights and read other samples. From the same samples
# the batch of 4 learns much more:


# %%
@cache
def losses(batch, lr, steps=60, seed=0):
    job = small_job(optimizer="sgd", global_batch=batch, lr=lr, steps=steps, seed=seed)
    return SimWorld(1).run(train, job)[0].losses


SEEDS = (0, 1, 2)
small = np.mean([losses(4, 0.2, 480, seed) for seed in SEEDS], axis=0)
picture(
    "loss",
    [],
    "part 3 of lesson 10b",
    losses=np.mean([losses(64, 0.6, 30, seed) for seed in SEEDS], axis=0).tolist(),
    reference_losses=small.reshape(30, 16).mean(axis=1).tolist(),
    title="mean loss of every 64 samples, three trainings each",
    counted="samples trained on, in units of 64",
    names=("4 samples per step", "64 samples per step"),
)

# %% [markdown]
# ## 4 The code
#
# The gradient g of B samples is the true one, G, plus noise. On average |g|^2 = |G|^2 + tr(Sigma)/B,
# where tr(Sigma) is the mean squared distance of one sample's gradient from G (the trace of their
# covariance matrix Sigma). Two batch sizes give both numbers, and data parallelism has two at hand: the
# rows of one rank and those of all ranks. The *noise scale* N = tr(Sigma)/|G|^2 is the batch at which
# noise and gradient have the same length. (McCandlish et al. also weigh noise and gradient by the curvature of the
# loss, the Hessian; this simple noise scale leaves it out.) For the numbers of the case:

# %%
squares = {4: 3.0, 16: 1.5}  # mean |g|^2 of 4 samples, and of 16
G_squared, trace = np.linalg.solve([[1, 1 / batch] for batch in squares], list(squares.values()))
print(f"|G|^2 = {G_squared:g}, tr(Sigma) = {trace:g}")
batch_guess.judge(trace / G_squared)

# %% [markdown]
# ## 5 Check
#
# A job measures N while it trains (`--noise-scale`):

# %%
job = small_job(optimizer="sgd", dp=2, global_batch=16, noise_scale=True, lr=0.2, steps=40)
N = SimWorld(2).run(train, job)[0].measured["noise_scale"]["samples"]
print(f"noise scale, measured: N = {N:.1f} samples")

# %% [markdown]
# With this N the theory gives the progress of a step, the best rate (the same part, 1 / (1 + N/B), of
# the best rate along the true gradient), and the samples for the same progress, both over those of a
# batch of 4:

# %%
rate, samples = {}, {}
print("batch  progress of a step  best rate  samples for the same progress")
for batch in (4, 8, 16, 32, 64, 256):
    rate[batch] = (1 + N / 4) / (1 + N / batch)
    samples[batch] = (batch + N) / (4 + N)
    progress = f"{1 / (1 + N / batch):19.0%}"
    print(f"{batch:5} {progress} {rate[batch]:10.1f} {samples[batch]:30.1f}")
samples_guess.judge(samples[256], within=0.1)

# %% [markdown]
# There are two regimes. With **B far below N** the progress and the best rate grow almost in proportion to
# the batch: twice the batch, twice the rate, half of the steps. With **B above N** both hardly grow, and
# more samples per step are mostly wasted.
#
# Does a training agree? Four batches train until the mean loss of the last 256 samples is below 1.8, three times each,
# with the rate of their row (0.2 for a batch of 4), and once with half of it:


# %%
def steps_to_the_loss(batch, lr, seed):
    """The steps after which the mean loss of the last 256 samples is below 1.8."""
    most, mean_of = {4: 480, 16: 160}.get(batch, 110), max(1, 256 // batch)
    curve = np.convolve(losses(batch, lr, most, seed), np.ones(mean_of) / mean_of, "valid")
    assert curve.min() < 1.8
    return int(np.argmax(curve < 1.8)) + mean_of


taken = {}
print(
    "batch  rate  steps of three trainings  samples  times those of 4  formula  with half the rate"
)
for batch in (4, 16, 64, 256):
    best = 0.2 * rate[batch]
    taken[batch] = np.array([steps_to_the_loss(batch, best, seed) for seed in SEEDS])
    mean, times = batch * taken[batch].mean(), batch * taken[batch].mean() / (4 * taken[4].mean())
    print(f"{batch:5} {best:5.2f} {taken[batch]!s:>25} {mean:8,.0f} {times:17.1f}", end="")
    print(f" {samples[batch]:8.1f} {steps_to_the_loss(batch, best / 2, 0):13} steps")
    assert 0.5 < times / samples[batch] < 2

# %% [markdown]
# The same in a picture. The lines are the formulas, drawn through the mean of the batch of 4. To the left of N the
# steps fall as the batch grows; to the right the samples rise with it:

# %%
figure = new_figure(9, 3.4)
sizes = np.geomspace(4, 256)
formulas = {"steps": (1 + N / sizes) / (1 + N / 4), "samples": (sizes + N) / (4 + N)}
for axes, (what, formula) in zip(figure.subplots(1, 2), formulas.items(), strict=True):
    each = {batch: steps * (batch if what == "samples" else 1) for batch, steps in taken.items()}
    axes.plot(sizes, formula * each[4].mean(), color=PALETTE["other"], linewidth=3)
    for batch, three in each.items():
        axes.plot([batch] * 3, three, "o", color=PALETTE["F"], markersize=4)
    axes.axvline(N, color=PALETTE["blocked"], linestyle=":")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="batch",
        xticks=list(taken),
        title=f"{what} to a loss of 1.8",
    )
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    tidy(axes)
handles = [line(PALETTE["other"], "the formula"), line(PALETTE["blocked"], "N", linestyle=":")]
handles.append(line(PALETTE["F"], "a training", marker="o", linestyle=""))
show(finish(figure, handles, "part 5 of lesson 10b"))

# %% [markdown]
# The formula is about one step, from weights at which N is 10; over a run N changes, so the agreement is rough, and
# trainings of one batch differ by a sixth. Beyond N a larger batch saves hardly any steps. Half of the rate costs the
# small batches a third more steps here, and the large ones none. `--adaptive-batch` in part 9 lets the batch follow the
# measured N ([batch_plan.py](../minidist/data/batch_plan.py)). The rule for the rate is that of SGD; with Adam the best
# rate grows about like the square root of the batch (Malladi et al. 2022; `--lr-scaling sqrt:5`, with 5 steps of
# warm-up).

# %% [markdown]
# ## 6 Break it
#
# Scale the rate with the batch above the noise scale, too: 64 samples in place of 4, so sixteen times the rate, where
# the table says 3. Such a rate meets a second limit, the curvature of the loss. A batch of 256, whose gradient has
# hardly any noise, shows that noise is not the reason:

# %%
for batch in (64, 256):
    with expect(NonFiniteError):
        losses(batch, 16 * 0.2)

# %% [markdown]
# A rate of 3.2 is above what any batch allows: the steps are too long for the curvature. So the rate may grow with the
# batch up to a limit only.
#
# A quieter mistake is in the measuring. Each step gives an estimate of |G|^2 and one of tr(Sigma), and both
# are right on average. The mean of their quotients is not N. Two hundred steps of four ranks with 4 rows
# each, whose true values are those of the case, |G|^2 = 1 and tr(Sigma) = 8:

# %%
shape = 200, 4, 4, 4  # steps, ranks, rows, numbers
noise = np.random.default_rng(0).normal(0, np.sqrt(2), shape)
ranks = np.array([1.0, 0, 0, 0]) + noise.mean(axis=2)  # the gradient of each rank's 4 rows
small = np.square(ranks).sum(axis=2).mean(axis=1)
big = np.square(ranks.mean(axis=1)).sum(axis=1)
traces = (small - big) / (1 / 4 - 1 / 16)
squared = big - traces / 16
print(f"|G|^2 of one step: {squared.min():.2f} to {squared.max():.2f}")
print(f"mean of the quotients: N = {np.mean(traces / squared):.1f}")
N = traces.mean() / squared.mean()
error = np.std(traces - N * squared) / np.sqrt(200) / squared.mean()  # of a quotient of means
print(f"quotient of the means: N = {N:.1f}, with a standard error of {error:.1f}")
assert abs(N - 8) < 2 * error

# %% [markdown]
# In a step in which |G|^2 comes out near 0 the quotient is huge, of either sign. So a job averages both
# numbers over many steps, and divides at the end.

# %% [markdown]
# ## 7 Exercise: the gradient and its noise, from one all-reduce
#
# `rows` are the gradients of this rank's rows, one per line; every rank has as many. Return one array: the
# mean gradient over the rows of all ranks, then |G|^2, then tr(Sigma), as estimated from this one step.
# The two batch sizes are the rows of one rank (take the mean of |g|^2 over the ranks) and those of all
# ranks. Judged: right numbers; bytes (par: one all-reduce of one number more than the gradient has).


# %%
def gradient_and_noise(comm, rows):
    return np.append(rows.mean(axis=0), [0.0, 0.0])


check("10b.gradient_and_noise", gradient_and_noise)

# %%
reveal("10b.gradient_and_noise")
check("10b.gradient_and_noise", solution("10b.gradient_and_noise"))

# %% [markdown]
# ## 8 Takeaway
#
# - mean |g|^2 = |G|^2 + tr(Sigma)/B: two batch sizes give both, and **N = tr(Sigma)/|G|^2** is the batch
#   around which a larger one stops paying.
# - The same progress takes **1 + N/B** steps and **B + N** samples (each times a constant). At B = N both
#   are twice what they are at best.

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
# | noise scale | McCandlish et al. 2018, *simple* noise scale; GPT-NeoX `log_gradient_noise_scale`, `gradient_noise_scale_n_batches` |
# | `--adaptive-batch` | "batch size warm-up" of GPT-3 and Megatron-LM (`--rampup-batch-size`), there by a fixed plan |
# | `--lr-scaling linear:STEPS` | linear scaling rule with gradual warm-up, Goyal et al. 2017 |
#
# Next: [10c Uneven ranks](10c_uneven_ranks.ipynb). All lessons are in the [index](README.md).
