# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16b Batch norm and micro-batches
#
# *25 minutes. Before it: 06 and 16.*
#
# ## 1 The case
#
# A network for images has a *batch norm* in every block: it subtracts from each channel the mean
# over all images and pixels that it is given, and divides by their standard deviation. 16 images are
# one training step. One device with a small memory takes them one by one, 16 micro-batches of one
# image, and adds up the gradients, as lesson 10 does.
#
# That computes something else than all 16 at once. How much else? Take the gradient of the first convolution
# from all 16 images at once, and from 16 micro-batches of one image. How long is the difference of the two, over
# the length of the first one: about 0, about 0.1, or about 1?

# %% [markdown]
# ## 2 Predict
#
# A norm that is given one image subtracts that image's mean. What can the network no longer see, that it sees
# among 16 images?

# %%
from minidist.course.lesson import check, predict, reveal, solution

length_guess = predict("length of the difference over that of the gradient", example=0.5)

# %%
from unittest.mock import patch

import numpy as np

from minidist import (
    Adam,
    DistributedDataParallel,
    SimWorld,
    Tensor,
    TrainConfig,
    batch_coordinates,
    cross_entropy,
    glyphs,
)
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.nn import CNN
from minidist.parallel.running_statistics import RunningStatistics
from minidist.parallel.sync_batch_norm import convert_sync_batchnorm, sync_batch_norm_bytes
from minidist.report import show
from minidist.report.frame import new_figure, tidy

# %% [markdown]
# ## 3 The idea and its picture
#
# In the core lessons so far a batch could be cut wherever one liked: gradients are sums over rows. **Batch
# normalisation looks at all rows that it is given, so each way of cutting a batch computes something else.** Ranks
# that merge their statistics compute what one device does. This saves the result of a large batch on small
# memories, and costs messages in every norm, forward and backward, for which all ranks wait.
#
# The gradient of the first convolution, from 16 images in one or more micro-batches. (`batch_coordinates`
# says which step and which rows of the batch the norms see, so that their moving averages are merged in
# order.)


# %%
def gradient(parts, norm, batch=0):
    """The gradient of the first convolution, from 16 images in `parts` micro-batches."""
    data, rows = glyphs(), 16 * batch + np.arange(16).reshape(parts, -1)
    model = CNN((1, 12, 12), data.classes, channels=4, blocks=2, norm=norm, dtype=np.float64)
    for part in rows:
        images, labels = data.rows(part)
        with batch_coordinates(0, int(part[0])):
            cross_entropy(model(Tensor(images.astype(np.float64))), labels, 16).backward()
    return model.stem.first.conv.weight.grad


def differences(counts, norm, batch):
    """How long the differences from the whole gradient are, over its length."""
    whole = gradient(1, norm, batch)
    cuts = [gradient(parts, norm, batch) for parts in counts]
    return [float(np.linalg.norm(cut - whole) / np.linalg.norm(whole)) for cut in cuts]


# %% [markdown]
# Without norms the cut changes nothing; with norms every number of micro-batches gives another
# gradient. At 1.0 the difference is as long as the gradient itself. The line is the mean of five batches, and the band
# has all five:

# %%
counts = (1, 2, 4, 8, 16)
figure = new_figure(8, 3.2)
axes = figure.add_subplot()
for norm, name, colour in ((False, "without norms", "#4477AA"), (True, "with norms", "#EE6677")):
    batches = [differences(counts, norm, batch) for batch in range(5 if norm else 1)]
    means = np.mean(batches, axis=0)
    print(f"{name:14} micro-batches {counts}: difference {np.round(means, 2)} on average")
    axes.plot(counts, means, "o-", color=colour, label=name)
    axes.fill_between(
        counts, np.min(batches, axis=0), np.max(batches, axis=0), color=colour, alpha=0.2
    )
    assert np.max(batches) < 1e-12 or norm
axes.set_xscale("log", base=2)
axes.set_xticks(counts, counts)
axes.set_title("the gradient of 16 images in micro-batches, and in one", fontsize=10, loc="left")
axes.set_xlabel("micro-batches")
axes.set_ylabel("difference / length")
axes.legend(fontsize=8)
tidy(axes)
show(figure)
length_guess.judge(means[-1], within=0.2)

# %% [markdown]
# Among 16 images one may be brighter than another. Once each has had its own mean subtracted, none is: what all pixels
# of an image have in common is lost in a norm of one image.

# %% [markdown]
# ## 4 The code
#
# How statistics of parts are merged: the mean of all rows is the weighted mean of the means, and
# their variance has two parts, within and between (Chan et al., 1979).


# %%
def merged(parts):
    rows = sum(n for _, _, n in parts)
    mean = sum(m * n for m, _, n in parts) / rows
    return mean, sum((v + (m - mean) ** 2) * n for m, v, n in parts) / rows, rows


# %% [markdown]
# Ten numbers in parts of seven and three:

# %%
numbers = np.random.default_rng(0).normal(size=10)
parts = [(part.mean(), part.var(), len(part)) for part in (numbers[:7], numbers[7:])]
mean, variance, _ = merged(parts)
print(f"merged: off by {abs(mean - numbers.mean()):.0e} and {abs(variance - numbers.var()):.0e}")
average = (parts[0][1] + parts[1][1]) / 2
print(f"the mean of the variances: off by {abs(average - numbers.var()):.2f}")

# %% [markdown]
# Two layers use it. SyncBatchNorm merges what all ranks have in the forward pass, and normalises by
# that ([sync_batch_norm.py](../minidist/parallel/sync_batch_norm.py)). GPipe's batch norm normalises by the
# micro-batch alone, and merges only the moving average by which the model is evaluated later, once per
# mini-batch ([batch_norm.py](../minidist/nn/batch_norm.py)).

# %% [markdown]
# ## 5 Check
#
# The smallest example of what is lost: a norm of two rows. What differs between them is gone, except for the sign:

# %%
two_rows = np.random.default_rng(1).normal(size=(2, 3))
normalised = (two_rows - two_rows.mean(axis=0)) / two_rows.std(axis=0)
print(normalised)

# %% [markdown]
# That cut batches give other gradients is not an error of the pipeline. One device that trains on the
# same micro-batches computes the same gradients, bit for bit, and evaluates the same model. `compare`
# checks this for every layout:

# %%
JOB = {
    "model": "cnn",
    "layers": 2,
    "width": 4,
    "data": "glyphs",
    "global_batch": 16,
    "optimizer": "sgd",
    "lr": 0.1,
}


def against_one_device(ranks, **settings):
    """The verdict on three steps: every gradient, weight, optimizer state and held-out loss."""
    config = TrainConfig.make(**{**JOB, "steps": 3, "evaluate_every": 1, **settings})
    return SimWorld(ranks).run(compare_rank, config)[0]


# %% [markdown]
# Two stages, two replicas and two micro-batches. With `reduction="ordered"` the ranks add in one device's
# order, so every bit must agree.

# %%
verdict = against_one_device(4, pp=2, dp=2, accumulation=2, reduction="ordered")
print("largest difference:", max(verdict.max_difference.values()))
assert verdict.equal

# %% [markdown]
# To compute the gradient of the whole batch, the ranks must normalise together. Then four ranks
# with 4 images each equal one device with 16 images, up to rounding.

# %%
verdict = against_one_device(4, dp=4, batch_norm="sync", precision="fp64")
print(f"largest difference: {max(verdict.max_difference.values()):.0e}")
assert verdict.equal

# %% [markdown]
# What it costs, for the five norms of the network, one in the stem and two per block. Forward each rank sends the
# number of its rows and two numbers for each of C channels to every other rank. In backward every input has changed
# the mean and the variance that all outputs use; so an all-reduce sums two numbers for each channel, one for each of
# these two:

# %%
forward, backward = sync_batch_norm_bytes(4, 4)
world = SimWorld(4)
world.run(train, TrainConfig.make(**JOB, dp=4, batch_norm="sync", steps=1))
sent = sum(trace.bytes_by_purpose()["batch_norm"] for trace in world.traces)
print(f"a norm: {forward:,} B forward, {backward:,} B backward; five norms, both ways: {sent:,} B")
assert forward == 4 * 3 * 8 * (1 + 2 * 4)  # n (n-1) 8 (1 + 2 C)
assert backward == 2 * 3 * 8 * 2 * 4  # 2 (n-1) 8 x 2 C, from all ranks together
assert sent == 5 * (forward + backward)

# %% [markdown]
# ## 6 Break it
#
# Four data-parallel ranks, each with another camera: the images of rank r are r + 1 times as bright. After
# training each rank evaluates its model on the same 200 images, 50 of each brightness. With `together` the
# norms are SyncBatchNorm, without it GPipe's. `model.stem.first.norm.running` has the moving averages of the
# first norm:

# %%
data = glyphs()
held_out, held_out_labels = data.rows(np.arange(1800, 2000))
held_out = held_out.astype(np.float64) * np.repeat([1, 2, 3, 4], 50)[:, None]


def train_on_a_camera(comm, together=False, steps=120, lr=0.03):
    """Returns the weights, one channel's moving average, and the part of images named rightly."""
    model = CNN((1, 12, 12), data.classes, channels=8, blocks=2, dtype=np.float64)
    model = convert_sync_batchnorm(model, comm) if together else model
    parallel = DistributedDataParallel(model, comm)
    optimizer = Adam(model.parameters())
    for step in range(steps):
        images, labels = data.rows((np.arange(16) + 16 * (4 * step + comm.rank)) % 1600)
        images = (1 + comm.rank) * images.astype(np.float64)
        with batch_coordinates(step, 16 * comm.rank):
            cross_entropy(parallel(Tensor(images)), labels).backward()
        optimizer.lr = lr * (1 - step / steps)
        optimizer.step()
        parallel.zero_grad()
    model.eval()
    right = (model(Tensor(held_out)).data.argmax(axis=1) == held_out_labels).mean()
    weights = np.concatenate([p.data.ravel() for p in model.parameters()])
    return weights, model.stem.first.norm.running[0][1], right


# %% [markdown]
# Program 1 is the control: all ranks normalise together. In program 2 each camera's images are normalised by themselves
# in training, so the network never sees that one is brighter than another; in evaluation one moving average serves
# them all. That is a choice, and a bad one here. **Program 3 has the bug**: the message that merges the moving averages,
# `RunningStatistics.combine`, is missing (`patch.object` replaces it by a function that does nothing). Training is
# the same as in program 2, to the last bit, but each rank evaluates another model. Here only rank 3 recognises clearly
# fewer; the other three lose hardly anything, and the choice of program 2 costs more than the bug:

# %%
together = SimWorld(4).run(train_on_a_camera, True)
merged = SimWorld(4).run(train_on_a_camera)
with patch.object(RunningStatistics, "combine", lambda self: None):
    wrong = SimWorld(4).run(train_on_a_camera)
for name, ranks in (("1 together", together), ("2 merged", merged), ("3 not merged", wrong)):
    means, parts = ([round(float(rank[i]), 2) for rank in ranks] for i in (1, 2))
    print(f"{name:12}: moving average on each rank {means}, recognised {parts}")
same = all(np.array_equal(rank[0], merged[0][0]) for rank in merged + wrong)
print("merged or not, the same weights:", same)
assert same
assert together[0][2] > merged[0][2] + 0.2

# %% [markdown]
# ## 7 Exercise: SyncBatchNorm
#
# Each rank has rows `x` of shape (rows, channels); the number of rows may differ from rank to rank,
# and may be 0. Return this rank's rows minus the mean of *all* rows, divided by sqrt(variance of
# all rows + eps), for each channel; the variance is the biased one, which divides by the number of rows.
#
# Judged: the result, on any number of ranks, and the bytes: a rank sends its statistics to every other
# one once, and not the rows themselves.


# %%
def sync_batch_norm(comm, x, eps):
    return (x - x.mean(axis=0)) / np.sqrt(x.var(axis=0) + eps) if len(x) else x


check("16b.sync_batch_norm", sync_batch_norm)

# %%
reveal("16b.sync_batch_norm")
check("16b.sync_batch_norm", solution("16b.sync_batch_norm"))

# %% [markdown]
# ## 8 Takeaway
#
# - Batch norm is not a sum over rows: **each way of cutting a batch computes another function**.
#   GPipe uses the statistics of micro-batches in training, and merges them for evaluation.
# - Statistics can be merged: the number of rows, the mean and the variance of each part give those
#   of the whole, with **n (n-1) 8 (1 + 2 C) bytes** for one norm, from all ranks together. SyncBatchNorm does
#   that in every forward pass, and sums two numbers per channel in every backward pass.
# - A training loss shows neither that evaluation uses other statistics nor that each rank has its own.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --model cnn --dp 4 --batch-norm sync --steps 20 --evaluate-every 10
#     mpiexec -n 4 minidist compare --model cnn --pp 2 --dp 2 --microbatches 2 --reduction ordered --steps 3
#     mpiexec -n 2 python mpi_examples/2_data_parallel/image_classifier.py --batch-norm sync

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `BatchNorm`, one step of the moving average per mini-batch | GPipe (Huang et al. 2019); torchgpipe `DeferredBatchNorm` |
# | `--batch-norm sync`, `convert_sync_batchnorm` | PyTorch `torch.nn.SyncBatchNorm.convert_sync_batchnorm`, Horovod `SyncBatchNormalization` |
# | statistics of micro-batches in training | "ghost batch normalization" (Hoffer et al. 2017) |
# | `RunningStatistics.combine` | PyTorch DDP's `broadcast_buffers` sends rank 0's instead, and forgets those of the others |
#
# With any norm, GPipe keeps the activations of all micro-batches until the last forward; another order need not.
#
# Next: [17 1F1B](17_1f1b.ipynb). All lessons are in the [index](README.md).
