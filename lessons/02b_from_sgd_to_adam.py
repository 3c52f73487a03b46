# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02b From SGD to Adam
#
# *25 minutes. Before it: 02.*
#
# ## 1 The case
#
# Lesson 02 counted two averages per parameter for Adam, 8 of the 16 bytes. What are they for?
#
# Along one weight a loss is a thousand times as steep as along another: (x^2 + 1000 y^2) / 2. Its
# gradient at (1, 1) is (1, 1000). SGD subtracts the learning rate lr times the gradient, so its first step
# moves y a thousand times as far as x. How many times as far as x does Adam's first step move y?

# %% [markdown]
# ## 2 Predict
#
# Adam keeps for each weight an average m of the gradients g and an average v of their squares, and
# subtracts lr m / sqrt(v). Both averages begin at 0, and each step moves them a little towards the new
# value: m = 0.9 m + 0.1 g, and v = 0.999 v + 0.001 g^2. So after the first gradient m is a tenth of g, and v
# is a thousandth of g^2. Adam corrects this: in the first step it divides m by 0.1 and v by 0.001, and in
# later steps by factors nearer to 1. How many times as long is the first step without the correction?
#
# For both numbers put the averages after one gradient into lr m / sqrt(v). A tenth off is good enough.

# %%
from minidist.course.lesson import check, predict, reveal, solution

adam_guess = predict("first step of Adam along y, over that along x", example=1000)
first_guess = predict("first step without correction, over that with it", example=0.1)

# %% [markdown]
# ## 3 The idea and its picture
#
# **Divide by v, and each weight gets a step of about the same length, whatever the size of its gradient;
# average in m, and what changes its sign from step to step cancels.** The steepest weight no longer decides
# the learning rate of all. Both averages are arrays of the parameters' shape, the optimizer's state (lesson 02).
#
# `descend` goes down in this valley, and returns the points that it visits:

# %%
import numpy as np

from minidist import SGD, Adam, Parameter
from minidist.base.memory import account_memory
from minidist.optim import RMSProp
from minidist.report import show
from minidist.report.frame import finish, line, new_figure, tidy
from minidist.report.palette import PALETTE

STEEP = np.array([1.0, 1000.0])  # along x and along y
STRAIGHT, TURNED = np.eye(2), np.array([[1.0, -1.0], [1.0, 1.0]]) / np.sqrt(2)  # by 45 degrees


def descend(kind, steps=100, turn=STRAIGHT, **settings):
    """Return the points of a descent in the valley, which is turned around its lowest point."""
    slope = turn @ np.diag(STEEP) @ turn.T
    p = Parameter(turn @ np.ones(2))
    optimizer, path = kind([p], **settings), [p.data.copy()]
    for _ in range(steps):
        p.grad = slope @ p.data
        optimizer.step()
        path.append(p.data.copy())
    return np.array(path)


# %% [markdown]
# The pictures show 100 steps, and lines of equal loss. Left is the valley of the case. With a rate above 0.002 SGD
# would move away from the lowest point along y. With a rate just below 0.002 it jumps from one slope to the other,
# and hardly moves along x. Adam takes a rate of 0.05 for both. Its m still holds older gradients, so it runs past
# the lowest point and comes back. Right is the same valley, turned by 45°; part 5 says what Adam cannot do there:

# %%
figure = new_figure(9, 4.6)
x, y = np.meshgrid(np.linspace(-1.15, 1.45, 200), np.linspace(-1.15, 1.45, 200))
runs = {"SGD": (SGD, 0.0019, PALETTE["compute"]), "Adam": (Adam, 0.05, PALETTE["F"])}
panels = zip(figure.subplots(1, 2), (STRAIGHT, TURNED), strict=True)
for axes, turn in panels:
    loss = np.square(np.stack([x, y], axis=-1) @ turn) @ STEEP / 2
    axes.contour(x, y, loss, levels=np.geomspace(0.3, 2000, 9), colors=PALETTE["other"])
    for kind, lr, colour in runs.values():
        axes.plot(*descend(kind, turn=turn, lr=lr).T, ".-", color=colour, linewidth=0.8)
    axes.plot(0, 0, "x", color=PALETTE["blocked"], zorder=3)
    axes.set(xlabel="first weight", ylabel="second weight", aspect="equal")
    tidy(axes)
handles = [line(colour, name, marker=".") for name, (_, _, colour) in runs.items()]
handles.append(line(PALETTE["blocked"], "the lowest point", marker="x", linestyle=""))
show(finish(figure, handles, "part 3 of lesson 02b", "a valley a thousand times as steep along y"))

# %% [markdown]
# ## 4 The code
#
# A gradient says in which direction the loss falls, and little about how far to go. Each of these
# optimizers has one more idea:
#
# - **SGD** has no state: p -= lr g. The steepest weight decides the rate of all.
# - **Momentum** keeps a sum of past gradients in which each counts 0.9 times as much as the one after it. Where they
#   have the same sign they add up, and where the sign changes at every step they cancel.
# - **RMSProp** keeps an average of the squares and divides by its root, so a weight moves by about lr
#   per step, whether its gradients are large or small. The average begins at 0, so the first step is
#   ten times as long: the root of 0.01 g^2 is a tenth of g.
# - **Adam** averages both, and removes this error. For equal gradients the averages after t steps are
#   1 - 0.9^t of g and 1 - 0.999^t of g^2, because they begin at 0; Adam divides them by these factors. To
#   the root 1e-8 is added, here and in RMSProp, so that nothing is divided by 0.
#
# RMSProp as a function:


# %%
def rmsprop(p, g, state, lr):
    state["square"] = 0.99 * state.get("square", 0.0) + 0.01 * g**2
    return p - lr * g / (np.sqrt(state["square"]) + 1e-8)


# %% [markdown]
# ## 5 Check
#
# The library's optimizers in the valley, each with the best of five rates. The last column is the state that each
# keeps, in arrays of the weights' shape:

# %%
LIBRARY = {
    "sgd": (SGD, {"lr": 0.0019}),
    "momentum": (SGD, {"lr": 0.003, "momentum": 0.9}),
    "rmsprop": (RMSProp, {"lr": 0.05}),
    "adam": (Adam, {"lr": 0.05}),
}
paths = {}
print(f"{'':8} {'after 1 step':19} {'20 steps':19} {'100 steps':19} state")
for name, (kind, settings) in LIBRARY.items():
    with account_memory() as account:
        paths[name] = descend(kind, **settings)
    arrays = account.peak_by_purpose.get("optimizer", 0) // paths[name][0].nbytes
    points = "   ".join(f"x {x:5.3f} y {y:6.3f}" for x, y in paths[name][[1, 20, 100]])
    print(f"{name:8} {points}   {arrays}")
    rates = (0.001, 0.0019, 0.003, 0.02, 0.05)
    ends = [np.hypot(*descend(kind, **settings | {"lr": lr})[-1]) for lr in rates]
    assert settings["lr"] == rates[np.argmin(ends)]
x, y = np.abs(paths["adam"][1] - 1)
adam_guess.judge(y / x, within=0.1)

# %% [markdown]
# RMSProp reaches the lowest point with one array, because its gradients here have no noise. What m is for
# shows on gradients that contradict each other: some that change their sign at every step, and some that
# are drawn at random around 0. How long is a step on average, in multiples of lr?

# %%
drawn = {
    "alternating": (-1.0) ** np.arange(1000),
    "random": np.random.default_rng(0).normal(size=1000),
}
for name, gradients in drawn.items():
    for kind in (RMSProp, Adam):
        p, steps = Parameter(np.zeros(1)), []
        optimizer = kind([p], lr=0.05)
        for g in gradients:
            before, p.grad = p.data[0], np.array([g])
            optimizer.step()
            steps.append(abs(p.data[0] - before) / 0.05)
        print(f"{name:12} {kind.__name__:8} {np.mean(steps):.2f} lr per step")

# %% [markdown]
# RMSProp makes steps of about lr that lead nowhere; Adam's are short, because in m such gradients cancel.
# That is what the second array is for: the gradients of a training are from few rows each, so they are noisy.
#
# And what Adam cannot do? It divides weight by weight. Turn the valley by 45°: now both weights have large gradients,
# and the direction in which the loss is flat is the diagonal between them (the right picture of part 3):

# %%
print("distance from the lowest point after 100 steps")
for name, (kind, settings) in LIBRARY.items():
    turned = descend(kind, turn=TURNED, **settings)[100]
    print(f"{name:8} as before {np.hypot(*paths[name][100]):.3f}, turned {np.hypot(*turned):.3f}")

# %% [markdown]
# SGD and momentum do not notice the turn. RMSProp and Adam are slower than SGD now: they only know how large the
# gradient of each weight is, and here both are equally large.

# %% [markdown]
# All of this is done element by element. So a rank that has **a piece of the parameters, of their
# gradients and of their state steps the piece as if it had the whole**, without a message. Lesson 11
# builds ZeRO on that. Two ranks' pieces, and one device:

# %%
rng = np.random.default_rng(0)
start, gradients = rng.normal(size=12), rng.normal(size=(5, 12))


def stepped(piece):
    """Return a piece of the weights after five steps of Adam that know this piece only."""
    parameter = Parameter(start[piece].copy())
    optimizer = Adam([parameter], lr=0.01)
    for gradient in gradients:
        parameter.grad = gradient[piece]
        optimizer.step()
    return parameter.data


pieces = np.concatenate([stepped(slice(0, 5)), stepped(slice(5, 12))])
print(f"max |w_parallel - w_single| = {np.abs(pieces - stepped(slice(None))).max():g}")
assert np.array_equal(pieces, stepped(slice(None)))

# %% [markdown]
# ## 6 Break it
#
# Adam without its correction: in the first step a tenth of g is too small, and the root of 0.001 g^2
# is too small by more, so the steps are too long. x passes 0 and comes back, and no error says so:

# %%
p, m, v, path = np.ones(2), 0.0, 0.0, []
for _ in range(20):
    g = STEEP * p
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    p = p - 0.05 * m / np.sqrt(v)
    path.append(p)
print("x after 1, 5, 10, 20 steps:", *(f"{path[at - 1][0]:.3f}" for at in (1, 5, 10, 20)))
first_guess.judge((1 - path[0][0]) / x, within=0.1)

# %% [markdown]
# ## 7 Exercise: Adam
#
# `gradients` (steps, size) are those of one piece of the weights, which begins with the values
# `weights`. Return the weights after all steps of Adam with the rate `lr`: the two averages of part 2,
# both corrected as in part 4, and 1e-8 added to the root of the corrected v.
#
# Judged: the weights. The library's optimizers may not be called.


# %%
def adam(weights, gradients, lr):
    state = {}
    for g in gradients:
        weights = rmsprop(weights, g, state, lr)
    return weights


check("02b.adam", adam)

# %%
reveal("02b.adam")
check("02b.adam", solution("02b.adam"))

# %% [markdown]
# ## 8 Takeaway
#
# - In float32 SGD keeps nothing, momentum and RMSProp keep 4 B per weight, and Adam keeps 8 B. Adam
#   **divides the average gradient by its usual size**. v gives every weight a step of about the same length,
#   and m shortens the steps where gradients contradict each other: a step is lr m / (sqrt(v) + eps), with m divided
#   by 1 - 0.9^t before and v by 1 - 0.999^t.
# - All of it is done element by element. So a rank steps a piece of the weights without a message.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/3_sharding/optimizers.py
#     mpiexec -n 2 minidist train --dp 2 --optimizer rmsprop --lr 0.003 --steps 20

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `SGD(momentum=)`, `RMSProp`, `Adam` | PyTorch `torch.optim.SGD`, `RMSprop`, `Adam`; Optax `optax.sgd`, `rmsprop`, `adam` |
# | 0.9 and 0.999 | `betas` in PyTorch and DeepSpeed; `--adam-beta1`, `--adam-beta2` of Megatron-LM; here `--betas` |
# | Adam (Kingma and Ba, 2015) with weights that also shrink | PyTorch `torch.optim.AdamW` (Loshchilov and Hutter, 2019) |
#
# Next: [03 Send, receive, deadlock](03_send_receive_deadlock.ipynb). All lessons are in the
# [index](README.md).
