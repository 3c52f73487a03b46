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
# *35 minutes. Before it: 06.*
#
# ## 1 The case
#
# A network is to compute with integers of 8 bits, so its weights and what goes into a layer are
# rounded to the points of a grid. It trains with the rounding on three ranks, each with its rows. The grid
# of a layer's inputs goes from the smallest input to the largest, and a rank knows only its own rows. So
# at the end of a step all ranks agree on the two numbers. The network has two layers. How many bytes do
# the three ranks send in a step, in all, to agree on the grids, with numbers of 8 B?

# %% [markdown]
# ## 2 Predict
#
# Two numbers are agreed on for each layer's inputs, all four in one all-reduce (lesson 04).

# %%
from minidist.course.lesson import check, picture, predict, reveal, solution

sent_guess = predict("bytes from all ranks in a step, to agree on the grids", example=64, unit="B")

# %%
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
from minidist.techniques.quantization.fake_quantize import Grid, fake_quantize
from minidist.techniques.quantization.layers import convert, int8_bytes, observers_of, prepare_qat
from minidist.techniques.quantization.ranges import update_ranges

# %% [markdown]
# ## 3 The idea and its picture
#
# *Quantise*: train with the points of a grid, so that the model loses nothing when it is converted to
# integers. What it saves: three quarters of the bytes of a weight, and integer products. What it
# costs: accuracy, unless the training knows what will be lost. And on several ranks **rounding is a
# decision, and all ranks must make the same one**.
#
# The training of this lesson. `prepare_qat` puts the rounding into the layers, and `update_ranges` is the
# agreement:

# %%
images, labels = glyphs().rows(np.arange(2000))
images = images.astype(np.float64)
ROWS, STEPS = 1600, 150  # the other 400 are never trained on


def train(comm, int8=False, agree=True, steps=STEPS):
    """Returns (losses, model, weights)."""
    model = MLP([images.shape[1], 64, 10], dtype=np.float64)
    model = prepare_qat(model) if int8 else model
    ddp = DistributedDataParallel(model, comm, reduction="sum", algorithm="ordered")
    flat, optimizer, losses = ddp.flat, Adam(ddp.flat, lr=0.03), []
    mine = np.array_split(np.arange(ROWS), comm.size)[comm.rank]
    for _ in range(steps):
        flat.zero_grad()
        loss = cross_entropy(ddp(Tensor(images[mine])), labels[mine], divisor=ROWS)
        loss.backward()
        optimizer.step()
        update_ranges(observers_of(model), comm if agree else None)
        losses.append(loss.item())
    return losses, model, flat.data.copy()


# %% [markdown]
# The loss of a float model, and of one that rounds weights and inputs to 8 bits. The two curves nearly
# coincide: 256 values are enough for this network.

# %%
dense = SimWorld(1).run(train)[0]
small = SimWorld(1).run(train, int8=True)[0]
picture(
    "loss",
    [],
    "part 3 of lesson 09b",
    losses=small[0],
    reference_losses=dense[0],
    title="float and INT8",
    names=("float", "INT8"),
)

# %% [markdown]
# ## 4 The code
#
# A grid is a scale s, an integer z that stands for 0, and the smallest and the largest integer.
# Training computes with the points of the grid, in floats. Rounding has the derivative 0 almost
# everywhere, so with it no weight would learn; backward therefore leaves the rounding out. That is
# the *straight-through estimator*. Where a value was clamped, the gradient is 0.


# %%
def toy_fake_quantize(x, s, z, low=0, high=255):
    """The values of x on the grid, and where the gradient passes."""
    levels = np.round(x / s) + z
    return (np.minimum(np.maximum(levels, low), high) - z) * s, (low <= levels) & (levels <= high)


values, passes = toy_fake_quantize(np.array([-0.3, 0.26, 1.0, 30.0]), s=0.1, z=2)
print("on a grid of tenths from -0.2 to 25.3:", np.round(values, 3), "gradient:", passes)

# %% [markdown]
# Why in every step, and not once at the end? With fewer bits than 8 the difference shows. This network's
# weights are rounded to a given number of bits; the float weights stay, and the optimizer changes them
# ([fake_quantize.py](../minidist/techniques/quantization/fake_quantize.py) is the library's version):


# %%
def with_bits(model, x, bits):
    """The outputs with weights rounded to `bits` bits; 0: not rounded."""
    most = 2 ** (bits - 1) - 1 if bits else 0
    for layer in model.layers:
        w = layer.weight
        grid = Grid(np.abs(w.data).max() / most, 0, -most, most) if bits else None
        x = linear(x, fake_quantize(w, grid) if bits else w, layer.bias)
        x = relu(x) if layer is not model.layers[-1] else x
    return x


def trained(bits):
    model = MLP([images.shape[1], 64, 10], dtype=np.float64)
    flat = FlatParameters(model.parameters())
    optimizer = Adam(flat, lr=0.03)
    for _ in range(STEPS):
        flat.zero_grad()
        cross_entropy(with_bits(model, Tensor(images[:ROWS]), bits), labels[:ROWS]).backward()
        optimizer.step()
    return model


# %% [markdown]
# Each row is two trainings: one that knows nothing of the rounding, and one that rounds in every step. Both
# are then judged with rounded weights, on pictures that they have never seen:


# %%
def percent_right(outputs):
    return float(100 * (outputs.data.argmax(axis=1) == labels[ROWS:]).mean())


floats, unseen = trained(0), Tensor(images[ROWS:])
for bits in (8, 4, 3, 2):
    later = percent_right(with_bits(floats, unseen, bits))
    always = percent_right(with_bits(trained(bits), unseen, bits))
    print(
        f"{bits} bits: {later:2.0f} % right if rounded at the end, {always:2.0f} % if in every step"
    )
    assert bits != 3 or always > later + 5

# %% [markdown]
# ## 5 Check
#
# The range of a weight is known. The range of a layer's inputs is observed, and agreed on by a maximum, in
# which the order of the ranks does not matter ([ranges.py](../minidist/techniques/quantization/ranges.py)). An
# all-reduce on n ranks sends 2 (n-1) times its array in all:

# %%
world = SimWorld(3)
(_, model, parallel), (_, _, second), _ = world.run(train, int8=True, steps=40)
sent = sum(trace.bytes_by_purpose()["quantization_range"] for trace in world.traces)
print(f"ranges: {sent:,} B from all ranks in 40 steps")
sent_guess.judge(sent / 40)
assert sent == 40 * 2 * (3 - 1) * 4 * 8

# %% [markdown]
# The grids are those of all rows. So three ranks have the weights of one device up to the order of additions
# inside a product, and all ranks have the same bits:

# %%
single = SimWorld(1).run(train, int8=True, steps=40)[0][2]
print(f"max |w_parallel - w_single| = {np.abs(parallel - single).max():.1e}")
print(f"ranks 0 and 1 differ by {np.abs(parallel - second).max():g}")
assert np.array_equal(parallel, second)
assert np.allclose(parallel, single, rtol=0, atol=1e-6)

# %% [markdown]
# Then the model is converted. What it computes with integers is what it has computed with rounded floats:


# %%
def right(model):
    with no_grad():
        return percent_right(model.eval()(Tensor(images[ROWS:])))


sizes, rounded = int8_bytes(model), right(model)
floating, integers = right(SimWorld(1).run(train, steps=40)[0][1]), right(convert(model))
print(f"weights: {sizes['weight_bytes']:,} B instead of {sizes['float_bytes'] // 2:,} B in float32")
print(f"right after 40 steps: {rounded:.1f} % rounded, {integers:.1f} % as integers")
print(f"a float model that has trained as long: {floating:.1f} %")
assert rounded == integers

# %% [markdown]
# ## 6 Break it
#
# Ranks that do not agree on ranges round the same number to different grids. Gradients are still
# summed, so the *weights* stay equal and nothing shows; but each rank computes with another model,
# and what the INT8 model recognises depends on the rank that saves it. Here rank 0 has the pictures with the
# least ink and rank 2 those with the most:

# %%
order = np.argsort(images[:ROWS].sum(axis=1))
images[:ROWS], labels[:ROWS] = images[order], labels[order]
results = SimWorld(3).run(train, int8=True, agree=False, steps=40)
scales = [float(model.layers[1].input_grid().scale) for _, model, _ in results]
for rank, (_, model, _) in enumerate(results):
    said = f"scale of the second layer's inputs {scales[rank]:.5f}, {right(model):.1f} % right"
    print(f"rank {rank}: {said}")
assert np.array_equal(results[0][2], results[1][2])
assert len(set(scales)) == 3

# %% [markdown]
# ## 7 Exercise: one grid
#
# Each rank has values `x` (perhaps none). Round them to int8's grid, as floats: 127 is the largest
# magnitude on *any* rank, halves are rounded to even, and where all values are zero they stay zero. What
# is judged: the values, and the bytes of one all-reduce of one number.


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
#   the rounding computes the same as integers.
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
# | observers, `--quantize-observer` | PyTorch `MinMaxObserver`, `MovingAverageMinMaxObserver` |
# | `update_ranges` at the end of a step | NVIDIA Transformer Engine: delayed scaling, `DelayedScaling(reduce_amax=True)` |
#
# Next: [09c Pruning](09c_pruning.ipynb). All of them are in the [index](README.md).
