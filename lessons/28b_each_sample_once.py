# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 28b Each sample once
#
# *25 minutes. Before it: 28.*
#
# ## 1 The case
#
# In an epoch each sample is to be read once, by whichever rank. A job dies and is resumed, and reads a
# batch again. Another job does not tell its loaders their ranks, so that all ranks read the same
# samples. No tensor has a wrong shape, and both losses fall. Both bugs were reported in libraries that are
# in use.
#
# What would a check cost? A million samples are read by eight ranks, and each rank describes what it has
# read by two numbers of 8 B, which all ranks gather; they go round a ring. How many bytes does a rank send?

# %% [markdown]
# ## 2 Predict
#
# Round a ring of eight ranks a rank passes on its own two numbers, and then those of others, until every
# rank has the numbers of all.

# %%
from minidist.course.lesson import check, predict, reveal, small_job, solution

bytes_guess = predict(
    "bytes that a rank sends to check a million samples", example=8_000_000, unit="B"
)

# %%
from functools import reduce
from operator import xor

import numpy as np
from matplotlib.colors import ListedColormap

from minidist import SimWorld, all_gather
from minidist.course.museum import find, run_exhibit
from minidist.job.equality.compare import compare_rank
from minidist.report import show
from minidist.report.frame import new_figure
from minidist.techniques.data_ledger.ledger import digest

# %% [markdown]
# ## 3 The idea and its picture
#
# **Ranks add up a hash of the number of each sample that they have read, and compare the total with
# that of the data set.** Nothing is sent whose size grows with the data. It costs a few bytes from
# each rank to every other one.
#
# What can go wrong: an epoch of 24 samples, and three mistakes of a loader. Each reads some samples twice in
# the place of others:

# %%
once = np.arange(24)
mistakes = {}
for old, new in (([0], [23]), ([0, 3], [1, 2]), ([0, 4, 5], [1, 2, 6])):
    mistakes[f"{old} missing, {new} twice"] = np.concatenate([np.setdiff1d(once, old), new])

# %% [markdown]
# The picture shows how often each sample is read: 0 is white, 1 blue, 2 red. Each row has as many red
# squares as white ones, so the number of samples that are read is right in all of them. Samples 8 to 22 are left out.

# %%
shown = [*range(8), 23]  # the samples between are read once each
times = np.array([np.bincount(read) for read in mistakes.values()])[:, shown]
axes = (figure := new_figure(6, 1.8)).add_subplot()
axes.imshow(times, cmap=ListedColormap(["#FFFFFF", "#4477AA", "#EE6677"]))
for (row, sample), number in np.ndenumerate(times):
    axes.text(sample, row, number, ha="center", va="center", fontsize=8)
axes.set_xticks(range(9), shown)
axes.set_yticks(range(3), list(mistakes))
axes.set_title("how often each of 24 samples is read", fontsize=10, loc="left")
show(figure)

# %% [markdown]
# ## 4 The code
#
# A number describes what was read. It must be a sum over the samples, so that the ranks' numbers can be
# added. Which sum sees the three mistakes? The sum of hashes modulo 2^64 is called *digest* here
# ([ledger.py](../minidist/techniques/data_ledger/ledger.py)):

# %%
numbers_of = {
    "sum": lambda read: int(read.sum()),
    "sum of squares": lambda read: int((read**2).sum()),
    "sum of hashes": digest,
}
for mistake, read in mistakes.items():
    seen = [name for name, number in numbers_of.items() if number(read) != number(once)]
    print(f"{mistake:33} is seen by: {', '.join(seen)}")

# %% [markdown]
# Mistakes are seldom random. A loader that is wrong by a constant stride reads numbers that are off by
# equal amounts, and such amounts cancel in a sum of numbers: 0 + 3 = 1 + 2. Hashes have no such pattern: two sets of
# samples have the same sum with a chance of about 1 in 2^64.
#
# Now four ranks read the 24 samples, each its own. Their digests add up to that of the data set:

# %%
total = 0
for rank in range(4):
    numbers = np.arange(rank, 24, 4)
    total = (total + digest(numbers)) % 2**64
    print(f"rank {rank}: count {numbers.size:2}, digest {digest(numbers):20}")
print(f"in all: count 24, digest {total:20}")
print(f"the data set:     digest {digest(once):20}")

# %% [markdown]
# On ranks each one gathers the counts and the digests of all. (When a digest is wrong, the count tells whether
# samples are missing or others were read in their place.) To write that is your exercise.

# %% [markdown]
# ## 5 Check
#
# The two bugs of the case are exhibits of the museum. `--check-data` keeps a ledger, which records what
# each rank reads and compares digests after every step. Only after a mismatch do ranks send the numbers
# themselves, to name the sample and the ranks. The last losses do not tell: in these small runs those with the
# bug are even lower, by chance:

# %%
for number in ("103", "108"):
    (exhibit,) = find(number)
    run = run_exhibit(exhibit, tests=False)
    right, wrong = run.right.losses[-1], run.wrong.losses[-1]
    print(f"{number}: {exhibit.title} ({exhibit.thread})")
    print(f"    last loss {right:.2f}, with the bug {wrong:.2f}")
    print(f"    {run.said.split(';')[0]}")
    assert "MismatchError" in run.said

# %% [markdown]
# The bytes of the check, for few samples and for many. Each rank has read every eighth of them:


# %%
def checked(comm, samples):
    return solution("28b.read_once")(comm, np.arange(comm.rank, samples, comm.size), samples)


for samples in (1_000, 1_000_000):
    world = SimWorld(8)
    answers = world.run(checked, samples)
    sent = sum(world.traces[0].bytes_by_purpose().values())
    print(f"{samples:9,} samples: a rank sends {sent} B; each was read once: {answers[0] == 1}")
    assert answers == [1] * 8
bytes_guess.judge(sent)

# %% [markdown]
# Eight ranks gather in 7 messages, each with the 16 B of one rank.

# %% [markdown]
# A job with the check trains what it trains without, and what one device trains:

# %%
job = small_job(dp=4, check_data=True, steps=3, global_batch=8)
verdict = SimWorld(4).run(compare_rank, job)[0]
print(f"max |w_parallel - w_single| = {verdict.max_difference['weights']:g}")
assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# Combine the hashes by exclusive or instead of a sum, as is often done for sets. Within one epoch that sees the
# three mistakes, too. But what is read twice cancels. Two ranks read for two epochs, and each sample should have
# been read twice; but their loaders do not know their ranks, and both read the same half, in each epoch:

# %%
hashes = {sample: digest(np.array([sample])) for sample in range(24)}
by_epoch = [reduce(xor, (hashes[sample] for sample in read)) for read in (once, *mistakes.values())]
print(f"one epoch: {sum(number != by_epoch[0] for number in by_epoch[1:])} of 3 mistakes are seen")


def both_totals(comm, halves):
    """Exclusive or and sum of the hashes of all ranks, of two epochs."""
    read = np.tile(halves[comm.rank], 2)
    mine = [reduce(xor, (hashes[sample] for sample in read)), digest(read)]
    by_xor, by_sum = all_gather(comm, np.array(mine, np.uint64)).reshape(-1, 2).T
    return int(np.bitwise_xor.reduce(by_xor)), int(by_sum.sum())


first, second = np.arange(0, 24, 2), np.arange(1, 24, 2)
totals = {}
for name, halves in (
    ("each its own half", (first, second)),
    ("both the first", (first, first)),
    ("both the second", (second, second)),
):
    totals[name] = SimWorld(2).run(both_totals, halves)[0]
    print(f"{name:17}: exclusive or {totals[name][0]}, sum {totals[name][1]}")
assert {by_xor for by_xor, _ in totals.values()} == {0}
assert len({by_sum for _, by_sum in totals.values()}) == 3

# %% [markdown]
# ## 7 Exercise: was each sample read once?
#
# `numbers` are the samples that this rank has read in an epoch of `samples`. `read_once` returns 1 on
# every rank when all ranks together have read each of 0 to `samples` - 1 once, and 0 when one was read
# twice, or by no rank. Use `digest`, the library's. Judged: the answer, and the bytes. Do not send the
# numbers, 16 bytes per rank are enough.


# %%
def read_once(comm, numbers, samples):
    mine = np.array([numbers.size, numbers.sum()])
    count, total = all_gather(comm, mine).reshape(-1, 2).sum(axis=0)
    return int(count == samples and total == samples * (samples - 1) // 2)


check("28b.read_once", read_once)

# %%
reveal("28b.read_once")
check("28b.read_once", solution("28b.read_once"))

# %% [markdown]
# ## 8 Takeaway
#
# - **A count and a sum of hashes, 16 bytes from each rank, say almost surely whether all of them together
#   have read each sample once.** Other samples have the same sum by chance once in 2^64. The loss does not
#   say it.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 minidist train --dp 2 --steps 3 --check-data
#     mpiexec -n 2 python mpi_examples/7_more/data_ledger.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `--check-data` | a stateful data loader's position (torchdata `StatefulDataLoader`), which is saved and not checked |
# | each sample once | PyTorch's `DistributedSampler` pads: some samples are read twice when the ranks do not divide their number |
# | a sum of hashes | an incremental multiset hash (Clarke et al. 2003) |
#
# All lessons are in the [index](README.md).
