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
# The example is a network that learns digits on four ranks. The links are slow, 10 MB/s:

# %%
import numpy as np

from minidist import (
    MLP,
    SGD,
    DistributedDataParallel,
    FlatParameters,
    FlopCounter,
    LinkModel,
    Parameter,
    SimWorld,
    Tensor,
    cross_entropy,
    glyphs,
    make_buckets,
    purpose,
)
from minidist.base.trace_file import only_steps
from minidist.base.traces import SpanEvent
from minidist.techniques.compression import QSGD, Cast, PowerSGD, Sign, TopK, compress

images, labels = glyphs().rows(np.arange(480))
links = LinkModel(alpha=2e-5, beta=1e-7, flops=3e9, memory_bandwidth=6e9)

# %% [markdown]
# An ordinary training loop. A *communication hook* replaces the all-reduce of a bucket by a function
# that compresses it:


# %%
def train(comm, make=None, steps=120, lr=0.5, width=64):
    """Returns the loss of each step over all rows, the weights, and the compressor."""
    mine = slice(comm.rank * 480 // comm.size, (comm.rank + 1) * 480 // comm.size)
    with FlopCounter() as counter:
        model = MLP([images.shape[1], width, 10])
        flat = FlatParameters(model.parameters())
        state = make(comm) if make else None
        model = DistributedDataParallel(
            model, comm, reduction="sum", algorithm="ordered", flat=flat
        )
        if state:
            model.register_comm_hook(state, compress)
        optimizer, losses = SGD(flat, lr=lr), []
        for step in range(steps):
            began = comm.time()
            flat.zero_grad()
            loss = cross_entropy(model(Tensor(images[mine])), labels[mine], divisor=480)
            comm.compute(counter.take(), name="forward")
            loss.backward()
            comm.compute(counter.take(), name="backward")
            optimizer.step()
            losses.append(loss.item())
            span = SpanEvent(comm.rank, "main", f"step {step}", began, comm.time(), "step")
            comm.trace.add_span(span)  # for the picture of one step
    return losses, flat.data.copy(), state


# %% [markdown]
# The pictures show the second step of rank 0, with the whole gradient, and with the largest hundredth of
# its elements. Backward takes equally long, and the messages take a small part of the step.

# %%
for make, what in ((None, "the whole gradient"), (lambda comm: TopK(comm, 0.01, "sum"), "top 1 %")):
    world = SimWorld(4, links=links)
    world.run(train, make, steps=2)
    second = only_steps(world.traces, 1, 2)
    ms = max(1e3 * (span.end - span.start) for span in second[0].spans)  # of the step itself
    picture("lanes", second, "part 3 of lesson 06d", title=f"{what}: a step of {ms:.1f} ms")

# %% [markdown]
# ## 4 The code
#
# Of one element in a hundred a place is sent with each value. A method for all elements sends only
# their *sign*, one bit, and one length: a 32nd of float32. A ring cannot add up signs as it passes them
# on, because the sum of three signs is not a sign. So every rank sends its signs to every other rank.
#
# Here are all messages of the sum of signs. A rank adds to its gradient the *residual*, which is what
# earlier steps have not sent. It sends the sign of each element of that sum, and one length for all,
# the mean of the absolute values. What this leaves over is the new residual. (A sign takes a byte here;
# the library packs eight signs into one.)


# %%
def sum_of_signs(comm, gradient, residual):
    """Return the sum of what the ranks send, and the new residual of this rank."""
    corrected = gradient + residual
    length, signs = np.abs(corrected).mean(keepdims=True), np.where(corrected < 0, -1, 1)
    signs = signs.astype(np.int8)
    sent = {comm.rank: (length, signs)}
    for distance in range(1, comm.size):
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        sent[source] = np.empty_like(length), np.empty_like(signs)
        comm.sendrecv(length, to, sent[source][0], source)
        comm.sendrecv(signs, to, sent[source][1], source)
    total = sum(sent[rank][0] * sent[rank][1] for rank in range(comm.size))
    return total, corrected - length * signs


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
# First the bytes. The signs of every rank are (n-1)/8 B per element, where the ring of float32 sends
# 8 (n-1)/n. The gain shrinks as ranks are added.

# %%
bytes_of = {}
for n in (4, 64):
    for name, make in (("ring", None), ("sign", lambda comm: Sign(comm, "sum"))):
        world = SimWorld(n, checks=False)
        world.run(train, make, steps=1, width=8)
        bytes_of[n, name] = sum(
            message.nbytes for message in world.traces[0].sent("gradient_reduce")
        )
    ratio = bytes_of[n, "ring"] / bytes_of[n, "sign"]
    print(f"{n:2} ranks: {ratio:.2f} times fewer bytes; on paper 64 / n = {64 / n:.0f}")
    assert abs(ratio / (64 / n) - 1) < 0.1

# %% [markdown]
# 1-bit Adam avoids this with two rounds. The signs of the j-th chunk go to rank j only, which adds
# them up, compresses the sum with a second residual and sends it to all: 2 (n-1)/n of an eighth of a
# byte per element, a 32nd of the ring's bytes for any n.
#
# How far does the loss fall? The library ([compression](../minidist/techniques/compression)) has more
# methods. `Cast` sends 16 bits per element. PowerSGD sends two thin matrices whose product is near the
# gradient's matrix. QSGD rounds up or down at random, so that the mean is right. Such a compressor is
# called unbiased. It needs no error feedback, but its rounding makes the gradient noisier. And to see
# what error feedback does, signs without it. A compressor's method `corrected` returns the gradient
# plus the residual; here it returns the gradient alone:


# %%
class Forgetful(Sign):
    def corrected(self, bucket):
        return bucket.buffer.copy()  # without the residual


METHODS = {
    "none": None,
    "bf16": lambda comm: Cast(comm, "bfloat16", "sum"),
    "top 10 %": lambda comm: TopK(comm, 0.1, "sum"),
    "sign": lambda comm: Sign(comm, "sum"),
    "sign, forgetful": lambda comm: Forgetful(comm, "sum"),
    "QSGD, 15 levels": lambda comm: QSGD(comm, 15, op="sum"),
    "PowerSGD, rank 2": lambda comm: PowerSGD(comm, 2, op="sum"),
}

# %% [markdown]
# The bytes per step and the loss after 120 steps, on four ranks, for one seed and one learning rate:

# %%
loss = {}
for name, make in METHODS.items():
    world = SimWorld(4)
    results = world.run(train, make)
    sent = sum(m.nbytes for m in world.traces[0].sent("gradient_reduce")) // 120
    first, loss[name] = (sum(losses[step] for losses, *_ in results) for step in (0, -1))
    print(f"{name:17} {sent:7,} B per step, loss from {first:.3f} to {loss[name]:.3f}")
assert loss["sign, forgetful"] > 1.2 * loss["sign"]

# %% [markdown]
# Signs with error feedback take a sixteenth of the bytes, and the loss falls somewhat less far; without
# error feedback it falls far less. The library's QSGD sends a byte per element to every rank, as many
# bytes as bf16 in a ring, although a sign and 15 levels need 5 bits, and fewer with the code of its
# paper. And where nothing is left out, the result is that of data parallelism, and that of one device
# up to float32's rounding:

# %%
(_, single, _), *_ = SimWorld(1).run(train, steps=5)
whole = SimWorld(3).run(train, steps=5)[0][1]
everything = SimWorld(3).run(train, lambda comm: TopK(comm, single.size, "sum"), steps=5)[0][1]
print(f"top 100 %: max |w_parallel - w_single| = {np.abs(everything - single).max():.1e}")
print(f"the bits of data parallelism: {np.array_equal(everything, whole)}")
assert np.array_equal(everything, whole)

# %% [markdown]
# ## 6 Break it
#
# These are the two weights of the case. `descend` trains them with a compressor that sends one element,
# and returns w after each step:


# %%
class ForgetfulTopK(TopK):
    def corrected(self, bucket):
        return bucket.buffer.copy()


def descend(comm, kind, steps=200):
    """Return w after each step."""
    weights = np.zeros(2)
    (bucket,) = make_buckets(FlatParameters([Parameter(np.zeros(2), name="w")]), 1e9)
    state = kind(comm, 1)
    history = []
    for _ in range(steps):
        bucket.buffer[...] = [10.0 if comm.rank == 0 else -10.0, weights[1] - 1.0]
        with purpose("gradient_reduce"):
            compress(state, bucket).wait()
        weights -= 0.1 * bucket.buffer
        history.append(weights[1])
    return history


forgetful = SimWorld(2).run(descend, ForgetfulTopK)[0]
weight_guess.judge(forgetful[-1])
assert forgetful[-1] == 0

# %% [markdown]
# Without error feedback the first element is the larger one in every step. The ranks' disagreement is
# sent, and cancels; what they agree on is never sent, and no error says so. With error feedback the
# residual of the second element grows on each rank until it is above 10, and then all of it is sent at
# once. So w changes in few steps only:

# %%
history = np.array(SimWorld(2).run(descend, TopK, 400)[0])
changes = np.flatnonzero(np.diff(history, prepend=0.0))
for at in changes[:5]:
    print(f"w is {history[at]:.2f} from step {at + 1} on")
mean = history[changes[1] : changes[5]].mean()
print(f"mean of w from step {changes[1] + 1} to {changes[5]}: {mean:.3f}")
assert abs(mean - 1) < 0.01

# %% [markdown]
# Each change after the first is 0.1 x 10 = 1 long, the learning rate times the residual, so w never settles, but its
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
#   only late; without it a part of the gradient may never be sent. An unbiased compressor (QSGD) needs
#   no error feedback, and adds noise.
# - What a ring can add up (16-bit numbers, PowerSGD's matrices) takes **2 (n-1)/n** times its size from
#   each rank. What it cannot (signs, indices), sent from each rank to each other, takes **n - 1** times
#   its size: it saves less with more ranks, and signs nothing on 64. Two rounds with a second
#   compression keep the factor of 32.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --dp 4 --steps 20 --compression powersgd:2
#     mpiexec -n 4 python mpi_examples/2_data_parallel/compression.py --compression topk:0.01

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `register_comm_hook(state, compress)` | PyTorch DDP `register_comm_hook` |
# | `Cast` | PyTorch `fp16_compress_hook`, `bf16_compress_hook`; Horovod `compression=Compression.fp16`; DeepSpeed `communication_data_type` |
# | `PowerSGD`, warm start | PyTorch `PowerSGDState(matrix_approximation_rank, warm_start, use_error_feedback)`, `powerSGD_hook` |
# | `Sign` with error feedback | 1-bit SGD (Seide et al. 2014), EF-signSGD; DeepSpeed `OneBitAdam`, `OnebitLamb` |
# | `TopK` | Deep gradient compression (Lin et al. 2018), with warm-up and momentum correction on top |
#
# Next: [06e Local SGD and DiLoCo](06e_local_sgd_and_diloco.ipynb). All lessons are in the
# [index](README.md).
