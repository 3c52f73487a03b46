# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 05 Latency or bandwidth?
#
# *30 minutes. Before it: 04.*
#
# ## 1 The case
#
# Sixteen ranks are joined by links with a latency of alpha = 1 µs and a speed of 10 GB/s, so that a
# byte takes beta = 0.1 ns. A message of S bytes takes **alpha + beta S** seconds. The ring of lesson 04
# sums an array in 30 rounds of messages with a 16th of it. Two other algorithms need fewer rounds:
#
# - *recursive doubling*: in each of 4 rounds a rank exchanges the sums that it has so far, of the whole
#   array, with another partner;
# - *Rabenseifner's* algorithm: in 8 rounds a rank exchanges a half of the array, a quarter, an eighth and
#   a 16th, and the same parts again in the reverse order.
#
# For one number recursive doubling is faster, because it has fewer rounds; for a gigabyte Rabenseifner's
# algorithm is faster, because it sends fewer bytes. At which size do they take the same time? And if one keeps
# the ring for a single number of 8 bytes, how many times as long as the fastest of the three does it take?

# %%
import numpy as np

from minidist import LinkModel, SimWorld, UsageError, all_reduce
from minidist.collectives.auto import cheapest, virtual_seconds
from minidist.course.lesson import check, expect, picture, predict, reveal, solution
from minidist.course.story import story
from minidist.report import show, step
from minidist.report.bench.virtual_collectives import bench_virtual_collectives
from minidist.report.crossover import crossover

# %% [markdown]
# ## 2 Predict
#
# Write both times as formulas of S and set them equal. For the second number: which of the three
# has the fewest rounds?

# %%
crossing = predict(
    "from this size on Rabenseifner's algorithm is faster", example=1_000_000, unit="B"
)
wrong = predict("time of the ring for 8 B over that of the fastest", example=2)

# %% [markdown]
# ## 3 The idea and its picture
#
# **The number of rounds decides for a short array, and the number of bytes for a long one.** Which
# all-reduce is the fastest follows from n, S, alpha and beta. The price is several
# algorithms in place of one, each of which has to work for every number of ranks.
#
# The picture shows the three algorithms on those 16 ranks. Both axes are logarithmic. On the left
# latency decides: a line's height is its number of rounds. On the right the bytes decide, and the
# lines of the ring and of Rabenseifner's algorithm are nearly one. The case asks where the green line
# and the blue line cross. `bench_virtual_collectives` measures the algorithms on the virtual clock for
# arrays of many sizes, and `crossover` draws the times. (The command below the picture draws all algorithms of the
# library.)

# %%
RANKS, ALPHA, BETA = 16, 1e-6, 1e-10
NETWORK = LinkModel(ALPHA, BETA, overhead=0.25e-6)  # the network of lesson 04
ALGORITHMS = ("recursive_doubling", "rabenseifner", "ring")
rows = bench_virtual_collectives("all_reduce", RANKS, NETWORK)["rows"]
figure = crossover(
    [row for row in rows if row["side"] in ALGORITHMS],
    title="all-reduce on 16 ranks",
    command="minidist bench collectives --simulated --overhead 2.5e-7 --picture c.svg",
)
show(figure)

# %% [markdown]
# Two of these algorithms as messages on 8 ranks. Recursive doubling has partners at the distances 1,
# 2 and 4, so it takes three rounds. The ring takes fourteen.


# %%
def summed(comm, size, algorithm):
    return all_reduce(comm, np.arange(size) + 100.0 * comm.rank, algorithm=algorithm)


command = (
    "minidist run mpi_examples/1_messages/collectives.py --ranks 8 --elements 16 --algorithm {} "
    "--trace t.jsonl; minidist report t.jsonl"
)
for algorithm in ("recursive_doubling", "ring"):
    world = SimWorld(8)
    world.run(summed, 16, algorithm)
    picture("space-time", world, command.format(algorithm), name=algorithm.replace("_", " "))

# %% [markdown]
# ## 4 The code
#
# Recursive doubling with every message. In binary notation the partner's number differs from the
# rank's in one digit, and `^` ("exclusive or") changes this digit:


# %%
def recursive_doubling(comm, array):
    incoming, distance = np.empty_like(array), 1
    while distance < comm.size:
        partner = comm.rank ^ distance
        comm.sendrecv(array, partner, incoming, partner)
        array += incoming
        distance *= 2
    return array


print("8 ranks:", SimWorld(8).run(lambda comm: recursive_doubling(comm, np.ones(1)))[0])

# %% [markdown]
# The same with 4 numbers, message by message: after each round every rank holds the sum of twice as many ranks as
# before.


# %%
def four_numbers(comm):
    recursive_doubling(comm, np.arange(4.0) + 10 * comm.rank)


show(step(four_numbers, 8), "Recursive doubling of 4 numbers on 8 ranks.")

# %% [markdown]
# It sends the whole array in every round. Rabenseifner's algorithm halves what is exchanged. First
# each rank keeps half of the array and gives the other half to a partner, then it keeps a quarter and
# gives a quarter, and so on until it holds the sum of one chunk. Which chunks a rank gives to which
# partner:


# %%
def halving(rank):
    """Return the partner of each round on 8 ranks, and the chunks that it is given."""
    own, rounds = set(range(8)), []
    for bit in (4, 2, 1):
        kept = {chunk for chunk in own if chunk & bit == rank & bit}
        rounds.append((rank ^ bit, sorted(own - kept)))
        own = kept
    return rounds


for rank in (0, 5):
    for partner, given in halving(rank):
        print(f"rank {rank} gives rank {partner} its sums of chunks {given}")

# %% [markdown]
# That is a reduce-scatter. In the all-gather that follows, the rounds run backwards, and the same
# chunks return with the whole sums. The library's version is
# [recursive_halving.py](../minidist/collectives/recursive_halving.py).

# %% [markdown]
# ## 5 Check
#
# Let n be a power of two. Recursive doubling takes log2 n (alpha + beta S). Rabenseifner's algorithm takes
# 2 log2 n alpha + 2 (n-1)/n beta S, because a half, a quarter and so on down to an n-th of the array are
# together (n-1)/n of it. Both times are equal at the size `equal`. (One number cannot be cut, so for 8 B each round in
# which a rank sends anything sends all of it.) `virtual_seconds` measures the time of an
# all-reduce on the virtual clock:


# %%
def measured(algorithm, nbytes, ranks=RANKS):
    return 1e6 * virtual_seconds("all_reduce", algorithm, ranks, nbytes, NETWORK)


rounds = np.log2(RANKS)
equal = ALPHA / BETA * rounds / (rounds - 2 * (RANKS - 1) / RANKS)
print(f"the formulas are equal at {equal:,.0f} B")
faster = []  # the sizes at which Rabenseifner's algorithm is faster
for nbytes in (8, 18_816, 18_832, 16_000_000):
    doubling, rabenseifner, ring = (measured(algorithm, nbytes) for algorithm in ALGORITHMS)
    print(f"{nbytes:10,} B: doubling {doubling:8.3f} µs,", end=" ")
    print(f"Rabenseifner {rabenseifner:8.3f} µs, ring {ring:8.3f} µs")
    faster += [nbytes] * (rabenseifner < doubling)
crossing.judge(faster[0], within=0.1)
print(f"{8:10,} B: the root of lesson 00 {measured('naive', 8):8.3f} µs")
wrong.judge(measured("ring", 8) / measured("recursive_doubling", 8), within=0.1)
assert 18_816 < equal < faster[0] == 18_832

# %% [markdown]
# On 16 ranks the ring is never the fastest by the formulas: 30 latencies are more than 8, and the bytes are equal. But
# 12 ranks are no power of two: before the rounds four of them send their whole array to another rank, and after the
# rounds they receive the whole sum. A ring needs none of that. Nor does `ordered`, the sum in rank order of lesson 04b:
# each part of the array goes straight to the rank that adds it up, and its sum straight to all others. On 16 MB:

# %%
for ranks in (12, 16):
    times = {name: measured(name, 16_000_000, ranks) for name in (*ALGORITHMS, "ordered")}
    print(f"{ranks} ranks:", ", ".join(f"{name} {time:,.0f} µs" for name, time in times.items()))
    assert (times["ring"] < times["rabenseifner"]) == (ranks == 12)

# %% [markdown]
# The ring's neighbours can be near each other (lesson 05b). The others also send to ranks that are far away,
# across the slow parts of a network.
#
# All return the same sum, up to rounding, for any number of ranks. Compared with one rank's addition:

# %%
for ranks in (3, 8, 13):
    data = np.random.default_rng(ranks).normal(size=(ranks, 11))
    for algorithm in ALGORITHMS:
        results = SimWorld(ranks).run(
            lambda comm, a=algorithm, d=data: all_reduce(comm, d[comm.rank].copy(), algorithm=a)
        )
        off = max(np.abs(result - data.sum(axis=0)).max() for result in results)
        print(f"{ranks:2} ranks, {algorithm:18} max |parallel - single| = {off:.1e}")
        assert off < 1e-12

# %% [markdown]
# `algorithm="auto"` puts n, S, alpha, beta and an overhead of a quarter of alpha into such formulas and takes the
# fastest algorithm that the library has (`cheapest`). Its choice for 16 processes that exchange messages through shared
# memory, and for 16 ranks in two networks:

# %%
NETWORKS = {
    "shared memory": (2e-7, 2e-10),
    "InfiniBand": (2e-6, 4e-11),
    "between cities": (5e-3, 8e-9),
}
for name, (alpha, beta) in NETWORKS.items():
    taken = [
        cheapest("all_reduce", nbytes, RANKS, alpha, beta) for nbytes in (8, 2**13, 2**17, 2**24)
    ]
    print(f"{name:14} 8 B: {taken[0]}, 8 KiB: {taken[1]}, 128 KiB: {taken[2]}, 16 MiB: {taken[3]}")

# %% [markdown]
# ## 6 Break it
#
# The recursive doubling of part 4 is right on 2, 4, 8 and 16 ranks, and no test on such numbers finds
# what is missing. On 6 ranks the partner of a rank may not exist:

# %%
with expect(UsageError):
    SimWorld(6).run(lambda comm: recursive_doubling(comm, np.ones(1)))

# %% [markdown]
# A choice can be wrong as well, and then nothing reports it. Choose for 8 KiB with the alpha and beta of
# shared memory, and run the choice between cities:

# %%
cities = LinkModel(*NETWORKS["between cities"])
seconds = {}
for believed in ("shared memory", "between cities"):
    taken = cheapest("all_reduce", 2**13, RANKS, *NETWORKS[believed])
    seconds[believed] = virtual_seconds("all_reduce", taken, RANKS, 2**13, cities)
    print(f"chosen for {believed}: {taken}, {1e3 * seconds[believed]:.1f} ms between cities")
print(f"{seconds['shared memory'] / seconds['between cities']:.2f} times as long")

# %% [markdown]
# So alpha and beta are measured: `mpiexec -n 2 python mpi_examples/1_messages/ping_pong.py` sends
# messages of several sizes back and forth between two processes of your machine, and prints how long they
# take. A line through these times gives both.

# %% [markdown]
# ## 7 Exercise: choose
#
# Return the name of the fastest of "recursive_doubling", "rabenseifner", "ring" and "binomial" for an
# array of `size` bytes on n ranks. n is a power of two, and a message of S bytes takes alpha + beta S.
# "binomial" is a tree: sums go up to rank 0 in log2 n rounds, and the result comes down again in log2 n
# more, each with the whole array. Judged: on generated cases no other algorithm takes less time.


# %%
def choose(n, size, alpha, beta):
    raise NotImplementedError("yours")


check("05.choose", choose)

# %%
reveal("05.choose")
check("05.choose", solution("05.choose"))

# %% [markdown]
# To write Rabenseifner's algorithm for any number of ranks is the last puzzle about messages:
# `minidist puzzle m20`.

# %% [markdown]
# ## 8 Takeaway
#
# - Time = rounds x alpha + bytes x beta. For short arrays recursive doubling, **log2 n (alpha + beta
#   S)**, where n is a power of two. For long ones Rabenseifner's algorithm, **2 log2 n alpha + 2 (n-1)/n
#   beta S**, where n is a power of two. Otherwise one that sends less than twice the array from each rank: the ring,
#   **2 (n-1) alpha + 2 (n-1)/n beta S**, or, where all pairs of ranks are equally near, direct messages between all
#   pairs (`ordered`, lesson 04b).
# - Where they cross depends on n and alpha / beta. Ask for `auto`, or measure; a crossover of one
#   network is wrong on another.

# %% [markdown]
# The job so far:

# %%
story("05")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/1_messages/collectives.py
#     mpiexec -n 2 python mpi_examples/1_messages/ping_pong.py
#     minidist bench collectives --ranks 2            # measured on your machine, with MPI_Allreduce

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `algorithm="auto"` | NCCL's tuner (`NCCL_ALGO`, `NCCL_PROTO` overrule it); Open MPI `coll_tuned` decision tables (an algorithm of your choice only with `coll_tuned_use_dynamic_rules 1`); MPICH's selection by size |
# | `recursive_doubling` | MPICH `MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM=recursive_doubling`; Open MPI `coll_tuned_allreduce_algorithm 3` |
# | `rabenseifner` | MPICH `reduce_scatter_allgather`; Open MPI `coll_tuned_allreduce_algorithm 6` |
# | `binomial` | Open MPI `coll_tuned_allreduce_algorithm 2` (reduce, then broadcast); NCCL's `NCCL_ALGO=Tree` is another one, a pipelined double binary tree |
# | `ring` | NCCL `NCCL_ALGO=Ring`; Open MPI `coll_tuned_allreduce_algorithm 4` |
# | a ping-pong; alpha, beta, overhead | OSU micro-benchmarks `osu_latency`, `osu_bw`; Hockney's model, LogGP's L, o and G |
#
# Next: [06 Data parallel is one big batch](06_data_parallel_is_one_big_batch.ipynb). Side room:
# [05b Two levels and topology](05b_two_levels.ipynb). All lessons are in the [index](README.md).
