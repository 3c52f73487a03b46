# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09c Pruning
#
# *25 minutes. Before it: 06.*
#
# ## 1 The case
#
# A network that recognises digits in pictures should become
# small: between steps 60 and 200 of 300 four fifths of its weights, the smallest ones, become zero and
# stay zero. It has matrices of 144 x 64 and 64 x 10 weights, and 74 biases, which are not pruned.
#
# It trains on three ranks. Where all ranks know which weights are zero, their gradients need not travel.
# How many times fewer bytes does a rank send in a step at the end?

# %% [markdown]
# ## 2 Predict
#
# Count what is kept. A twentieth off is good enough.

# %%
from minidist.course.lesson import check, picture, predict, reveal, solution

bytes_guess = predict("times fewer bytes in a step at the end", example=2.0)

# %%
import numpy as np

from minidist import (
    MLP,
    Adam,
    DistributedDataParallel,
    Parameter,
    SimWorld,
    Tensor,
    cross_entropy,
    glyphs,
    no_grad,
)
from minidist.parallel.compressor import compress
from minidist.techniques.pruning.pruner import KeptEntries, Part, Pruner, prunable
from minidist.techniques.pruning.schedule import SparsitySchedule

# %% [markdown]
# ## 3 The idea and its picture
#
# *Prune*: set most weights to zero, the smallest ones, and let the rest of the training recover
# from it. The gradients of zeros need not travel. Memory is another matter: in float32 each kept weight needs
# an index of 4 B next to its own 4 B, so a fifth of the weights takes two fifths of the bytes, and
# on ordinary hardware products get no faster, as the zeros lie anywhere. (That is why graphics cards want a regular
# pattern, `2:4` in part 9: two zeros in every four weights.) It costs accuracy, most of it when pruning comes too
# early. And on several ranks **which weights are zero is a decision, and all ranks must make the same one**.
#
# The model, with a pruner that sets zeros after each step. `compress` is called in place of the all-reduce (it is a
# hook), and with `KeptEntries` it sends the gradients of the kept weights only:

# %%
images, labels = glyphs().rows(np.arange(2000))
images = images.astype(np.float64)
ROWS, STEPS = 1600, 300  # the other 400 are never trained on


def prepared(comm, schedule, seed):
    """The model, its data parallelism and its pruner; without a schedule there is none."""
    model = MLP([images.shape[1], 64, 10], dtype=np.float64, seed=seed)
    pruner = schedule and Pruner(prunable(model), schedule)
    ddp = DistributedDataParallel(model, comm, reduction="sum", algorithm="ordered")
    if pruner:
        ddp.register_comm_hook(KeptEntries(comm, pruner, "sum", "ordered"), compress)
    return model, ddp, pruner


# %% [markdown]
# The training, an ordinary loop:


# %%
def train(comm, schedule=None, steps=STEPS, seed=0):
    """Returns (losses, model, weights, pruner, what this rank sent in the last step)."""
    model, ddp, pruner = prepared(comm, schedule, seed)
    flat, optimizer, losses, sent = ddp.flat, Adam(ddp.flat, lr=0.015), [], [0]
    mine = np.array_split(np.arange(ROWS), comm.size)[comm.rank]
    for step in range(steps):
        flat.zero_grad()
        loss = cross_entropy(ddp(Tensor(images[mine])), labels[mine], divisor=ROWS)
        loss.backward()
        optimizer.step()
        if pruner:
            pruner.prune(step + 1, [Part(p.name, p.data.reshape(-1)) for p in flat.parameters])
            flat.updated()
        losses.append(loss.item())
        sent.append(comm.trace.bytes_by_purpose().get("gradient_reduce", 0))
    return losses, model, flat.data.copy(), pruner, sent[-1] - sent[-2]


# %% [markdown]
# The loss of a dense model, and of one that prunes every five steps between steps 60 and 200, until four fifths of
# its weights are zero. The first prunings change little, as the smallest weights matter least. From step 85 on the
# loss jumps at most of them, and recovers only in part:

# %%
gradually = SparsitySchedule(0.8, 60, 200, 5)
dense = SimWorld(1).run(train)[0]
small = SimWorld(1).run(train, schedule=gradually)[0]
picture(
    "loss",
    [],
    "part 3 of lesson 09c",
    losses=small[0],
    reference_losses=dense[0],
    title="dense and sparse",
    names=("dense", "80 % zeros"),
)
print(f"the last loss: dense {dense[0][-1]:.3f}, with 80 % zeros {small[0][-1]:.3f}")

# %% [markdown]
# ## 4 The code
#
# Two functions decide. After step t a share of the weights becomes zero that rises fast at first, and
# then slowly (Zhu and Gupta 2017, equation 1). And the *mask* says which ones: it is true for the
# largest. Ranks with equal weights compute equal masks, so no mask is sent
# ([pruner.py](../minidist/techniques/pruning/pruner.py)).


# %%
def toy_sparsity(done, final=0.8, begin=60, end=200):
    """The share of zeros after `done` steps."""
    part = min(max((done - begin) / (end - begin), 0), 1)
    return final - final * (1 - part) ** 3


def toy_mask(weights, zeros):
    """True for the weights that are kept: the largest ones."""
    kept = np.zeros(weights.size, bool)
    kept[np.argsort(-np.abs(weights), kind="stable")[: weights.size - zeros]] = True
    return kept


for done in (60, 100, 150, 200, 300):
    print(f"after step {done:3}: {toy_sparsity(done):.2f}, the library's {gradually.at(done):.2f}")
print("two zeros of four:", toy_mask(np.array([0.9, -0.3, 0.05, 0.1]), 2))

# %% [markdown]
# ## 5 Check
#
# When should the weights become zero: early, late, or little by little as above? What three networks recognise that
# begin with different weights, dense and with three ways to prune them:


# %%
def right(model):
    with no_grad():
        outputs = model.eval()(Tensor(images[ROWS:])).data
    return float(100 * (outputs.argmax(axis=1) == labels[ROWS:]).mean())


schedules = {"dense": None, "little by little": gradually}
schedules |= {f"at once, step {at}": SparsitySchedule(0.8, at, at) for at in (30, 200)}
accuracy = {}
for name, schedule in schedules.items():
    models = [SimWorld(1).run(train, schedule=schedule, seed=seed)[0][1] for seed in (0, 1, 2)]
    accuracy[name] = [right(model) for model in models]
    each = ", ".join(f"{percent:.0f}" for percent in accuracy[name])
    print(f"{name:17} {each} % right, {np.mean(accuracy[name]):.0f} % in the mean")
assert accuracy["at once, step 30"] == np.min(list(accuracy.values()), axis=0).tolist()
assert all(np.subtract(accuracy["little by little"], accuracy["at once, step 200"]) > 0)

# %% [markdown]
# Four fifths of zeros cost this small network about 15 pictures in a hundred. The choice of the zeros is final, and
# after step 30 it is made by weights that have hardly been trained: every network loses most with it. Little by little
# loses least in each of the three, and is what is usual in large networks, too (Zhu and Gupta 2017).
#
# The bytes of a step, at the beginning and at the end:

# %%
(_, _, weights, pruner, last), *_ = SimWorld(3).run(train, schedule=gradually)
full = SimWorld(3).run(train, steps=1)[0][4]
kept = weights.size - sum(pruner.pruned(STEPS))
print(f"a rank sends {full:,} B in a dense step, {last:,} B now: {full / last:.1f} times fewer")
formula = 2 * 2 / 3 * 8 * kept
print(f"2 (n-1)/n of 8 B for each of {kept:,} kept entries: about {formula:,.0f} B")
bytes_guess.judge(full / last, within=0.05)

# %% [markdown]
# And is the pruned training that of one device, which part 3 has drawn?

# %%
_, _, single, _, _ = small
print(f"max |w_parallel - w_single| = {np.abs(weights - single).max():.0e}")
assert np.array_equal(weights == 0, single == 0)
assert np.abs(weights - single).max() < 1e-6

# %% [markdown]
# ## 6 Break it
#
# Two ranks whose weights differ in a last bit, because each has added in another order (lesson 04b). Two
# weights are nearly equal, and one of them has to go:

# %%
gradient = np.array([1.0, 10.0, 100.0, 1000.0])


def two_sums(comm):
    """Exchange the kept entries of two ranks, and add them."""
    second, third = (0.1 + 0.2, 0.3) if comm.rank == 0 else (0.3, 0.1 + 0.2)
    mask = toy_mask(np.array([0.9, second, third, 0.05]), 2)  # 0.1 + 0.2 is 0.30000000000000004
    own, others = gradient[mask], np.empty(2)
    comm.sendrecv(own, 1 - comm.rank, others, 1 - comm.rank)
    return np.flatnonzero(mask), own + others


for rank, (places, sums) in enumerate(SimWorld(2).run(two_sums)):
    print(f"rank {rank}: the gradients of weights {places} are {sums}")
assert sums[1] == 110

# %% [markdown]
# Both ranks send two numbers, so nothing fails. But the second number of rank 0 is the gradient of
# weight 1, and that of rank 1 the gradient of weight 2. Their sum, 110, belongs to no weight.
#
# A quieter one: prune once and let the optimizer go on. At a pruned weight Adam's average of old gradients is not
# zero, so the next step moves the weight away from zero again. The pruner therefore sets the zeros
# after every step:

# %%
for every_step in (False, True):
    parameter = Parameter(np.array([1.0, 0.1, -0.2, 2.0]))
    optimizer = Adam([parameter], lr=0.01)
    kept = np.array([True, False, False, True])
    for step in range(4):
        parameter.grad = np.array([0.3, 0.2, -0.4, 0.1]) * (kept if step else 1)
        optimizer.step()
        if step == 0 or every_step:
            parameter.data = parameter.data * kept
    print(
        f"zeros set {'after every step' if every_step else 'once'}: {parameter.data.round(3) + 0.0}"
    )
    assert (parameter.data[~kept] == 0).all() == every_step

# %% [markdown]
# ## 7 Exercise: an all-reduce of what is kept
#
# `mask` is the same on every rank. Return the sum of all ranks' gradients where it is true, 0
# elsewhere. The mask may keep all entries or none. Judged: right sums; bytes (par: kept entries only).


# %%
def kept_all_reduce(comm, gradient, mask):
    return gradient * mask


check("09c.kept_all_reduce", kept_all_reduce)

# %%
reveal("09c.kept_all_reduce")
check("09c.kept_all_reduce", solution("09c.kept_all_reduce"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Do not prune before the weights are trained**; the usual schedule is s_t = s_f (1 - (1 - (t - t0) /
#   (t1 - t0))³), fast at first and then slowly.
# - Ranks with equal weights have equal masks, so each rank sends **2 (n-1)/n times the bytes of the kept
#   gradients**, and no mask.
# - A pruned weight has to be set to zero after every step.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/7_more/sparsity.py
#     mpiexec -n 4 minidist train --dp 4 --sparsity 0.8 --sparsity-schedule 5,15 --steps 20
#     mpiexec -n 2 minidist train --dp 2 --sparsity-pattern 2:4 --sparsity-schedule 5 --steps 10

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `SparsitySchedule` | TensorFlow `tfmot.sparsity.keras.PolynomialDecay(power=3)`; DeepSpeed `"sparse_pruning": {"schedule_offset", "schedule_offset_end", "dense_ratio"}` |
# | `--sparsity-scope layer`, `global` | PyTorch `torch.nn.utils.prune.l1_unstructured`, `global_unstructured` |
# | `--sparsity-pattern 2:4` | PyTorch `torch.sparse.to_sparse_semi_structured`; NVIDIA ASP (Apex) |
#
# Next: [09d Distillation](09d_distillation.ipynb). All lessons are in the
# [index](README.md).
