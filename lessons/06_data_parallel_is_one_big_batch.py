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
# *25 minutes. Before it: 04.*
#
# ## 1 The case
#
# Eight rows are one training step on two ranks. Rank 0 gets 5 of them and rank 1 gets 3, because rows divide unevenly,
# or, where a sampler makes them equal, the tokens that count do not. Take one weight of the model. The mean of its
# gradient over rank 0's rows is 1, over rank 1's rows it is 9. One device with all eight rows would get the mean over
# the rows.
#
# What must both ranks get? And if four ranks sum their gradients round a ring, how many bytes leave a rank in every
# step?

# %%
import numpy as np

from minidist import (
    MLP,
    SGD,
    FlatParameters,
    LinkModel,
    SimWorld,
    Tensor,
    all_reduce,
    cross_entropy,
)
from minidist.course.lesson import check, expect, picture, predict, reveal, solution
from minidist.course.story import story

# %% [markdown]
# ## 2 Predict
#
# The first number is arithmetic with 1, 9, 5 and 3. The second is a part of the model's bytes, where
# 1 means as many bytes as the model has.

# %%
mean = predict("gradient of the mean over all 8 rows", example=5.0)
share = predict("bytes that leave a rank in a step, as a part of the model's", example=1.0)

# %% [markdown]
# ## 3 The idea and its picture
#
# Train on n ranks so that **every weight after every step is what one device with the whole batch
# would have**. Each rank holds the whole model, a *replica*, and takes a part of the rows, its
# *shard*; the gradients are summed with an all-reduce. It saves time, as each rank computes on 1/n of
# the rows. It costs messages, because the gradients travel in every step, and each rank holds the
# whole model.
#
# The example has eight rows of 16 numbers, four classes, and an ordinary training loop. Two lines of
# it depend on the other ranks: the loss is divided by the rows of *all* ranks, and the gradients are
# summed over them.

# %%
rng = np.random.default_rng(0)
rows, targets = rng.normal(size=(8, 16)), rng.integers(0, 4, 8)


def shards(*counts):
    """One (rows, targets) for each rank."""
    cuts = np.cumsum(counts)[:-1]
    return list(zip(np.split(rows, cuts), np.split(targets, cuts), strict=True))


def train(comm, shards, steps=20, divisor=8):
    """Returns this rank's part of the loss, and the weights, after each step."""
    x, y = shards[comm.rank]
    model = MLP([16, 32, 4], dtype=np.float64)
    flat = FlatParameters(model.parameters())
    optimizer = SGD(flat, lr=0.5)
    losses, weights = [], []
    for _ in range(steps):
        flat.zero_grad()
        loss = cross_entropy(model(Tensor(x)), y, divisor)  # the rows of all ranks
        comm.compute(seconds=1e-6 * len(y), name="forward")  # for the picture: 1 µs for a row,
        loss.backward()
        comm.compute(seconds=2e-6 * len(y), name="backward")  # and twice that for its gradient
        all_reduce(comm, flat.grad, algorithm="ring")
        optimizer.step()
        losses.append(loss.item())
        weights.append(flat.data.copy())
    return losses, weights


# %% [markdown]
# One step on two ranks, whose links are slow here, 1 ns for a byte: 5 rows take longer than 3, so rank 1 waits. Its
# first message leaves at 9 µs, is delivered after 3.7 µs, and is received when rank 0 has computed, at 15 µs: there
# the arrow ends. Then rank 0 waits too, for the second half of the sum.

# %%
world = SimWorld(2, links=LinkModel(alpha=1e-6, beta=1e-9))
world.run(train, shards(5, 3), steps=1)
picture("space-time", world, "part 3 of lesson 06", name="a step on 2 ranks")

# %% [markdown]
# ## 4 The code
#
# You have read all of it. In a library a wrapper of the model does the sum: `DistributedDataParallel`
# sends rank 0's weights to all ranks at the start, and sums the gradients while `loss.backward()`
# runs. So the ranks may begin with different weights:

# %%
from minidist import DistributedDataParallel


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
# How the wrapper begins to sum before backward has ended
# ([data_parallel.py](../minidist/core/parallel/data_parallel.py)) is the subject of [lesson
# 06b](06b_buckets_and_overlap.ipynb).

# %% [markdown]
# ## 5 Check
#
# The case: a mean over 5 rows counts five times, and a mean over 3 rows three times.


# %%
def mean_of_all(comm, means, counts):
    total = np.array([means[comm.rank] * counts[comm.rank]])
    return float(all_reduce(comm, total)[0] / sum(counts))


answer = SimWorld(2).run(mean_of_all, [1.0, 9.0], [5, 3])
print(f"every rank gets {answer}")
mean.judge(answer[0])

# %% [markdown]
# Is the training the same as on one device? Equal losses are not enough: what counts is how far apart
# the weights are after each step.

# %%
single_losses, single_weights = SimWorld(1).run(train, shards(8))[0]


def compared(ranks):
    """Return the loss over all rows, and max |w_parallel - w_single|, both for each step."""
    losses = np.sum([losses for losses, _ in ranks], axis=0).tolist()
    pairs = zip(ranks[0][1], single_weights, strict=True)
    return losses, [np.abs(parallel - single).max() for parallel, single in pairs]


for counts in ((5, 3), (4, 4), (3, 1, 2, 2)):
    losses, off = compared(SimWorld(len(counts)).run(train, shards(*counts)))
    print(f"shards {counts}: max |w_parallel - w_single| = {max(off):.1e}")
    assert max(off) < 1e-12

# %% [markdown]
# The bytes, counted from the messages of a step on four ranks. A model of Ψ parameters has Ψ gradients,
# and the ring sends 2 (n-1)/n Ψ numbers from each rank:

# %%
world = SimWorld(4)
(_, weights), *_ = world.run(train, shards(3, 1, 2, 2), steps=1)
size, sent = weights[0].nbytes, sum(message.nbytes for message in world.traces[0].sent())
print(
    f"the model has {size:,} B; rank 0 sends {sent:,} B; 2 (n-1)/n of it: {2 * 3 * size // 4:,} B"
)
share.judge(sent / size, within=0.02)

# %% [markdown]
# ## 6 Break it
#
# In PyTorch a loss is by default the mean over the rank's rows, and the wrapper averages the ranks'
# gradients: together they make a mean of means. For equal shards it is right. For shards of 5 and 3
# it trains *another* problem, in which each of the 3 rows counts more than each of the 5. A mean of
# means divides the loss of each row by (its rank's rows x the number of ranks). For shards of 5 and 3 the
# losses do not show the bug:


# %%
def mean_of_means(comm, shards):
    own_rows = len(shards[comm.rank][1])
    return train(comm, shards, divisor=own_rows * comm.size)


for counts in ((4, 4), (7, 1), (5, 3)):
    losses, off = compared(SimWorld(2).run(mean_of_means, shards(*counts)))
    print(f"mean of means, shards {counts}: max |w_parallel - w_single| = {max(off):.1e}", end="; ")
    print(f"last loss {losses[-1]:.3f}, on one device {single_losses[-1]:.3f}")
assert max(off) > 0.01
title = "shards (5, 3), mean of means"
curves = {"losses": losses, "reference_losses": single_losses, "max_difference": off}
picture("loss", [], "part 6 of lesson 06", title=title, **curves)

# %% [markdown]
# The curves are still hardly apart, and the weights differ in the second decimal place. With shards of 7
# and 1 they are further apart, and there the loss shows it.
#
# The mean of means is a common bug: between 2024 and 2026 users reported it to seven projects
# ([the list](../minidist/course/museum/catalogue.toml), exhibit 1a). In minidist a loss records over how many rows it
# is a mean, and the messages of the gradients carry that number. The ranks compare the numbers, so such a job ends in
# its first step:

# %%
from minidist import MismatchError

with expect(MismatchError):
    SimWorld(2).run(wrapped, shards(5, 3), reduction="mean", divisor=None)

# %% [markdown]
# ## 7 Exercise: a weighted average
#
# Rank r has `gradient`, the mean over its `count` rows (or over its tokens that are not masked).
# Return the mean over the rows of all ranks, the same on every rank. A rank may have no rows: then
# its mean is `nan`, and 0 times `nan` is `nan`. One call of `all_reduce` is enough. Judged: the means;
# bytes, messages and time are only printed.


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
# - Data parallel training equals training with one big batch when the replicas start equal, **every**
#   gradient is summed, and the divisor is the number of rows of **all** ranks: g = sum over ranks of
#   (count_r / total) mean_r.
# - It sends **2 (n-1)/n Ψ** numbers from each rank in a step for a model of Ψ parameters, however
#   large the batch is.

# %% [markdown]
# The job so far:

# %%
story("06")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/2_data_parallel/data_parallel_gpt.py
#     mpiexec -n 2 python mpi_examples/7_more/device.py      # --device cuda: with CuPy and a GPU
#     mpiexec -n 3 python mpi_examples/first_steps.py
#     mpiexec -n 3 python mpi_examples/library_in_200_lines.py      # and the methods of lessons 12 and 17

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `DistributedDataParallel(model, comm)` | PyTorch `DistributedDataParallel`; Horovod `hvd.DistributedOptimizer`; DeepSpeed `"zero_optimization": {"stage": 0}`; Megatron-LM `--data-parallel-sharding-strategy no_shard` (the default) |
# | `reduction="sum"`, `divisor=` | PyTorch averages (the hook divides by the world size); Hugging Face `average_tokens_across_devices`; Megatron-LM `--calculate-per-token-loss` |
# | shards of the data | PyTorch `DistributedSampler`, `set_epoch`; it makes shards equal by repeating rows, or drops some (`drop_last=True`) |
#
# Next: [09 Mixed precision](09_mixed_precision.ipynb). Side rooms: [06b Buckets and
# overlap](06b_buckets_and_overlap.ipynb), [06c Parameter server](06c_parameter_server.ipynb), [06d
# Fewer bytes](06d_fewer_bytes.ipynb), [06e Local SGD and DiLoCo](06e_local_sgd_and_diloco.ipynb),
# [06f Loading data](06f_loading.ipynb). On the path of an evening 06b is next. All lessons are in the
# [index](README.md).
