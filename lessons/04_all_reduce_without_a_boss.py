# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 All-reduce without a boss
#
# *30 minutes. Before it: 00, 03.*
#
# ## 1 The case
#
# Eight ranks have a gradient of 1,000 numbers each, 8,000 B. Every rank needs the sum of all eight.
# This is an *all-reduce*. The obvious way is that of lesson 00, with a boss: all send their gradient
# to rank 0, which adds them up and sends the sum back to each. Then rank 0 sends and receives the
# gradients of all others.
#
# A way without a boss: the ranks form a ring, and each sends only to its right neighbour. The array
# is cut into eight chunks, and each chunk travels round the ring, first to be added up, then to be
# passed on as a finished sum. Every rank sends the same.
#
# How many bytes leave rank 0 in the first way, and how many in the second?

# %%
import numpy as np

from minidist import LinkModel, SimWorld, all_gather, all_reduce
from minidist.course.lesson import check, picture, predict, reveal, solution
from minidist.course.story import story
from minidist.report import show

# %% [markdown]
# ## 2 Predict
#
# Count messages, and bytes per message, of rank 0 alone.

# %%
guess = {
    "naive": predict("bytes that leave rank 0, the boss of 8", example=8_000, unit="B"),
    "ring": predict("bytes that leave rank 0 in the ring of 8", example=8_000, unit="B"),
}

# %% [markdown]
# ## 3 The idea and its picture
#
# Sum an array over all ranks so that **every rank has the sum and no rank sends more than another**.
# The sum takes two halves: after the *reduce-scatter* each rank has one chunk of the sum, and the
# *all-gather* gives all chunks to all ranks. With a boss, n - 1 whole arrays go into one rank and
# n - 1 come out of it. The ring sends less than two arrays from each rank, however many ranks there
# are. What it costs: 2 (n-1) steps one after the other, and each takes the *latency* of a message,
# the time that even an empty one needs.
#
# Four ranks have 12 numbers each, so a chunk has 3 numbers (24 B). In the first three steps sums are
# formed, and in three more they are distributed:


# %%
def summed(comm, size, algorithm):
    array = np.arange(size) + 100.0 * comm.rank
    return all_reduce(comm, array, algorithm=algorithm)


# Latency, seconds per byte, and for how much of the latency a rank is busy with a message.
network = LinkModel(alpha=1e-6, beta=1e-10, overhead=0.25e-6)
world = SimWorld(4, links=network)
world.run(summed, 12, "ring")
command = (
    "minidist run mpi_examples/1_messages/ring_all_reduce.py --elements 12 --ranks 4 "
    "--trace t.jsonl; minidist report t.jsonl"
)
picture("space-time", world, command, name="ring of 4")
picture("bytes-matrix", world, f"{command} --picture bytes-matrix", name="ring of 4")

# %% [markdown]
# With a boss, all messages of the same sum are in rank 0's row and column:

# %%
boss = SimWorld(4, links=network)
boss.run(summed, 12, "naive")
command = command.replace("--elements", "--algorithm naive --elements")
picture("bytes-matrix", boss, f"{command} --picture bytes-matrix", name="boss of 4")

# %% [markdown]
# The stepper shows what the chunks hold in between: the arrow keys go from message to message. A
# colour is a chunk; it is filled when it holds the whole sum.

# %%
from minidist import report


def eight_numbers(comm):
    all_reduce(comm, np.arange(8.0) + 10 * comm.rank, algorithm="ring")


show(report.step(eight_numbers, 4), "A ring all-reduce of 8 numbers on 4 ranks.")

# %% [markdown]
# ## 4 The code
#
# This is the first half, the reduce-scatter. Each rank sends to its right neighbour what it has just
# added up; after n-1 steps the chunk with the rank's own number is complete. Here a chunk is one
# number, and a rank returns its own chunk. All numbers are 1 on rank 0, 10 on rank 1, 100 on rank 2
# and 1000 on rank 3, so a sum shows which ranks are in it.


# %%
def own_sum(comm, numbers, steps):
    travelling = numbers[[comm.rank - 1]]  # it ends at the rank before this one, after n - 1 steps
    for step in range(steps):
        arrived = np.empty(1)
        comm.sendrecv(travelling, (comm.rank + 1) % comm.size, arrived, (comm.rank - 1) % comm.size)
        travelling = arrived + numbers[comm.rank - 2 - step]
    return travelling


def who_is_in_it(comm, steps=3):
    return own_sum(comm, np.full(4, 10.0**comm.rank), steps)


print("complete chunks:", *SimWorld(4).run(who_is_in_it))

# %% [markdown]
# The library's `reduce_scatter` ([ring.py](../minidist/core/collectives/ring.py)) does the same with
# chunks of any size, also of 0 numbers. Its `all_gather` is the second half: each rank sends on the
# chunk that it has received last, and adds nothing.

# %% [markdown]
# ## 5 Check
#
# The bytes that leave each rank are counted in its trace. By the formula the ring sends 2 (n-1)/n S
# from each rank, for an array of S bytes:

# %%
for algorithm in ("naive", "ring"):
    world = SimWorld(8)
    world.run(summed, 1000, algorithm)
    leaving = [sum(m.nbytes for m in trace.sent()) for trace in world.traces]
    guess[algorithm].judge(leaving[0])
    print(f"{algorithm}, all ranks: {leaving}")
print(f"2 (n-1)/n S = {2 * 7 * 8000 // 8:,} B")
assert leaving[0] == 2 * 7 * 8000 // 8

# %% [markdown]
# Is it what one rank computes? For whole numbers it is, exactly. For others it is up to rounding,
# because a ring adds each chunk in another order ([lesson 04b](04b_order_of_additions.ipynb)).


# %%
def both(comm, data):
    whole, real = data[comm.rank].round(), data[comm.rank].copy()
    return all_reduce(comm, whole), all_reduce(comm, real)


data = np.random.default_rng(0).normal(0, 100, (8, 1000))
results = SimWorld(8).run(both, data)
whole_off = max(np.abs(whole - data.round().sum(axis=0)).max() for whole, _ in results)
real_off = max(np.abs(real - data.sum(axis=0)).max() for _, real in results)
print(f"whole numbers: max |parallel - single| = {whole_off:g}")
print(f"real numbers:  max |parallel - single| = {real_off:.1e}")
assert whole_off == 0
assert real_off < 1e-12

# %% [markdown]
# The boss's time grows with n, because n - 1 arrays go through one rank in each direction. The ring's
# hardly grows once the array is large. For a small array the boss is faster: the ring waits for
# 2 (n-1) latencies one after the other, where the boss is busy with each message for a quarter of a
# latency. Lesson 05 finds what is better than both.

# %%
print(f"{'':8} {'80 B':>24}   {'8 MB':>26}")
for ranks in (2, 4, 8, 16):
    times = []
    for size in (10, 1_000_000):
        for algorithm in ("ring", "naive"):
            world = SimWorld(ranks, links=network)
            world.run(summed, size, algorithm)
            times.append(world.end_time * 1e6)
    print(
        "{:2} ranks: ring {:5.1f} µs, boss {:4.1f} µs   ring {:6.0f} µs, boss {:6.0f} µs".format(
            ranks, *times
        )
    )


# %% [markdown]
# ## 6 Break it
#
# Here is a bug that no comparison *between ranks* finds: one step too few in the first half. The
# second half distributes the wrong sums to all ranks, so all of them agree. That ranks agree does
# not mean that they are right.


# %%
def one_step_too_few(comm):
    part = who_is_in_it(comm, steps=comm.size - 2)  # should be comm.size - 1
    return all_gather(comm, part)


results = SimWorld(4).run(one_step_too_few)
print("ranks agree:", all(np.array_equal(result, results[0]) for result in results))
print("rank 0 has:", results[0], "and should have 1111 everywhere")

# %% [markdown]
# The digits show which rank is missing in each chunk. What is missing after two steps too few? Change
# the 2, and run the cell again.


# %% [markdown]
# ## 7 Exercise: the ring, for any size and any n
#
# Sum `array` over all ranks **in place**, with `comm.sendrecv` alone. The size need not be a multiple
# of n, may be smaller than n, and may be 0; n may be 1. No rank may send more bytes than in our
# solution.


# %%
def ring_all_reduce(comm, array):
    raise NotImplementedError("yours")  # comm.sendrecv(outgoing, to, incoming, source)


check("04.ring_all_reduce", ring_all_reduce)

# %%
reveal("04.ring_all_reduce")
check("04.ring_all_reduce", solution("04.ring_all_reduce"))


# %% [markdown]
# What the check says to a ring that passes on its own part instead of the sum:


# %%
def passes_on_its_own_part(comm, array):
    total, part = array.copy(), np.empty_like(array)
    for _ in range(comm.size - 1):
        comm.sendrecv(array.copy(), (comm.rank + 1) % comm.size, part, (comm.rank - 1) % comm.size)
        total += part
    array[...] = total


check("04.ring_all_reduce", passes_on_its_own_part)

# %% [markdown]
# ## 8 Takeaway
#
# - All-reduce = reduce-scatter + all-gather. Round a ring each is n-1 steps with one chunk.
# - Each rank sends **2 (n-1)/n S** bytes for an array of S bytes: less than 2 S for any number of ranks,
#   and no algorithm sends less (Patarasuk and Yuan, 2009). It takes **2 (n-1)** latencies, one after
#   the other.

# %% [markdown]
# The job of the course so far, a model of 7 billion parameters on cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with parameters of 2 B, gradients
# added up in float32 (4 B) and 12 B for Adam in every row:

# %%
story("04")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/1_messages/ring_all_reduce.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `all_reduce(algorithm="ring")` | NCCL `ncclAllReduce` with `NCCL_ALGO=Ring`; Open MPI `coll_tuned_allreduce_algorithm 4` (ring); MPICH `MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM` |
# | `all_reduce` | PyTorch `dist.all_reduce`; JAX `jax.lax.psum`; Horovod `hvd.allreduce` |
# | `reduce_scatter`, `all_gather` | PyTorch `dist.reduce_scatter_tensor`, `dist.all_gather_into_tensor`; JAX `psum_scatter`, `all_gather` |
#
# Next: [05 Latency or bandwidth?](05_latency_or_bandwidth.ipynb). Side room: [04b The order of
# additions](04b_order_of_additions.ipynb). On the path of an evening 06 is next. All lessons are in the
# [index](README.md).
