# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 28 The museum of bugs
#
# *30 minutes. Before it: 06; its exhibits are about 02b, 10, 11, 12, 14b, 17 and 22.*
#
# ## 1 The case
#
# The loss of a distributed program falls, and nothing raises. Is the program right? Take a bug that was reported
# to seven projects within two years (`minidist museum 1a` names them), the mean of means. Eleven rows are one
# training step on three ranks, which have 4, 4 and 3 of them. Each rank takes the mean of the gradient over its
# own rows, and the three means are averaged. It was tested with 12 rows, where it is right.
#
# With 11 rows the gradient is wrong: some rows count more than they should. How many times as much as it
# should does a row of the third rank count? And does the loss show it? Part 5 trains a small model with each of
# ten such bugs. In how many of these runs is the last loss within 5 % of the right one?

# %% [markdown]
# ## 2 Predict
#
# In the right gradient every row has the same weight. What is the weight of a row of the third rank in its
# rank's mean, and what is the weight of this mean in the average? The second number is a guess.

# %%
from minidist.course.lesson import check, predict, reveal, solution

weight_guess = predict("weight of a row of the third rank, over the right one", example=1.0)
unseen_guess = predict("of ten bugs, those with a last loss within 5 %", example=1)

# %%
from dataclasses import replace

import numpy as np

from minidist import SimWorld, all_gather, all_reduce
from minidist.course.museum import exhibits, find, run_exhibit
from minidist.course.museum.jobs import train_job
from minidist.course.story import story
from minidist.report import show
from minidist.report.frame import new_panel

# %% [markdown]
# ## 3 The idea and its picture
#
# **A falling loss proves nothing; compare every gradient and weight with one device.** It saves you from a
# model that is trained wrongly without anyone noticing. It costs one run more.
#
# minidist has a museum of such bugs. Each exhibit is planted into the code that trains, for the time of one
# run. The bug of the case is exhibit 1a: 11 rows on 3 ranks, 12 steps. One of these curves is the loss of the
# program with the bug. Which one?

# %%
(means,) = find("1a")
run = run_exhibit(means, tests=False)  # without the tests that catch it
right, wrong = run.right.losses, run.wrong.losses
figure, axes = new_panel(8, 2.5)
for name, losses, colour in (("A", wrong, "#4477AA"), ("B", right, "#CCBB44")):
    axes.plot(range(1, 13), losses, color=colour, label=name, marker="o", markersize=4)
axes.legend()
axes.set_xlabel("step")
axes.set_title("loss of exhibit 1a, without and with the bug", fontsize=10, loc="left")
show(figure)

# %% [markdown]
# It is A. Both curves rise and fall at the same steps, and they end close to each other. Compared number by number
# with one device, the loss of the first step already shows this bug; many others it does not show, as part 5 will
# tell. The first gradient tells more. Its difference is given as a part of the largest entry, `ratio`:

# %%
for step in (0, -1):
    print(f"{'last' if step else 'first'} loss {right[step]:.4f}, with the bug {wrong[step]:.4f}")
off = run.differences["gradients"].ratio
print(f"the first gradient is off by up to {off:.0%} of the largest entry of its tensor")
assert off > 0.1

# %% [markdown]
# ## 4 The code
#
# The bug in its smallest form. This is the gradient on one device, of a linear model whose loss is the mean
# squared error:


# %%
def gradient(w, x, y):
    return 2 * x.T @ (x @ w - y) / len(y)


# %% [markdown]
# And this is the step on several ranks. Each has the rows `mine`. It looks right:


# %%
def mean_of_means(comm, w, x, y):
    mine = np.array_split(np.arange(len(y)), comm.size)[comm.rank]
    total = all_reduce(comm, gradient(w, x[mine], y[mine]))
    return total / comm.size


# %% [markdown]
# The comparison: a rank computes both gradients, of the same rows with the same weights. It takes the
# largest difference of all entries, as a part of the largest entry:


# %%
def difference(comm, step, w, x, y):
    right = gradient(w, x, y)
    return np.abs(step(comm, w, x, y) - right).max() / np.abs(right).max()


# %% [markdown]
# Weights and rows drawn at random: 12 rows, 9 in float32, and 11:


# %%
def batch(rows):
    draw = np.random.default_rng(rows)
    return draw.normal(size=3), draw.normal(size=(rows, 3)), draw.normal(size=rows)


for rows, dtype in ((12, np.float64), (9, np.float32), (11, np.float64)):
    numbers = [array.astype(dtype) for array in batch(rows)]
    off = SimWorld(3).run(difference, mean_of_means, *numbers)
    print(f"{rows} rows, {dtype.__name__}: max |difference| / max |right| = {off[0]:.1e}")

# %% [markdown]
# With 12 and 9 rows the two differ by rounding only, because ranks add in another order: by about 1e-16 in
# float64, and 1e-7 in float32. A comparison needs data with which a bug can show: here, rows that cannot be
# divided equally.

# %% [markdown]
# ## 5 Check
#
# The weight of the case. In this batch the model predicts every row without an error but the last one. So
# the whole gradient is that of the last row, and the ratio of both gradients is the ratio of its weights:

# %%
w, x, _ = batch(11)
y = x @ w
y[-1] += 1
wrong = SimWorld(3).run(mean_of_means, w, x, y)[0]
ratio = wrong[0] / gradient(w, x, y)[0]
print(f"a row of the third rank counts {ratio:.3f} times as much as it should, 11/9 = {11 / 9:.3f}")
weight_guess.judge(ratio, within=0.03)

# %% [markdown]
# A row of the third rank has a third of its rank's mean, and this mean is a third of the average: 1/9, where
# it should be 1/11.
#
# Now a round through the museum, which `minidist museum` shows as a whole. All ten but the last one were reported in
# public code. Six of their jobs are made longer here, so that a loss can fall: 40 steps of a GPT with one or two
# layers, on two or four ranks, which cut it as their settings say.

# %%
ROUND = ("1a", "114", "121", "128", "123", "129", "132", "120", "139", "19a")
SMALL = {"steps": 40, "lr": 0.02, "width": 8, "layers": 1, "context": 4, "precision": "fp64"}
LONGER = {
    "121": {"ranks": 2, "zero": 2, "micro_batch": 1, "accumulation": 3},
    "128": {"ranks": 2, "zero": 2},
    "123": {"ranks": 4, "zero": 3, "dp_replicate": 2, "clip": 0.05},
    "129": {"ranks": 2, "tp": 2},
    "132": {"ranks": 2, "optimizer": "sgd", "lr": 0.5, "layers": 2, "pp": 2, "microbatches": 4},
    "139": {"ranks": 2, "zero": 3, "optimizer": "adam"},
}
runs = []
for number in ROUND:
    (exhibit,) = find(number)
    if number in LONGER:
        exhibit = replace(exhibit, job=train_job(**{**SMALL, **LONGER[number]}))
    runs.append(run_exhibit(exhibit, tests=False))
print(f"{'exhibit':54} loss: first    last  last with the bug")
for each in runs:
    first, last, with_it = each.right.losses[0], each.right.losses[-1], each.wrong.losses[-1]
    print(
        f"{each.exhibit.number:4}{each.exhibit.title:54} {first:7.4f} {last:7.4f} {with_it:18.4f}"
    )

# %% [markdown]
# Which of these bugs would you have noticed? A dot is an exhibit: to the right by how much its last loss is off,
# and upwards by how much the weights are, as a part of the largest entry. In the band the loss is within 5 %:

# %%
off_loss = [abs(each.wrong.losses[-1] / each.right.losses[-1] - 1) for each in runs]
off_weight = [each.differences["weights"].ratio for each in runs]
figure, axes = new_panel(7, 3.2)
axes.axvspan(-1, 5, color="#F0F0F0")
for each, x, y in zip(runs, off_loss, off_weight, strict=True):
    axes.plot(100 * x, 100 * y, "o", color="#4477AA")
    axes.annotate(each.exhibit.number, (100 * x, 100 * y), (5, 3), textcoords="offset points")
axes.set_yscale("symlog", linthresh=1)
axes.set_yticks([0, 1, 10, 100], ["0", "1", "10", "100"])
axes.set_xscale("symlog", linthresh=1)
axes.set_xlim(left=-0.2)
axes.set_xticks([0, 1, 5, 10, 50], ["0", "1", "5", "10", "50"])
axes.set_xlabel("last loss off by, in %")
axes.set_ylabel("weights off by, in %")
axes.set_title("ten bugs: what the loss shows, and what the weights show", fontsize=10, loc="left")
show(figure)
unseen = sum(off < 0.05 for off in off_loss)
unseen_guess.judge(unseen, within=0.15)
better = sum(each.wrong.losses[-1] < each.right.losses[-1] for each in runs)
print(f"{better} of {len(runs)} end with a lower loss than the right program")

# %% [markdown]
# How many have the right first loss, to the last digit? And which show nothing in the first gradient?

# %%
same = sum(each.wrong.losses[0] == each.right.losses[0] for each in runs)
print(f"first loss equal: {same} of {len(runs)} bugs")
blind = [e.exhibit.number for e in runs if e.differences["gradients"].ratio < 1e-9]
print("first gradient equal: exhibits", ", ".join(blind))
reported = sum(bool(exhibit.thread) for exhibit in exhibits())
print(f"{reported} of all {len(exhibits())} exhibits were reported in public code")

# %% [markdown]
# The first loss is computed before any backward pass, sum of gradients or update, so a bug in one of these cannot
# change it. Three rows have a right first gradient. Exhibit 139 computes wrong weights from right gradients. In 114
# only the gradients of short windows are wrong (the micro-batches of one step), and the first window is a whole
# one. So compare weights after several steps as well. Exhibit 19a changes no number at all: it only takes memory,
# and only the peak shows it.

# %% [markdown]
# ## 6 Break it
#
# A comparison may be as blind as the loss. In this step every rank learns the right sum, but the last rank
# goes on with the mean of its own rows:


# %%
def last_keeps_its_own(comm, w, x, y):
    mine = np.array_split(np.arange(len(y)), comm.size)[comm.rank]
    own = gradient(w, x[mine], y[mine])
    total = all_reduce(comm, own * len(mine))
    return own if comm.rank == comm.size - 1 else total / len(y)


off = SimWorld(3).run(difference, last_keeps_its_own, *batch(11))
print("difference on each rank:", ", ".join(f"{each:.1e}" for each in off))
assert off[0] < 1e-12 < off[2]

# %% [markdown]
# Rank 0 alone would find nothing. So every rank compares, and `all_gather` tells all of them what each has
# found:


# %%
def largest_anywhere(comm):
    own = difference(comm, last_keeps_its_own, *batch(11))
    return all_gather(comm, np.array([own])).max()


print(", ".join(f"{each:.2f}" for each in SimWorld(3).run(largest_anywhere)))

# %% [markdown]
# ## 7 Exercise: which steps are wrong?
#
# `steps` is a list of four training steps, each like `mean_of_means` above: `step(comm, w, x, y)` returns
# this rank's gradient. You cannot see their code. `gradient(w, x, y)` is the right one on one device, and
# every rank has all rows. Return which steps are wrong on any rank, counted from 0 and in rising order, the
# same list on every rank; a step that differs by rounding only is right. Every rank must call every step,
# because the ranks exchange messages in it. Judged: the list.


# %%
def wrong_steps(comm, steps, gradient, w, x, y):
    right = gradient(w, x, y).sum()
    return [i for i, step in enumerate(steps) if abs(step(comm, w, x, y).sum() - right) > 1e-9]


check("28.wrong_steps", wrong_steps)

# %%
reveal("28.wrong_steps")
check("28.wrong_steps", solution("28.wrong_steps"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Compare tensors, not curves**: gradients after one step, weights after a few, and the peak of
#   memory, each with one device's, find what a loss may never show.
# - **On every rank, entry by entry, with data on which a bug can show**: rows that cannot be divided equally.

# %% [markdown]
# The job of the course so far, since lesson 12 a model of 65 billion parameters on 64 cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with 2^20 tokens per step. It does not fit
# on one device, so its layout is compared with one device on a small model:

# %%
story("28")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 minidist compare --dp 2 --steps 3
#     mpiexec -n 2 minidist train --dp 2 --steps 3 --check-replicas
#     mpiexec -n 2 python mpi_examples/7_more/dump_gradients.py --bug one
#
# `compare` trains on the ranks and on one device. `--check-replicas` compares a hash of the weights of all
# replicas in every step: it needs no second run, and finds only what makes replicas differ.
# `minidist museum` shows the table, `minidist museum 9a` one exhibit with the tests that catch it,
# `minidist museum 101-146` the bugs of 2024 to 2026.

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | planting a bug | mutation testing |
# | compare with one device | Megatron-LM's and torchtitan's "loss parity" runs (curves); PyTorch `TORCH_DISTRIBUTED_DEBUG=DETAIL` (consistency of collectives) |
# | `--check-replicas` | Megatron-LM `--check-weight-hash-across-dp-replicas-interval` |
#
# This was the last lesson of the core. Side room: [28b Each sample
# once](28b_each_sample_once.ipynb). All lessons are in the [index](README.md).
