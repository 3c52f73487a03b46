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
# should does a row of the third rank count? And does the loss show it?

# %% [markdown]
# ## 2 Predict
#
# In the right gradient every row has the same weight. Which weight has a row of the third rank in the mean
# of its own rank, and which weight has this mean in the average?

# %%
from minidist.course.lesson import check, picture, predict, reveal, solution

weight_guess = predict("weight of a row of the third rank, over the right one", example=1.0)

# %%
import numpy as np

from minidist import SimWorld, all_gather, all_reduce
from minidist.course.museum import exhibits, find, run_exhibit
from minidist.course.story import story

# %% [markdown]
# ## 3 The idea and its picture
#
# **A falling loss proves nothing; compare every gradient and weight with one device.** It saves you from a
# model that is trained wrongly without anyone noticing. It costs one run more.
#
# minidist has a museum of such bugs. Each exhibit is planted into the code that trains, for the time of one
# run. The bug of the case is exhibit 1a: 11 rows on 3 ranks, 12 steps. One curve is the loss without the
# bug, the other one the loss with it. Without their labels, could you tell which is which?

# %%
(means,) = find("1a")
run = run_exhibit(means, tests=False)  # without the tests that catch it
picture(
    "loss",
    [],
    "minidist museum 1a -o curves.svg",
    losses=run.wrong.losses,
    reference_losses=run.right.losses,
    title="exhibit 1a, without and with the bug",
    names=("without the bug", "with the bug"),
)

# %% [markdown]
# Both curves rise and fall at the same steps, and they end close to each other. Compared number by number with
# one device, the loss of the first step already shows this bug; many others it does not show, as part 5 will
# tell. The first gradient tells more. Its difference is given as a part of the largest entry, `ratio`:

# %%
right, wrong = run.right.losses, run.wrong.losses
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
# Now a round through the museum. (`minidist museum` shows all of it.) All but the last one were reported in
# public code. Look at the two columns of losses first, and ask yourself which of these bugs you would have
# noticed. |Δgradient| is the largest difference of the first gradient, as above, and |Δweight| that of the
# weights at the end.
#
# Some words of the titles: a window is the micro-batches of one step. Keys go round in the ring of lesson 22. The
# norm is that of the whole gradient, by which it is clipped. Of the two uses of a weight one is the embedding,
# and one the output matrix. The words are those of a vocabulary that is cut over the ranks (14b). And a loss is
# normalised when it is divided by the number of micro-batches.

# %%
ROUND = {"1a": "06", "114": "10", "121": "10", "128": "11", "123": "12", "129": "14b"}
ROUND |= {"132": "17", "120": "22", "139": "02b", "19a": "12"}
runs = [run_exhibit(find(number)[0], tests=False) for number in ROUND]
print(f"{'exhibit':58} lesson steps  last loss: right, wrong  |Δgradient| |Δweight|")
for shown, lesson in zip(runs, ROUND.values(), strict=True):
    right, wrong = shown.right.losses[-1], shown.wrong.losses[-1]
    gradients, weights = (shown.differences[kind].ratio for kind in ("gradients", "weights"))
    title = f"{shown.exhibit.number:4}{shown.exhibit.title:54} {lesson:6}"
    steps = len(shown.right.losses)
    print(f"{title} {steps:5} {right:17.3f} {wrong:6.3f} {gradients:12.1%} {weights:9.1%}")

# %% [markdown]
# Six of these runs have three steps, so their losses could hardly differ; the columns on the right differ all
# the same. How many have a last loss that is within 5 % of the right one? And how many have the right first
# loss, to the last digit?

# %%
unseen = sum(abs(each.wrong.losses[-1] / each.right.losses[-1] - 1) < 0.05 for each in runs)
print(f"last loss within 5 %: {unseen} of {len(runs)} bugs")
same = sum(each.wrong.losses[0] == each.right.losses[0] for each in runs)
print(f"first loss equal: {same} of {len(runs)} bugs")
reported = sum(bool(exhibit.thread) for exhibit in exhibits())
print(f"{reported} of all {len(exhibits())} exhibits were reported in public code")

# %% [markdown]
# 114 shows in the loss, which looks better than it is. The first loss is computed before any backward pass,
# sum of gradients or update, so a bug in one of these cannot change it.
#
# Three rows have a right first gradient. Exhibit 139 computes wrong weights from right gradients. In 114 only
# the gradients of short windows are wrong, and the first window is a whole one. So compare weights after several
# steps as well. Exhibit 19a changes no number at all: it only takes memory, and only the peak shows it.

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
