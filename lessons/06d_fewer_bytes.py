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
# *30 minutes. Before it: 06 and 06b.*
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
# **Send less of the gradient, remember what was not sent, and send it later.** It saves bytes, and time
# where links are slow. It costs computing, memory for what is remembered (as many numbers as there are
# parameters), and equality with one device. Its steps are different steps, so a run has to show how far
# the loss falls, its *convergence*. What can be proved is that nothing is lost.
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


def one_step(comm, largest):
    comm.compute(seconds=5e-4, name="forward")
    comm.compute(seconds=1e-3, name="backward")
    if largest:
        all_gather(comm, np.zeros(2 * 99, np.float32))
    else:
        all_reduce(comm, np.zeros(9930, np.float32), algorithm="ring")


for largest, what in ((False, "the whole gradient"), (True, "the largest 1 %")):
    world = SimWorld(4, links=LinkModel(alpha=2e-5, beta=1e-7))
    world.run(one_step, largest)
    title = f"{what}: a step of {1e3 * world.end_time:.1f} ms"
    picture("lanes", world, "part 3 of lesson 06d", title=title)

# %% [markdown]
# ## 4 The code
#
# Of one element in a hundred a place is sent with each value. Another method sends of every element
# only its sign, one bit, and one length for all: a 32nd of float32. A ring cannot add up signs as it
# passes them on, because the sum of three signs is not a sign. So every rank sends its signs to every
# other rank.
#
# A rank adds to its gradient the *residual*, which is what earlier steps have not sent. It sends the sign
# of each element of that sum, and as the length the mean of the absolute values. What this leaves over is
# the new residual. `np.packbits` puts eight signs into a byte, and `np.unpackbits` takes them out:


# %%
def sum_of_signs(comm, gradient, residual):
    """Return the sum of what the ranks send, and the new residual of this rank."""
    corrected = gradient + residual
    length, signs = np.abs(corrected).mean(keepdims=True), np.packbits(corrected >= 0)
    sent = {comm.rank: (length, signs)}
    for distance in range(1, comm.size):
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        sent[source] = np.empty_like(length), np.empty_like(signs)
        comm.sendrecv(length, to, sent[source][0], source)
        comm.sendrecv(signs, to, sent[source][1], source)
    values = []
    for rank in range(comm.size):
        length, signs = sent[rank]
        values.append(np.where(np.unpackbits(signs, count=gradient.size), length, -length))
    return sum(values), corrected - values[comm.rank]


# %% [markdown]
# On two ranks with four elements each, in the first step, where no residual exists yet:

# %%
first = np.array([[3.0, -1.0, 0.5, -2.0], [1.0, -3.0, 1.5, 4.0]])
results = SimWorld(2).run(lambda comm: sum_of_signs(comm, first[comm.rank], np.zeros(4)))
print(f"all gradients {first.sum(axis=0)}, the sum of what was sent {results[0][0]}")
for rank, (_, left) in enumerate(results):
    print(f"rank {rank}: residual {left}")

# %% [markdown]
# The sum is crude, and the residuals say by how much. This memory is called *error feedback*. Over any
# number of steps **sent + residuals = all gradients**: nothing is lost, it is only late. After six
# steps:

# %%
gradients = np.random.default_rng(0).normal(size=(6, 2, 20))  # 6 steps, 2 ranks, 20 elements


def six_steps(comm):
    arrived, residual = np.zeros(20), np.zeros(20)
    for gradient in gradients[:, comm.rank]:
        total, residual = sum_of_signs(comm, gradient, residual)
        arrived += total
    return arrived, residual


(arrived, left), (_, left_on_1) = SimWorld(2).run(six_steps)
off = np.abs(arrived + left + left_on_1 - gradients.sum(axis=(0, 1))).max()
print(f"max |sent + residuals - all gradients| = {off:.0e}")
assert off < 1e-14

# %% [markdown]
# ## 5 Check
#
# First the bytes, of a gradient of 9,930 numbers in float32. The signs of every rank are (n-1)/8 B per
# element, where the ring of float32 sends 8 (n-1)/n. The gain shrinks as ranks are added:

# %%
gradient = np.ones(9930, np.float32)
for n in (4, 64):
    ring, signs = SimWorld(n), SimWorld(n)
    ring.run(lambda comm: all_reduce(comm, gradient.copy(), algorithm="ring"))
    signs.run(lambda comm: sum_of_signs(comm, gradient, 0 * gradient))
    sent = [sum(m.nbytes for m in world.traces[0].sent()) for world in (ring, signs)]
    ratio = sent[0] / sent[1]
    print(f"{n:2} ranks: {sent[0]:,} B and {sent[1]:,} B, {ratio:.2f} times fewer", end="; ")
    print(f"64/n = {64 / n:.0f}")
    assert abs(ratio / (64 / n) - 1) < 0.1

# %% [markdown]
# 1-bit Adam avoids this with two rounds. The signs of the j-th chunk go to rank j only, which adds
# them up, compresses the sum with a second residual and sends it to all: 2 (n-1)/n of an eighth of a
# byte per element, a 32nd of the ring's bytes for any n.
#
# How far does the loss fall? The training loop is that of lesson 00 with a residual. `share` is a
# function that sums the gradients:

# %%
images, labels = glyphs().rows(np.arange(480))


def train(comm, share, steps=120):
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
# The loss over all rows after 120 steps on four ranks, with the whole gradient, with signs, and with
# signs whose residual is dropped:


# %%
def whole(comm, gradient, residual):
    return all_reduce(comm, gradient.copy(), algorithm="ring"), residual


def forgetful(comm, gradient, residual):
    return sum_of_signs(comm, gradient, 0 * gradient)[0], residual


for share in (whole, sum_of_signs, forgetful):
    world = SimWorld(4)
    results = world.run(train, share)
    sent = sum(m.nbytes for m in world.traces[0].sent()) // 120
    first, last = (sum(losses[step] for losses, _ in results) for step in (0, -1))
    print(f"{share.__name__:12} {sent:6,} B per step, loss from {first:.3f} to {last:.3f}")
assert last > 2

# %% [markdown]
# Signs with error feedback take a sixteenth of the bytes, and the loss falls somewhat less far. Without
# error feedback it falls far less. (This is one seed, and one learning rate for all three.) And where
# nothing is left out, the weights are those of one device up to float32's rounding:

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
# ## 7 Exercise: the largest elements, with error feedback
#
# `gradients` (steps, length) are this rank's, one per step; `steps` may be 0. In each step a rank
# sends the `k` elements of gradient + residual with the largest absolute values, as values and places,
# and keeps the rest as its new residual. Return the sums over the ranks, an array (steps, length), and
# this rank's residual after the last step. `all_gather(comm, array)` returns the arrays of all
# ranks, one after the other. Judged: sums and residuals, and that no rank sends more bytes than in our
# solution; messages and time are only printed.


# %%
def error_feedback(comm, gradients, k):
    sums = np.zeros_like(gradients)
    for total, gradient in zip(sums, gradients, strict=True):
        places = np.argsort(-np.abs(gradient))[:k]
        total[places] = gradient[places]
    return sums, np.zeros(gradients.shape[1])


check("06d.error_feedback", error_feedback)

# %%
reveal("06d.error_feedback")
check("06d.error_feedback", solution("06d.error_feedback"))

# %% [markdown]
# ## 8 Takeaway
#
# - **sent + residual = gradient + earlier residual**: with error feedback nothing is lost, it is
#   only late; without it a part of the gradient may never be sent.
# - What a ring cannot add up (signs, places) goes from each rank to each other, **n - 1** times its
#   size, where a ring takes **2 (n-1)/n** times: it saves less with more ranks, and signs nothing on 64.
#   Two rounds with a second compression keep the factor of 32.

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
# | `--compression sign`, with error feedback | 1-bit SGD (Seide et al. 2014), EF-signSGD; DeepSpeed `OneBitAdam`, `OnebitLamb` |
# | `--compression topk:0.01` | Deep gradient compression (Lin et al. 2018), with warm-up and momentum correction on top |
#
# Next: [06e Local SGD and DiLoCo](06e_local_sgd_and_diloco.ipynb). All lessons are in the
# [index](README.md).
