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
# *35 minutes. Before it: 06.*
#
# ## 1 The case
#
# A network for pictures of digits recognises 83 of 100 that it has never seen. It should become
# small. After step 30 of 150 four fifths of its weights, the smallest ones, become zero and stay
# zero; then the training goes on for 120 steps. Another run does the same little by little, between
# steps 30 and 100.
#
# How many percent does each of the two recognise at the end? And while it trains on three ranks:
# where all ranks know which weights are zero, their gradients need not travel. How many times less
# does a rank send in a step at the end?

# %% [markdown]
# ## 2 Predict
#
# Eight percentage points off is good enough.

# %%
from minidist.course.lesson import check, picture, predict, reveal, solution

guess = {
    "at once": predict("right after pruning at once", example=40, unit="%"),
    "little by little": predict("right after pruning little by little", example=82, unit="%"),
}
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
from minidist.techniques.pruning.selection import keep_largest, magnitude_keys, selection_bytes

# %% [markdown]
# ## 3 The idea and its picture
#
# *Prune*: set most weights to zero, the smallest ones, and let the rest of the training recover from
# it. What it saves: the zeros need not be stored, and their gradients need not travel. What it
# costs: accuracy, the less the more slowly it is done. And on several ranks **which weights are zero
# is a decision, and all ranks must decide alike**.
#
# The loss of a dense model, and of one that prunes four fifths of its weights on the way (steps 30
# to 100). It is set back, and recovers.

# %%
images, labels = glyphs().rows(np.arange(2000))
ROWS, STEPS = 1600, 150  # the other 400 are never trained on


def train(comm, schedule=None, steps=STEPS):
    """Returns (losses, model, weights, pruner, what this rank sent in the last step)."""
    model = MLP([images.shape[1], 64, 10], dtype=np.float64)
    pruner = schedule and Pruner(prunable(model), schedule)
    ddp = DistributedDataParallel(model, comm, reduction="sum", algorithm="ordered")
    if pruner:
        ddp.register_comm_hook(KeptEntries(comm, pruner, "sum", "ordered"), compress)
    flat, optimizer, losses, sent = ddp.flat, Adam(ddp.flat, lr=0.03), [], [0]
    mine = np.array_split(np.arange(ROWS), comm.size)[comm.rank]
    for step in range(steps):
        flat.zero_grad()
        loss = cross_entropy(
            ddp(Tensor(images[mine].astype(np.float64))), labels[mine], divisor=ROWS
        )
        loss.backward()
        optimizer.step()
        if pruner:
            pruner.prune(step + 1, [Part(p.name, p.data.reshape(-1)) for p in flat.parameters])
            flat.updated()
        losses.append(loss.item())
        sent.append(comm.trace.bytes_by_purpose().get("gradient_reduce", 0))
    return losses, model, flat.data.copy(), pruner, sent[-1] - sent[-2]


def right(model):
    with no_grad():
        outputs = model.eval()(Tensor(images[ROWS:].astype(np.float64))).data
    return float(100 * (outputs.argmax(axis=1) == labels[ROWS:]).mean())


gradually = SparsitySchedule(0.8, 30, 100, 5)
dense = SimWorld(1).run(train)[0]
small = SimWorld(1).run(train, schedule=gradually)[0]
picture(
    "loss",
    [],
    "minidist train --model mlp --steps 150 --sparsity 0.8 --sparsity-schedule 30,100,5",
    losses=small[0],
    reference_losses=dense[0],
    title="dense and sparse",
    names=("dense", "80 % zeros"),
)

# %% [markdown]
# ## 4 The code
#
# After step t the smallest weights become zero, as many as the schedule says (Zhu and
# Gupta 2017, equation 1). Equal weights give equal masks, so no mask is sent; and where all ranks
# know what is zero, an all-reduce can leave it out ([pruner.py](../minidist/techniques/pruning/pruner.py)).


# %%
def toy_sparsity(done, final=0.8, begin=30, end=100):
    """The share of zeros after `done` steps: fast at first, then slowly."""
    part = min(max((done - begin) / (end - begin), 0), 1)
    return final - final * (1 - part) ** 3


for done in (0, 30, 50, 70, 100, 150):
    print(f"after step {done:3}: {toy_sparsity(done):.2f}, the library's {gradually.at(done):.2f}")

# %% [markdown]
# ## 5 Check
#
# What the networks recognise, and what a rank sends:

# %%
accuracy = {"dense": right(dense[1])}
for name, schedule in (("at once", SparsitySchedule(0.8, 30, 30)), ("little by little", gradually)):
    world = SimWorld(3)
    (_, sparse, weights, pruner, last), *_ = world.run(train, schedule=schedule)
    accuracy[name] = right(sparse)
for name, percent in accuracy.items():
    print(f"{name:16} {percent:.0f} % right")
    if name in guess:
        guess[name].judge(percent, within=8 / percent)

full = SimWorld(3).run(train, steps=1)[0][4]
kept = weights.size - sum(pruner.pruned(STEPS))
print(f"a rank sends {full:,} B in a dense step, {last:,} B now: {full / last:.1f} times fewer")
print(
    f"the formula, 2 (n-1)/n of 8 B for each of {kept:,} kept entries: about "
    f"{2 * 2 / 3 * 8 * kept:,.0f} B"
)
bytes_guess.judge(full / last, within=0.1)

# %% [markdown]
# Where every rank has only a *shard* of the weights (ZeRO 3), no rank alone can find the smallest
# of all. Sending the weights would do; counting does, too: how many have which top 8 bits, then the
# next 8, until the threshold is known. 256 numbers per digit, however many weights there are:

# %%
whole = np.random.default_rng(0).standard_normal(90_000).astype(np.float32)


def threshold(comm):
    mine = np.array_split(whole, comm.size)[comm.rank]
    return keep_largest([magnitude_keys(mine)], [0], [9_000], 4, comm)[0]


world = SimWorld(3)
mask = np.concatenate(world.run(threshold))
sent = sum(trace.bytes_by_purpose()["pruning"] for trace in world.traces)
print(
    f"{mask.sum():,} of {mask.size:,} kept; sent {sent:,} B, the formula says "
    f"{selection_bytes(1, 1, 4, 3):,} B; "
    f"a gather would be {2 * whole.nbytes:,} B"
)
assert np.array_equal(np.sort(np.abs(whole[mask])), np.sort(np.abs(whole))[-9_000:])
assert sent == selection_bytes(1, 1, 4, 3)

# %% [markdown]
# ## 6 Break it
#
# Prune once and let the optimizer go on. Its average of old gradients is not zero where the weight
# is, so the next step moves the weight away from zero again. The pruner therefore sets the zeros
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
        f"zeros set {'after every step' if every_step else 'once'}: {np.round(parameter.data, 3)}"
    )
    assert (parameter.data[~kept] == 0).all() == every_step

# %% [markdown]
# ## 7 Exercise: an all-reduce of what is kept
#
# `mask` is the same on every rank. Return the sum of all ranks'
# gradients where it is true, 0 elsewhere, and send no more than you must.


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
# - **s_t = s_f (1 - (1 - (t - t0) / (t1 - t0))³)**: prune fast, then slowly, and let it recover.
#   Equal weights give equal masks, so only **2 (n-1)/n of the kept gradients** are sent, and no
#   mask.
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
# Next: [09d Distillation](09d_distillation.ipynb). All of them are in the
# [index](README.md).
