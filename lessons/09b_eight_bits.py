# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09b Eight bits
#
# *30 minutes. Before it: 06.*
#
# ## 1 The case
#
# A network is to compute with small integers, so its weights are rounded to the points of a grid: whole
# multiples of one number s. With 8 bits these are -127 s to 127 s, with 3 bits only -3 s to 3 s, and in both the
# last point is the largest weight. So with 3 bits a weight has one of seven values.
#
# The network recognises 89 of 100 digits that it has not seen. The weights can be rounded after the training. Or the
# last 50 steps of 200 already compute with rounded weights, so that the training knows what will be lost. How many
# of 100 does it recognise with weights of 3 bits in either way? A network that guesses recognises 10.
#
# The inputs of each layer are rounded, too, and on several ranks each rank sees other inputs and would choose
# another grid. Part 5 and the parts after it are about that.

# %% [markdown]
# ## 2 Predict
#
# Most weights are small, and the largest decides how far apart the points are. A tenth off is good enough.

# %%
from minidist.course.lesson import check, predict, reveal, solution

later_guess = predict("digits of 100 with 3 bits, rounded after the training", example=50)
within_guess = predict("digits of 100 with 3 bits, rounded in the training", example=50)

# %%
from copy import deepcopy

import numpy as np

from minidist import (
    MLP,
    Adam,
    DistributedDataParallel,
    FlatParameters,
    SimWorld,
    Tensor,
    cross_entropy,
    glyphs,
    no_grad,
)
from minidist.core.autograd import linear
from minidist.nn import relu
from minidist.report import show
from minidist.report.frame import finish, line, new_panel
from minidist.report.palette import MEMORY, PALETTE, RANKS
from minidist.techniques.quantization.fake_quantize import Grid, fake_quantize
from minidist.techniques.quantization.layers import convert, int8_bytes, observers_of, prepare_qat
from minidist.techniques.quantization.ranges import update_ranges

# %% [markdown]
# ## 3 The idea and its picture
#
# *Quantise*: train with the points of a grid, so that the model loses nothing when it is converted
# to integers, with 8 bits called INT8. It saves three quarters of the bytes of a weight with 8 bits, and time on
# processors that multiply 8-bit integers faster than floats. It costs accuracy, unless the training knows what
# will be lost. And on several ranks **rounding is a decision, and all ranks must make the same
# one**.
#
# A layer's inputs are rounded, too. Their grid goes from the smallest input seen in the training to the
# largest, and what notes these two numbers is called an observer. A rank sees only the inputs of its rows, so
# after every step `update_ranges` makes all ranks agree: each sends its largest, and its smallest with the sign
# changed, and the maximum of both is taken. `prepare_qat` puts the rounding and the observers into the layers:

# %%
images, labels = glyphs().rows(np.arange(2000))
images = images.astype(np.float64)
ROWS, STEPS = 1600, 150  # the other 400 are never trained on


def train(comm, int8=False, agree=True, steps=STEPS):
    """Returns (model, weights)."""
    model = MLP([images.shape[1], 64, 10], dtype=np.float64)
    model = prepare_qat(model) if int8 else model
    ddp = DistributedDataParallel(model, comm, reduction="sum", algorithm="ordered")
    flat, optimizer = ddp.flat, Adam(ddp.flat, lr=0.01)
    mine = np.array_split(np.arange(ROWS), comm.size)[comm.rank]
    for _ in range(steps):
        flat.zero_grad()
        cross_entropy(ddp(Tensor(images[mine])), labels[mine], divisor=ROWS).backward()
        optimizer.step()
        update_ranges(observers_of(model), comm if agree else None)
    return model, flat.data.copy()


# %% [markdown]
# The weights of the first layer after a training in float, and the seven points of the grid with 3 bits, in red.
# Few weights are near the ends, and the largest decides how far apart the points are:

# %%
((dense, _),) = SimWorld(1).run(train)
weights = dense.layers[0].weight.data
figure, axes = new_panel(8, 2.7)
axes.hist(weights.ravel(), bins=120, color=MEMORY["parameter"])
for point in range(-3, 4):
    axes.axvline(point * np.abs(weights).max() / 3, color=PALETTE["blocked"])
axes.set(xlabel="weight", ylabel="number of weights")
show(finish(figure, [], "part 3 of lesson 09b", "the first layer, and the grid with 3 bits"))

# %% [markdown]
# ## 4 The code
#
# A grid is a scale s, an integer z that stands for 0, and the smallest and the largest integer.
# Training computes with the points of the grid, in floats. Rounding has the derivative 0 almost
# everywhere, so with it no weight would learn; backward therefore leaves the rounding out. That is
# the *straight-through estimator*. A value outside the grid becomes its first or last point (it is clamped);
# there the gradient is 0.


# %%
def toy_fake_quantize(x, s, z, low=0, high=255):
    """The values of x on the grid, and where the gradient passes."""
    levels = np.round(x / s) + z
    return (np.minimum(np.maximum(levels, low), high) - z) * s, (low <= levels) & (levels <= high)


values, passes = toy_fake_quantize(np.array([-0.3, 0.26, 1.0, 30.0]), s=0.1, z=2)
print("on a grid of tenths from -0.2 to 25.3:", np.round(values, 3), "gradient:", passes)

# %% [markdown]
# The weights of the picture, rounded to 8 bits and to 3:

# %%
for bits in (8, 3):
    most = 2 ** (bits - 1) - 1
    s = np.abs(weights).max() / most
    rounded = toy_fake_quantize(weights, s, 0, -most, most)[0]
    print(f"{bits} bits: points {s:.4f} apart, a weight is off by at most", end=" ")
    print(f"{np.abs(rounded - weights).max():.4f}, and {np.mean(rounded == 0):.0%} become 0")

# %% [markdown]
# So with few bits it makes a difference whether the training has seen the rounding. Here only the weights are
# rounded, on one device, each matrix with one grid, to a given number of bits. The float weights stay, and the
# optimizer changes them
# ([fake_quantize.py](../minidist/techniques/quantization/fake_quantize.py) is the library's version):


# %%
def largest(weights):
    return np.abs(weights).max()


def with_bits(model, x, bits, last=largest):
    """The outputs with weights of `bits` bits (0: not rounded); `last`: a grid's last point."""
    most = 2 ** (bits - 1) - 1 if bits else 0
    for layer in model.layers:
        w = layer.weight
        grid = Grid(last(w.data) / most, 0, -most, most) if bits else None
        x = linear(x, fake_quantize(w, grid) if bits else w, layer.bias)
        x = relu(x) if layer is not model.layers[-1] else x
    return x


# %% [markdown]
# The training, and the share of the unseen pictures that a network recognises:


# %%
def trained(model, bits, steps, lr, last=largest):
    """A copy of the model after that many steps with weights of `bits` bits."""
    model = deepcopy(model)
    flat = FlatParameters(model.parameters())
    optimizer = Adam(flat, lr=lr)
    for _ in range(steps):
        flat.zero_grad()
        outputs = with_bits(model, Tensor(images[:ROWS]), bits, last)
        cross_entropy(outputs, labels[:ROWS]).backward()
        optimizer.step()
    return model


def percent_right(outputs):
    return float(100 * (outputs.data.argmax(axis=1) == labels[ROWS:]).mean())


def percents(models, bits, last=largest):
    return np.array([percent_right(with_bits(model, unseen, bits, last)) for model in models])


# %% [markdown]
# Three networks train for 150 steps in float. Then they take 50 more steps in float, and separately 50 steps
# that round. Both are judged with rounded weights, on the 400 pictures that they have never seen. The three numbers
# in brackets are percents of the three networks, and the fourth is their mean:

# %%
unseen, later, always = Tensor(images[ROWS:]), {}, {}
sizes = [images.shape[1], 64, 10]
begun = [trained(MLP(sizes, dtype=np.float64, seed=seed), 0, STEPS, 0.01) for seed in range(3)]
floats = [trained(model, 0, 50, 0.003) for model in begun]
print(f"float : right {percents(floats, 0).round()} {percents(floats, 0).mean():.0f} %")
for bits in (8, 4, 3, 2):
    rounds = [trained(model, bits, 50, 0.003) for model in begun]
    later[bits], always[bits] = percents(floats, bits), percents(rounds, bits)
    print(
        f"{bits} bits: right if rounded later {later[bits].round()} {later[bits].mean():.0f} %, ",
        end="",
    )
    print(f"in training {always[bits].round()} {always[bits].mean():.0f} %")
later_guess.judge(later[3].mean(), within=0.1)
within_guess.judge(always[3].mean(), within=0.1)
assert all(always[3] > later[3] + 10)

# %% [markdown]
# The same in a picture; a point is a network, and a line the mean of three:

# %%
figure, axes = new_panel(8, 3)
handles = []
ways = {"rounded in the training": (always, PALETTE["F"]), "rounded later": (later, RANKS[1])}
for name, (shares, colour) in ways.items():
    axes.plot(list(shares), [share.mean() for share in shares.values()], color=colour)
    for bits, share in shares.items():
        axes.plot([bits] * 3, share, "o", color=colour, markersize=4)
    handles.append(line(colour, name, marker="o"))
axes.axhline(10, color=PALETTE["other"], linestyle=":")
handles.append(line(PALETTE["other"], "a network that guesses", linestyle=":"))
axes.set(xlabel="bits of a weight", ylabel="right [%]", ylim=(0, 100), xticks=list(later))
show(finish(figure, handles, "part 4 of lesson 09b", "unseen digits, with rounded weights"))

# %% [markdown]
# With 8 bits it does not matter, with 3 bits it matters much, for each of the three networks. With 2 bits this grid
# has only -s, 0 and s, and as s is the largest weight of all nearly all weights become 0. A smaller s, which cuts off
# the largest weights, helps. Here it is two standard deviations:


# %%
def two_deviations(weights):
    return 2 * weights.std()


rounds = [trained(model, 2, 50, 0.003, two_deviations) for model in begun]
right = percents(rounds, 2, two_deviations)
print(f"2 bits, s = two standard deviations: right if rounded in training {right.round()}")
assert all(right > always[2] + 10)

# %% [markdown]
# ## 5 Check
#
# Now three ranks, 8 bits (INT8), and the inputs are rounded, too. So there are three kinds of grids in this lesson:
#
# | what is rounded | a grid for | from, to | the integer z of 0 |
# |---|---|---|---|
# | weights in part 4 | each matrix | -, + the largest weight | 0 |
# | weights from here on | each output of a layer | -, + its largest weight | 0 |
# | inputs from here on | each layer | the smallest and the largest input of any rank | any |
#
# All ranks know the weights and so their grids. The range of a layer's inputs is agreed on by a maximum, in which the
# order of the ranks does not matter, in one `all_reduce(comm, array, "max")`
# ([ranges.py](../minidist/techniques/quantization/ranges.py)):

# %%
world = SimWorld(3)
(model, parallel), (_, second), _ = world.run(train, int8=True, steps=40)
sent = sum(trace.bytes_by_purpose()["quantization_range"] for trace in world.traces)
print(f"ranges: {sent / 40:,.0f} B from all ranks in a step; 2 (n-1) 4 x 8 B = {2 * 2 * 4 * 8}")
assert sent == 40 * 2 * (3 - 1) * 4 * 8

# %% [markdown]
# The grids are those of all rows. So three ranks have the weights of one device up to the order of additions
# inside a product, and all ranks have the same bits:

# %%
single = SimWorld(1).run(train, int8=True, steps=40)[0][1]
print(f"max |w_parallel - w_single| = {np.abs(parallel - single).max():.1e}")
print(f"ranks 0 and 1 differ by {np.abs(parallel - second).max():g}")
assert np.array_equal(parallel, second)
assert np.allclose(parallel, single, rtol=0, atol=1e-6)

# %% [markdown]
# Then the model is converted to integers. A weight takes 1 B, and the grid of each of the 74 outputs of the layers
# 8 B. The integers recognise in each picture what the rounded floats recognise:


# %%
def outputs_of(model):
    with no_grad():
        return model.eval()(unseen)


rounded, size = outputs_of(model), int8_bytes(model)
integers = outputs_of(convert(model))
floating = outputs_of(SimWorld(1).run(train, steps=40)[0][0])
print(f"weights: {size['weight_bytes']:,} B instead of {size['float_bytes'] // 2:,} B in float32")
shares = [percent_right(outputs) for outputs in (integers, floating)]
print(f"right after 40 steps: {shares[0]:.1f} % as integers, {shares[1]:.1f} % in float")
assert np.array_equal(rounded.data.argmax(axis=1), integers.data.argmax(axis=1))
assert size["weight_bytes"] == 144 * 64 + 64 * 10 + 8 * 74

# %% [markdown]
# ## 6 Break it
#
# Ranks that do not agree on ranges round the same number to different grids. Gradients are still
# summed, so the *weights* stay equal and nothing shows; but each rank computes with another model,
# and what the INT8 model recognises depends on the rank that saves it. Here rank 0 has the pictures with the
# least ink and rank 2 those with the most; first with the agreement, then without:

# %%
order = np.argsort(images[:ROWS].sum(axis=1))
images[:ROWS], labels[:ROWS] = images[order], labels[order]
for agree in (True, False):
    results = SimWorld(3).run(train, int8=True, agree=agree, steps=40)
    scales = [float(model.layers[1].input_grid().scale) for model, _ in results]
    percent = [f"{percent_right(outputs_of(model)):.1f} %" for model, _ in results]
    print(f"agreed: {agree!s:5}; right on ranks 0, 1, 2: {', '.join(percent)}")
    print(f"    scales of the second layer's inputs: {', '.join(f'{s:.5f}' for s in scales)}")
    assert np.array_equal(results[0][1], results[1][1])
    assert len(set(scales)) == (1 if agree else 3)

# %% [markdown]
# ## 7 Exercise: one grid
#
# Each rank has values `x` (perhaps none). Round them to int8's grid, as floats: 127 is the largest
# magnitude on *any* rank, halves are rounded to even, and where all values are zero they stay zero. Judged:
# right values; bytes (par: one all-reduce of one number).


# %%
def one_grid(comm, x):
    scale = np.abs(x).max(initial=0.0) / 127 or 1.0
    return np.clip(np.round(x / scale), -127, 127) * scale


check("09b.one_grid", one_grid)

# %%
reveal("09b.one_grid")
check("09b.one_grid", solution("09b.one_grid"))

# %% [markdown]
# ## 8 Takeaway
#
# - **y = (clamp(round(x / s) + z) - z) s**, gradient 1 inside the range: a network that trains with
#   the rounding loses less when it becomes integers.
# - The ranks agree on the ranges with one maximum, **two numbers per layer**, or each has another model.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/7_more/quantization.py
#     mpiexec -n 4 minidist train --dp 4 --zero 1 --quantize int8 --evaluate-every 10 --steps 20

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `fake_quantize`, `affine_grid`, `symmetric_grid` | PyTorch `torch.fake_quantize_per_tensor_affine`, `torch.fake_quantize_per_channel_affine`; TensorFlow `fake_quant_with_min_max_vars` |
# | `prepare_qat`, `convert` | PyTorch `torch.ao.quantization.prepare_qat`, `convert`; torchao `QATConfig(step="prepare")`, `step="convert"` |
# | training with the rounding; the straight-through estimator | Jacob et al. 2018; Bengio et al. 2013. Ternary weights (-s, 0, s): Li and Liu 2016 |
# | observers, `--quantize-observer` | PyTorch `MinMaxObserver`, `MovingAverageMinMaxObserver` |
# | `update_ranges` at the end of a step | NVIDIA Transformer Engine: delayed scaling, `DelayedScaling(reduce_amax=True)` |
#
# Next: [09c Pruning](09c_pruning.ipynb). All lessons are in the [index](README.md).
