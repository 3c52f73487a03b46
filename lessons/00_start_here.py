# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 Start here
#
# *15 minutes. Before it: Python and NumPy.*
#
# ## 1 The case
#
# A job runs on 64 machines, and each of them has computed one loss, a number of 8 bytes. The first
# machine shall print the mean of all 64. It cannot look into the memory of the others: **every
# number that another one needs must be sent, and every number that is sent must be received**.
#
# Such a worker with a memory of its own is a *rank*, and ranks are numbered from 0. How
# many messages does it take until rank 0 has all losses? And how long does that take on 1,024
# ranks?
#
# In this lesson you write **one function that is a program for any number of ranks**, and run it on
# 1, 4 and 64 of them in this process. What it saves: the same function runs unchanged on one
# machine or on many.

# %%
import inspect

import numpy as np

from minidist.base.errors import DeadlockError
from minidist.collectives import naive
from minidist.comm import LinkModel, SimWorld
from minidist.course.lesson import check, expect, predict, solution
from minidist.report import draw, show

# %% [markdown]
# ## 2 Predict
#
# Commit to two numbers before you go on; `predict` waits for them, and part 5 judges them by what
# was measured.
#
# A message takes 1 µs from rank to rank. For a quarter of that time a rank is busy with taking it
# in, and takes in no other one meanwhile.

# %%
messages = predict("messages until rank 0 of 64 has every loss", example=64)
time = predict("time until rank 0 of 1,024 ranks has every loss", example=1, unit="µs")

# %% [markdown]
# ## 3 The idea and its picture
#
# Four ranks have a number each, and rank 0 *gathers* them. In the picture a rank is a horizontal
# line, time runs to the right, and an arrow is a message. The picture is drawn from the record of a
# run.


# %%
def gather_to_zero(comm, value):
    """Rank 0 returns the values of all ranks; the others return None."""
    if comm.rank != 0:
        comm.send(np.array([value]), 0)
        return None
    values = np.array([value] * comm.size)
    for source in range(1, comm.size):
        comm.recv(values[source : source + 1], source)  # the message lands in its place
    return values


def program(comm):
    return gather_to_zero(comm, 10.0 * comm.rank)


network = LinkModel(alpha=1e-6, beta=1e-10, overhead=0.25e-6)
world = SimWorld(4, links=network)
results = world.run(program)
header = {"name": "gather on 4 ranks", "command": "part 3 of lessons/00_start_here.py"}
show(draw("space-time", world.traces, header))

# %% [markdown]
# The time is *virtual*: a message takes `alpha + beta * bytes` seconds, here 1 µs and 0.1 ns per
# byte, and for the `overhead`, a part of alpha, a rank is busy with it. So the picture is the same
# on every machine. Under MPI the same record holds real times, and lesson 27 measures the three
# numbers of your machine.

# %% [markdown]
# ## 4 The code
#
# `program(comm)` above is all there is. `comm.rank` is the number of this rank, `comm.size` the
# number of all ranks. `SimWorld(64).run(program)` calls `program` once for each rank and returns
# the list of what they returned. `comm.send(array, 3)` sends an array to rank 3, `comm.recv(array,
# 3)` fills an array with what rank 3 sent.

# %%
for ranks in (1, 4, 64):
    world = SimWorld(ranks, links=network)
    results = world.run(program)
    print(
        f"{ranks:2} ranks: rank 0 has {results[0][:4]}{' ...' if ranks > 4 else ''}, the others "
        f"{results[1:2]}"
    )

# %% [markdown]
# The library's own gather is the same idea; there rank 0 starts all receives first and then waits
# for all of them:

# %%
print(inspect.getsource(naive.gather))

# %% [markdown]
# ## 5 Check
#
# Each rank keeps a record of its messages: `world.traces[rank]`. The answer is counted there.

# %%
messages.judge(sum(len(trace.sent()) for trace in world.traces))
received = sum(m.nbytes for m in world.traces[0].messages if m.kind == "receive")
print(f"received by rank 0: {received} B")

for ranks in (64, 1024):
    world = SimWorld(ranks, links=network, record=False)
    world.run(program)
    print(f"{ranks:5,} ranks: rank 0 has everything after {1e6 * world.end_time:.2f} µs")
time.judge(1e6 * world.end_time, within=0.05)

# %% [markdown]
# So a rank that receives from all others becomes the bottleneck: its messages arrive together, and
# it takes in one after the other. Lesson 04 does without such a rank.

# %% [markdown]
# One number was enough for a count. Now a computation: each rank adds up its part of an array, and
# rank 0 adds the parts. It must equal what one rank alone gets; for whole numbers exactly, in any
# order.


# %%
def total(comm, numbers):
    mine = np.array_split(numbers, comm.size)[comm.rank]
    parts = gather_to_zero(comm, mine.sum())
    return None if parts is None else parts.sum()


numbers = np.arange(1000.0)
(alone,) = SimWorld(1).run(total, numbers)
for ranks in (2, 3, 64):
    parallel = SimWorld(ranks).run(total, numbers)[0]
    print(f"{ranks:2} ranks: max |parallel - alone| = {abs(parallel - alone):g}")


# %% [markdown]
# ## 6 Break it
#
# Forget that rank 0 has no rank to send to, and let every rank receive. Real programs hang here
# until someone kills them. The simulated world detects that no rank can continue, and reports which
# rank waits for which, and at which line.


# %%
def everybody_receives(comm):
    incoming = np.empty(1)
    comm.recv(incoming, (comm.rank + 1) % comm.size)
    comm.send(incoming, (comm.rank - 1) % comm.size)


world = SimWorld(4)
with expect(DeadlockError):
    world.run(everybody_receives)
command = (
    "minidist run mpi_examples/1_messages/ring_exchange.py --way receive_then_send --ranks 4 "
    "--trace t.jsonl"
)
show(draw("space-time", world.traces, {"command": f"{command}; minidist report t.jsonl"}))

# %% [markdown]
# ## 7 Exercise: speak in rank order
#
# Each rank calls `say("...")` exactly once: rank 0 first, then rank 1, and so on, and no rank
# begins before the rank before it has finished. Ranks share nothing, so a *token* must go from rank
# to rank: the rank that holds it may speak.


# %%
def in_rank_order(comm, say):
    raise NotImplementedError("yours")


check("00.in_rank_order", in_rank_order)

# %% [markdown]
# The check runs your function on several numbers of ranks, 1 among them, with sends that wait for
# the receiver and with sends that do not. *Par* is what our own solution needs. When yours is right
# you read this:

# %%
check("00.in_rank_order", solution("00.in_rank_order"))

# %% [markdown]
# A wrong answer gets the smallest case in which it fails, a picture and a hint. Here the token leaves before the
# sentence:


# %%
def too_early(comm, say):
    token = np.zeros(1)
    if comm.rank > 0:
        comm.recv(token, comm.rank - 1)
    if comm.rank < comm.size - 1:
        comm.send(token, comm.rank + 1)
    say("me")


check("00.in_rank_order", too_early)

# %% [markdown]
# ## 8 Takeaway
#
# - A distributed program is **one function of a communicator**: `main(comm)`.
# - A gather on n ranks sends **n - 1** messages, and all of them go into one rank, which takes them
#   in one by one: **alpha + (n - 2) overhead** for short ones.

# %% [markdown]
# ## 9 The same code under mpiexec
#
# `launch(main)` runs `main(comm)` on the processes that `mpiexec` started, or on `--ranks N` virtual ranks:
#
#     mpiexec -n 4 python mpi_examples/1_messages/hello.py
#     python mpi_examples/first_steps.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `comm.rank`, `comm.size` | MPI `comm.Get_rank()`, `comm.Get_size()`; PyTorch `dist.get_rank()`, `dist.get_world_size()`; environment `RANK`, `WORLD_SIZE` |
# | `launch(main)` under `mpiexec -n 4` | PyTorch `torchrun --nproc-per-node 4`; DeepSpeed `deepspeed --num_gpus 4`; JAX `jax.distributed.initialize()` |
# | `send`, `recv` | MPI `Send`, `Recv`; PyTorch `dist.send`, `dist.recv` |
# | `gather` | MPI `Gather`; PyTorch `dist.gather` |
#
# Next: [01 Autograd in an hour](01_autograd_in_an_hour.ipynb), or [03 Send, receive,
# deadlock](03_send_receive_deadlock.ipynb). All of them are in the [index](README.md).
