# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06f Loading data
#
# *20 minutes. Before it: 06.*
#
# ## 1 The case
#
# A training step computes for 30 ms. To make the batch for it takes 50 ms, because pictures are
# decoded, cropped and mirrored. The rank makes its batches itself, so a step takes 80 ms, in which it
# trains for 30. Another process, a *loader*, could make the next batch while the rank trains on this
# one, and several loaders could make several batches.
#
# For how much of the time does the training still wait with one loader? And how many loaders are
# needed until no step after the first waits any more?

# %% [markdown]
# ## 2 Predict
#
# A loader makes one batch after the other, and the training uses them in their order.

# %%
from minidist.course.lesson import check, picture, predict, reveal, solution

waits_guess = predict(
    "part of the time that the training waits, with one loader", example=60, unit="%"
)
loaders_guess = predict("loaders until no later step waits", example=4)

# %% [markdown]
# ## 3 The idea and its picture
#
# **Make the next batch while this one trains.** The price is memory and cores. The batches must be the same,
# and in the same order, as if the rank had made them itself.
#
# The pictures show eight steps without a loader, with one and with two. The ranks after rank 0 are loaders, and take
# turns. A loader sends each batch as soon as it is made, however far ahead it is (part 4 limits that); at the end
# `waitall` waits for all of its requests. Grey is making a batch ("compute" in the legend), blue and green are the
# step, and red is the time for which rank 0 waits for a batch.

# %%
import numpy as np

from minidist import ANY, SimWorld
from minidist.data import PrefetchingSampler
from minidist.data.workers import open_sampler


def eight_steps(comm):
    batch, sends, loaders = np.zeros(2), [], comm.size - 1
    for i in range(8):
        maker = 1 + i % loaders if loaders else 0
        if comm.rank == maker:
            comm.compute(seconds=0.05, name="make a batch")
        if comm.rank == maker and loaders:
            sends.append(comm.isend(batch.copy(), 0))
        if comm.rank == 0:
            if loaders:
                comm.recv(batch, maker)
            comm.compute(seconds=0.01, name="forward")
            comm.compute(seconds=0.02, name="backward")
    comm.waitall(sends)


longest = 0.0
for ranks, name in ((1, "no loader"), (2, "one loader"), (3, "two loaders")):
    world = SimWorld(ranks)
    world.run(eight_steps)
    longest = max(longest, world.end_time)
    picture("space-time", world, "part 3 of lesson 06f", name=name, most_seconds=longest)

# %% [markdown]
# ## 4 The code
#
# The rows of every batch are known in advance. So of N loaders, loader i mod N makes batch i, and the
# batches are used in their order: the speed of a loader changes nothing in the results
# ([workers.py](../minidist/data/workers.py)). Where pictures are cropped at random, the draws depend on
# the seed and on the sample's place in the job, and not on the loader.
#
# A loader must not run ahead without end, because its batches take memory. With a depth of P at most P
# batches are being made or wait: batch i is begun when step i - P has taken its batch. A few lines
# compute when each step of the rank ends:

# %%
MAKE, STEP = 50, 30  # ms


def ends_of_steps(loaders, steps, depth=8):
    """When each step ends; with 0 loaders the rank makes a batch before each step."""
    free, ends, now = [0] * max(1, loaders), [], 0  # free: when a loader can begin its next batch
    for i in range(steps):
        number = i % len(free)
        room = ends[i - depth] - STEP if i >= depth else 0  # when the step i - depth began
        free[number] = MAKE + (max(free[number], room) if loaders else now)
        now = max(now, free[number]) + STEP
        ends.append(now)
    return ends


print("steps end at", *ends_of_steps(0, 5), "ms without a loader")

# %% [markdown]
# ## 5 Check
#
# This is the time of a step once the first batches are made. With N loaders it is the larger of two
# times: that of the training, and 1/N of the time to make a batch.

# %%
periods = {}
for loaders in (0, 1, 2, 3):
    ends = ends_of_steps(loaders, 100)
    periods[loaders] = (ends[-1] - ends[49]) / 50
    waits = 100 * (1 - STEP / periods[loaders])
    print(
        f"loaders: {loaders}, a step: {periods[loaders]:.0f} ms, {waits:.1f} % of it not training"
    )
waits_guess.judge(100 * (1 - STEP / periods[1]))
loaders_guess.judge(min(loaders for loaders, ms in periods.items() if ms == STEP))
assert all(periods[n] == max(STEP, MAKE / n) for n in (1, 2, 3))
for depth in (1, 2):
    ends = ends_of_steps(2, 100, depth)
    print(f"2 loaders with a depth of {depth}, a step: {(ends[-1] - ends[49]) / 50:.0f} ms")

# %% [markdown]
# With a depth of 1 the second loader has nothing to do: a depth of at least the number of loaders is
# needed. A larger one lets the training go on when a batch takes longer than the others.
#
# In data parallelism (lesson 06) a late batch costs more, because the gradients are summed in every
# step: all ranks wait for the latest batch of all.
#
# `sampler` makes batches of 8 texts of 64 bytes. A `PrefetchingSampler` does the same in a thread that runs
# ahead. (Only one thread of Python at a time runs Python code, so a loader that computes in Python itself should be a
# process.) Here are the batches of six steps, with and without it, compared and not timed:

# %%
sampler = open_sampler("pydoc", False, 8, 64, 0)
requests = [(step, 0, 8) for step in range(6)]  # the step, the first row and the end of the rows
off = 0
with PrefetchingSampler(open_sampler("pydoc", False, 8, 64, 0), requests) as ahead:
    for request in requests:
        for with_loader, without in zip(
            ahead.batch(*request), sampler.batch(*request), strict=True
        ):
            off = max(off, np.abs(with_loader - without).max())
print(f"batches of the loader: {ahead.served}; max |with - without| = {off:g}")
assert off == 0

# %% [markdown]
# ## 6 Break it
#
# The rank takes the batch that comes first, from whichever loader it is. No step waits for a slow
# loader any more (`recv` from `ANY` takes the message that arrives first), which looks like an improvement. A
# step moves one weight w a tenth of the way to the number in the batch. Two loaders are equally fast; then
# the first one is three times as slow, as on a machine that does something else for a while:


# %%
def first_come(comm, seconds, batches=6):
    """Rank r > 0 makes a batch in `seconds[r]` s; rank 0 returns the order of its training."""
    if comm.rank > 0:
        sends = []
        for i in range(comm.rank - 1, batches, comm.size - 1):
            comm.compute(seconds=seconds[comm.rank], name="make a batch")
            sends.append(comm.isend(np.array([float(i)]), 0))
        comm.waitall(sends)
        return None
    order, batch = [], np.empty(1)
    for _ in range(batches):
        comm.recv(batch, ANY)
        comm.compute(seconds=STEP / 1000, name="forward and backward")
        order.append(int(batch[0]))
    return order


orders = {}
for name, seconds in (("equally fast", [0, 0.05, 0.05]), ("one is late", [0, 0.15, 0.05])):
    orders[name] = SimWorld(3).run(first_come, seconds)[0]
    w = 0.0
    for number in orders[name]:
        w += 0.1 * (number - w)
    print(f"loaders {name}: trained on the batches {orders[name]}, w ends at {w:.3f}")
assert orders["equally fast"] == [0, 1, 2, 3, 4, 5] != orders["one is late"]

# %% [markdown]
# Each batch is used once, so a loss curve shows nothing. But the weight depends on how fast the
# machines were: no run can be repeated, and a bug that appears once cannot be found again.

# %% [markdown]
# ## 7 Exercise: loaders in order
#
# Rank 0 trains, and the other ranks load. `make(i)` returns batch i, an array of 2 numbers. It is
# slow, so loader i mod N makes batch i; rank 0 makes batches itself only when it is the only rank.
# Return, on rank 0, all batches in their order, of shape (batches, 2), and on a loader an empty array
# of shape (0, 2). Which loader is fastest must change nothing. Judged: the batches, and messages, bytes
# and time: a batch is sent once, and all loaders make batches at the same time.


# %%
def in_order(comm, batches, make):
    if comm.rank > 0:
        return np.zeros((0, 2))
    return np.array([make(i) for i in range(batches)]).reshape(batches, 2)


check("06f.in_order", in_order)

# %%
reveal("06f.in_order")
check("06f.in_order", solution("06f.in_order"))

# %% [markdown]
# ## 8 Takeaway
#
# - A step takes **max(train, make / N)** with N loaders and a depth of at least N, and train + make
#   without one. In data parallelism every rank waits for the latest batch of all.
# - Loader **i mod N** makes batch i, and the batches are taken in their order. So all loaders work at
#   the same time, and the batches have the same bits as without them.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/7_more/efficient_loading.py --workers 2
#     mpiexec -n 2 python mpi_examples/7_more/data_stages.py
#     mpiexec -n 2 minidist train --dp 2 --loader-workers 2 --prefetch-batches 8 --steps 20
#
# `data_stages.py` crops and mirrors pictures at random. What never changes need not be made in every epoch
# but can be stored:
#
#     mpiexec -n 2 python mpi_examples/7_more/caching.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `--loader-workers N --prefetch-batches P` | PyTorch `DataLoader(num_workers=N, prefetch_factor=P / N, multiprocessing_context="spawn", in_order=True)` |
# | `--data 'cifar:DIR \| crop:4 \| flip'` | torchvision `RandomCrop(32, padding=4)`, `RandomHorizontalFlip()`; `tf.data` `map` |
#
# Next: [09 Mixed precision](09_mixed_precision.ipynb). All lessons are in the [index](README.md).
