# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 All-reduce without a root
#
# *30 minutes. Before it: 00, 03.*
#
# ## 1 The case
#
# Eight ranks have a gradient of 1,000 numbers each, 8,000 B. Every rank needs the sum of all eight.
# This is an *all-reduce*. The obvious way is that of lesson 00, with rank 0 as the *root*: all send
# their gradient to rank 0, which adds them up and sends the sum back to each.
#
# A way without a root: the ranks form a ring, and each sends only to its right neighbour. The array
# is cut into eight chunks, and each chunk travels round the ring, first to be added up, then to be
# passed on as a finished sum. Every rank sends the same number of bytes.
#
# How many bytes leave rank 0 in the first way, and how many in the second?

# %%
import numpy as np

from minidist import LinkModel, SimWorld, all_reduce, report
from minidist.course.lesson import check, picture, predict, reveal, solution
from minidist.course.story import story

# %% [markdown]
# ## 2 Predict
#
# Count messages, and bytes per message, of rank 0 alone.

# %%
guess = {
    "naive": predict("bytes that leave rank 0, the root of 8", example=8_000, unit="B"),
    "ring": predict("bytes that leave rank 0 in the ring of 8", example=8_000, unit="B"),
}

# %% [markdown]
# ## 3 The idea and its picture
#
# Sum an array over all ranks so that **every rank has the sum and no rank sends more than another**. The sum takes two
# halves: after the *reduce-scatter* each rank has one chunk of the sum, and the *all-gather* gives all chunks to all
# ranks. With a root, n - 1 whole arrays go into one rank and n - 1 come out of it. The ring sends as many bytes in all,
# but divides them: less than two arrays leave each rank, however many ranks there are. It costs 2 (n-1) steps one after
# the other, and each takes the *latency* of a message, the time that even an empty one needs. In the first part of the
# latency, the *overhead*, the sender can send nothing else; in the last part, as long, the receiver can receive nothing
# else.
#
# Four ranks have 12 numbers each, so a chunk has 3 numbers (24 B). In the first three steps sums are
# formed, and in three more they are distributed. In every step each rank sends to the right and
# receives from the left. On an arrow is the number of the chunk (the command below the picture writes the bytes there):


# %%
def summed(comm, size, algorithm):
    array = np.arange(size) + 100.0 * comm.rank
    return all_reduce(comm, array, algorithm=algorithm)


network = LinkModel(alpha=1e-6, beta=1e-10, overhead=0.25e-6)  # latency, seconds per byte, overhead
world = SimWorld(4, links=network)
world.run(summed, 12, "ring")
command = (
    "minidist run mpi_examples/1_messages/ring_all_reduce.py --algorithm {} --elements 12 "
    "--ranks 4 --trace t.jsonl; minidist report t.jsonl --picture {}"
)
chunks = {rank: [(rank - 1 - step) % 4 for step in range(3)] for rank in range(4)}  # first half
for rank, numbers in chunks.items():
    numbers += [(rank - step) % 4 for step in range(3)]  # second half
labels = {rank: [f"chunk {number}" for number in numbers] for rank, numbers in chunks.items()}
drawn_by = command.format("ring", "space-time")
picture("space-time", world, drawn_by, name="ring of 4", labels=labels)

# %% [markdown]
# The bytes that each rank sends to each other one: in the ring every rank sends the same number to its
# right neighbour. With a root ("naive"), all messages are in rank 0's row and column:

# %%
for algorithm, name in (("ring", "ring of 4"), ("naive", "root of 4")):
    world = SimWorld(4, links=network)
    world.run(summed, 12, algorithm)
    picture("bytes-matrix", world, command.format(algorithm, "bytes-matrix"), name=name)

# %% [markdown]
# The stepper shows what the chunks hold in between: the arrow keys go from message to message. A
# colour is a chunk; it is filled when it holds the whole sum.


# %%
def eight_numbers(comm):
    all_reduce(comm, np.arange(8.0) + 10 * comm.rank, algorithm="ring")


report.show(report.step(eight_numbers, 4), "A ring all-reduce of 8 numbers on 4 ranks.")

# %% [markdown]
# ## 4 The code
#
# This is the first half, the reduce-scatter. Each rank sends to its right neighbour what it has just
# added up. Chunk j starts at rank j + 1, so after n-1 steps it is complete on rank j. Here a chunk is
# one number, and a rank returns its own chunk. Chunk j is j + 1 on rank 0, 10 times that on rank 1, 100
# times on rank 2 and 1000 times on rank 3, so the digits of a sum show which ranks are in it.


# %%
def own_sum(comm, numbers, steps):
    n, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    travelling = numbers[left]  # this chunk starts here, and ends at the left neighbour
    for step in range(steps):
        arrived = np.empty(1)
        comm.sendrecv(np.array([travelling]), right, arrived, left)
        travelling = arrived[0] + numbers[(left - 1 - step) % n]
    return travelling


def digits(comm, steps=3):
    return own_sum(comm, np.arange(1.0, 5.0) * 10.0**comm.rank, steps)


print("complete chunks:", *SimWorld(4).run(digits))
print("rank 0 adds its part of the chunks", *((3 - 1 - step) % 4 for step in range(3)))

# %% [markdown]
# In the second half, the all-gather, each rank begins with the chunk that it has completed, sends on what
# it has received last, and adds nothing:


# %%
def all_sums(comm, own):
    n, travelling, arrived = comm.size, np.array([own]), np.empty(1)
    sums = {comm.rank: own}
    for step in range(n - 1):
        comm.sendrecv(travelling, (comm.rank + 1) % n, arrived, (comm.rank - 1) % n)
        travelling = arrived.copy()
        sums[(comm.rank - 1 - step) % n] = travelling[0]
    return [float(sums[chunk]) for chunk in range(n)]


right = SimWorld(4).run(lambda comm: all_sums(comm, digits(comm)))
print("rank 3 has:", right[3])
assert right == [[1111, 2222, 3333, 4444]] * 4

# %% [markdown]
# The library does both with chunks of any size, also of 0 numbers
# ([ring.py](../minidist/core/collectives/ring.py)).

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
# The root's time grows with n, because n - 1 arrays go through one rank in each direction. The ring's
# never exceeds that of twice the array, here 1,600 µs, plus the latencies. For a small array the root is
# faster: the ring waits for 2 (n-1) latencies one after the other, where the root is busy with each
# message for its overhead, a quarter of a latency. Lesson 05 finds what is better than both.

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
        "{:2} ranks: ring {:5.1f} µs, root {:4.1f} µs   ring {:6.0f} µs, root {:6.0f} µs".format(
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
    return all_sums(comm, digits(comm, steps=comm.size - 2))  # should be comm.size - 1


results = SimWorld(4).run(one_step_too_few)
print("ranks agree:", all(result == results[0] for result in results))
print("rank 0 has: ", results[0])
print("and not:    ", right[0])

# %% [markdown]
# A 0 shows which rank is missing in a sum (444 is 0444). And each sum is in the place of another chunk, because rank r
# has, one step before the end, chunk r + 1. After two steps too few, two ranks are missing in
# each sum, and each sum is two places off: change the 2, and run the cell again.


# %% [markdown]
# ## 7 Exercise: the ring, for any size and any n
#
# Sum `array` over all ranks **in place**, with `comm.sendrecv` alone. The two loops are those of part 4,
# with a chunk of the array in place of one number. The size need not be a multiple of n, may be smaller
# than n, and may be 0; n may be 1.
#
# `np.array_split(array, n)` cuts an array into n chunks whose sizes differ by one at most. Each chunk is a
# view: what is written into it is written into the array.

# %%
array = np.arange(10.0)
chunks = np.array_split(array, 4)
chunks[1] += np.array([100.0, 200.0, 300.0])
print("the chunks have the sizes", *map(len, chunks))
print("the array is now", array)

# %% [markdown]
# Judged: the sum on every rank; bytes (par). The library's collectives may not be called.


# %%
def ring_all_reduce(comm, array):
    raise NotImplementedError("yours")  # comm.sendrecv(outgoing, to, incoming, source)


check("04.ring_all_reduce", ring_all_reduce)

# %%
reveal("04.ring_all_reduce")
check("04.ring_all_reduce", solution("04.ring_all_reduce"))

# %% [markdown]
# ## 8 Takeaway
#
# - All-reduce = reduce-scatter + all-gather. Round a ring each is n-1 steps with one chunk.
# - Each rank sends **2 (n-1)/n S** bytes for an array of S bytes: less than 2 S for any number of ranks.
#   No algorithm lets the busiest rank send less, unless the network itself adds (Patarasuk and Yuan, 2009).
#   It takes **2 (n-1)** latencies, one after the other.

# %% [markdown]
# The job so far:

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
# | `all_reduce(algorithm="ring")` | NCCL `ncclAllReduce` with `NCCL_ALGO=Ring`; Open MPI `coll_tuned_allreduce_algorithm 4` (ring; with `coll_tuned_use_dynamic_rules 1`, without which it is ignored); MPICH `MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM` |
# | `all_reduce` | PyTorch `dist.all_reduce`; JAX `jax.lax.psum`; Horovod `hvd.allreduce` |
# | `reduce_scatter`, `all_gather` | PyTorch `dist.reduce_scatter_tensor`, `dist.all_gather_into_tensor`; JAX `psum_scatter`, `all_gather` |
#
# Next: [05 Latency or bandwidth?](05_latency_or_bandwidth.ipynb). Side room: [04b The order of
# additions](04b_order_of_additions.ipynb). On the path of an evening 06 is next. All lessons are in the
# [index](README.md).
