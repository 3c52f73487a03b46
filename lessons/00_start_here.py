# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 Start here: four ranks learn to read
#
# *30 minutes. Before it: Python, NumPy, and a training loop in the style of PyTorch.*
#
# ## 1 The case
#
# A network learns to read digits from 64 small pictures. One machine computes the gradient of all
# 64. You have four machines, so each gets 16 of the pictures and a quarter of the work. After every
# step all four must hold **the weights that one machine would hold**, or four networks are trained
# in place of one.
#
# A worker with a separate memory, here a machine and usually one process, is a *rank*; ranks are numbered from 0. No
# rank can look into the memory of another one: every number that another rank needs must be sent, and every number
# that is sent must be received. What has to be sent here? And what happens if it is not?
#
# This page trains on four ranks, which it simulates in one process. Four of the pictures:

# %%
import numpy as np

from minidist import MLP, SGD, FlatParameters, SimWorld, Tensor, cross_entropy, glyphs
from minidist.course.lesson import check, expect, picture, predict, reveal, solution
from minidist.course.story import story

images, labels = glyphs().rows(np.arange(64))
images = images.astype(np.float64)
for lines in zip(*images[:4].reshape(4, 12, 12), strict=True):  # the first four, line by line
    print("   ".join("".join("#" if ink > 0.45 else " " for ink in line) for line in lines))
print("labels:", *labels[:4])

# %% [markdown]
# ## 2 Predict
#
# Commit to two numbers before you go on; `predict` waits for them, and parts 5 and 6 compare them with
# what was measured. The network, a multi-layer perceptron (`MLP`), has 4,970 weights of 8 bytes each: 144
# pixels, 32 hidden units, 10 digits. The first number is about a training in which the ranks share what is
# needed. In the second training nothing is sent at all: 100 % means that the loss of rank 0 falls as far as
# in the first, and 0 % that it does not fall.

# %%
sent = predict("bytes that rank 3 sends in one step", example=1000, unit="B")
fall = predict("how far rank 0's loss falls when nothing is sent", example=0, unit="%")

# %% [markdown]
# ## 3 The idea and its picture
#
# The gradient of 64 pictures is the sum of what each picture adds to it. So each rank computes the
# sum over its own 16, and **the four sums are added**. Here rank 0 adds them and sends the result
# back to the others. Everything else is what one machine does.
#
# `comm` is the *communicator*: all ranks that exchange messages. `comm.rank` is the number of this rank,
# and `comm.size` is how many ranks there are. `comm.send(array, 3)` sends an array to rank 3;
# `comm.recv(array, 3)` fills an array with what rank 3 sent.


# %%
def add_up(comm, gradient):
    """Every rank's `gradient` becomes the sum over all ranks."""
    if comm.rank > 0:
        comm.send(gradient, 0)
        comm.recv(gradient, 0)  # the sum comes back into the same array
        return
    incoming = np.empty_like(gradient)
    for source in range(1, comm.size):
        comm.recv(incoming, source)
        gradient += incoming
    for target in range(1, comm.size):
        comm.send(gradient, target)


# %% [markdown]
# This is the training loop of one rank, as PyTorch would write it; a `Tensor` is an array whose gradient
# `backward` computes. Of four ranks each takes every fourth picture, and begins with the picture that has
# the rank's number. All ranks begin with the same weights, because `MLP` draws them with the same seed.
# The loss is divided by 64, the number of all pictures, so the gradients of the ranks add up to that of
# one machine:


# %%
def train(comm, share=add_up, steps=60):
    mine = slice(comm.rank, None, comm.size)
    network = MLP([144, 32, 10], dtype=np.float64)
    weights = FlatParameters(network.parameters())  # all in one array, and all gradients in another
    optimizer = SGD(weights, lr=1.0)

    losses = []  # what a job prints: the mean over the pictures of this rank
    for _ in range(steps):
        weights.zero_grad()  # backward adds to the gradients, so they begin at 0
        loss = cross_entropy(network(Tensor(images[mine])), labels[mine], divisor=64)
        loss.backward()
        share(comm, weights.grad)
        optimizer.step()
        losses.append(float(loss.data) * comm.size)
    return losses, weights.data.copy(), network


# %% [markdown]
# `SimWorld(4).run(train)` calls `train(comm)` once for each of four ranks and returns the list of
# what they returned. The loss on one rank, and the mean of the losses on four, lie on each other:

# %%
alone, alone_weights, _ = SimWorld(1).run(train)[0]
four = SimWorld(4).run(train)
mean = np.mean([losses for losses, _, _ in four], axis=0)
for at in (0, 59):
    print(f"step {at + 1:2}: loss {alone[at]:.4f} on 1 rank, {mean[at]:.4f} on 4 ranks")
curves = {"losses": mean.tolist(), "reference_losses": alone, "names": ("1 rank", "4 ranks")}
picture("loss", [], "part 3 of lesson 00", title="the same training twice", **curves)

# %% [markdown]
# Step through one sum of two numbers per rank: the arrow keys go from message to message. A row is an array
# of `add_up`, under the number of its rank. On rank 0 `gradient` grows from 1 to 3, 6 and 10, and `incoming` is
# empty until a message is there. A cell is dark when it holds its last value.

# %%
from minidist.report import show, step


def one_sum(comm):
    add_up(comm, np.array([1.0, 10.0]) * (comm.rank + 1))


world = step(one_sum, 4)
show(world, "Rank 0 adds two numbers of each rank and sends the sums back.")

# %% [markdown]
# The same run as one picture: a rank is a horizontal line, time runs to the right, and an arrow is a
# message. Red is the time in which a rank waits for another one, and pink the time in which it waits for
# bytes that are on their way. Here the bytes leave when `send` is called, and a send is red until its
# receiver has the message. The time is *virtual*: it is computed from the messages, so the picture is the
# same on every machine. A message takes 1 µs, and 0.1 ns more for each byte.

# %%
picture("space-time", world, "part 3 of lesson 00", name="one sum on 4 ranks")

# %% [markdown]
# ## 4 The code
#
# You have read all of it: `train` is an ordinary training loop with one more line,
# `share(comm, weights.grad)`, and every message is sent in `add_up`. The same function runs on
# any number of ranks; on one rank `add_up` sends nothing.

# %%
for ranks in (1, 2, 8, 64):
    results = SimWorld(ranks).run(train)
    mean = np.mean([losses[-1] for losses, _, _ in results])
    print(f"pictures per rank: {64 // ranks:2}, ranks: {ranks:2}, last loss: {mean:.4f}")

# %% [markdown]
# ## 5 Check
#
# Four equal digits of a loss prove little. The weights must be equal, on every rank, up to the
# rounding of 64-bit numbers:

# %%
for rank, (_, weights, _) in enumerate(four):
    print(f"rank {rank}: max |w_parallel - w_single| = {abs(weights - alone_weights).max():.1e}")
assert all(abs(weights - alone_weights).max() < 1e-12 for _, weights, _ in four)

# %% [markdown]
# Each rank keeps a record of its messages, its *trace*: `world.traces[rank]`. The bytes of one step
# are counted there:

# %%
world = SimWorld(4)
world.run(train, add_up, 1)
for trace in world.traces:
    print(f"rank {trace.rank} sends {sum(m.nbytes for m in trace.sent()):7,} B in a step")
sent.judge(sum(m.nbytes for m in world.traces[3].sent()))

# %% [markdown]
# Every weight has one number in the gradient, so a rank sends one number per weight, and not one
# picture. Rank 0 sends three times as many bytes. The more ranks there are, the longer one sum takes, as
# all gradients go through rank 0: 39,760 B take 3.98 µs, n - 1 gradients come in one after the other and n - 1
# sums go out, which is 2 (1 + 3.98 (n - 1)) µs in all. Lesson 04 does without such a rank.

# %%
for ranks in (4, 8, 64):
    world = SimWorld(ranks)
    world.run(lambda comm: add_up(comm, np.ones(4970)))
    print(f"one sum of 4,970 numbers on {ranks:2} ranks takes {world.end_time * 1e6:3.0f} µs")

# %% [markdown]
# ## 6 Break it
#
# Forget to share the gradients. No rank waits, no error is raised, and the loss falls all the same:


# %%
def forget(comm, gradient):
    """Send nothing: every rank trains a separate network."""


wrong = SimWorld(4).run(train, forget)
right_fall, wrong_fall = (run[0][0][0] - run[0][0][-1] for run in (four, wrong))
now, before = wrong[0][0][59], four[0][0][59]
print(f"step 60: rank 0 prints the loss {now:.4f}, with sharing {before:.4f}")
fall.judge(100 * wrong_fall / right_fall, within=0.1)

# %% [markdown]
# And what has it trained? The weights of two ranks, and the loss of rank 0's network on all 64 pictures,
# after the last step (part 3 printed the loss before it) and in the picture after every fifth one:

# %%
print(f"max |w_rank0 - w_rank1| = {abs(wrong[0][1] - wrong[1][1]).max():.2f}")
for name, run in (("shared", four), ("nothing sent", wrong)):
    everything = cross_entropy(run[0][2](Tensor(images)), labels)
    print(f"{name:12}: loss on all pictures {float(everything.data):.4f}")

after = [SimWorld(4).run(train, forget, steps)[0][2] for steps in range(0, 60, 5)]
curves = {"losses": [cross_entropy(network(Tensor(images)), labels).item() for network in after]}
curves |= {"reference_losses": wrong[0][0][::5], "counted": "steps, in units of 5"}
curves["names"] = "rank 0's 16 pictures, which it prints", "all 64 pictures"
picture("loss", [], "part 6 of lesson 00", title="rank 0, when nothing is sent", **curves)

# %% [markdown]
# There are four networks now, and each has learned 16 pictures and nothing else: on all 64 rank 0's is worse than
# before the first step (2.2847 in part 3). (Each rank's step is a quarter as long as it would be alone, because the
# loss is still divided by 64. With 16 the printed loss is lower still, and that on all pictures higher.) **A falling
# loss proves nothing**: this course compares weights. Many published failures of distributed training are of this kind;
# lesson 28 collects them.
#
# The other mistake does not stay hidden. Let every rank receive before it sends: a real program
# waits here until someone ends it. The simulated world detects that no rank can continue, and
# reports which rank waits for which, and at which line:

# %%
from minidist import DeadlockError


def everybody_receives(comm):
    incoming = np.empty(1)
    comm.recv(incoming, (comm.rank + 1) % comm.size)
    comm.send(incoming, (comm.rank - 1) % comm.size)


world = SimWorld(4)
with expect(DeadlockError):
    world.run(everybody_receives)
picture("space-time", world, "part 6 of lesson 00")

# %% [markdown]
# Break it yourself: leave out the second loop of `add_up` in part 3, and run the cells from there on.
# Ranks 1 to 3 wait for rank 0, whose sum never comes; rank 0 has gone on to the next step and waits for
# rank 1.

# %% [markdown]
# ## 7 Exercise: speak in rank order
#
# Each rank calls `say("...")` exactly once: rank 0 first, then rank 1, and so on, and no rank
# begins before the rank before it has finished. Ranks share no variables, so a message must tell a
# rank that it may speak, a *token* that goes from rank to rank. A sentence takes 1 ms.
#
# The check runs your function on several numbers of ranks, 1 among them, with sends that wait for the
# receiver and with sends that do not. *Par* is what our own solution needs. Where an
# exercise says that bytes, messages, time or memory are judged, yours must not exceed par; the other numbers that
# the check prints are for information. For a wrong
# answer it shows the smallest case in which the answer fails, a picture of the messages, and a hint.
#
# Judged: one sentence per rank, in order; messages (par).


# %%
def in_rank_order(comm, say):
    raise NotImplementedError("yours")


check("00.in_rank_order", in_rank_order)

# %% [markdown]
# `reveal` prints our solution when yours is right, or after three tries. For a right answer the check
# prints this:

# %%
reveal("00.in_rank_order")
check("00.in_rank_order", solution("00.in_rank_order"))

# %% [markdown]
# ## 8 Takeaway
#
# - A distributed program is **one function of a communicator**: `train(comm)`.
# - Training in which each rank has all weights and a part of the data (data parallelism) **adds gradients in
#   every step**, and afterwards all ranks hold the weights of one machine.
# - If one of n ranks adds all gradients, each other rank sends as many bytes as its gradient has, and this
#   one **n - 1** times as many.

# %% [markdown]
# The course follows one job: a model of 7 billion parameters, and from lesson 12 on one of 65 billion, is to be trained
# on cards (NVIDIA H100 GPUs) with 80 GB of memory each, which are 85 x 10^9 B (a GB is 10^9 B in the table), and with
# numbers of 16 bits, 2 B. (It has 6.74 billion, to be exact. In training a parameter needs 18 B, which makes 121 GB:
# lesson 02 counts them.) Every core lesson adds a row to the table of that job: the number of cards, the bytes of the
# fullest card, whether they fit, and the seconds of a step of 2^20 tokens (here pieces of text, not messages), or,
# where these do not change, a remark. `minidist plan` computes the numbers ([story.py](../minidist/course/story.py)).
# The last column says what is still wrong, and the lessons that follow work on it:

# %%
story("00")

# %% [markdown]
# ## 9 The same code under mpiexec
#
# `mpiexec -n 4`, which comes with an MPI library, starts a program four times. `launch(main)` runs
# `main(comm)` on the processes that it started, or on `--ranks N` simulated ranks:
#
#     mpiexec -n 4 python mpi_examples/1_messages/hello.py
#     mpiexec -n 4 python mpi_examples/first_steps.py
#     python mpi_examples/first_steps.py --ranks 4

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `comm.rank`, `comm.size` | MPI `comm.Get_rank()`, `comm.Get_size()`; PyTorch `dist.get_rank()`, `dist.get_world_size()`; environment `RANK`, `WORLD_SIZE` |
# | `launch(main)` under `mpiexec -n 4` | PyTorch `torchrun --nproc-per-node 4`; DeepSpeed `deepspeed --num_gpus 4`; JAX `jax.distributed.initialize()`, in processes that something else has started |
# | `send`, `recv` | MPI `Send`, `Recv`; PyTorch `dist.send`, `dist.recv` |
# | `add_up` | MPI `Allreduce`; PyTorch `dist.all_reduce`; done for you by `DistributedDataParallel` |
#
# Next: [02 What a step keeps in memory](02_what_a_step_costs.ipynb). Side room: [00b
# Autograd](00b_autograd_in_an_hour.ipynb). On the paths of an hour and of an evening 03 is next. All lessons
# are in the [index](README.md).
