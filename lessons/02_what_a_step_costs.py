# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 What a step keeps in memory
#
# *25 minutes. Before it: 00.*
#
# ## 1 The case
#
# A network with layers of 512, 512, 512 and 10 outputs trains on 1,024 rows of 256 numbers each, in
# float32, with the optimizer Adam, which keeps two running averages per parameter. The memory of the
# machine is full. Somebody suggests a quarter of the rows, and SGD with momentum, which keeps one number
# per parameter (lesson 02b explains both).
#
# How many bytes are alive at the peak then? What has to be counted?

# %%
import numpy as np

from minidist import MLP, SGD, Adam, FlatParameters, SimWorld, Tensor, cross_entropy, no_grad
from minidist.base.memory import account_memory
from minidist.core.base.trace import track
from minidist.course.lesson import check, picture, predict, reveal, solution
from minidist.course.story import story

SIZES, ROWS = [256, 512, 512, 512, 10], 1024
rng = np.random.default_rng(0)
rows = rng.normal(size=(ROWS, SIZES[0])).astype(np.float32)
targets = rng.integers(0, SIZES[-1], ROWS)

# %% [markdown]
# ## 2 Predict
#
# Count the weights first; then what else is alive at the moment when most is alive. Three small kinds of
# bytes count too: the input, the gradient with respect to one layer's output that backward works on,
# and half a megabyte of work arrays that the optimizer keeps. `zero_grad` here sets the gradients to 0 and keeps
# their arrays, so from the second step on they are always alive. 10 % off is good enough.

# %%
weights = sum(parameter.data.nbytes for parameter in MLP(SIZES).parameters())
print(f"{weights // 4:,} parameters in float32: {weights:,} B; the input has {rows.nbytes:,} B")
peak = predict("peak with 256 rows and momentum", example=3_000_000, unit="B")

# %% [markdown]
# ## 3 The idea and its picture
#
# There are **four kinds of bytes: parameters, gradients, optimizer state and activations**. An
# *activation* is an output of a layer that forward keeps because backward needs it again. The first
# three kinds grow with the model, and activations grow with the batch. Many later lessons reduce one of
# the four, so one has to know which is the largest; the others reduce time.
#
# The picture shows three steps with Adam and all 1,024 rows, on one rank; each change of the account is as wide as
# another, and below the axis is what runs. In forward activations accumulate; in backward they are freed and
# gradients are allocated. From the second step on the gradients and Adam's two averages exist from the start. (In
# the small bump at the left, where the model is made, `FlatParameters` copies the parameters into one array.)
#
# `account_memory` keeps an account of all arrays that the library allocates inside its block, `track` adds
# an array of our own to it, and the last line but one hands the account over to the picture. `marks` says after how
# many events each part begins. The rest is an ordinary training loop:


# %%
def train(comm, steps=3, optimizer=Adam, count=ROWS):
    """Returns the account, the weights and the marks."""
    with account_memory(timeline=True) as account:
        marks = [(0, "model")]
        model = MLP(SIZES)
        flat = FlatParameters(model.parameters())
        optimizer = optimizer(flat, lr=1e-3)
        x = Tensor(track(rows[:count].copy(), "input"))
        for _ in range(steps):
            marks.append((len(account.events), "forward"))
            flat.zero_grad()
            loss = cross_entropy(model(x), targets[:count])
            marks.append((len(account.events), "backward"))
            loss.backward()
            marks.append((len(account.events), "step"))
            optimizer.step()
    comm.trace.memory = [(0.0, live) for live in account.history()]
    return account, flat.data, marks


world = SimWorld(1)
((account, _, marks),) = world.run(train)
picture("memory", world, "part 3 of lesson 02", name="three steps of Adam", marks=marks)

# %% [markdown]
# ## 4 The code
#
# Each array is counted from its creation until Python frees it. There is no call that frees it: an
# array is freed when nothing refers to it any more. The graph of `loss` refers to what backward needs:


# %%
def activations(when):
    print(f"{when:38} {counted.by_purpose.get('activation', 0):9,} B of activations")


with account_memory() as counted:
    model = MLP(SIZES)
    y = model(Tensor(rows))
    activations("after the layers")
    loss = cross_entropy(y, targets)
    del y  # `del` takes a name away, and not an array
    activations("after the loss, and y is gone")
    loss.backward()
    activations("after backward")
    loss = cross_entropy(model(Tensor(rows)), targets)
    activations("after the loss of another forward")
    del loss
    activations("that loss is gone, without a backward")

# %% [markdown]
# The library's account ([memory.py](../minidist/base/memory.py)) also knows the purpose of each
# array, such as "activation" or "gradient".

# %% [markdown]
# ## 5 Check
#
# The bytes at the peak, by purpose, and a formula for each. In float32 a parameter takes 4 B, its
# gradient 4 B, and Adam's two averages 8 B. In this network an activation takes 4 B per output and row,
# because a layer and its ReLU are one operation, which keeps one array. (Of the last layer the logits are not kept:
# the loss keeps an array of the same size, made from their softmax.)

# %%
formula = {
    "parameter": weights,
    "gradient": weights,
    "optimizer": 2 * weights,
    "activation": 4 * ROWS * sum(SIZES[1:]) + 4,  # and the loss, one number
    "activation_gradient": 4 * ROWS * max(SIZES[1:]),  # the gradient that backward has in hand
    "input": 4 * ROWS * SIZES[0],
    "workspace": 2 * 4 * 65536,  # two work arrays for a block of the optimizer's step
}
for purpose, nbytes in account.at_peak.items():
    print(f"{purpose:20} {nbytes:10,} B   formula {formula[purpose]:10,} B")
    assert nbytes == formula[purpose]

# %% [markdown]
# The job of the case has the same purposes, with one array in place of two averages, and a quarter of
# the rows in the formulas that count rows:


# %%
def momentum(flat, lr):
    return SGD(flat, lr=lr, momentum=0.9)


((other, _, _),) = SimWorld(1).run(train, optimizer=momentum, count=ROWS // 4)
print(f"a quarter of the rows, momentum: {other.peak / account.peak:.0%} of the peak above")
peak.judge(other.peak, within=0.1)

# %% [markdown]
# Of the four kinds, half the batch halves the activations only. Another optimizer changes the
# optimizer's state only:

# %%
KINDS = ("parameter", "gradient", "optimizer", "activation")
print(f"{'':24}", *(f"{name:>12}" for name in KINDS))
for label, options in {
    "Adam": {},
    "Adam, half the rows": {"count": ROWS // 2},
    "SGD": {"optimizer": SGD},
    "SGD with momentum": {"optimizer": momentum},
}.items():
    ((other, _, _),) = SimWorld(1).run(train, **options)
    print(f"{label:24}", *(f"{other.at_peak.get(name, 0):10,} B" for name in KINDS))

# %% [markdown]
# So the model costs 16 B per parameter in float32 with Adam. In mixed precision it is 16 too: 2 for
# the fp16 parameter, 2 for its gradient, 12 for Adam (a float32 copy and two averages). A library that
# adds gradients up in float32, as Megatron-LM does, has 4 for the gradient, and 18 in all. That is the
# arithmetic behind the question whether a model fits. Without any activation:

# %%
for name, parameters in (
    ("GPT-2", 124e6),
    ("1.5 billion", 1.5e9),
    ("7 billion", 7e9),
    ("175 billion", 175e9),
):
    size = parameters / 1e9
    print(f"{name:12} {16 * size:7,.1f} GB with 16 B per parameter, {18 * size:7,.1f} GB with 18 B")


# %% [markdown]
# ## 6 Break it
#
# A common leak: evaluation needs no backward, and a program that omits `no_grad()` records a graph
# for each batch all the same. A list of losses, kept for their mean, then keeps every activation of
# every batch:


# %%
from contextlib import nullcontext


def evaluate(comm, recording):
    with account_memory(timeline=True) as account:
        marks = [(0, "model")]
        model = MLP(SIZES)
        losses = []
        for batch in range(8):
            marks.append((len(account.events), f"batch {batch}"))
            part = slice(batch * 128, batch * 128 + 128)
            with nullcontext() if recording else no_grad():
                losses.append(cross_entropy(model(Tensor(rows[part])), targets[part]))
        mean = np.mean([loss.item() for loss in losses])
    comm.trace.memory = [(0.0, live) for live in account.history()]
    return float(mean), account.peak_by_purpose["activation"], marks


for recording in (False, True):
    world = SimWorld(1)
    ((mean, activations, marks),) = world.run(evaluate, recording)
    label = "a graph for each batch" if recording else "no_grad()"
    print(f"{label:24} mean loss {mean:.4f}, activations at most {activations:,} B")
picture("memory", world, "part 6 of lesson 02", name="a graph for each batch", marks=marks)

# %% [markdown]
# (Without a graph two outputs of 128 x 512 numbers are alive, a layer's input and its output, and seven losses of 4 B.
# With graphs 128 x 10 x 4 B are a work array of the last loss.) Mend it without `no_grad()`: the list must keep
# the number, `.item()`, in place of each loss. Change the line with `losses.append` and the line below it, and
# run the cell again.

# %% [markdown]
# ## 7 Exercise: free in the right order
#
# Can a step do with less? The gradient of a layer is needed once, to update that layer. So update it
# *inside* backward, and drop the gradient.
#
# Write a step of SGD for layers y = x W. A layer has `forward(x)`, `weight_gradient(x, g)`,
# `input_gradient(g)` and `update(weight_gradient)`; g is the gradient of its output, and
# `loss_gradient(y)` gives the first one. `input_gradient` has to run before `update`, because it uses the
# weight of forward. Every array is counted as long as your function refers to it.
#
# Judged: the weights after the step; bytes alive at the peak (par).


# %%
def step(layers, x, loss_gradient):
    inputs = [x]
    for layer in layers:
        inputs.append(layer.forward(inputs[-1]))
    g = loss_gradient(inputs.pop())
    gradients = []
    for layer in reversed(layers):
        gradients.append(layer.weight_gradient(inputs.pop(), g))
        g = layer.input_gradient(g)
    for layer in layers:
        layer.update(gradients.pop())


check("02.free_in_order", step)

# %% [markdown]
# Our solution, once it is printed, says in its comments which array ends where. The checker's verdict on it:

# %%
reveal("02.free_in_order")
check("02.free_in_order", solution("02.free_in_order"))

# %% [markdown]
# ## 8 Takeaway
#
# - A step holds **parameters + gradients + optimizer state + activations**.
#   The first three take **16 B per parameter** with Adam in float32; the activations take, in this network, **4 B
#   per row and output**. ZeRO (lessons 11 and 12) divides the first three among ranks, and recomputation
#   (lesson 10) reduces the last.
# - The peak lies at the start of backward, when everything is alive at once. (PyTorch's `zero_grad` drops the
#   gradients by default; here they stay, and are set to 0.) An array is freed with its last reference, so the
#   order of the steps and the names that refer to arrays decide.

# %% [markdown]
# The job of the course so far, a model of 7 billion parameters on cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with parameters of 2 B, gradients
# added up in float32 (4 B) and 12 B for Adam in every row. It has 6.74 billion, to be exact, so these 18 B
# per parameter are 121 GB, most of the bytes of the first row; nearly all others are activations:

# %%
story("02")

# %% [markdown]
# ## 9 The same code under mpiexec
#
# `peak_bytes` in the output is the peak of each rank's account:
#
#     mpiexec -n 2 minidist train --model mlp --data glyphs --dp 2 --optimizer adam --steps 3 --json

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `account_memory()`, `account.peak` | PyTorch `torch.cuda.memory_allocated`, `torch.cuda.max_memory_allocated`; JAX `jax.profiler.save_device_memory_profile` |
# | the picture over time | PyTorch `torch.cuda.memory._record_memory_history`, `_dump_snapshot`, and its memory_viz page |
# | 16 B per parameter | DeepSpeed `estimate_zero2_model_states_mem_needs_all_live`; Accelerate `accelerate estimate-memory` |
# | an update inside backward | PyTorch `register_post_accumulate_grad_hook`; torchtune `optimizer_in_bwd`; LOMO |
# | dropping gradients | PyTorch `optimizer.zero_grad(set_to_none=True)` |
# | `no_grad()` | PyTorch `torch.no_grad`, `torch.inference_mode` |
#
# Next: [03 Send, receive, deadlock](03_send_receive_deadlock.ipynb). Side room:
# [02b From SGD to Adam](02b_from_sgd_to_adam.ipynb). All lessons are in the [index](README.md).
