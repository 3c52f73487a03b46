# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06d Fewer bytes
#
# *25 minutes. Before it: 06 and 06b.*
#
# ## 1 The case
#
# Two ranks train two weights. The link between them is slow, so in each step a rank sends only the
# element of its gradient with the larger absolute value, and drops the other one.
#
# About the first weight the ranks disagree: its gradient is 10 on rank 0 and -10 on rank 1. About the
# second weight, w, they agree: its gradient is w - 1 on both ranks, and w begins at 0. A step is w <- w -
# 0.1 times the mean of what the ranks sent. Where is w after 200 steps?

# %% [markdown]
# ## 2 Predict
#
# Write down what each rank sends in the first step.

# %%
from minidist.course.lesson import check, picture, predict, reveal, solution

weight_guess = predict("the second weight after 200 steps", example=1.0)

# %% [markdown]
# ## 3 The idea and its picture
#
# **Send less of the gradient, remember what was not sent, and send it later.** The price is memory for what
# is remembered (as many numbers as there are parameters), and the weights are no longer those of one device. That
# nothing is lost is one line of algebra; the *convergence* of such a training is proved for small learning
# rates (Stich et al. 2018; Karimireddy et al. 2019); how far the loss falls here a run has to show.
#
# The example is a network with 9,930 weights on four ranks, whose links are slow, 10 MB/s. The pictures
# show one step of rank 0 and its messages: with the whole gradient in a ring, and with the largest
# hundredth of its elements. Of these a rank sends values and places, 99 of each. What is large differs
# from rank to rank, so these are not added on the way: `all_gather` gives every rank the arrays of all
# ranks, one after the other.

# %%
import numpy as np

from minidist import (
    MLP,
    SGD,
    FlatParameters,
    LinkModel,
    SimWorld,
    Tensor,
    all_gather,
    all_reduce,
    cross_entropy,
    glyphs,
)
from minidist.report import show
from minidist.report.frame import finish, line, new_panel
from minidist.report.palette import PALETTE


def one_step(comm, largest):
    comm.compute(seconds=5e-4, name="forward")
    comm.compute(seconds=1e-3, name="backward")
    if largest:
        all_gather(comm, np.zeros(2 * 99, np.float32))
    else:
        all_reduce(comm, np.zeros(9930, np.float32), algorithm="ring")


longest = 0.0
for largest, what in ((False, "the whole gradient"), (True, "the largest 1 %")):
    world = SimWorld(4, links=LinkModel(alpha=2e-5, beta=1e-7))
    world.run(one_step, largest)
    longest = max(longest, world.end_time)
    title = f"{what}: a step of {1e3 * world.end_time:.1f} ms"
    picture("lanes", world, "part 3 of lesson 06d", title=title, most_seconds=longest)

# %% [markdown]
# ## 4 The code
#
# A rank sends the k elements with the largest absolute values, first their places and then the values. It adds
# up what all ranks have sent:


# %%
def sum_of_largest(comm, elements, k):
    """Return the sum of every rank's k largest elements, and the places of this rank's."""
    places = np.argsort(-np.abs(elements))[:k].astype(np.int32)
    all_places, all_values = all_gather(comm, places), all_gather(comm, elements[places])
    total = np.zeros_like(elements)
    np.add.at(total, all_places, all_values)  # several ranks may send the same place
    return total, places


# %% [markdown]
# What a step has not sent is the *residual*, and the next step adds it to its gradient. This memory is called
# *error feedback*:


# %%
def with_feedback(comm, gradient, residual, k=99):
    """Return the sum of what the ranks send, and the new residual of this rank."""
    corrected = gradient + residual
    total, places = sum_of_largest(comm, corrected, k)
    left = corrected.copy()
    left[places] = 0
    return total, left


# %% [markdown]
# On two ranks with four elements each, when a rank sends two of them, in the first step, where no residual
# exists yet:

# %%
first = np.array([[3.0, -1.0, 0.5, -2.0], [1.0, -3.0, 1.5, 4.0]])
results = SimWorld(2).run(lambda comm: with_feedback(comm, first[comm.rank], np.zeros(4), 2))
print(f"all gradients {first.sum(axis=0)}, the sum of what was sent {results[0][0]}")
for rank, (_, left) in enumerate(results):
    print(f"rank {rank}: residual {left}")

# %% [markdown]
# Over any number of steps **sent + residuals = all gradients**: nothing is lost, it is only late. After six
# steps:

# %%
gradients = np.random.default_rng(0).normal(size=(6, 2, 20))  # 6 steps, 2 ranks, 20 elements


def six_steps(comm):
    arrived, residual = np.zeros(20), np.zeros(20)
    for gradient in gradients[:, comm.rank]:
        total, residual = with_feedback(comm, gradient, residual, 2)
        arrived += total
    return arrived, residual


(arrived, left), (_, left_on_1) = SimWorld(2).run(six_steps)
off = np.abs(arrived + left + left_on_1 - gradients.sum(axis=(0, 1))).max()
print(f"max |sent + residuals - all gradients| = {off:.0e}")
assert off < 1e-14

# %% [markdown]
# ## 5 Check
#
# First the bytes, of a gradient of 9,930 numbers in float32. With `all_gather` the 99 values and places of a
# rank, 792 B, go to all n - 1 others, where the ring of float32 sends 2 (n-1)/n of the whole. So the gain
# shrinks as ranks are added:

# %%
gradient = np.ones(9930, np.float32)
for n in (4, 64):
    ring, largest = SimWorld(n), SimWorld(n)
    ring.run(lambda comm: all_reduce(comm, gradient.copy(), algorithm="ring"))
    largest.run(lambda comm: with_feedback(comm, gradient, 0 * gradient))
    sent = [sum(m.nbytes for m in world.traces[0].sent()) for world in (ring, largest)]
    print(f"{n:2} ranks: {sent[0]:,} B and {sent[1]:,} B, {sent[0] / sent[1]:.1f} times fewer")

# %% [markdown]
# How far does the loss fall? The training loop is that of lesson 00 with a residual. `share` is a
# function that sums the gradients:

# %%
images, labels = glyphs().rows(np.arange(480))


def train(comm, share, steps=300):
    """Return the loss of each step, of this rank's part of the rows, and the weights."""
    mine = slice(comm.rank * 480 // comm.size, (comm.rank + 1) * 480 // comm.size)
    network = MLP([images.shape[1], 64, 10])
    weights = FlatParameters(network.parameters())
    optimizer, residual, losses = SGD(weights, lr=0.5), np.zeros_like(weights.data), []
    for _ in range(steps):
        weights.zero_grad()
        loss = cross_entropy(network(Tensor(images[mine])), labels[mine], divisor=480)
        loss.backward()
        weights.grad[...], residual = share(comm, weights.grad, residual)
        optimizer.step()
        losses.append(loss.item())
    return losses, weights.data.copy()


# %% [markdown]
# The loss over all rows in 300 steps on four ranks, with the whole gradient, with its largest hundredth, and
# with the largest hundredth and a residual that is dropped:


# %%
def whole(comm, gradient, residual):
    return all_reduce(comm, gradient.copy(), algorithm="ring"), residual


def forgetful(comm, gradient, residual):
    return sum_of_largest(comm, gradient, 99)[0], residual


curves = {}
for share in (whole, with_feedback, forgetful):
    world = SimWorld(4)
    results = world.run(train, share)
    sent = sum(m.nbytes for m in world.traces[0].sent()) // 300
    curves[share] = curve = np.sum([losses for losses, _ in results], axis=0).tolist()
    print(f"{share.__name__:13} {sent:6,} B per step, loss from {curve[0]:.3f} to {curve[-1]:.3f}")
assert curves[whole][-1] < curves[with_feedback][-1] < curves[forgetful][-1] - 1
figure, axes = new_panel(8, 3.6)
colours = {whole: PALETTE["other"], with_feedback: PALETTE["F"], forgetful: PALETTE["blocked"]}
for share, colour in colours.items():
    axes.plot(curves[share], color=colour, linewidth=3 if share is whole else 1.5)
axes.set(xlabel="step", ylabel="loss")
handles = [line(colour, share.__name__.replace("_", " ")) for share, colour in colours.items()]
show(finish(figure, handles, "part 5 of lesson 06d", "all bytes, and a 25th of them"))

# %% [markdown]
# With a 25th of the bytes the loss falls a little later than with the whole gradient. Without error feedback
# it falls far less: what all ranks need is small on each of them, and is never sent. (The spikes of the whole gradient
# come from the learning rate, which is large on purpose. Half and twice this rate give the same order of the three.)
# And where nothing is left out, the weights are those of one device up to float32's rounding:

# %%
single, parallel = (SimWorld(n).run(train, whole, 5)[0][1] for n in (1, 4))
print(f"the whole gradient: max |w_parallel - w_single| = {np.abs(parallel - single).max():.1e}")
assert np.abs(parallel - single).max() < 1e-6

# %% [markdown]
# ## 6 Break it
#
# These are the two weights of the case. Each rank sends the larger of two elements; the zero stands for
# what is not sent. `descend` returns w after each step:


# %%
def descend(comm, feedback, steps=200):
    w, residual, history = 0.0, np.zeros(2), []
    for _ in range(steps):
        gradient = np.array([10.0 if comm.rank == 0 else -10.0, w - 1.0])
        corrected = gradient + residual
        is_largest = np.arange(2) == np.argmax(np.abs(corrected))
        sent = np.where(is_largest, corrected, 0.0)
        if feedback:
            residual = corrected - sent
        w -= 0.1 * all_reduce(comm, sent, op="avg")[1]
        history.append(w)
    return history


forgetful_w = SimWorld(2).run(descend, False)[0][-1]
weight_guess.judge(forgetful_w)
assert forgetful_w == 0

# %% [markdown]
# Without error feedback the first element is the larger one in every step. The ranks' disagreement is
# sent, and cancels; what they agree on is never sent, and no error says so. With error feedback the
# residual of the second element grows on each rank until it is above 10, and then all of it is sent at
# once. So w changes in few steps only:

# %%
history = np.array(SimWorld(2).run(descend, True, 400)[0])
changes = np.flatnonzero(np.diff(history, prepend=0.0))
for at in changes[:5]:
    print(f"w is {history[at]:.2f} from step {at + 1} on")
mean = history[changes[1] : changes[5]].mean()
print(f"mean of w from step {changes[1] + 1} to {changes[5]}: {mean:.3f}")
assert abs(mean - 1) < 0.01

# %% [markdown]
# Each change is about 0.1 x 10 = 1 long, the learning rate times the residual, so w never settles. But its
# mean is right, because nothing is lost.

# %% [markdown]
# ## 7 Exercise: signs, with error feedback
#
# Another compression sends of every element only its sign, and one length for all. (A ring cannot add up signs
# either. 1-bit Adam sends them in two rounds: the signs of chunk j go to rank j, which adds them up, compresses the
# sum with a second residual and sends it to all, a 32nd of the ring's bytes for any n.) `gradients` (steps, length)
# are this rank's, one per step; `steps` may be 0. In each step a rank sends, of gradient + residual, which elements
# are not negative, one bit each, and one length, the mean of the absolute values. That stands for this length times
# the signs, and what is left is the new residual. Return the sums over the ranks of what they have sent so, an array
# (steps, length), and this rank's residual after the last step. Judged: sums and residuals, and that no rank sends
# more bytes than in our solution: in a step 8 B for the length and 1 B for eight elements (`np.packbits`,
# `np.unpackbits`), to each other rank. Messages and time are only printed.


# %%
def sign_feedback(comm, gradients):
    sums = np.zeros_like(gradients)
    for total, gradient in zip(sums, gradients, strict=True):
        length = np.abs(gradient).mean()
        total += np.where(gradient >= 0, length, -length)
    return sums, np.zeros(gradients.shape[1])


check("06d.sign_feedback", sign_feedback)

# %%
reveal("06d.sign_feedback")
check("06d.sign_feedback", solution("06d.sign_feedback"))

# %% [markdown]
# ## 8 Takeaway
#
# - **sent + residual = gradient + earlier residual**: with error feedback nothing is lost, it is
#   only late; without it a part of the gradient may never be sent.
# - What a ring cannot add up, such as values at different places, goes from each rank to each other, **n - 1**
#   times its size, where a ring takes **2 (n-1)/n** times: it saves less with more ranks.

# %% [markdown]
# ## 9 The same code under mpiexec
#
# The library has more methods ([compression](../minidist/techniques/compression)):
#
#     mpiexec -n 4 minidist train --dp 4 --steps 20 --compression powersgd:2
#     mpiexec -n 4 python mpi_examples/2_data_parallel/compression.py --compression topk:0.01

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | a *communication hook*, which replaces the all-reduce of a bucket; `DistributedDataParallel.register_comm_hook` | PyTorch DDP `register_comm_hook` |
# | `--compression bf16`, 16 bits per element | PyTorch `fp16_compress_hook`, `bf16_compress_hook`; Horovod `compression=Compression.fp16`; DeepSpeed `communication_data_type` |
# | `--compression powersgd:2`, two thin matrices, which a ring can add up | PyTorch `PowerSGDState(matrix_approximation_rank, warm_start, use_error_feedback)`, `powerSGD_hook` |
# | `--compression sign`, with error feedback | 1-bit SGD (Seide et al. 2014), EF-signSGD; DeepSpeed `OneBitAdam`, `OneBitLamb` |
# | `--compression topk:0.01` | Deep gradient compression (Lin et al. 2018) |
#
# Next: [06e Local SGD and DiLoCo](06e_local_sgd_and_diloco.ipynb). All lessons are in the
# [index](README.md).
