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
# *20 minutes. Before it: 04 and 05.*
#
# ## 1 The case
#
# Eight ranks sum an array of 1,000,000 B. They are on two machines of four: ranks 0 to 3 on the
# first, 4 to 7 on the second. Inside a machine a byte takes 0.1 ns, from one to the other 2 ns,
# twenty times as long; each message takes, in addition, 1 µs inside a machine and 10 µs from one to the other.
#
# Three ways to do it:
#
# 1. a ring in the order of the ranks. Each link of a ring carries 2 (n-1)/n of the array (lesson 04);
# 2. the same ring, where the batch system has placed the ranks alternately: even ranks on the first
#    machine, odd ones on the second. Then every link of the ring joins the machines;
# 3. a reduce-scatter inside each machine, after which each rank has the sum of a quarter; then an
#    all-reduce of this quarter with the rank that has the same one on the other machine; then an
#    all-gather inside each machine.
#
# How many bytes are sent between the machines in each of the three?

# %%
import numpy as np

from minidist import LinkModel, SimWorld, all_reduce
from minidist.collectives.auto import fastest
from minidist.course.lesson import check, predict, reveal, solution
from minidist.report import show
from minidist.report.frame import finish, new_figure, patch
from minidist.report.palette import PALETTE

# %% [markdown]
# ## 2 Predict
#
# All bytes that go from one machine to the other, in both directions together, of the first way and of
# the third. 5 % off is good enough.

# %%
guess = {
    "ring": predict("bytes between machines, ring in rank order", example=1_000_000, unit="B"),
    "two levels": predict("bytes between machines, first inside", example=1_000_000, unit="B"),
}

# %% [markdown]
# ## 3 The idea and its picture
#
# **Send most of the bytes over the fast links**: first inside each machine, then between machines. With
# two machines of L ranks, a rank sends only an L-th of the array over the slow links. There are three
# phases one after the other, and the program has to know which ranks share a machine.
#
# In this network a link is slow when it joins two machines. `machine[r]` is the machine of rank r:

# %%
SIZE = 125_000  # numbers of 8 B
FAST, SLOW = (1e-6, 1e-10), (1e-5, 2e-9)  # (alpha, beta) inside a machine and between two
IN_ORDER, ALTERNATING = [0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1]


def network(machine):
    return LinkModel(link=lambda a, b: FAST if machine[a] == machine[b] else SLOW)


def summed(comm, algorithm):
    return all_reduce(comm, np.arange(SIZE) + 1000.0 * comm.rank, algorithm=algorithm)


# %% [markdown]
# The pictures show how many kilobytes each rank sends to each other one in the three ways. A cell with a red border
# joins two machines: two cells of the ring in rank order, all eight of the alternating ring, and of two levels
# eight with few bytes.

# %%
runs = {}
figure = new_figure(11, 4.5)
panels = iter(figure.subplots(1, 3))
for name, algorithm, machine in (
    ("ring", "ring", IN_ORDER),
    ("alternating ring", "ring", ALTERNATING),
    ("two levels", "two_level", IN_ORDER),
):
    world = SimWorld(8, links=network(machine))
    runs[name] = world, machine, world.run(summed, algorithm)
    sent = np.zeros((8, 8))
    for trace in world.traces:
        for message in trace.sent():
            sent[trace.rank, message.peer] += message.nbytes / 1000
    axes = next(panels)
    axes.imshow(sent, cmap="Purples", vmax=4000)
    for a, b in np.argwhere(sent):
        axes.text(b, a, f"{sent[a, b]:.0f}", ha="center", va="center", fontsize=7)
        if machine[a] != machine[b]:
            axes.bar(b, 1, 1, a - 0.5, fill=False, edgecolor=PALETTE["blocked"], linewidth=2)
    axes.set(title=name, xlabel="to rank", ylabel="from rank")
handles = [patch("white", "kB sent"), patch(PALETTE["blocked"], "red border: between machines")]
show(finish(figure, handles, "part 3 of lesson 05b"))

# %% [markdown]
# ## 4 The code
#
# Two levels are three sums and copies that you know from lesson 04, in two smaller communicators.
# `comm.split(colour)` returns the communicator of all ranks that give the same number:


# %%
def two_levels(comm, array, machine_size):
    """All-reduce in place; equal machines, whose ranks divide the array."""
    inside = comm.split(comm.rank // machine_size)  # the ranks of this machine
    across = comm.split(comm.rank % machine_size)  # the ranks with the same chunk on all machines
    chunks = array.reshape(inside.size, -1)
    for step in range(1, inside.size):  # reduce-scatter inside: every rank gets one chunk's sum
        to, source = (inside.rank + step) % inside.size, (inside.rank - step) % inside.size
        part = np.empty_like(chunks[0])
        inside.sendrecv(chunks[to].copy(), to, part, source)
        chunks[inside.rank] += part
    all_reduce(across, chunks[inside.rank], algorithm="ring")  # of one chunk
    for step in range(1, inside.size):  # all-gather inside
        to, source = (inside.rank + step) % inside.size, (inside.rank - step) % inside.size
        inside.sendrecv(chunks[inside.rank], to, chunks[source], source)
    return array


small = SimWorld(8).run(lambda comm: two_levels(comm, np.arange(16.0) + comm.rank, 4))
print("equal to one device:", np.array_equal(small[5], 8 * np.arange(16.0) + 28))

# %% [markdown]
# The library's version ([two_level.py](../minidist/collectives/two_level.py)) also takes machines of
# unequal size. Inside a machine it sends round a ring, as the picture shows, in place of straight to
# the partner: the same bytes. It asks the world which ranks are joined by the fastest links; under MPI
# these are the processes of one host.
#
# ## 5 Check
#
# The bytes are counted from the messages between ranks on different machines. The last two columns are
# times. In the simulated world each pair of ranks has a separate link, which no other pair slows down.
# The ranks of a real machine usually share one network card: the bytes that leave the machine, half of
# those that are counted, follow one another through it at 2 ns each, and the sum takes at least that long:


# %%
def between_machines(world, machine):
    return sum(
        message.nbytes
        for trace in world.traces
        for message in trace.sent()
        if machine[trace.rank] != machine[message.peer]
    )


single = 8 * np.arange(SIZE) + 1000.0 * 28
print("                 between machines   a link per pair   one card, at least")
for name, (world, machine, results) in runs.items():
    crossing = between_machines(world, machine)
    card = crossing / 2 * SLOW[1]
    print(f"{name:17} {crossing:14,} B {1e3 * world.end_time:14.2f} ms {1e3 * card:17.2f} ms")
    assert all(np.array_equal(result, single) for result in results)
    if name in guess:
        guess[name].judge(crossing, within=0.05)

# %% [markdown]
# All three return the sum of one device. Two levels are the fastest on both clocks. The placement of the
# ring decides where a card is shared: placed alternately, four times as many bytes have to go through it.
# With a link per pair, each link of the ring carries as many bytes as before.
#
# Two levels have three phases, so they are slower for a short array. `algorithm="auto"` compares the
# library's algorithms on the virtual clock:

# %%
for nbytes in (8, 2**12, 2**20, 2**26):
    print(f"{nbytes:>12,} B: {fastest('all_reduce', nbytes, network(IN_ORDER), tuple(range(8)))}")

# %% [markdown]
# ## 6 Break it
#
# The communicator is told the wrong machines. The sum stays right, because two levels are right for any
# groups of ranks; only more bytes are sent over the slow links, more even than by the ring in rank order.
# No test of the result finds it, but a count of the bytes does:


# %%
def told(comm, nodes):
    comm.set_nodes(nodes)
    return all_reduce(comm, np.ones(SIZE), algorithm="two_level")


for nodes in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]):
    world = SimWorld(8, links=network(IN_ORDER))
    right = all(np.array_equal(result, np.full(SIZE, 8.0)) for result in world.run(told, nodes))
    crossing = between_machines(world, IN_ORDER)
    print(f"told {nodes}: right {right}, {crossing:,} B between machines")
    assert right

# %% [markdown]
# ## 7 Exercise: two levels on machines of unequal size
#
# `machines[r]` is the machine of rank r. The machines have different numbers of ranks, so the chunks of
# part 4 do not fit. But the smallest machine has k ranks, and so k ranks of every machine can each sum a k-th of
# the array with the others' at the same time. Return the sum of all ranks' arrays, on every rank. A message inside
# a machine takes no time here; between machines it takes 10 µs, and 10 ns per byte. Judged: right sums, and that
# they take no longer than k rings between the machines, which run at the same time.
#
# Calls of `all_reduce` and of `broadcast(comm, array, root)`, which copies the root's array to all, are allowed, but
# the algorithms "two_level" and "auto" are not: they are what you write.


# %%
def two_level_sum(comm, array, machines):
    total = array.copy()
    all_reduce(comm, total)
    return total


check("05b.two_level_sum", two_level_sum)

# %%
reveal("05b.two_level_sum")
check("05b.two_level_sum", solution("05b.two_level_sum"))

# %% [markdown]
# ## 8 Takeaway
#
# - **First inside each machine, then between them, then inside again**: on M machines of L ranks, each rank sends 2
#   (M-1)/M of an L-th of the array over the slow links.
# - In a good order M links of a ring join different machines, in a bad one all n, which then share the
#   machines' network cards. No result shows that; the bytes matrix does.
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
# Next: [06 Data parallel is one big batch](06_data_parallel_is_one_big_batch.ipynb). All
# lessons are in the [index](README.md).
