# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04b The order of additions
#
# *20 minutes. Before it: 04.*
#
# ## 1 The case
#
# Eight ranks add up 1,000 real numbers each with the ring of lesson 04. On Monday they sum the whole
# array with one call. On Tuesday a setting has changed, and they sum the same array in four pieces of
# about 250 numbers, the *buckets*, each with a separate call. Nothing else has changed, and yet the
# sums are not the same. A computer rounds after each addition, so (a + b) + c and a + (b + c) may
# differ in their last bits. And the ring adds every chunk in another order.
#
# How many of the 1,000 sums have other bits on Tuesday? There is an all-reduce whose order of
# additions never changes: rank 0's number first, then rank 1's, and so on. How many bytes leave
# rank 0 with it?

# %%
import numpy as np

from minidist import LinkModel, SimWorld, all_reduce
from minidist.course.lesson import check, predict, reveal, solution
from minidist.report import show
from minidist.report.frame import finish, new_figure
from minidist.report.palette import RANKS

# %% [markdown]
# ## 2 Predict
#
# The ring cuts an array, or a bucket, into 8 chunks. The sum of a chunk starts at one rank and goes from
# there to the others in turn. In which order is an element added up when its chunk starts at rank 2,
# and in which when it starts at rank 5? Another order changes the bits of a sum of these numbers in
# more than half of the cases. A fifth off is good enough for the first number.

# %%
bits_guess = predict("sums that have other bits", example=50)
bytes_guess = predict("bytes that leave rank 0 in rank order", example=28_000, unit="B")

# %% [markdown]
# ## 3 The idea and its picture
#
# **The bits of a sum depend on the order of its additions, so add in the order of the ranks.** Each rank
# sends its part of chunk j directly to rank j. Rank j keeps all parts until it can add them in the order
# 0, 1, 2, and so on. Then the finished chunks go round the ring, which only copies. The price is as much
# memory again as the array has and, in the first half, messages to every rank instead of to one neighbour. It takes
# less time than the ring of lesson 04 for short arrays, because the latencies of the first half overlap:


# %%
def summed(comm, data, algorithm, cuts=()):
    """The sum over the ranks of a rank's row of `data`, in buckets that end at `cuts`."""
    array = data[comm.rank].copy()
    for bucket in np.split(array, cuts):
        all_reduce(comm, bucket, algorithm=algorithm)
    return array


links = LinkModel(alpha=1e-6, beta=1e-10, overhead=0.25e-6)
for algorithm in ("ring", "ordered"):
    world = SimWorld(4, links=links)
    world.run(summed, np.ones((4, 12)), algorithm)
    print(f"{algorithm:7}: 12 numbers on 4 ranks take {world.end_time * 1e6:.1f} µs")

# %% [markdown]
# The picture shows who is added when on the eight ranks of the case: a row is a chunk, and a number is a rank. In the
# ring no two chunks have the same order, so an element that moves to another chunk gets another one:

# %%
ring = [[(chunk + 1 + place) % 8 for place in range(8)] for chunk in range(8)]
figure = new_figure(8, 3.6)
tables = {"ring": ring, "ordered": [list(range(8))] * 8}
for axes, (name, orders) in zip(figure.subplots(1, 2), tables.items(), strict=True):
    for chunk, order in enumerate(orders):
        axes.bar(range(8), 1, bottom=chunk - 0.5, width=1, color=[RANKS[r] for r in order])
        for place, rank in enumerate(order):
            axes.text(place, chunk, rank, ha="center", va="center")
    axes.set(title=name, xlabel="place in the sum", ylabel="chunk", ylim=(7.5, -0.5))
show(finish(figure, [], "part 3 of lesson 04b"))

# %% [markdown]
# ## 4 The code
#
# This ring shows its order. In place of a sum it sends the list of the ranks whose numbers are in the
# sum, in the order in which they were added. Each rank adds its own number to the list that has
# arrived, and sends the list on:


# %%
def who_was_added_when(comm):
    """Return the order in which chunk `rank` is added up."""
    n, rank = comm.size, comm.rank
    orders = [np.full(n, -1) for _ in range(n)]  # one list for each chunk; -1: no rank yet
    for order in orders:
        order[0] = rank
    for step in range(n - 1):
        leaving, arriving = (rank - 1 - step) % n, (rank - 2 - step) % n
        incoming = np.empty(n, int)
        comm.sendrecv(orders[leaving], (rank + 1) % n, incoming, (rank - 1) % n)
        incoming[step + 1] = rank  # this rank's part is added to what has come in
        orders[arriving] = incoming
    return orders[rank].tolist()


for chunk, order in enumerate(SimWorld(4).run(who_was_added_when)):
    print(f"chunk {chunk} is added up in the order {order}")
assert SimWorld(8).run(who_was_added_when) == ring

# %% [markdown]
# When the array is cut elsewhere, an element belongs to another chunk, and its order changes. On Tuesday
# only about one in eight elements is in a chunk with the same number.

# %% [markdown]
# ## 5 Check
#
# The same 8 x 1,000 numbers in one piece and in four buckets, with each of the two algorithms:

# %%
data = np.random.default_rng(0).normal(0, 100, (8, 1000))
for algorithm in ("ring", "ordered"):
    world = SimWorld(8)
    whole = world.run(summed, data, algorithm)[0]
    buckets = SimWorld(8).run(summed, data, algorithm, [248, 496, 744])[0]
    different = np.count_nonzero(whole != buckets)
    leaving = sum(message.nbytes for message in world.traces[0].sent())
    print(f"{algorithm:7}: {different} sums differ, {leaving:,} B sent")
    if algorithm == "ring":
        at = np.flatnonzero(whole != buckets)[0]
        print(f"    sum {at}: {float(whole[at])} on Monday, {float(buckets[at])} on Tuesday")
        bits_guess.judge(different, within=0.2)
bytes_guess.judge(leaving)
assert different == 0

# %% [markdown]
# The sum in rank order has the bits of one device that adds rank by rank:

# %%
sequential = data[0].copy()
for rank in range(1, 8):
    sequential += data[rank]
print(f"max |parallel - single| = {np.abs(whole - sequential).max():g}")
assert np.array_equal(whole, sequential)

# %% [markdown]
# ## 6 Break it
#
# Here each rank begins with its own part, and adds the parts of the ranks before it in turn. The order on a rank never
# changes, but it is another one on each rank. When the sums are gradients, the weights of the ranks differ in their
# last bits, and the next step goes on from there. The loss of a rank is (w - its row of `data`)²/2:


# %%
def own_part_first(comm, own):
    total, part = own.copy(), np.empty_like(own)
    for distance in range(1, comm.size):
        to, source = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.sendrecv(own, to, part, source)
        total += part
    return total


def train(comm, steps):
    w = np.zeros(1000)
    for _ in range(steps):
        w = w - 0.01 * own_part_first(comm, w - data[comm.rank])
    return w


for steps in (1, 20):
    weights = SimWorld(8).run(train, steps)
    off = np.abs(weights[7] - weights[0])
    different = np.count_nonzero(off)
    print(
        f"steps: {steps:2}, {different} weights differ, max |w_rank7 - w_rank0| = {off.max():.0e}"
    )
    assert off.any()

# %% [markdown]
# ## 7 Exercise: a reduce-scatter in rank order
#
# Return this rank's chunk (as `np.array_split(array, n)` cuts it) of the sum over all ranks, added
# in the order of the ranks: rank 0's part first, then rank 1's, and so on.
#
# Judged: all bits of the chunk; bytes (par). The library's collectives may not be called.


# %%
def ordered_reduce_scatter(comm, array):
    raise NotImplementedError("yours")  # comm.sendrecv(outgoing, to, incoming, source)


check("04b.ordered_reduce_scatter", ordered_reduce_scatter)

# %%
reveal("04b.ordered_reduce_scatter")
check("04b.ordered_reduce_scatter", solution("04b.ordered_reduce_scatter"))

# %% [markdown]
# ## 8 Takeaway
#
# - A sum's bits depend on the order of its additions, and a ring's order depends on where the array
#   is cut.
# - `algorithm="ordered"` always adds in the order of the ranks, for the same **2 (n-1)/n S** bytes per
#   rank, and with as much memory again as the array has.
#
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/1_messages/order_of_additions.py
#     mpiexec -n 4 minidist compare --dp 4 --steps 5 --reduction ordered
#
# The first command finds the orders by trying which pairs of numbers cancel. For chunk 2 it prints
# 0 + 3 + 1 + 2 in place of 3, 0, 1, 2: the first two numbers may be exchanged, as a + b has the bits of
# b + a.
#
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `all_reduce(algorithm="ordered")` | Intel MPI `I_MPI_CBWR`, the same bits in every run, not this order; NCCL promises nothing; MPI recommends the same bits for the same arguments and ranks |
# | the same bits in every run | PyTorch `torch.use_deterministic_algorithms`, for the operations of one device; JAX `--xla_gpu_deterministic_ops` |
#
# Next: [05 Latency or bandwidth?](05_latency_or_bandwidth.ipynb). All lessons are in the
# [index](README.md).
