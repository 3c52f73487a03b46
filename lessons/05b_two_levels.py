# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05b Two levels and topology
#
# *25 minutes. Before it: 04 and 05.*
#
# ## 1 The case
#
# Eight ranks sum an array of 1,000,000 B. They are on two machines of four: ranks 0 to 3 on the
# first, 4 to 7 on the second. Inside a machine a byte takes 0.1 ns, from one to the other 2 ns,
# twenty times as long.
#
# A ring in the order of the ranks leaves a machine at two places, 3 to 4 and 7 to 0; each of its
# links carries 2 (n-1)/n of the array. Now the batch system places the ranks alternately: even ranks
# on the first machine, odd ones on the second. The same ring then leaves a machine with every
# link.
#
# And there is a third way: sum inside each machine first (each rank gets the sum of a quarter),
# then exchange these quarters with the partner on the other machine, then gather inside. How many
# bytes cross between the machines in each of the three?

# %%
import numpy as np

from minidist import LinkModel, SimWorld, all_reduce
from minidist.collectives.auto import fastest
from minidist.course.lesson import check, picture, predict, reveal, solution

# %% [markdown]
# ## 2 Predict
#
# All bytes that go from one machine to the other, in both directions together. 5 % off is good
# enough.

# %%
guess = {
    "ring": predict(
        "bytes between machines, ring in the order of ranks", example=1_000_000, unit="B"
    ),
    "alternating": predict(
        "bytes between machines, ranks placed alternately", example=1_000_000, unit="B"
    ),
    "two_level": predict("bytes between machines, first inside", example=1_000_000, unit="B"),
}

# %% [markdown]
# ## 3 The idea and its picture
#
# **Send most of the bytes over the fast links**: first inside each machine, then across, so that the slow
# links carry as little as they can. What it saves: with L ranks per machine the slow links carry an
# L-th of the array from each rank. What it costs: three phases one after the other, and the program
# has to know which ranks share a machine.
#
# The pictures show how many bytes each rank sends to each other one: in the ring in the order of
# ranks, in the same ring with neighbours on different machines, and with two levels.

# %%
SIZE = 125_000  # numbers of 8 B
FAST, SLOW = (1e-6, 1e-10), (1e-5, 2e-9)  # (alpha, beta) inside a machine and across


def machine(rank, alternating):
    return rank % 2 if alternating else rank // 4


def network(alternating):
    same = lambda a, b: machine(a, alternating) == machine(b, alternating)  # noqa: E731
    return LinkModel(link=lambda a, b: FAST if same(a, b) else SLOW)


def summed(comm, algorithm):
    return all_reduce(comm, np.arange(SIZE) + 1000.0 * comm.rank, algorithm=algorithm)


runs = {}
for name, algorithm, alternating in (
    ("ring", "ring", False),
    ("alternating", "ring", True),
    ("two_level", "two_level", False),
):
    world = SimWorld(8, links=network(alternating))
    results = world.run(summed, algorithm)
    runs[name] = (world, alternating, results)
    picture("bytes-matrix", world, "part 3 of lesson 05b", name=name)

# %% [markdown]
# ## 4 The code
#
# Two levels from three calls that you know. `comm.split(colour)` makes a communicator of the ranks
# with the same colour:


# %%
def two_levels(comm, array, machine_size):
    """All-reduce in place; equal machines, whose ranks divide the array."""
    inside = comm.split(comm.rank // machine_size)  # the ranks of my machine
    across = comm.split(comm.rank % machine_size)  # my partners on the other machines
    chunks = array.reshape(inside.size, -1)
    for step in range(1, inside.size):  # reduce-scatter inside: every rank gets one chunk's sum
        to, source = (inside.rank + step) % inside.size, (inside.rank - step) % inside.size
        part = np.empty_like(chunks[0])
        inside.sendrecv(chunks[to].copy(), to, part, source)
        chunks[inside.rank] += part
    all_reduce(across, chunks[inside.rank], algorithm="ring")  # a chunk only
    for step in range(1, inside.size):  # all-gather inside
        to, source = (inside.rank + step) % inside.size, (inside.rank - step) % inside.size
        inside.sendrecv(chunks[inside.rank], to, chunks[source], source)
    return array


small = SimWorld(8).run(lambda comm: two_levels(comm, np.arange(16.0) + comm.rank, 4))
print("equal to one device:", np.array_equal(small[5], 8 * np.arange(16.0) + 28))

# %% [markdown]
# The library's, for machines of unequal size, too:
# [two_level.py](../minidist/collectives/two_level.py). It asks the world which ranks are joined by
# the fastest links; under MPI these are the processes of one host.
#
# ## 5 Check
#
# Counted from the messages of each run, between ranks on different machines:

# %%
single = 8 * np.arange(SIZE) + 1000.0 * 28
for name, (world, alternating, results) in runs.items():
    crossing = sum(
        message.nbytes
        for trace in world.traces
        for message in trace.sent()
        if machine(trace.rank, alternating) != machine(message.peer, alternating)
    )
    guess[name].judge(crossing, within=0.05)
    off = max(np.abs(result - single).max() for result in results)
    print(f"  {1e3 * world.end_time:.2f} ms; max |parallel - single| = {off:g}")

# %% [markdown]
# The time of a ring is that of its slowest link, in every one of its steps, however few of them are
# slow. Two levels send less over the slow links, and pay for three phases; so for a short array
# they are the slower way. `auto` tries all on the virtual clock where links differ:

# %%
for nbytes in (8, 2**12, 2**20, 2**26):
    print(f"{nbytes:>12,} B: {fastest('all_reduce', nbytes, network(False), tuple(range(8)))}")

# %% [markdown]
# ## 6 Break it
#
# A communicator that is told the wrong machines. The sum stays right, because two levels are right
# for any groups of ranks; only the bytes cross where they are slow. No test of numbers finds it, a
# count of bytes does:


# %%
def told(comm, nodes):
    comm.set_nodes(nodes)
    return all_reduce(comm, np.ones(SIZE), algorithm="two_level")


for nodes in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]):
    world = SimWorld(8, links=network(False))
    right = all(np.array_equal(result, np.full(SIZE, 8.0)) for result in world.run(told, nodes))
    crossing = sum(
        m.nbytes
        for t in world.traces
        for m in t.sent()
        if machine(t.rank, False) != machine(m.peer, False)
    )
    print(
        f"told {nodes}: right {right}, {crossing:,} B between machines, "
        f"{1e3 * world.end_time:.2f} ms"
    )

# %% [markdown]
# ## 7 Exercise: the order of a ring
#
# `nodes[r]` is the machine of rank r. Return the ranks in an order in which a ring visits them, so
# that as few of its links as possible join different machines.


# %%
def ring_order(nodes):
    return list(range(len(nodes)))


check("05b.ring_order", ring_order)

# %%
reveal("05b.ring_order")
check("05b.ring_order", solution("05b.ring_order"))

# %% [markdown]
# ## 8 Takeaway
#
# - **First inside, then across**: from each rank 2 (M-1)/M of an L-th of the array crosses, for M
#   machines of L ranks.
# - A ring is as slow as its slowest link. In a good order it crosses between machines M times, in a
#   bad one n times.
# - The order of ranks is a part of the program's speed, and no result shows it: look at the bytes
#   matrix.
#
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/1_messages/collectives.py
#     minidist bench network --hosts 3                  # machines with slow links, which needs root
#
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `all_reduce(algorithm="two_level")` | NCCL's trees and CollNet across nodes; Horovod `HOROVOD_HIERARCHICAL_ALLREDUCE`; DeepSpeed ZeRO++ hierarchical all-to-all |
# | `comm.split(colour)` | MPI `MPI_Comm_split`, `MPI_Comm_split_type(MPI_COMM_TYPE_SHARED)`; PyTorch `dist.new_group`, `init_device_mesh` |
# | the order of ranks | MPI `--map-by`, `--rankfile`; NCCL finds rings from the topology of the machine; `MPI_Cart_create(reorder=1)` |
#
# Next: [06 Data parallel is one big batch](06_data_parallel_is_one_big_batch.ipynb). All of them
# are in the [index](README.md).
