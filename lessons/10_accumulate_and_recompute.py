# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 Accumulate and recompute
#
# *35 minutes. Before it: 02 and 06.*
#
# ## 1 The case
#
# A network of 16 equal layers keeps the output of every layer, and for backward the softmax of the last one:
# 17 arrays of 262,144 B are alive when backward begins, and the memory is too small. There are two ways to
# keep fewer.
#
# One cuts the batch: four *micro-batches* of a quarter of the rows go through the network one after the
# other, and their gradients are added. The other cuts the network into k *segments* of 16/k layers.
# Forward keeps only the input of each segment. When backward comes to a segment, the segment runs forward
# again from its input, and the outputs of all its layers are there until backward has passed them.
#
# With many short segments there are many inputs to keep; with few long ones a segment needs much
# when it runs again. Of k = 1, 2, 4, 8 and 16, which has the lowest peak? And how much more
# arithmetic is it, for forward and backward together, when backward is twice as much work as
# forward?

# %% [markdown]
# ## 2 Predict
#
# Count arrays for k = 1 and for k = 16 first.

# %%
from minidist.course.lesson import check, memory_of, picture, predict, reveal, solution

segments_guess = predict("segments with the lowest peak", example=16)
arithmetic = predict("arithmetic of a step, over that without recomputation", example=1.5)

# %%
from contextlib import nullcontext
from itertools import pairwise

import numpy as np

from minidist import (
    MLP,
    DistributedDataParallel,
    FlatParameters,
    FlopCounter,
    Module,
    SimWorld,
    Tensor,
    cross_entropy,
)
from minidist.base.coordinates import batch_coordinates
from minidist.course.story import story
from minidist.nn import Dropout, checkpoint

LAYERS, WIDTH, ROWS = 16, 64, 512
UNIT = 8 * ROWS * WIDTH  # bytes of one layer's output, for all rows
MOST = 5_000_000  # bytes at the upper end of each picture
rng = np.random.default_rng(0)
# The batch: the inputs of all rows, and the number of each one's right output.
rows, targets = rng.normal(size=(ROWS, WIDTH)), rng.integers(0, WIDTH, ROWS)

# %% [markdown]
# ## 3 The idea and its picture
#
# Train with fewer activation bytes, and change nothing, or only the rounding. **Accumulation** cuts the batch, and
# **recomputation** cuts the network. Accumulation costs nothing here, as long as only the last pass sends (small
# products are less efficient on real devices), recomputation costs one more forward.
#
# The network, and its segments as functions of their input:


# %%
def network(p=0.0):
    """The model and its flat parameters; p: the share that each layer's dropout sets to zero."""
    model = MLP([WIDTH] * (LAYERS + 1), dtype=np.float64)
    model.drop, flat = Dropout(p), FlatParameters(model.parameters())
    flat.data[...] *= 6**0.5  # or 16 layers would make every signal vanish (He et al. 2015)
    return model, flat


def pieces(model, lengths):
    for first, last in pairwise(np.cumsum([0, *lengths])):

        def piece(x, layers=model.layers[first:last]):
            for layer in layers:
                x = model.drop(layer(x))
            return x

        yield piece


# %% [markdown]
# One forward and backward, with segments (their lengths; None: no recomputation) or micro-batches.
# `checkpoint(piece, x)` is the recomputation; part 4 shows it by hand. `memory_of(comm)` counts the bytes that are
# alive, as `account_memory` does in lesson 02, and keeps them for the picture. The parameters are made before it, so
# they are not counted here. `marks` says after how many events forward and backward begin:


# %%
def step(comm, segments=None, micro_batches=1, p=0.0):
    """Returns the gradient, the peak of the activations in outputs of a layer, and the marks."""
    (model, flat), marks = network(p), []
    with memory_of(comm) as account, batch_coordinates(seed=1):  # the seed of all dropouts
        for part in np.array_split(np.arange(ROWS), micro_batches):
            marks.append((len(account.events), "forward"))
            x = Tensor(rows[part])
            for piece in pieces(model, segments or [LAYERS]):
                x = checkpoint(piece, x) if segments else piece(x)
            loss = cross_entropy(x, targets[part], divisor=ROWS)
            marks.append((len(account.events), "backward"))
            loss.backward()
            del x, loss
    return flat.grad, account.peak_by_purpose["activation"] / UNIT, marks


# %% [markdown]
# The memory of one step at one scale: without changes, in four micro-batches, and in two and four segments.
# Look at the light blue, the activations. Without changes they rise once, to 17 arrays: 16 outputs (the last one is
# there because `x` names it) and the softmax. With four micro-batches they rise four times, a quarter as high. With
# segments forward keeps one array for each, a step of the stairs, and backward has a hill for each segment that runs
# again. (The teeth in forward are outputs inside a segment, freed at once.) With more segments the stairs are higher
# and the hills are lower:

# %%
plans = {"as it is": {}, "4 micro-batches": {"micro_batches": 4}}
plans |= {f"{k} segments": {"segments": [LAYERS // k] * k} for k in (2, 4)}
for title, plan in plans.items():
    marks = (world := SimWorld(1)).run(step, **plan)[0][2]
    shown = {"title": title, "most_bytes": MOST, "marks": marks}
    picture("memory", world, "part 3 of lesson 10", **shown)

# %% [markdown]
# ## 4 The code
#
# `checkpoint(fn, x)` runs `fn` without recording and keeps x. When backward comes to it, it runs
# `fn` again, now recording, and runs backward through what it has just recorded
# ([checkpoint.py](../minidist/nn/ops/checkpoint.py)). By hand, for layers tanh(x W):


# %%
def through(layers, x):
    """The inputs of all layers, and the output."""
    inputs = [x]
    for w in layers:
        inputs.append(np.tanh(inputs[-1] @ w))
    return inputs


def backward(layers, kept, g):
    """kept: the input of a segment. Forward again, then back through what it has just made."""
    inputs, gradients = through(layers, kept), []
    for w, x, y in zip(layers[::-1], inputs[-2::-1], inputs[:0:-1], strict=True):
        g = g * (1 - y * y)
        gradients.append(x.T @ g)
        g = g @ w.T
    return g, gradients[::-1]


# %% [markdown]
# Four layers, as one segment and as two. Of the two only x and the input of the second are kept, and
# backward begins with the second:

# %%
layers, x = [rng.normal(size=(3, 3)) for _ in range(4)], rng.normal(size=(5, 3))
_, whole = backward(layers, x, np.ones((5, 3)))

middle = through(layers[:2], x)[-1]  # all that is kept besides x
g, second = backward(layers[2:], middle, np.ones((5, 3)))
_, first = backward(layers[:2], x, g)
same = all(np.array_equal(a, b) for a, b in zip(whole, first + second, strict=True))
print("two segments have the gradients of one, bit for bit:", same)
assert same

# %% [markdown]
# Accumulation needs no code at all: backward adds to the gradients that are there. It needs the right divisor: the
# rows of the whole batch, not of the micro-batch. With its own rows four means are added:

# %%
model = MLP([WIDTH] * 3, dtype=np.float64)
ratios = []
for divisor in (ROWS, None):  # None: the rows of this pass
    model.zero_grad()
    for part in np.array_split(np.arange(ROWS), 4):
        cross_entropy(model(Tensor(rows[part])), targets[part], divisor).backward()
    ratios.append(np.abs(next(model.parameters()).grad).max())
print(f"divided by its own rows, the gradient is {ratios[1] / ratios[0]:.0f} times as large")
assert round(ratios[1] / ratios[0]) == 4

# %% [markdown]
# ## 5 Check
#
# Activations alive at the peak, in layers, compared with a formula: the outputs of the k segments are kept
# (each is the next one's input), and in backward the L/k layers of one segment are there again. One array
# more: the softmax's probabilities, which become the first gradient in place.


# %%
def layers_at_peak(**plan):
    return SimWorld(1).run(step, **plan)[0][1]


print(f"no segments: {layers_at_peak():.0f} layers; L + 1 = {LAYERS + 1}")
peaks = {}
for k in (1, 2, 4, 8, 16):
    peaks[k] = layers_at_peak(segments=[LAYERS // k] * k)
    formula = k + LAYERS // k + 1
    print(f"k = {k:2}: {peaks[k]:2.0f} layers; k + L/k + 1 = {formula:2}")
    assert round(peaks[k]) == formula
segments_guess.judge(min(peaks, key=peaks.get))

# %% [markdown]
# √L equal segments keep the fewest arrays alive, here 4 (Chen et al. 2016). One segment saves nothing: in backward
# all 16 outputs are there again, and the segment's own output besides. (Segments of unequal lengths, and segments
# inside segments, need fewer still: Griewank and Walther 2000, `--recompute budget:BYTES` in part 9.)
#
# And with micro-batches:

# %%
for m in (2, 4):
    peak = layers_at_peak(micro_batches=m)
    print(f"{m} micro-batches: {peak:.2f} layers; (L + 1) / m = {(LAYERS + 1) / m:.2f}")
    assert abs(peak - (LAYERS + 1) / m) < 0.01

# %% [markdown]
# The arithmetic: `FlopCounter` counts the operations of a step. Forward runs twice instead of once, so a step whose
# backward has twice the work of a forward is 2 + 2 in place of 1 + 2. The first layer's input is data, so its input
# gradient is not computed: the ratio is 1.34 and not 4/3:

# %%
flops = {}
for segments in (None, [4] * 4):
    world = SimWorld(1)
    with FlopCounter() as counter:
        world.run(step, segments=segments)
    flops[segments is not None] = sum(number for number, _ in counter.totals.values())
print(f"{flops[False]:,} operations without recomputation, {flops[True]:,} with four segments")
arithmetic.judge(flops[True] / flops[False], within=0.05)

# %% [markdown]
# Does it change a number? With dropout, which must fall on the same elements when a segment runs again:

# %%
single, recomputed = (SimWorld(1).run(step, p=0.1, segments=s)[0][0] for s in (None, [4] * 4))
whole, parts = (SimWorld(1).run(step, micro_batches=m)[0][0] for m in (1, 4))
off, off_parts = np.abs(recomputed - single).max(), np.abs(parts - whole).max()
print(f"4 segments with dropout: max |g_recomputed - g_single| = {off}")
print(f"4 micro-batches:         max |g_accumulated - g_single| = {off_parts:.1e}")
assert off == 0
assert off_parts < 1e-12

# %% [markdown]
# Recomputation gives the same bits: the same operations in the same order. Accumulation adds in
# another order, so its last digits differ.
#
# With several ranks accumulation saves messages, too: the passes before the last one stand in `no_sync()`, which adds
# up and sends nothing, and only the last one sums the gradients over the ranks:


# %%
def four_passes(comm, wait):
    parallel = DistributedDataParallel(MLP([WIDTH] * 3), comm, reduction="sum")
    mine = np.array_split(np.arange(ROWS), comm.size)[comm.rank]
    for number, part in enumerate(np.array_split(mine, 4)):
        with parallel.no_sync() if wait and number < 3 else nullcontext():
            outputs = parallel(Tensor(rows[part].astype(np.float32)))
            cross_entropy(outputs, targets[part], divisor=ROWS).backward()


for wait in (False, True):
    world = SimWorld(2)
    world.run(four_passes, wait)
    sent = world.traces[0].bytes_by_purpose()["gradient_reduce"]
    print(f"{'with' if wait else 'without'} no_sync a rank sends {sent:,} B")

# %% [markdown]
# To the optimizer four passes are one batch of four times the size. Lesson 10b asks how large a batch should
# be, and with which learning rate.

# %% [markdown]
# ## 6 Break it
#
# Recompute a dropout that draws from a common generator. When a layer runs again it draws other masks than
# in forward. The loss is that of forward, and right; the gradient belongs to another network:


# %%
class CarelessDropout(Module):
    def __init__(self):
        self.generator = np.random.default_rng(7)

    def forward(self, x):
        return x * Tensor((self.generator.random(x.shape) > 0.1) / 0.9)


def careless(recompute):
    (model, flat), x = network(), Tensor(rows)
    model.drop = CarelessDropout()
    for piece in pieces(model, [1] * LAYERS):
        x = checkpoint(piece, x) if recompute else piece(x)
    loss = cross_entropy(x, targets)
    loss.backward()
    return loss.item(), flat.grad.copy()


# %% [markdown]
# Without and with recomputation of every layer:

# %%
(loss, right), (same_loss, wrong) = careless(False), careless(True)
off = np.abs(wrong - right).max() / np.abs(right).max()
print(f"losses {loss:.6f} and {same_loss:.6f}")
print(f"the gradient is off by {off:.0%} of its largest entry")
assert loss == same_loss
assert off > 0.01

# %% [markdown]
# minidist's dropout cannot do that: its draws depend on (seed, step, module, call, sample), and
# `checkpoint` repeats the count of calls. What if a generator has to be shared? That is the exercise.

# %% [markdown]
# ## 7 Exercise: a replay that draws the same mask
#
# `segment.forward(x, rng)` draws a mask from the generator `rng` and returns the output y.
# `segment.gradient(x, g, rng)` runs forward again, so it draws again, and turns the gradient g of the output into
# that of x. Return y and a function `backward(g)` that returns the gradient of x. Backward may run more than once,
# and what others draw from `rng` later must be what they would draw without recomputation. Judged: right output,
# right gradients (`backward` is called twice), right later draws.


# %%
def recompute(segment, x, rng):
    y = segment.forward(x, rng)
    return y, lambda g: segment.gradient(x, g, rng)


check("10.recompute", recompute)

# %%
reveal("10.recompute")
check("10.recompute", solution("10.recompute"))

# %% [markdown]
# ## 8 Takeaway
#
# - **m micro-batches: 1/m of the activations**, the same sum of gradients, if each divides by the
#   rows of the whole batch.
# - **k equal segments: k + L/k + 1 arrays instead of L + 1, fewest at k = √L**, for one more forward (4/3 of
#   the arithmetic). The replay must see the same parameters and the same random draws.

# %% [markdown]
# The job of the course so far, a model of 7 billion parameters on cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with parameters of 2 B, gradients
# added up in float32 (4 B) and 12 B for Adam in every row. (It has 6.74 billion, to be exact: 121 GB of states.)

# %%
story("10")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 minidist train --dp 2 --micro-batch 2 --accumulation 4 --steps 3 --json
#     mpiexec -n 2 minidist train --dp 2 --micro-batch 8 --accumulation 1 --steps 3 --json
#     mpiexec -n 2 minidist train --dp 2 --micro-batch 8 --accumulation 1 --steps 3 --json --recompute full
#     mpiexec -n 2 minidist train --dp 2 --micro-batch 8 --accumulation 1 --steps 3 --json --recompute sqrt --layers 9
#     mpiexec -n 2 minidist train --dp 2 --micro-batch 8 --accumulation 1 --steps 3 --json --recompute budget:3000000
#     mpiexec -n 2 python mpi_examples/7_more/recompute.py
#     mpiexec -n 2 python mpi_examples/7_more/memory_budget.py --pp 2
#
# `peak_bytes` differs; the losses agree but for the last digit of float32. The last example chooses the
# micro-batch and the segments anew when its memory budget changes between two steps.

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `checkpoint(fn, x)` | PyTorch `torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False)`, `checkpoint_sequential`; JAX `jax.checkpoint` (`jax.remat`) |
# | segments of layers | Megatron-LM `--recompute-granularity full --recompute-method uniform --recompute-num-layers`, and `--recompute-granularity selective`, which recomputes attention only; DeepSpeed `activation_checkpointing`; Hugging Face `gradient_checkpointing=True` |
# | the same draws in a replay | PyTorch `preserve_rng_state=True` |
# | `--accumulation`, `--micro-batch` | DeepSpeed `gradient_accumulation_steps`, `train_micro_batch_size_per_gpu`; Megatron-LM `--micro-batch-size`, `--global-batch-size` |
# | `no_sync()` | PyTorch `model.no_sync()`; Accelerate `accelerator.accumulate(model)` |
#
# What is left, 122.4 GB, are nearly all states of parameters, and each of the eight cards holds all of them.
#
# Next: [11 ZeRO 1 and 2](11_zero_1_and_2.ipynb). Side rooms: [10b Batch size and
# noise](10b_batch_size_and_noise.ipynb), [10c Uneven ranks](10c_uneven_ranks.ipynb). All lessons are
# in the [index](README.md).
