# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 20c Stages of equal time
#
# *30 minutes. Before it: 17.*
#
# ## 1 The case
#
# Layers are not equal: an embedding is fast, and a head over a large vocabulary is slow. Here are eight
# layers that take 1, 2, 3, 9, 2, 5, 2 and 8 ms, forward and backward together, a third of it forward.
# They are cut into four stages of consecutive layers, for 1F1B with twelve micro-batches.
#
# With two layers each the stages take 3, 12, 7 and 10 ms, and all wait for the second one. How long does
# the slowest stage take when the layers are cut as well as can be? And how long does a step take then?

# %% [markdown]
# ## 2 Predict
#
# No stage can take less than its longest layer. In the middle of a step the slowest stage never waits;
# at both ends it waits for one micro-batch on its way through the other stages.

# %%
from minidist.course.lesson import check, expect, predict, reveal, solution

slowest_guess = predict("slowest stage of the best cut", example=10, unit="ms")
step_guess = predict("time of a step with the best cut", example=300, unit="ms")

# %%
import numpy as np

from minidist import MLP, Pipeline, SimWorld, Tensor, UsageError, get_schedule, split_model
from minidist.pipeline.partition import by_slowest
from minidist.pipeline.times import Times
from minidist.pipeline.timing import time_plan
from minidist.report import show
from minidist.report.gantt import gantt

# %% [markdown]
# ## 3 The idea and its picture
#
# **Cut a model so that its slowest stage is as fast as can be.** What it saves: waiting, in every
# micro-batch. What it costs: measuring the layers, and other cuts than the obvious ones.
#
# A cut as a list of sizes, the times of its stages, and the plan of a step with them:

# %%
COSTS = [1, 2, 3, 9, 2, 5, 2, 8]


def stages_of(costs, sizes):
    """Return the time of each stage."""
    return [sum(part) for part in np.split(np.array(costs), np.cumsum(sizes)[:-1])]


def timed(sizes):
    third = [total / 3 for total in stages_of(COSTS, sizes)]  # F, I and W
    times = Times(third, third, third, [0] * (len(sizes) - 1))
    return time_plan(get_schedule("1f1b").plan(len(sizes), 12), times, spans=True)


# %% [markdown]
# Above two layers on each stage, below three, one, three and one. The grey is waiting. (The bubble in the
# titles is the waiting of the busiest rank, which above computes most of the time. Compare the ends.)

# %%
show(gantt([timed([2, 2, 2, 2]), timed([3, 1, 3, 1])], command="part 3 of lesson 20c"))

# %% [markdown]
# ## 4 The code
#
# The obvious way fills one stage after the other, as long as it stays below the average, and leaves the
# rest to the last one:


# %%
def fill(costs, stages):
    """Return the sizes of stages that are filled up to the average, one after the other."""
    average, sizes, taken = sum(costs) / stages, [], 0
    for stage in range(stages - 1):
        size, total = 1, costs[taken]
        while total + costs[taken + size] <= average and taken + size < len(costs) - stages + stage:
            total += costs[taken + size]
            size += 1
        sizes.append(size)
        taken += size
    return [*sizes, len(costs) - taken]


# %% [markdown]
# In the case, and with five layers on two stages: a stage stops before it would be above the average,
# and the last one gets all that is left.

# %%
for costs, stages in ((COSTS, 4), ([1, 15, 18, 11, 11], 2)):
    best = [stage.last - stage.first + 1 for stage in by_slowest(costs, stages)]
    for name, sizes in (("filled", fill(costs, stages)), ("best", best)):
        slowest = max(stages_of(costs, sizes))
        print(f"{costs} {name:6}: sizes {sizes}, the slowest stage takes {slowest} ms")

# %% [markdown]
# The best one is in [partition.py](../minidist/pipeline/partition.py). To find it is your exercise. There
# are 35 cuts of eight layers into four stages, and far too many of a hundred layers to try all.

# %% [markdown]
# ## 5 Check
#
# The best cut, and the time of a step with both cuts of the picture:

# %%
best = [stage.last - stage.first + 1 for stage in by_slowest(COSTS, 4)]
for sizes in ([2, 2, 2, 2], best):
    times = [int(time) for time in stages_of(COSTS, sizes)]
    print(f"{sizes} layers take {times!s:14} ms: a step takes {timed(sizes).makespan:.0f} ms")
slowest_guess.judge(max(stages_of(COSTS, best)))
step_guess.judge(timed(best).makespan, within=0.05)

# %% [markdown]
# Where a model is cut changes no bit of its gradients:


# %%
def gradients(comm, sizes):
    stages, _ = split_model(MLP([8] * 9, dtype=np.float64), comm.size, [comm.rank], sizes)
    plan = get_schedule("1f1b").plan(comm.size, 3)
    parts = [np.random.default_rng(i).normal(size=(2, 8)) for i in range(3)]
    Pipeline(comm, plan, stages, lambda y, x: (y * Tensor(x)).sum()).step(parts, parts)
    return {q.name: q.grad.copy() for stage in stages for q in stage.flat.parameters}


equal, cut, whole = (
    {
        name: array
        for own in SimWorld(len(sizes)).run(gradients, sizes)
        for name, array in own.items()
    }
    for sizes in ([2, 2, 2, 2], best, [8])
)
off = max(
    np.abs(array - whole[name]).max() for each in (equal, cut) for name, array in each.items()
)
print(f"max |g_parallel - g_single| = {off:g}")
assert off == 0

# %% [markdown]
# ## 6 Break it
#
# A cut belongs to the times that were measured. Make the longest layer three times as fast, as by a
# better kernel, and keep the cut: the slowest stage is as slow as before, because it is another one.

# %%
faster = [1, 2, 3, 3, 2, 5, 2, 8]
again = [stage.last - stage.first + 1 for stage in by_slowest(faster, 4)]
for name, sizes in (("the old cut", best), ("cut again", again)):
    print(f"{name:11} {sizes}: the slowest stage takes {max(stages_of(faster, sizes))} ms")
assert max(stages_of(faster, best)) == max(stages_of(COSTS, best)) > max(stages_of(faster, again))

# %% [markdown]
# And there must be a layer for each stage:

# %%
with expect(UsageError):
    by_slowest(COSTS, 9)

# %% [markdown]
# ## 7 Exercise: the best cut
#
# `cut(times, stages)`: how many consecutive layers each stage gets. Judged is that the stage that takes
# longest is as short as can be. Every stage has at least one layer; there are at least as many layers
# as stages.


# %%
def cut(times, stages):
    each = len(times) // stages
    return [each] * (stages - 1) + [len(times) - each * (stages - 1)]


check("20c.min_max_split", cut)

# %%
reveal("20c.min_max_split")
check("20c.min_max_split", solution("20c.min_max_split"))

# %% [markdown]
# Ranks may differ, too: seconds alone do not say whether a layer is expensive or its rank is slow.
# `stages_by_time(comm, sizes, seconds, flops)`: rank r has `sizes[r]` layers. `seconds` and `flops` are
# the measured times and the work of *your* layers, two arrays. A rank's pace is its seconds divided by
# its FLOPs, and a layer takes its FLOPs times the pace of the rank that has it.
#
# Return the number of layers of each stage, a list, the same on every rank; stage r is on rank r. What
# is judged: the time of the slowest stage, which must be the least of all cuts, and two numbers sent
# for each layer. `all_gather(comm, array, counts=[...])` gathers arrays of unequal lengths, and
# `by_slowest(costs, stages, paces)` cuts layers whose costs are multiplied by the pace of their stage.
#
# An example: rank 0 took 2 s and 4 s for layers of 2 and 4 FLOPs, so its pace is 1 s per FLOP. Rank 1
# took 8 s for a layer of 2 FLOPs, so its pace is 4. With [2, 1] the slowest stage takes 8 s, and with
# [1, 2] it takes 24 s.


# %%
def stages_by_time(comm, sizes, seconds, flops):
    return sizes


check("20c.stages_by_time", stages_by_time)

# %%
reveal("20c.stages_by_time")
check("20c.stages_by_time", solution("20c.stages_by_time"))

# %% [markdown]
# ## 8 Takeaway
#
# - **All stages wait for the slowest one, in every micro-batch**: measure the layers, and cut so that the
#   slowest stage is as fast as can be.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/6_pipeline/profile_and_partition.py
#     mpiexec -n 2 python mpi_examples/6_pipeline/repartition.py
#     minidist profile --layers 6 --width 16 -o profile.json
#     minidist partition profile.json --machines 2 --method gpipe --json > stages.json
#     mpiexec -n 2 minidist train --layers 6 --width 16 --pp 2 --schedule gpipe --recompute full --partition stages.json

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `minidist partition`, min-max cuts | GPipe's and PipeDream's partitioners; torchgpipe `balance_by_time` |
# | `minidist profile` | PipeDream's profiler; DeepSpeed's flops profiler |
#
# Next: [22 Long context](22_long_context.ipynb). All of them are in the [index](README.md).
