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
# at both ends together it waits at most as long as one micro-batch takes in the other stages.

# %%
from minidist.course.lesson import check, predict, reveal, solution

slowest_guess = predict("slowest stage of the best cut", example=10, unit="ms")
step_guess = predict("time of a step with the best cut", example=300, unit="ms")

# %%
import numpy as np

from minidist import MLP, Pipeline, SimWorld, Tensor, get_schedule, split_model
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
# Above two layers on each stage, below three, one, three and one. The grey is waiting. The strips count the
# micro-batches whose activations a rank keeps: four on the first stage and one on the last. A cut by time
# does not look at this memory.


# %%
def title_of(sizes):
    timing = timed(sizes)
    waiting = 1 - sum(timing.busy) / sum(timing.windows)
    return (
        f"{sizes}: a step takes {timing.makespan:.0f} ms; "
        f"ranks wait {waiting:.0%} of the time from their first action to their last"
    )


cuts = [2, 2, 2, 2], [3, 1, 3, 1]
show(gantt([timed(cut) for cut in cuts], "part 3 of lesson 20c", [title_of(cut) for cut in cuts]))

# %% [markdown]
# ## 4 The code
#
# The average of a stage is 8 ms. The obvious way fills one stage after the other, as long as it stays below
# the average, and leaves the rest to the last one: 1 + 2 + 3 ms, because 9 more would be too many; then 9 ms
# alone; then 2 + 5 ms; and 2 + 8 ms are left. The best cut is found by `by_slowest`:

# %%
best = [stage.last - stage.first + 1 for stage in by_slowest(COSTS, 4)]
for name, sizes in (("filled", [3, 1, 2, 2]), ("best", best)):
    print(f"{name:6} {sizes}: the slowest stage takes {max(stages_of(COSTS, sizes))} ms")

# %% [markdown]
# It is in [partition.py](../minidist/pipeline/partition.py). To write it yourself is your exercise.

# %% [markdown]
# ## 5 Check
#
# The best cut, and the time of a step with both cuts of the picture:

# %%
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
# ## 7 Exercise: the best cut
#
# `cut(times, stages)`: how many consecutive layers each stage gets. Every stage has at least one layer;
# there are at least as many layers as stages. Judged: the time of the slowest stage, which must be the least
# of all cuts.


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
# Return the number of layers of each stage, a list, the same on every rank; stage r is on rank r.
# `all_gather(comm, array, counts=[...])` gathers arrays of unequal lengths, and
# `by_slowest(costs, stages, paces)` cuts layers whose costs are multiplied by the pace of their stage.
#
# An example: rank 0 took 2 s and 4 s for layers of 2 and 4 FLOPs, so its pace is 1 s per FLOP. Rank 1
# took 8 s for a layer of 2 FLOPs, so its pace is 4. With [2, 1] the slowest stage takes 8 s, and with
# [1, 2] it takes 24 s.
#
# Judged: the time of the slowest stage, which must be the least of all cuts, and the bytes sent: two
# numbers for each layer are enough.


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
