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
# Eight rows shall be one training step on two ranks. Rank 0 gets 5 of them and rank 1 gets 3,
# because shards are seldom equal. Take one weight of the model. The mean of its gradient over rank
# 0's rows is 1, over rank 1's rows it is 9. One device with all eight rows would get the mean over
# the rows.
#
# What must both ranks get? And when the whole model has 676 numbers of 8 bytes, how much of it
# leaves a rank in every step, when four ranks sum their gradients round a ring?

# %%
import numpy as np

from minidist import (
    MLP,
    SGD,
    DistributedDataParallel,
    FlatParameters,
    FlopCounter,
    LinkModel,
    MismatchError,
    SimWorld,
    Tensor,
    TrainConfig,
    all_reduce,
    cross_entropy,
)
from minidist.collectives import volume
from minidist.course.lesson import check, expect, predict, solution
from minidist.course.story import story
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train as train_job
from minidist.report import draw, show

# %% [markdown]
# Eight rows of 16 numbers, four classes. Two ranks get 5 and 3 of them: shards are seldom equal.

# %%
rng = np.random.default_rng(0)
rows, targets = rng.normal(size=(8, 16)), rng.integers(0, 4, 8)


def shards(*counts):
    """One (rows, targets) for each rank."""
    ends = np.cumsum(counts)
    return [
        (rows[end - n : end], targets[end - n : end]) for n, end in zip(counts, ends, strict=True)
    ]


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
# One step on two ranks. First rank 0 sends its weights, then each computes on its rows (5 rows take
# longer than 3), then the gradients are summed round the ring. This function made it; part 4
# explains it.


# %%
def train(comm, shards, steps=20, reduction="sum", rows_of="all ranks"):
    """Returns this rank's part of the loss, and the weights, after each step."""
    x, y = shards[comm.rank]
    total = sum(len(targets) for _, targets in shards)
    divisor = {"all ranks": total, "this rank": len(y), "": None}[rows_of]  # None: a mean
    # Rank 0's weights are sent to every rank.
    model = MLP([16, 32, 4], dtype=np.float64, seed=comm.rank)
    flat = FlatParameters(model.parameters())
    parallel = DistributedDataParallel(model, comm, reduction=reduction, flat=flat)
    optimizer = SGD(flat, lr=0.5)
    losses, weights = [], []
    # Counts operations, so that the virtual clock knows what computing costs.
    with FlopCounter() as counter:
        for _ in range(steps):
            flat.zero_grad()
            loss = cross_entropy(parallel(Tensor(x)), y, divisor)
            comm.compute(counter.take(), name="forward")
            loss.backward()
            comm.compute(counter.take(), name="backward")  # what the reducer has not charged yet
            optimizer.step()
            losses.append(loss.item())
            weights.append(flat.data.copy())
    return losses, weights


# %%
slow = LinkModel(flops=2e9, memory_bandwidth=4e9)  # a slow device, so that computing is seen
world = SimWorld(2, links=slow)
world.run(train, shards(5, 3), steps=1)
command = (
    "minidist train --model mlp --data glyphs --dp 2 --steps 1 --trace t.jsonl; minidist report "
    "t.jsonl"
)
show(draw("space-time", world.traces, {"name": "a step on 2 ranks", "command": command}))

# %% [markdown]
# ## 4 The code
#
# In `train` above the loss of a rank is the sum over its rows, divided by the number of rows of
# *all* ranks. `DistributedDataParallel(reduction="sum")` sums the gradients over the ranks while
# `loss.backward()` runs. That is all.
#
# Without the wrapper it is one all-reduce of the gradients between backward and the optimizer:


# %%
def by_hand(comm, shards, steps=20):
    x, y = shards[comm.rank]
    flat = FlatParameters((model := MLP([16, 32, 4], dtype=np.float64, seed=0)).parameters())
    optimizer = SGD(flat, lr=0.5)
    for _ in range(steps):
        flat.zero_grad()
        cross_entropy(model(Tensor(x)), y, sum(len(labels) for _, labels in shards)).backward()
        all_reduce(comm, flat.grad)
        optimizer.step()
    return flat.data


wrapped = SimWorld(2).run(train, shards(5, 3))[0][1][-1]
toy = SimWorld(2).run(by_hand, shards(5, 3))[0]
print(f"max |by hand - wrapped| after 20 steps = {np.abs(toy - wrapped).max():.0e}")

# %% [markdown]
# The library's version ([gradients.py](../minidist/core/parallel/gradients.py)) starts the all-reduce while
# backward still runs, bucket by bucket: [lesson 06b](06b_buckets_and_overlap.ipynb).

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
# Is the training the same as on one device? The question is not whether the losses look alike, but
# how far apart the weights are after each step.


# %%
def compare(parallel, single):
    """Return per step the loss of all ranks together, the loss of one device, and max |w_parallel
    - w_single|.
    """
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
show(
    draw(
        "loss",
        [],
        {
            **header,
            "title": "shards (3, 1, 2, 2), divided by all rows",
            "command": "part 5 of lessons/06_data_parallel_is_one_big_batch.py",
        },
    )
)

# %% [markdown]
# The bytes, counted by purpose, beside the closed forms. `startup` is rank 0's weights and a digest
# of the model's shapes.

# %%
world = SimWorld(4)
(_, weights), *_ = world.run(train, shards(3, 1, 2, 2), steps=5)
size = weights[0].size
reduce_elements = sum(volume("all_reduce", "ring", size, 4, rank).elements for rank in range(4))
formula = {
    "gradient_reduce": 5 * 8 * reduce_elements,
    "startup": volume("broadcast", "naive", 1, 4, 0).elements * (8 * size + 16),
}
per_step = world.traces[0].bytes_by_purpose()["gradient_reduce"] // 5
print(f"the model has {8 * size:,} B; rank 0 sends {per_step:,} B of gradients per step")
share.judge(per_step / (8 * size), within=0.02)
command = (
    "minidist train --model mlp --data glyphs --dp 4 --steps 5 --trace t.jsonl; minidist report "
    "t.jsonl"
)
header = {
    "name": "5 steps on 4 ranks",
    "closed_form": formula,
    "command": f"{command} --picture bytes-by-purpose",
}
show(draw("bytes-by-purpose", world.traces, header))

# %% [markdown]
# **The batch has grown; which learning rate?** Four ranks of 2 rows each train on a batch of 8. A
# rate that is right for 2 rows makes a quarter as many steps per row read, so it is taken four times
# (Goyal et al. 2017): one step of 4 lr along the mean of four small gradients goes about as far as
# four small steps do. At the start, while the weights change fast, that goes too far; so the rate
# climbs to it by equal amounts over the first W steps, from the rate of the small batch.
#
#     minidist train --dp 4 --micro-batch 2 --base-batch 2 --lr-scaling linear:W

# %%
GROWN = {"data": "markov", "layers": 1, "width": 16, "heads": 2, "context": 8, "dp": 4}
GROWN |= {"micro_batch": 2, "optimizer": "sgd", "lr": 0.1, "steps": 5}
GROWN |= {"base_batch": 2, "lr_scaling": "linear:3", "reduction": "ordered"}


def rates(state):
    """Print the learning rate of a step."""
    if state.rank == 0:
        rate = GROWN["lr"] * state.job.lr_factor(state.step)
        print(f"step {state.step}: learning rate {rate:.2f}")


rates.reads_tensors = False
SimWorld(4).run(train_job, TrainConfig.make(**GROWN), [rates])
verdict = SimWorld(4).run(compare_rank, TrainConfig.make(**GROWN))[0]
print(verdict.sentence())
assert verdict.equal

# %% [markdown]
# It is a rule of thumb that holds up to a batch that the noise of the gradient limits: [10b Batch
# size and noise](10b_batch_size_and_noise.ipynb) measures where.
#
# ## 6 Break it
#
# `reduction="mean"` is what PyTorch does: each rank takes the mean over its own rows, and the means
# are averaged. For equal shards it is right. For shards of 5 and 3 it trains *another* problem, in
# which the 3 rows weigh more. The loss knows over how many rows it is a mean, so the ranks compare
# these numbers in the headers of their gradient messages, and such a job ends in its first step:

# %%
with expect(MismatchError):
    SimWorld(2).run(train, shards(5, 3), reduction="mean", rows_of="")

# %% [markdown]
# PyTorch does not compare them. A divisor is taken as it is given, so dividing by the rank's own
# rows shows what would happen. Look how healthy the loss is:

# %%
for counts in ((4, 4), (5, 3)):
    parallel = SimWorld(2).run(train, shards(*counts), reduction="mean", rows_of="this rank")
    header = compare(parallel, single)
    header["losses"] = [loss / 2 for loss in header["losses"]]
    print(
        f"mean of means, shards {counts}: max |w_parallel - w_single| = "
        f"{max(header['max_difference']):.1e}"
    )
show(
    draw(
        "loss",
        [],
        {
            **header,
            "title": "shards (5, 3), mean of means",
            "command": "part 6 of lessons/06_data_parallel_is_one_big_batch.py",
        },
    )
)


# %% [markdown]
# The other classic: a rank that forgets to synchronise. Here the loop calls the model and not its
# wrapper; the replicas drift apart, and each loss on its own looks fine. (`no_sync()` with nothing
# after it does the same in other libraries; here the optimizer refuses to step.)


# %%
def forgotten(comm, shards, steps=20):
    x, y = shards[comm.rank]
    model = MLP([16, 32, 4], dtype=np.float64, seed=0)
    flat = FlatParameters(model.parameters())
    optimizer = SGD(flat, lr=0.5)
    for _ in range(steps):
        flat.zero_grad()
        loss = cross_entropy(model(Tensor(x)), y)
        loss.backward()
        optimizer.step()
    return loss.item(), flat.data.copy()


(loss_0, w_0), (loss_1, w_1) = SimWorld(2).run(forgotten, shards(5, 3))
print(
    f"losses {loss_0:.4f} and {loss_1:.4f}, but max |w_rank0 - w_rank1| = "
    f"{np.abs(w_0 - w_1).max():.4f}"
)
assert np.abs(w_0 - w_1).max() > 0.01

# %% [markdown]
# ## 7 Exercise: a weighted average
#
# Rank r has `gradient`, the mean over its `count` rows (or over its tokens that are not masked).
# Return the mean over the rows of all ranks, the same on every rank. A rank may have no rows: then
# its mean is `nan`. Use `all_reduce` from `minidist.collectives`; one call is enough.


# %%
def weighted_average(comm, gradient, count):
    return all_reduce(comm, gradient.copy(), op="avg")


check("06.weighted_average", weighted_average)

# %%
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
# `minidist plan` counts it ([story.py](../minidist/course/story.py)):

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
# [06f Data: caching and loading](06f_loading.ipynb). All of them are in the [index](README.md).
