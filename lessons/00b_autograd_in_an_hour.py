# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00b Autograd
#
# *30 minutes. Before it: 00, the chain rule.*
#
# ## 1 The case
#
# A network has to recognise ten digits. It has never been trained, so its 10 outputs are random, and it
# gives every digit about the same probability. Its *loss* is the mean of -log(probability of the right
# digit), with the natural logarithm. Training lowers the loss, and needs the derivative of this one
# number with respect to every weight, thousands of them.
#
# The forward pass computes the loss, and the backward pass computes all the derivatives. How many operations
# does backward need for each operation of forward? A multiplication counts as one operation, and so does an
# addition. And, to check the first pass: how large is the loss before the first step?

# %%
from itertools import pairwise

import numpy as np

from minidist import MLP, AutogradError, FlopCounter, SimWorld, Tensor, cross_entropy
from minidist.course.lesson import check, expect, picture, predict, reveal, solution
from minidist.report import show
from minidist.report.frame import finish, new_panel
from minidist.report.palette import PALETTE

# %% [markdown]
# ## 2 Predict
#
# For the first number: a layer multiplies matrices, once in forward. What does backward have to multiply for
# it? The network has five layers of 64 x 64 weights and one of 64 x 10, and the first layer needs no gradient
# of its input. For the second: what is the probability of the right digit?

# %%
backward = predict("operations of backward for one of forward, six layers", example=1.0)
untrained = predict("loss of an untrained network with 10 classes", example=1.0)

# %% [markdown]
# ## 3 The idea and its picture
#
# **Forward records a graph, and backward goes through it in reverse**: it begins with the newest node,
# and passes gradients on to older nodes. You derive one gradient per operation, once; no model needs a
# derivation. The price is memory: what forward has saved stays until backward has used it.
# Distributed training depends on this order: gradients that are complete early can be sent while
# backward still computes (lesson 06b).
#
# The picture shows the operations of one training step of that network with 32 rows: of the six layers in forward,
# and then, from the last layer to the first, the gradient of each layer's weight *and* that of its input. A bar is
# as long as 2 B k m operations, a product of B rows with k x m weights; part 5 compares them with what
# `FlopCounter` counts. On this clock a million operations take 1 µs:


# %%
SIZES = [64, 64, 64, 64, 64, 64, 10]


def counted(comm):
    model, x = MLP(SIZES, bias=False, dtype=np.float64), Tensor(np.ones((32, 64)))
    with FlopCounter() as counter:
        cross_entropy(model(x), np.zeros(32, dtype=int)).backward()
    operations = {kind: number for kind, (number, _) in counter.totals.items()}
    seconds = [2e-12 * 32 * k * m for k, m in pairwise(SIZES)]  # of each layer
    for layer in range(6):
        comm.compute(seconds=seconds[layer], name="forward")
    for layer in reversed(range(6)):
        comm.compute(seconds=seconds[layer], name="weight gradient")
        if layer > 0:
            comm.compute(seconds=seconds[layer], name="input gradient")
    return operations


timed = SimWorld(1)
(operations,) = timed.run(counted)
picture("gantt", timed, "part 3 of lesson 00b", title="1 µs is a million operations")

# %% [markdown]
# ## 4 The code
#
# A `Tensor` wraps an array. An operation makes a new tensor and a *node*, which keeps the nodes of its
# inputs and, for each, a function that turns the gradient of the output into the gradient of that
# input. For `y = a * b + a`:

# %%
a, b = Tensor(np.array([2.0]), requires_grad=True), Tensor(np.array([3.0]), requires_grad=True)
y = a * b + a
node = y.node
print("y is made by", node.name, "from", [source.name for source, _ in node.inputs])
y.backward()
print("dy/da = b + 1 =", a.grad, "   dy/db = a =", b.grad)

# %% [markdown]
# `a` was used twice, so its gradient has two contributions, which were added. The function below is a
# whole backward pass. It visits a node after all nodes that use its result, when the gradient of the
# node is complete:


# %%
def gradients_of(root, gradient):
    """Returns the gradient of each node that `root` depends on."""
    order, gradients = [], {root: gradient}

    def visit(node):  # the inputs of a node come before it
        if node not in order:
            for source, _ in node.inputs:
                visit(source)
            order.append(node)

    visit(root)
    for node in reversed(order):
        for source, gradient_of_input in node.inputs:
            part = gradients[node]
            if gradient_of_input is not None:  # None: it equals the gradient of the output
                part = gradient_of_input(part)
            gradients[source] = gradients.get(source, 0) + part
    return gradients


by_hand = gradients_of((a * b + a).node, np.ones(1))
print("dy/da =", by_hand[a.node], "  dy/db =", by_hand[b.node])

# %% [markdown]
# The graph, with its values and with the gradient that backward sends along each edge. It visits y, then a * b, b
# and a; two gradients arrive at a, 3 + 1 = 4:

# %%
figure, axes = new_panel(8, 2.6)
axes.axis("off")
values = {"a": a.data[0], "b": b.data[0], "a * b": (a * b).data[0], "y": y.data[0]}
places = {"y": (3, 0.7), "a * b": (1.6, 0.3), "b": (0, 0), "a": (0, 1)}
edges = {("y", "a * b"): "1", ("y", "a"): "1"}
edges |= {("a * b", "a"): f"1 * b = {values['b']:g}", ("a * b", "b"): f"1 * a = {values['a']:g}"}
white = {"boxstyle": "round", "facecolor": "white"}
for (newer, older), text in edges.items():
    arrow = {"arrowstyle": "->", "color": PALETTE["B"], "shrinkA": 25, "shrinkB": 25}
    axes.annotate("", places[older], places[newer], arrowprops=arrow)
    middle = np.mean([places[older], places[newer]], axis=0)
    plain = white | {"edgecolor": "white"}
    axes.text(*middle, text, color=PALETTE["B"], ha="center", va="center", bbox=plain)
for number, (name, place) in enumerate(places.items(), 1):
    words = f"{number}. {name} = {values[name]:g}"
    axes.text(*place, words, ha="center", va="center", bbox=white)
axes.set(xlim=(-0.4, 3.4), ylim=(-0.2, 1.2))
show(finish(figure, [], "part 4 of lesson 00b", "backward goes from y to its inputs"))

# %% [markdown]
# The library's version ([backward.py](../minidist/core/autograd/backward.py)) also frees what a node has
# saved once the node was visited, and reports each parameter whose gradient is complete.

# %% [markdown]
# A linear layer `y = x W + b` has three gradients: of its input (needed by the layer before it), of
# its weight and of its bias.

# %%
rng = np.random.default_rng(0)
x, W, bias = (
    Tensor(rng.normal(size=shape), requires_grad=True) for shape in ((5, 3), (3, 2), (2,))
)
g = rng.normal(size=(5, 2))
(x @ W + bias).backward(g)
by_hand = {"x": g @ W.data.T, "W": x.data.T @ g, "bias": g.sum(axis=0)}
for name, tensor in (("x", x), ("W", W), ("bias", bias)):
    print(f"{name:4} max |autograd - by hand| = {np.abs(tensor.grad - by_hand[name]).max():.1e}")

# %% [markdown]
# ## 5 Check
#
# The loss of an untrained network (a smaller one than that of part 3: with ten outputs each of them guesses), and the
# operations of part 3, counted. They are fewer than two for one, as the first layer needs no gradient of its input.

# %%
model = MLP([20, 50, 10], dtype=np.float64, seed=1)
inputs, classes = rng.normal(size=(2000, 20)), rng.integers(0, 10, 2000)
loss = cross_entropy(model(Tensor(inputs)), classes).item()
print(f"the logarithm of 10 is {np.log(10):.3f}")
untrained.judge(loss, within=0.1)
assert abs(loss - np.log(10)) < 0.3

for kind, number in operations.items():
    print(f"{kind:16} {number / 1e6:6.2f} million operations")
in_backward = operations["input_gradient"] + operations["weight_gradient"]
assert np.isclose(in_backward * 1e-12 + operations["forward"] * 1e-12, timed.end_time)
backward.judge(in_backward / operations["forward"], within=0.15)

# %% [markdown]
# Is the gradient right? A small step h along one weight must change the loss by h times the gradient of
# that weight. The slope is measured between w - h and w + h:

# %%
weight = next(model.parameters())
cross_entropy(model(Tensor(inputs)), classes).backward()


def loss_with(value, place=(3, 4)):
    kept = weight.data[place]
    weight.data[place] = value
    result = cross_entropy(model(Tensor(inputs)), classes).item()
    weight.data[place] = kept
    return result


h = 1e-5
measured = (loss_with(weight.data[3, 4] + h) - loss_with(weight.data[3, 4] - h)) / (2 * h)
error = abs(measured / weight.grad[3, 4] - 1)
print(f"autograd {weight.grad[3, 4]:.10f}, measured {measured:.10f}: relative error {error:.0e}")
assert error < 1e-5

# %% [markdown]
# A gradient is a sum over rows, so two ranks can have some of the rows each, as in lesson 00. Each runs
# backward for its rows, sends its gradient to the other rank, and adds what arrives; `sendrecv` sends and
# receives in one call:


# %%
def on_two_ranks(comm, rows):
    mine, other_rank = rows[comm.rank], 1 - comm.rank
    model = MLP([20, 50, 10], dtype=np.float64, seed=1)
    cross_entropy(model(Tensor(inputs[mine])), classes[mine], divisor=2000).backward()
    own = np.concatenate([parameter.grad.reshape(-1) for parameter in model.parameters()])
    others = np.empty_like(own)
    comm.sendrecv(own, other_rank, others, other_rank)
    return own + others


single = np.concatenate([parameter.grad.reshape(-1) for parameter in model.parameters()])
world = SimWorld(2)
parallel = world.run(on_two_ranks, (slice(0, 700), slice(700, 2000)))[0]
print(f"max |g_parallel - g_single| = {np.abs(parallel - single).max():.1e}")
assert np.abs(parallel - single).max() < 1e-12
picture("space-time", world, "part 5 of lesson 00b", name="two ranks, one gradient")

# %% [markdown]
# ## 6 Break it
#
# Backward frees what forward saved, as soon as it has used it. So a second backward pass over the
# same graph cannot work, and raises an error:

# %%
model.zero_grad()
loss = cross_entropy(model(Tensor(inputs)), classes)
loss.backward()
with expect(AutogradError):
    loss.backward()

# %% [markdown]
# Another bug raises no error. Gradients are *added* to those that are there, so without `zero_grad()`
# a step follows the sum of all gradients so far. A hundred steps with it and without it:

# %%
losses = {}
for zeroed in (True, False):
    model, losses[zeroed] = MLP([20, 50, 10], dtype=np.float64, seed=1), []
    for _ in range(101):
        if zeroed:
            model.zero_grad()
        loss = cross_entropy(model(Tensor(inputs)), classes)
        loss.backward()
        for parameter in model.parameters():
            parameter.data = parameter.data - 2 * parameter.grad
        losses[zeroed].append(loss.item())
    at = ", ".join(f"{losses[zeroed][steps]:.2f} after {steps} steps" for steps in (0, 50, 100))
    print(f"zero_grad: {zeroed!s:5}  loss {at}")
assert losses[True][50] > losses[True][100]
assert losses[False][50] < losses[False][100] > losses[True][100]

# %% [markdown]
# At first the bug even helps: its steps are longer, because no old gradient is forgotten. Then these gradients
# carry the weights past the lowest point, and the loss rises. The first fifty steps do not show it.

# %% [markdown]
# ## 7 Exercise: two backward functions
#
# The first is that of `c = a + b` with NumPy's broadcasting. Given the gradient of `c` and the shapes
# of `a` and `b`, return the gradients of `a` and `b`. As with the bias above, a value that was
# repeated has the sum of the gradients of its copies.
#
# Judged: both gradients, compared with the library's.


# %%
def add_backward(gradient, shape_a, shape_b):
    return gradient, gradient


check("00b.add_backward", add_backward)

# %% [markdown]
# The second is that of the loss: the mean over rows of -log softmax(z)[target], where z is a row of
# `logits` (rows, classes) and softmax(z)_i = exp(z_i) / sum_j exp(z_j). Return its gradient with respect
# to `logits`. (The derivative of log(sum_j exp(z_j)) is softmax(z).) It must be right for large logits,
# too: `exp(1000)` is infinite. Softmax does not change when the same number is subtracted from all
# logits of a row, so subtract the largest one first.
#
# Judged: the gradient, compared with the library's.


# %%
def cross_entropy_backward(logits, targets):
    raise NotImplementedError("yours")


check("00b.cross_entropy_backward", cross_entropy_backward)

# %% [markdown]
# Our solutions:

# %%
for name in ("00b.add_backward", "00b.cross_entropy_backward"):
    reveal(name)
    check(name, solution(name))

# %% [markdown]
# ## 8 Takeaway
#
# - Forward records nodes. **Backward visits them in reverse, the newest first**, adds the gradients that
#   arrive at each, and frees what was saved.
# - Backward takes about **two operations for each of forward**, one for the gradient of a layer's input
#   and one for that of its weight: for a weight of k x m and B rows a step takes 6 B k m operations.

# %% [markdown]
# ## 9 The same code under mpiexec
#
# Autograd knows no ranks, so nothing changes; here each rank runs its own backward pass and the
# gradients are summed:
#
#     mpiexec -n 4 python mpi_examples/2_data_parallel/data_parallel_gpt.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `Tensor`, `.backward()`, `.grad` | PyTorch the same; JAX `jax.grad`, `jax.vjp` (no stored `.grad`); TensorFlow `tf.GradientTape` |
# | "second backward" error | PyTorch "Trying to backward through the graph a second time"; there `retain_graph=True` |
# | input and weight gradient apart | Megatron-LM `--delay-wgrad-compute`; zero-bubble pipelines' B and W |
#
# Next: [02 What a step keeps in memory](02_what_a_step_costs.ipynb). All lessons are in the
# [index](README.md).
