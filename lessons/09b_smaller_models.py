# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09b Smaller models
#
# *45 minutes. Before it: 06 and 06d.*
#
# ## 1 The case
#
# A network for pictures of digits recognises 83 of 100 that it has never seen. It shall become
# small. After step 30 of 150 four fifths of its weights, the smallest ones, become zero and stay
# zero; then the training goes on for 120 steps. Another run does the same little by little, between
# steps 30 and 100.
#
# How many percent does each of the two recognise at the end? And while it trains on three ranks:
# where all ranks know which weights are zero, their gradients need not travel. How many times less
# does a rank send in a step at the end?

# %%
import tempfile

import numpy as np

from minidist import (
    MLP,
    Adam,
    DistributedDataParallel,
    SimWorld,
    Tensor,
    TrainConfig,
    UsageError,
    cross_entropy,
    glyphs,
    no_grad,
)
from minidist.course.lesson import check, expect, predict, reveal, solution
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train as train_job
from minidist.parallel.compressor import compress
from minidist.report import draw, show
from minidist.techniques.distillation.loss import distillation_loss
from minidist.techniques.pruning.pruner import KeptEntries, Part, Pruner, prunable
from minidist.techniques.pruning.schedule import SparsitySchedule
from minidist.techniques.pruning.selection import keep_largest, magnitude_keys, selection_bytes
from minidist.techniques.quantization.fake_quantize import (
    affine_grid,
    fake_quantize,
    symmetric_grid,
)
from minidist.techniques.quantization.layers import (
    convert,
    int8_bytes,
    int8_matmul,
    observers_of,
    prepare_qat,
)
from minidist.techniques.quantization.ranges import ranges_volume, update_ranges

# %% [markdown]
# ## 2 Predict
#
# Eight percentage points off is good enough.

# %%
guess = {
    "at once": predict("right after pruning at once", example=40, unit="%"),
    "little by little": predict("right after pruning little by little", example=82, unit="%"),
}
bytes_guess = predict("times fewer bytes in a step at the end", example=2.0)

# %% [markdown]
# ## 3 The idea and its picture
#
# Train a model that is small **when it is used**: weights and inputs of 8 bits (*quantise*), most
# weights zero (*prune*), or a small model that learns from a large one (*distil*). What it saves: a
# quarter of the bytes of a weight and integer products; with pruning also bytes of gradients while
# it trains. What it costs: accuracy, unless the training knows what will be lost. And on several
# ranks one thing has to be watched: **rounding and pruning are decisions, and all ranks must decide
# alike**.
#
# The loss of a dense float32 model, and of one that rounds to 8 bits and prunes four fifths of its
# weights on the way (steps 30 to 100). It is set back, and recovers.

# %%
images, labels = glyphs().rows(np.arange(2000))
ROWS, STEPS = 1600, 150  # the other 400 are never trained on


def train(comm, int8=False, schedule=None, agree=True, steps=STEPS):
    """Returns (losses, model, weights, pruner, what this rank sent in the last step)."""
    model = MLP([images.shape[1], 64, 10], dtype=np.float64)
    model = prepare_qat(model) if int8 else model
    observers, pruner = observers_of(model), schedule and Pruner(prunable(model), schedule)
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
        update_ranges(observers, comm if agree else None)
        losses.append(loss.item())
        sent.append(comm.trace.bytes_by_purpose().get("gradient_reduce", 0))
    return losses, model, flat.data.copy(), pruner, sent[-1] - sent[-2]


def right(model):
    with no_grad():
        outputs = model.eval()(Tensor(images[ROWS:].astype(np.float64))).data
    return float(100 * (outputs.argmax(axis=1) == labels[ROWS:]).mean())


gradually = SparsitySchedule(0.8, 30, 100, 5)
dense = SimWorld(1).run(train)[0]
small = SimWorld(1).run(train, int8=True, schedule=gradually)[0]
command = (
    "minidist train --model mlp --steps 150 --quantize int8 --sparsity 0.8 --sparsity-schedule "
    "30,100,5 --trace t.jsonl; minidist report t.jsonl --picture loss"
)
header = {
    "losses": small[0],
    "reference_losses": dense[0],
    "command": command,
    "title": "dense float and sparse INT8",
}
show(draw("loss", [], header, names=("dense, float", "80 % zeros, INT8")))

# %% [markdown]
# ## 4 The code
#
# **Quantise.** A grid is a scale s, an integer z that stands for 0, and the smallest and the
# largest integer. Training computes with the points of the grid, in floats. Rounding has
# the derivative 0 almost everywhere, so with it no weight would learn; backward therefore leaves
# the rounding out. That is the *straight-through estimator*. Where a value was clamped, the
# gradient is 0.


# %%
def toy_fake_quantize(x, s, z, low=0, high=255):
    """The values of x on the grid, and where the gradient passes."""
    levels = np.round(x / s) + z
    return (np.minimum(np.maximum(levels, low), high) - z) * s, (low <= levels) & (levels <= high)


values, passes = toy_fake_quantize(np.array([-0.3, 0.26, 1.0, 30.0]), s=0.1, z=2)
print("on a grid of tenths from -0.2 to 25.3:", np.round(values, 3), "gradient:", passes)

# %% [markdown]
# The library's version is [fake_quantize.py](../minidist/techniques/quantization/fake_quantize.py). The range of a weight is known. The range of a layer's inputs is observed, and at the end of a
# step the ranks agree on it: two numbers per layer, and a maximum, which has no order of additions
# to care for ([quantization.py](../minidist/techniques/quantization/ranges.py)).

# %% [markdown]
# **Prune.** After step t the smallest weights become zero, as many as the schedule says (Zhu and
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
# First the integers. One layer by hand: uint8 inputs, int8 weights, sums in int32; the zero point
# of the inputs is taken off afterwards, once per output. The floats of training compute the same:

# %%
rng = np.random.default_rng(0)
x, w = rng.normal(1, 1, (3, 5)), rng.normal(0, 1, (5, 2))
inputs, weights = (
    affine_grid(x.min(), x.max(), np.float64),
    symmetric_grid(np.abs(w).max(), np.float64),
)
q, p = inputs.quantize(x), weights.quantize(w)
total = int8_matmul(q, p) - int(inputs.zero_point) * p.sum(axis=0, dtype=np.int32)
floats = fake_quantize(Tensor(x), inputs).data @ fake_quantize(Tensor(w), weights).data
print(f"{q.dtype} x {p.dtype} -> {total.dtype}; first row {total[0]}")
print(
    "max |integers x scales - floats| = "
    f"{np.abs(total * inputs.scale * weights.scale - floats).max():.1e}"
)
assert np.allclose(total * inputs.scale * weights.scale, floats, rtol=0, atol=1e-12)

# %% [markdown]
# A whole model, on three ranks and on one: the grids are those of all rows, so the weights agree up
# to the order of additions inside a product; and on three ranks they have the same bits. Then the
# model is converted.

# %%
world = SimWorld(3)
(_, model, parallel, *_), (_, other, second, *_), _ = world.run(train, int8=True, steps=40)
single = SimWorld(1).run(train, int8=True, steps=40)[0][2]
print(
    f"max |w_parallel - w_single| = {np.abs(parallel - single).max():.1e}; ranks 0 and 1: "
    f"{np.abs(parallel - second).max():.0f}"
)
assert np.array_equal(parallel, second)
assert np.allclose(parallel, single, rtol=0, atol=1e-6)

sent = sum(trace.bytes_by_purpose()["quantization_range"] for trace in world.traces)
print(
    f"ranges: {sent:,} B from all ranks in 40 steps; the formula says "
    f"{40 * 8 * ranges_volume(2, 3):,} B"
)
assert sent == 40 * 8 * ranges_volume(2, 3)

sizes, rounded = int8_bytes(model), right(model)
integers = right(convert(model))
print(f"weights: {sizes['weight_bytes']:,} B instead of {sizes['float_bytes'] // 2:,} B in float32")
print(f"right: {rounded:.1f} % rounded, {integers:.1f} % as integers")
assert rounded == integers

# %% [markdown]
# Now the zeros.

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
whole = rng.standard_normal(90_000).astype(np.float32)


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
# **Distil.** A teacher is a checkpoint, and a student a job that names it. Here the last of four
# ranks has the teacher and sends its logits; the others train the student. Where the teacher is
# changes no bit of the student:

# %%
JOB = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "context": 16,
    "data": "markov",
    "micro_batch": 2,
    "reduction": "ordered",
}
with tempfile.TemporaryDirectory() as folder:
    SimWorld(1).run(
        train_job,
        TrainConfig.make(**{**JOB, "layers": 2, "width": 32}, steps=40, lr=0.01, save=folder),
    )
    taught = {
        **JOB,
        "distill_from": folder,
        "temperature": 2.0,
        "distill_weight": 0.5,
        "dp": 3,
        "steps": 3,
    }
    world = SimWorld(4)
    losses = world.run(train_job, TrainConfig.make(**taught, teacher_ranks=1))[0].losses
    sent = world.traces[3].bytes_by_purpose()["teacher"]
    everywhere = SimWorld(3).run(train_job, TrainConfig.make(**taught))[0].losses
    verdict = SimWorld(4).run(compare_rank, TrainConfig.make(**taught, teacher_ranks=1))[0]
print(verdict.sentence())
print(f"the teacher sent {sent:,} B: 3 steps of 6 samples of 16 tokens, each with 16 logits of 4 B")
assert verdict.equal
assert losses == everywhere
assert sent == 3 * 6 * 16 * 16 * 4

# %% [markdown]
# The loss is one node, and its gradient (1 - a) (softmax(z) - onehot) + a T (q - p) is stable at any temperature:


# %%
def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum()


z, teacher, label, T, a = np.array([1.0, 0.5, -1.0]), np.array([2.0, 1.5, -3.0]), 0, 2.0, 0.5
hard, q, p = softmax(z), softmax(z / T), softmax(teacher / T)
loss = -(1 - a) * np.log(hard[label]) + a * T**2 * (p * np.log(p / q)).sum()
gradient = (1 - a) * (hard - np.eye(3)[label]) + a * T * (q - p)

logits = Tensor(z[None], requires_grad=True)
node = distillation_loss(logits, np.array([label]), teacher[None], T, a, divisor=1)
node.backward()
print(f"the toy's loss {loss:.4f}, the library's {node.item():.4f}")
print(f"max |gradient - the library's| = {np.abs(gradient - logits.grad[0]).max():.0e}")

# %% [markdown]
# The library's version ([loss.py](../minidist/techniques/distillation/loss.py)) also takes rows that do not
# count, and classes that the teacher excludes.

# %% [markdown]
# ## 6 Break it
#
# Ranks that do not agree on ranges round the same number to different grids. Gradients are still
# summed, so the *weights* stay equal and nothing shows; but each rank computes with another model,
# and the INT8 model depends on who saves it:

# %%
results = SimWorld(3).run(train, int8=True, agree=False, steps=40)
scales = [float(model.layers[0].input_grid().scale) for _, model, *_ in results]
scales += [float(model.layers[1].input_grid().scale) for _, model, *_ in results]
print("scales of the second layer's inputs:", *(f"{scale:.5f}" for scale in scales[3:]))
assert np.array_equal(results[0][2], results[1][2])
assert len(set(scales[3:])) == 3

# %% [markdown]
# A model that has seen nothing cannot be converted:

# %%
with expect(UsageError):
    convert(prepare_qat(MLP([4, 4, 2])))

# %% [markdown]
# ## 7 Exercises
#
# **One grid.** Each rank has values `x` (perhaps none). Round them to int8's grid, as floats: 127 is the largest
# magnitude on *any* rank, halves are rounded to even, and where all values are zero they stay zero.


# %%
def one_grid(comm, x):
    scale = np.abs(x).max(initial=0.0) / 127 or 1.0
    return np.clip(np.round(x / scale), -127, 127) * scale


check("09b.one_grid", one_grid)

# %%
reveal("09b.one_grid")
check("09b.one_grid", solution("09b.one_grid"))

# %% [markdown]
# **An all-reduce of what is kept.** `mask` is the same on every rank. Return the sum of all ranks'
# gradients where it is true, 0 elsewhere, and send no more than you must.


# %%
def kept_all_reduce(comm, gradient, mask):
    return gradient * mask


check("09b.kept_all_reduce", kept_all_reduce)

# %%
reveal("09b.kept_all_reduce")
check("09b.kept_all_reduce", solution("09b.kept_all_reduce"))

# %% [markdown]
# **Distil.** A small model learns more from a large one's *probabilities* than from labels: that a
# 3 looks a little like an 8 is in them, the more so when the logits are divided by a temperature
# first (Hinton et al. 2015). Ranks 0 to `teachers` - 1 have the teacher, the others are students:
# student j is rank `teachers` + j, and its teacher is rank j % `teachers`. `logits(j)` returns, on
# a teacher, the logits for student j's rows. Return, on a student, its soft targets softmax(logits
# / temperature), an array (rows, 4); on a teacher an empty one, (0, 4).


# %%
def distil(comm, teachers, logits, rows, temperature):
    if comm.rank < teachers:
        return np.zeros((0, 4))
    return np.full((rows, 4), 0.25)


check("09b.distil", distil)

# %%
reveal("09b.distil")
check("09b.distil", solution("09b.distil"))

# %% [markdown]
# ## 8 Takeaway
#
# - **y = (clamp(round(x / s) + z) - z) s**, gradient 1 inside the range: a model that trains with
#   the rounding loses nothing when it is converted. Ranks agree on ranges with a maximum, two
#   numbers per layer.
# - **s_t = s_f (1 - (1 - (t - t0) / (t1 - t0))³)**: prune fast, then slowly, and let it recover.
#   Equal weights give equal masks, so only **2 (n-1)/n of the kept gradients** are sent, and no
#   mask.
# - **(1 - a) cross-entropy + a T² KL(p || q)**, p and q at temperature T: a student needs the
#   teacher's logits and nothing else, so the teacher may be anywhere: on each rank, in shards, on
#   ranks of its own, or on the disk.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/7_more/quantization.py
#     mpiexec -n 4 python mpi_examples/7_more/sparsity.py
#     mpiexec -n 4 python mpi_examples/7_more/distillation.py
#     mpiexec -n 4 minidist train --dp 4 --zero 1 --quantize int8 --evaluate-every 10 --steps 20
#     mpiexec -n 4 minidist train --dp 4 --sparsity 0.8 --sparsity-schedule 5,15 --steps 20
#     mpiexec -n 2 minidist train --dp 2 --sparsity-pattern 2:4 --sparsity-schedule 5 --steps 10
#     mpiexec -n 3 minidist train --dp 2 --teacher-ranks 1 --distill-from runs/teacher --layers 1 --steps 20

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `fake_quantize`, `affine_grid`, `symmetric_grid` | PyTorch `torch.fake_quantize_per_tensor_affine`, `torch.fake_quantize_per_channel_affine`; TensorFlow `fake_quant_with_min_max_vars` |
# | `prepare_qat`, `convert` | PyTorch `torch.ao.quantization.prepare_qat`, `convert`; torchao `QATConfig(step="prepare")`, `step="convert"` |
# | observers, `--quantize-observer` | PyTorch `MinMaxObserver`, `MovingAverageMinMaxObserver` |
# | `update_ranges` at the end of a step | NVIDIA Transformer Engine: delayed scaling, `DelayedScaling(reduce_amax=True)` |
# | `SparsitySchedule` | TensorFlow `tfmot.sparsity.keras.PolynomialDecay(power=3)`; DeepSpeed `"sparse_pruning": {"schedule_offset", "schedule_offset_end", "dense_ratio"}` |
# | `--sparsity-scope layer`, `global` | PyTorch `torch.nn.utils.prune.l1_unstructured`, `global_unstructured` |
# | `--distill-from`, `--temperature`, `--distill-weight` | Hugging Face's `DistillationTrainer` examples: `alpha`, `temperature`; TRL `GKDTrainer` |
# | `--sparsity-pattern 2:4` | PyTorch `torch.sparse.to_sparse_semi_structured`; NVIDIA ASP (Apex) |
#
# Next: [10 Accumulate and recompute](10_accumulate_and_recompute.ipynb). All of them are in the
# [index](README.md).
