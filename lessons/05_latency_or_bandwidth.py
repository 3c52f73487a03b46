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
# *35 minutes. Before it: 04.*
#
# ## 1 The case
#
# Sixteen ranks are joined by links with a latency of alpha = 1 µs and a speed of 10 GB/s, so that a
# byte takes beta = 0.1 ns. A message of S bytes takes **alpha + beta S** seconds. The ring of lesson 04
# sums an array in 30 rounds of messages with a 16th of it. Two other algorithms need fewer rounds:
#
# - *recursive doubling*: in each of 4 rounds a rank and another partner exchange the sums of the
#   whole array that they have so far;
# - *Rabenseifner's* algorithm: 8 rounds, with a half of the array, a quarter, an eighth and a 16th,
#   and back again.
#
# For one number recursive doubling is faster, because it has fewer rounds; for a gigabyte
# Rabenseifner's algorithm is faster, because it sends fewer bytes. At which size do they take the
# same time? And if one keeps the ring for a single number of 8 bytes, how many times as long as the
# best of all algorithms does it take?

# %%
import numpy as np

from minidist import LinkModel, SimWorld, UsageError, all_reduce
from minidist.collectives import volume
from minidist.collectives.auto import cheapest, virtual_seconds
from minidist.course.lesson import check, expect, picture, predict, reveal, solution
from minidist.course.story import story
from minidist.report import show
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
wrong = predict("time of the ring for 8 B over that of the best", example=2)

# %% [markdown]
# ## 3 The idea and its picture
#
# **The number of rounds decides for a short array, and the number of bytes for a long one.** Which
# all-reduce is the fastest follows from n, S, alpha and beta. It saves time at every size. It costs
# several algorithms in place of one, each of which has to work for every number of ranks.
#
# The picture shows the three algorithms on those 16 ranks. Both axes are logarithmic. On the left
# latency decides: a line's height is its number of rounds. On the right the bytes decide, and the
# lines of the ring and of Rabenseifner's algorithm are nearly one. (A rank is also busy with each
# message that it sends or receives, for a quarter of alpha, its *overhead*.)
# `bench_virtual_collectives` measures the algorithms on the virtual clock, and `crossover` draws them.

# %%
ALPHA, BETA, RANKS = 1e-6, 1e-10, 16
NETWORK = LinkModel(ALPHA, BETA, overhead=ALPHA / 4)
ALGORITHMS = ("recursive_doubling", "rabenseifner", "ring")
rounds = np.log2(RANKS)
formula = ALPHA / BETA * rounds / (rounds - 2 * (RANKS - 1) / RANKS)
rows = bench_virtual_collectives("all_reduce", RANKS, NETWORK)["rows"]
figure = crossover(
    [row for row in rows if row["side"] in ALGORITHMS],
    title="all-reduce on 16 ranks",
    command="minidist bench collectives --simulated --overhead 2.5e-7 --picture c.svg",
)
axes = figure.axes[0]
axes.axvline(formula, color="#888888", linewidth=0.8)
axes.text(formula, 0.95, " the case", transform=axes.get_xaxis_transform())
show(figure)

# %% [markdown]
# Two of these algorithms as messages on 8 ranks. Recursive doubling has partners at the distances 1,
# 2 and 4, so it takes three rounds. The ring takes fourteen.


# %%
def summed(comm, size, algorithm):
    return all_reduce(comm, np.arange(size) + 100.0 * comm.rank, algorithm=algorithm)


command = (
    "minidist run mpi_examples/1_messages/collectives.py --ranks 8 --algorithm {} --trace t.jsonl; "
    "minidist report t.jsonl"
)
for algorithm in ("recursive_doubling", "ring"):
    world = SimWorld(8)
    world.run(summed, 16, algorithm)
    picture("space-time", world, command.format(algorithm), name=algorithm.replace("_", " "))

# %% [markdown]
# Recursive doubling of 4 numbers, message by message: after each round every rank holds the sum of
# twice as many ranks as before.

# %%
from minidist import report


def four_numbers(comm):
    all_reduce(comm, np.arange(4.0) + 10 * comm.rank, algorithm="recursive_doubling")


show(report.step(four_numbers, 8), "Recursive doubling of 4 numbers on 8 ranks.")

# %% [markdown]
# ## 4 The code
#
# Can one have both, few rounds *and* few bytes? Yes: halve what is exchanged in every round. First
# each rank keeps half of the array and gives the other half to a partner, then it keeps a quarter and
# gives a quarter, and so on until it holds the sum of one chunk. This is a reduce-scatter; an
# all-gather that doubles what a rank has in every round follows. Together they are *Rabenseifner's*
# all-reduce. Which chunks a rank gives to which partner in the first half:


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
# In the second half the rounds run backwards, and the same chunks return with the whole sums. The
# library's version ([recursive_halving.py](../minidist/collectives/recursive_halving.py)) takes any
# number of ranks: before the rounds, ranks beyond a power of two send their array to another rank,
# and after the rounds they receive the sum.

# %% [markdown]
# ## 5 Check
#
# The crossover by the formula, log2 n (alpha + beta S) = 2 log2 n alpha + 2 (n-1)/n beta S, and on the
# virtual clock, where the interval in which it lies is halved until it is short. `virtual_seconds`
# measures an all-reduce without adding any numbers:


# %%
def measured(algorithm, nbytes, ranks=RANKS):
    return virtual_seconds("all_reduce", algorithm, ranks, nbytes, NETWORK)


low, high = RANKS, 2**26
while high - low > RANKS:
    middle = (low + high) // 2 // RANKS * RANKS
    if measured("rabenseifner", middle) < measured("recursive_doubling", middle):
        high = middle
    else:
        low = middle
print(f"on the clock {high:,} B, by the formula {formula:,.0f} B")
crossing.judge(high, within=0.1)
assert abs(high - formula) <= 2 * RANKS
best = cheapest("all_reduce", 8, RANKS, ALPHA, BETA, NETWORK.overhead)
wrong.judge(measured("ring", 8) / measured(best, 8), within=0.1)

# %% [markdown]
# The most messages and bytes that one rank sends, counted in a run on 16 ranks with an array of
# 160 kB, and the times of three sizes:

# %%
print(
    f"{'':20} {'most messages':>17} {'most bytes':>14} {'µs, 80 B':>10} "
    f"{'µs, 160 kB':>11} {'µs, 16 MB':>11}"
)
for algorithm in ALGORITHMS:
    world = SimWorld(RANKS)
    world.run(summed, 20_000, algorithm)
    messages = max(len(trace.sent()) for trace in world.traces)
    leaving = max(sum(m.nbytes for m in trace.sent()) for trace in world.traces)
    assert (messages, leaving // 8) == max(
        volume("all_reduce", algorithm, 20_000, RANKS, r) for r in range(RANKS)
    )
    times = [1e6 * measured(algorithm, nbytes) for nbytes in (80, 160_000, 16_000_000)]
    print(
        f"{algorithm:20} {messages:>17} {leaving:>12,} B {times[0]:>10.1f} {times[1]:>11.1f} "
        f"{times[2]:>11.0f}"
    )

# %% [markdown]
# On 16 ranks the ring is never the fastest. But 12 ranks are no power of two: before the rounds four of
# them send their whole array to another rank, and after the rounds they receive the whole sum. A ring
# needs none of that. On 16 MB:

# %%
for ranks in (12, 16):
    times = {name: 1e6 * measured(name, 16_000_000, ranks) for name in ALGORITHMS}
    print(f"{ranks} ranks:", ", ".join(f"{name} {time:,.0f} µs" for name, time in times.items()))
    assert (times["ring"] < times["rabenseifner"]) == (ranks == 12)

# %% [markdown]
# Also, the partners of the other two are up to n/2 ranks away, across the slow parts of a network. The
# neighbours in a ring can be near each other (lesson 05b).
#
# Every algorithm must return the same sum, for any number of ranks. Compared with one rank's addition:

# %%
for ranks in (3, 8, 13):
    data = np.random.default_rng(ranks).normal(size=(ranks, 11))
    for algorithm in ("recursive_doubling", "rabenseifner"):
        results = SimWorld(ranks).run(
            lambda comm, a=algorithm, d=data: all_reduce(comm, d[comm.rank].copy(), algorithm=a)
        )
        off = max(np.abs(result - data.sum(axis=0)).max() for result in results)
        same = len({result.tobytes() for result in results}) == 1
        print(
            f"{ranks:2} ranks, {algorithm:18} max |parallel - single| = {off:.1e}; all ranks "
            f"have the same bits: {same}"
        )
        assert off < 1e-12
        assert same

# %% [markdown]
# `algorithm="auto"` puts n, S, alpha, beta and the overhead into these formulas and takes the fastest.
# (Where n is no power of two, it takes `ordered` for long arrays. `ordered` sends as many bytes as a ring
# and adds in the order of the ranks: lesson 04b.) Its choice on 16 ranks in three networks:

# %%
for name, alpha, beta in (
    ("inside a machine", 2e-7, 2e-10),
    ("InfiniBand", 2e-6, 4e-11),
    ("between cities", 5e-3, 8e-9),
):
    taken = [
        cheapest("all_reduce", nbytes, RANKS, alpha, beta) for nbytes in (8, 2**13, 2**17, 2**24)
    ]
    print(f"{name:17} 8 B: {taken[0]}, 8 KiB: {taken[1]}, 128 KiB: {taken[2]}, 16 MiB: {taken[3]}")

# %% [markdown]
# ## 6 Break it
#
# This recursive doubling passes every test on 2, 4 and 8 ranks. On 6 ranks the partner of a rank may
# not exist:


# %%
def doubling_for_powers_of_two(comm, array):
    incoming, distance = np.empty_like(array), 1
    while distance < comm.size:
        partner = comm.rank ^ distance
        comm.sendrecv(array, partner, incoming, partner)
        array += incoming
        distance *= 2
    return array


print("8 ranks:", SimWorld(8).run(lambda comm: doubling_for_powers_of_two(comm, np.ones(1)))[0])
with expect(UsageError):
    SimWorld(6).run(lambda comm: doubling_for_powers_of_two(comm, np.ones(1)))

# %% [markdown]
# Alpha and beta are measured: `mpiexec -n 2 python mpi_examples/1_messages/ping_pong.py` sends
# messages of several sizes back and forth between two processes of your machine, and prints how long
# they take. A line through these times gives both.

# %% [markdown]
# ## 7 Exercises
#
# **Halving and doubling for any n.** Sum `array` over all ranks in place, by the algorithm of part 4.
# It must work for any n and any size, also for 0 numbers. Ranks beyond a power of two send their
# array to another rank before the rounds, and receive the sum after them. Judged: the sums, and that
# no rank sends more messages or bytes than in our solution; the time is only printed.


# %%
def halving_doubling(comm, array):
    raise NotImplementedError("yours")


check("05.halving_doubling", halving_doubling)

# %%
reveal("05.halving_doubling")
check("05.halving_doubling", solution("05.halving_doubling"))

# %% [markdown]
# **choose(n, size, alpha, beta).** Return the name of the fastest of "recursive_doubling",
# "rabenseifner", "ring" and "binomial" (a tree: up to rank 0 and down again, 2 log2 n rounds with the
# whole array) for an array of `size` bytes, where n is a power of two and nothing has an overhead.
# Judged: on generated cases no other algorithm takes less time.


# %%
def choose(n, size, alpha, beta):
    raise NotImplementedError("yours")


check("05.choose", choose)

# %%
reveal("05.choose")
check("05.choose", solution("05.choose"))

# %% [markdown]
# ## 8 Takeaway
#
# - Time = rounds x alpha + bytes x beta. For short arrays recursive doubling, **log2 n (alpha + beta
#   S)**, where n is a power of two. For long ones Rabenseifner's algorithm, **2 log2 n alpha + 2 (n-1)/n
#   beta S**, where n is a power of two, and otherwise the ring, **2 (n-1) alpha + 2 (n-1)/n beta S**.
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
# | `algorithm="auto"` | NCCL's tuner (`NCCL_ALGO`, `NCCL_PROTO` overrule it); Open MPI `coll_tuned` decision tables; MPICH's selection by size |
# | `recursive_doubling` | MPICH `MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM=recursive_doubling`; Open MPI `coll_tuned_allreduce_algorithm 3` |
# | `rabenseifner` | MPICH `reduce_scatter_allgather`; Open MPI `coll_tuned_allreduce_algorithm 6` |
# | `binomial` | Open MPI `coll_tuned_allreduce_algorithm 2` (reduce, then broadcast); unlike NCCL's `NCCL_ALGO=Tree`, a pipelined double binary tree |
# | `ring` | NCCL `NCCL_ALGO=Ring`; Open MPI `coll_tuned_allreduce_algorithm 4` |
# | a ping-pong; alpha, beta, overhead | OSU micro-benchmarks `osu_latency`, `osu_bw`; Hockney's model, LogGP's L, o and G |
#
# Next: [06 Data parallel is one big batch](06_data_parallel_is_one_big_batch.ipynb). Side room:
# [05b Two levels and topology](05b_two_levels.ipynb). All lessons are in the [index](README.md).
