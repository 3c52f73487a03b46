# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06 Data parallel is one big batch
#
# *30 minutes. Before it: 04.*
#
# ## 1 The case
#
# Eight rows are one training step on two ranks. Rank 0 gets 5 of them and rank 1 gets 3,
# because shards are seldom equal. Take one weight of the model. The mean of its gradient over rank
# 0's rows is 1, over rank 1's rows it is 9. One device with all eight rows would get the mean over
# the rows.
#
# What must both ranks get? And when the whole model has 676 numbers of 8 bytes, how much of it
# leaves a rank in every step, when four ranks sum their gradients round a ring?

# %%
import numpy as np

from minidist import MLP, SGD, FlatParameters, SimWorld, Tensor, all_reduce, cross_entropy
from minidist.course.lesson import check, expect, picture, predict, reveal, solution
from minidist.course.story import story
from minidist.report import draw, show

# %% [markdown]
# ## 2 Predict
#
# The first number is arithmetic with 1, 9, 5 and 3. The second is a part of the model's bytes: 1
# means all of it.

# %%
mean = predict("gradient of the mean over all 8 rows", example=5.0)
share = predict("bytes that leave a rank in a step, as a part of the model's", example=1.0)

# %% [markdown]
# ## 3 The idea and its picture
#
# Train on n ranks so that **every weight after every step is what one device with the whole batch
# would have**. Each rank holds the whole model and takes a shard of the rows; the gradients are
# summed with an all-reduce. What it saves: time, as each rank computes on 1/n of the rows. What it
# costs: the gradients travel in every step, and each rank holds the whole model.
#
# Eight rows of 16 numbers, four classes, and an ordinary training loop. Two lines of it know of other
# ranks: the loss is divided by the rows of *all* ranks, and the gradients are summed over them.

# %%
rng = np.random.default_rng(0)
rows, targets = rng.normal(size=(8, 16)), rng.integers(0, 4, 8)


def shards(*counts):
    """One (rows, targets) for each rank."""
    cuts = np.cumsum(counts)[:-1]
    return list(zip(np.split(rows, cuts), np.split(targets, cuts), strict=True))


def train(comm, shards, steps=20, mean_of_means=False):
    """Returns this rank's part of the loss, and the weights, after each step."""
    x, y = shards[comm.rank]
    flat = FlatParameters((model := MLP([16, 32, 4], dtype=np.float64)).parameters())
    optimizer = SGD(flat, lr=0.5)
    divisor = sum(len(labels) for _, labels in shards)  # the rows of all ranks
    if mean_of_means:
        divisor = len(y) * comm.size  # part 6
    losses, weights = [], []
    for _ in range(steps):
        flat.zero_grad()
        loss = cross_entropy(model(Tensor(x)), y, divisor)
        comm.compute(seconds=1e-6 * len(y), name="forward")  # for the picture: 1 µs for a row,
        loss.backward()
        comm.compute(seconds=2e-6 * len(y), name="backward")  # and twice that for its gradient
        all_reduce(comm, flat.grad, algorithm="ring")
        optimizer.step()
        losses.append(loss.item())
        weights.append(flat.data.copy())
    return losses, weights


# %% [markdown]
# One step on two ranks: 5 rows take longer than 3, so rank 1 waits before the gradients go round.

# %%
world = SimWorld(2)
world.run(train, shards(5, 3), steps=1)
picture("space-time", world, "part 3 of lesson 06", name="a step on 2 ranks")

# %% [markdown]
# ## 4 The code
#
# You have read all of it. Others put the all-reduce into a wrapper of the model, and so does the
# library: `DistributedDataParallel` sends rank 0's weights to all ranks at the start, and sums the
# gradients while `loss.backward()` runs.

# %%
from minidist import DistributedDataParallel, MismatchError


def wrapped(comm, shards, steps=20, reduction="sum", divisor=8.0):
    x, y = shards[comm.rank]
    model = MLP([16, 32, 4], dtype=np.float64, seed=comm.rank)  # rank 0's weights replace these
    flat = FlatParameters(model.parameters())
    parallel = DistributedDataParallel(model, comm, reduction=reduction, flat=flat)
    optimizer = SGD(flat, lr=0.5)
    for _ in range(steps):
        flat.zero_grad()
        cross_entropy(parallel(Tensor(x)), y, divisor).backward()
        optimizer.step()
    return flat.data


library = SimWorld(2).run(wrapped, shards(5, 3))[0]
ours = SimWorld(2).run(train, shards(5, 3))[0][1][-1]
print(f"max |wrapped - by hand| after 20 steps = {np.abs(library - ours).max():.0e}")

# %% [markdown]
# How the wrapper begins to sum before backward has ended, bucket by bucket
# ([gradients.py](../minidist/core/parallel/gradients.py)), is [lesson
# 06b](06b_buckets_and_overlap.ipynb).

# %% [markdown]
# ## 5 Check


# %%
def mean_of_all(comm, means, counts):
    total = np.array([means[comm.rank] * counts[comm.rank]])
    return float(all_reduce(comm, total)[0] / sum(counts))


answer = SimWorld(2).run(mean_of_all, [1.0, 9.0], [5, 3])
print(f"every rank gets {answer}")
mean.judge(answer[0])

# %% [markdown]
# Is the training the same as on one device? The question is not whether the losses look equal, but
# how far apart the weights are after each step.


# %%
def compare(parallel, single):
    """Return the losses of both, step by step, and max |w_parallel - w_single|."""
    losses = np.sum([losses for losses, _ in parallel], axis=0)
    alone, weights = single[0]
    difference = [
        np.abs(mine - theirs).max() for mine, theirs in zip(parallel[0][1], weights, strict=True)
    ]
    return {"losses": losses.tolist(), "reference_losses": alone, "max_difference": difference}


single = SimWorld(1).run(train, shards(8))
for counts in ((5, 3), (4, 4), (3, 1, 2, 2)):
    header = compare(SimWorld(len(counts)).run(train, shards(*counts)), single)
    print(f"shards {counts}: max |w_parallel - w_single| = {max(header['max_difference']):.1e}")
    assert max(header["max_difference"]) < 1e-12
header["title"] = "shards (3, 1, 2, 2), divided by all rows"
header["command"] = "part 5 of lesson 06"
show(draw("loss", [], header))

# %% [markdown]
# The bytes, counted from the messages of a step on four ranks, with the ring's formula:

# %%
world = SimWorld(4)
(_, weights), *_ = world.run(train, shards(3, 1, 2, 2), steps=1)
size, sent = weights[0].nbytes, sum(message.nbytes for message in world.traces[0].sent())
print(
    f"the model has {size:,} B; rank 0 sends {sent:,} B; 2 (n-1)/n of it: {2 * 3 * size // 4:,} B"
)
share.judge(sent / size, within=0.02)

# %% [markdown]
# **The batch has grown; which learning rate?** Four ranks with 4 rows each make a step with 16 rows,
# and a quarter as many steps for the same rows. Digits again, 1,600 pictures five times over: one
# rank, then four with the rate of one, then four with four times the rate (Goyal et al. 2017). One
# step of 4 lr along the mean of four gradients goes about as far as four steps of lr do.

# %%
from minidist import glyphs

pictures, digits = glyphs().rows(np.arange(2000))
pictures = pictures.astype(np.float64)


def five_epochs(comm, lr):
    """Returns the number of steps, and the loss on 400 pictures that were never trained on."""
    flat = FlatParameters((model := MLP([144, 32, 10], dtype=np.float64)).parameters())
    optimizer, batch = SGD(flat, lr=lr), 4 * comm.size
    for step in range(steps := 5 * 1600 // batch):
        first = step * batch + 4 * comm.rank
        mine = np.arange(first, first + 4) % 1600
        flat.zero_grad()
        cross_entropy(model(Tensor(pictures[mine])), digits[mine], divisor=batch).backward()
        all_reduce(comm, flat.grad)
        optimizer.step()
    return steps, cross_entropy(model(Tensor(pictures[1600:])), digits[1600:]).item()


for ranks, lr in ((1, 0.1), (4, 0.1), (4, 0.4)):
    steps, loss = SimWorld(ranks).run(five_epochs, lr)[0]
    print(f"{ranks} rank{'s' * (ranks > 1)}, learning rate {lr}: {steps:,} steps, loss {loss:.2f}")

# %% [markdown]
# Equal weights were not the question here: with a larger batch, other steps are made, on one device too. At the
# start, while the weights change fast, the large rate can go too far, so it climbs by equal amounts
# over the first W steps; and above some batch the rule fails: [10b Batch size and
# noise](10b_batch_size_and_noise.ipynb) measures where. In a job it is
#
#     minidist train --dp 4 --micro-batch 2 --base-batch 2 --lr-scaling linear:W
#
# ## 6 Break it
#
# In PyTorch a loss is by default the mean over this rank's rows, and the wrapper averages the ranks'
# gradients: together a mean of means. For equal shards it is right. For shards of 5 and 3 it trains *another* problem, in which the 3 rows weigh more. Look
# how healthy the loss is:

# %%
for counts in ((4, 4), (5, 3)):
    header = compare(SimWorld(2).run(train, shards(*counts), mean_of_means=True), single)
    off = max(header["max_difference"])
    print(f"mean of means, shards {counts}: max |w_parallel - w_single| = {off:.1e}")
assert off > 0.01
header["title"] = "shards (5, 3), mean of means"
header["command"] = "part 6 of lesson 06"
show(draw("loss", [], header))

# %% [markdown]
# The mean of means is a common bug: between 2024 and 2026 users reported it to seven projects (lesson 28
# counts them). In minidist a loss
# knows over how many rows it is a mean, and the ranks compare these numbers in the headers of their
# gradient messages; so such a job ends in its first step:

# %%
with expect(MismatchError):
    SimWorld(2).run(wrapped, shards(5, 3), reduction="mean", divisor=None)

# %% [markdown]
# The other classic is lesson 00's: no all-reduce at all. With a wrapper it takes one word, a loop that
# calls `model(x)` and not `parallel(x)`.

# %% [markdown]
# ## 7 Exercise: a weighted average
#
# Rank r has `gradient`, the mean over its `count` rows (or over its tokens that are not masked).
# Return the mean over the rows of all ranks, the same on every rank. A rank may have no rows: then
# its mean is `nan`. One call of `all_reduce` is enough.


# %%
def weighted_average(comm, gradient, count):
    return all_reduce(comm, gradient.copy(), op="avg")


check("06.weighted_average", weighted_average)

# %%
reveal("06.weighted_average")
check("06.weighted_average", solution("06.weighted_average"))

# %% [markdown]
# ## 8 Takeaway
#
# - Data parallel equals one big batch when replicas start equal, **every** gradient is summed, and
#   the divisor is the **global** number of rows: g = sum over ranks of (count_r / total) mean_r.
# - It sends **2 (n-1)/n Ψ** numbers from each rank in a step for a model of Ψ parameters, however
#   large the batch.

# %% [markdown]
# The job of the course so far, a model of 7 billion parameters on cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with parameters of 2 B, gradients
# added up in float32 (4 B) and 12 B for Adam in every row:

# %%
story("06")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/2_data_parallel/data_parallel_gpt.py
#     mpiexec -n 3 python mpi_examples/library_in_200_lines.py
#     mpiexec -n 4 python mpi_examples/2_data_parallel/lr_scaling.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `DistributedDataParallel(model, comm)` | PyTorch `DistributedDataParallel`; Horovod `hvd.DistributedOptimizer`; DeepSpeed `"zero_optimization": {"stage": 0}`; Megatron-LM `--data-parallel-sharding-strategy no_shard` |
# | `reduction="sum"`, `divisor=` | PyTorch averages (the hook divides by the world size); Hugging Face `average_tokens_across_devices`; Megatron-LM `--calculate-per-token-loss` |
# | `no_sync()` | PyTorch `model.no_sync()`; Accelerate `accelerator.no_sync(model)`, `accelerator.accumulate(model)` |
# | `bucket_cap_mb` | PyTorch `bucket_cap_mb`; DeepSpeed `reduce_bucket_size`; Megatron-LM `--ddp-bucket-size` |
# | `--lr-scaling linear:W --base-batch B` | linear scaling rule with gradual warm-up, Goyal et al. 2017; Horovod scales `lr` by `hvd.size()` by hand |
# | shards of the data | PyTorch `DistributedSampler`, `set_epoch` |
#
# Next: [09 Mixed precision](09_mixed_precision.ipynb). Side rooms: [06b Buckets and
# overlap](06b_buckets_and_overlap.ipynb), [06c Parameter server](06c_parameter_server.ipynb), [06d
# Fewer bytes](06d_fewer_bytes.ipynb), [06e Local SGD and DiLoCo](06e_local_sgd_and_diloco.ipynb),
# [06f Loading data](06f_loading.ipynb). The evening goes on with 06b. All of them are
# in the [index](README.md).
