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
# *30 minutes. Before it: 06; its exhibits are about 11, 14, 17 and 22.*
#
# ## 1 The case
#
# The loss of a distributed program falls, and nothing raises. Is it right? Eleven rows are one training
# step on three ranks, which get as nearly equal parts of them as possible. Each rank takes the mean of
# the gradient over its own rows, and the ranks' gradients are averaged. The authors had tested it with
# 12 rows: there it is right.
#
# With 11 rows the gradient is wrong. Does the loss show it? Part 5 shows this bug and ten more. In how many
# of the ten is the last loss no more than 5 % worse than the right one, or even better?

# %%
import numpy as np

from minidist import all_gather
from minidist.course.lesson import check, picture, predict, reveal, solution
from minidist.course.museum import exhibits, find, run_exhibit
from minidist.course.story import story

# %% [markdown]
# ## 2 Predict
#
# A bug that makes the loss much worse is noticed, and mended soon. Which ones remain?

# %%
unseen_guess = predict("bugs of ten whose loss is at most 5 % worse", example=2)

# %% [markdown]
# ## 3 The idea and its picture
#
# **A falling loss proves nothing; compare every gradient and weight with one device.** About half
# of the bugs in this museum were reported in public code, each with a link; the others are bugs of
# the same kind. It saves you from a model that is trained wrongly without anybody's knowing. It
# costs one run more.
#
# Exhibit 13a: the input and the output embedding of a model are one matrix. In a pipeline they are
# on two stages, and the sum of their two gradients was forgotten, so that two copies drift apart.
# The grey curve is the run without the bug. Could you tell?

# %%
(tied,) = find("13a")
run = run_exhibit(tied, tests=False)
picture(
    "loss",
    [],
    "minidist museum 13a -o curves.svg",
    losses=run.wrong.losses,
    reference_losses=run.right.losses,
    title="exhibit 13a, without and with the bug",
    names=("without the bug", "with the bug"),
)

# %% [markdown]
# How far apart the curves are, and how far off the first gradient is:

# %%
losses = run.wrong.losses
apart = max(abs(a - b) for a, b in zip(losses, run.right.losses, strict=True))
print(
    f"the losses fall from {losses[0]:.2f} to {losses[-1]:.2f} and are never more than "
    f"{apart:.3f} apart;"
)
off = run.differences["gradients"].ratio
print(f"the first gradient is off by {off:.0%} of its largest entry")
assert apart < 0.01 * losses[0]
assert off > 0.5

# %% [markdown]
# ## 4 The code
#
# A bug is injected in memory into the code that trains, for the time of one run. This is the case's
# bug, exhibit 1a, as it is in [gradients.py](../minidist/course/museum/gradients.py): the loss of a rank
# is the mean over its own rows, and the ranks' gradients are averaged. Five rows and three, with
# gradients 0 to 7:

# %%
shards = [np.arange(5.0), np.arange(5.0, 8)]
print("the mean of the ranks' means:", np.mean([shard.mean() for shard in shards]))
print("the mean over all rows:      ", np.concatenate(shards).mean())
means, masked = find("1")

# %% [markdown]
# ## 5 Check
#
# The case: 11 rows on 3 ranks for 12 steps, without the bug and with it. The comparison takes the gradients
# of the first step, tensor by tensor: the largest difference, as a part of the largest entry of the right
# one.

# %%
run = run_exhibit(means, tests=False)
right, wrong = (each.tensors[0]["gradients"] for each in (run.right, run.wrong))
for name, gradient in right.items():
    difference, largest = np.abs(wrong[name] - gradient).max(), np.abs(gradient).max()
    print(
        f"{name:16} max |difference| {difference:.4f}, largest entry {largest:.3f}: "
        f"{difference / largest:.0%}"
    )
worse = run.wrong.losses[-1] / run.right.losses[-1] - 1
print(
    f"last loss {run.right.losses[-1]:.3f}, with the bug {run.wrong.losses[-1]:.3f}: {worse:+.1%}"
)
assert worse < 0.05

# %% [markdown]
# It is number one because seven projects were told of it within two years (`minidist museum 1a` names
# them). In language models ranks differ in the tokens that count, even where they have the same number of
# rows. That is 1b, whose
# last loss is lower with the bug, also because the bug is in the printed average as well. minidist refuses both: a loss knows over how many rows it is a
# mean, and ranks whose gradients are averaged compare these numbers.

# %%
run = run_exhibit(masked, tests=False)
print(f"last loss {run.right.losses[-1]:.2f}, with the bug {run.wrong.losses[-1]:.2f}")
print(run.said.partition(", at ")[0])
assert run.wrong.losses[-1] < run.right.losses[-1]

# %% [markdown]
# A round through the museum (`minidist museum` shows all of it). Look at the two columns of losses
# first, and ask yourself which of these bugs you would have noticed. The next column is the largest
# error of a gradient after one step, as a part of the largest entry of its tensor. The last one says
# whether a weight that ranks should have in common differs between them at the end.
#
# Of the words in the titles: a fused QKV matrix has the weights of queries, keys and values in one. Under
# sequence parallelism (14b) a tensor-parallel rank has some of the tokens in layer norms. A mesh axis (20)
# has groups of ranks, and transposed groups are those of another axis.

# %%
ROUND = ("1b", "3", "6", "8", "12a", "14", "17", "19a", "27a", "30")
runs = [run_exhibit(find(number)[0], tests=False) for number in ROUND]


def drift(recording):
    """Whether a weight of rank 0 differs from that of the same name on another rank."""
    first, *others = (tensors.get("weights", {}) for tensors in recording.tensors)
    return any(
        not np.array_equal(array, other[name])
        for other in others
        for name, array in first.items()
        if name in other
    )


# %% [markdown]
# Ten of the exhibits:

# %%
print(f"{'':66} last loss  with it  |Δgradient|  drift")
unseen = apart = 0
for shown in runs:
    right, wrong = shown.right.losses[-1], shown.wrong.losses[-1]
    unseen += wrong < 1.05 * right
    exhibit, off = shown.exhibit, shown.differences["gradients"].ratio
    drifts = drift(shown.wrong) and not drift(shown.right)
    apart += drifts
    print(
        f"{exhibit.number:4}{exhibit.title:62} {right:9.3f} {wrong:8.3f} {off:9.0%}"
        f"{'    drift' if drifts else ''}"
    )
print(f"replicas drift apart in {apart}")
reported = sum(bool(exhibit.thread) for exhibit in exhibits())
print(f"{reported} of all {len(exhibits())} exhibits were reported in public code")
unseen_guess.judge(unseen)

# %% [markdown]
# Some change no number at all: 19a only takes memory, and only the peak shows it. And 6 has the
# right gradient in the first step: its weights differ, which `compare` sees too.

# %% [markdown]
# ## 6 Break it
#
# A check may be as blind as the loss. Suppose that replicas are compared by the sum of their weights, one
# number for each rank, and that one replica has two entries in each other's place:

# %%
weights = np.arange(8.0)
replica = weights.copy()
replica[[2, 5]] = weights[[5, 2]]
print(
    f"sums {weights.sum():g} and {replica.sum():g}, "
    f"max |difference| {np.abs(weights - replica).max():g}"
)
assert weights.sum() == replica.sum()

# %% [markdown]
# ## 7 Exercise: are the replicas still equal?
#
# Three of the ten bugs let replicas drift apart, and a cheap check after each step would have found
# these three. (It compares replicas with each other. A bug that changes all of them in the same way needs
# the comparison with one device.) `first_difference(comm, weights)`: the lowest rank whose float64 array
# differs from rank 0's in any bit, or -1, the same answer on every rank. A *digest* is enough, 16 bytes
# that almost surely differ when any byte of the weights does: `hashlib.blake2b(weights.tobytes(),
# digest_size=16).digest()`. Judged: the answer, and the bytes. Weights are long, so do not send them.


# %%
def first_difference(comm, weights):
    sums = all_gather(comm, np.array([weights.sum()]))
    return int(np.argmax(sums != sums[0])) if (sums != sums[0]).any() else -1


check("28.first_difference", first_difference)

# %%
reveal("28.first_difference")
check("28.first_difference", solution("28.first_difference"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Compare tensors, not curves**: gradients after one step, weights after a few, and the peak of
#   memory, each with one device's, find what a loss may never show.
# - 16 bytes per rank say almost surely whether replicas are equal: a digest, gathered.

# %% [markdown]
# The job of the course so far, since lesson 12 a model of 65 billion parameters on 64 cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with 2^20 tokens per step:

# %%
story("28")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 minidist compare --dp 2 --steps 3
#     mpiexec -n 2 minidist train --dp 2 --steps 3 --check-replicas
#     mpiexec -n 2 python mpi_examples/7_more/dump_gradients.py --bug one
#
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
