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
# *25 minutes. Before it: 17.*
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
from itertools import combinations, pairwise

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
# **Cut a model so that its slowest stage is as fast as can be.** It saves waiting, in every
# micro-batch. It costs measuring the layers, and other cuts than the obvious ones.
#
# A cut as a list of sizes, the times of its stages, and the plan of a step with them:

# %%
COSTS = [1, 2, 3, 9, 2, 5, 2, 8]


def stages_of(costs, sizes):
    """Return the time of each stage."""
    return [sum(part) for part in np.split(np.array(costs), np.cumsum(sizes)[:-1])]


def timed(sizes, costs=COSTS):
    # F, and backward as two equal parts, which 1F1B runs together.
    third = [total / 3 for total in stages_of(costs, sizes)]
    times = Times(third, third, third, [0] * (len(sizes) - 1))
    return time_plan(get_schedule("1f1b").plan(len(sizes), 12), times, spans=True)


# %% [markdown]
# Above two layers on each stage, below three, one, three and one. In a row of the plan light grey is waiting:
# below there is less of it. The strips in a darker grey count the micro-batches whose activations a rank keeps, four on
# the first stage and one on the last. They are the same for both cuts, but below, the first stage has three
# layers: it keeps the activations of 4 x 3 layers, and above those of 4 x 2. A cut by time does not look at
# memory.

# %%
cuts = [2, 2, 2, 2], [3, 1, 3, 1]
plans = [timed(sizes) for sizes in cuts]
titles = [
    f"stages of {sizes} layers: a step takes {plan.makespan:.0f} ms"
    for sizes, plan in zip(cuts, plans, strict=True)
]
figure = gantt(plans, "part 3 of lesson 20c", titles)
figure.axes[-1].set_xlabel("time [ms]")
show(figure)

# %% [markdown]
# ## 4 The code
#
# Two stages first: the second one may begin at each layer but the first. Try them all, and keep the place at
# which the slower of both stages is the fastest:


# %%
def best_of_two(costs):
    """Return the time of the slowest stage, and how many layers the first one has."""
    return min((max(sum(costs[:i]), sum(costs[i:])), i) for i in range(1, len(costs)))


slowest, first = best_of_two(COSTS)
print(f"two stages: {first} layers and {len(COSTS) - first}, the slowest takes {slowest} ms")

# %% [markdown]
# More stages are the same question again: try each place where the last stage could begin, and cut what is
# before it in the best way into one stage less. To write this is your exercise. The library has it as
# `by_slowest`, in [partition.py](../minidist/pipeline/partition.py):

# %%
best = [stage.last - stage.first + 1 for stage in by_slowest(COSTS, 4)]
print(f"four stages: {best} layers, the slowest takes {max(stages_of(COSTS, best))} ms")

# %% [markdown]
# The average of a stage is 8 ms, and no cut of these layers reaches it.

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
# The slowest stage takes 9 ms for each of twelve micro-batches, 108 ms. In the lower picture rank 1 waits 22 ms
# together: 2 ms before its first forward, 11 ms for its first gradient, 3 and 2 ms between its last backwards, and
# 4 ms at the end. That is less than one micro-batch takes in the other stages, 6 + 9 + 8 ms.

# %% [markdown]
# And with less memory? Stage s keeps 4 - s micro-batches, so a card that has room for 6, 8 or 12 activations of a layer
# allows some cuts only. The best of those:

# %%
every_cut = [
    [b - a for a, b in pairwise((0, *places, len(COSTS)))]
    for places in combinations(range(1, len(COSTS)), 3)
]
for room in (6, 8, 12):
    allowed = [
        sizes for sizes in every_cut if max((4 - s) * n for s, n in enumerate(sizes)) <= room
    ]
    sizes = min(allowed, key=lambda sizes: (max(stages_of(COSTS, sizes)), timed(sizes).makespan))
    print(f"room for {room:2}: {sizes}, a step takes {timed(sizes).makespan:.0f} ms")

# %% [markdown]
# Where a model is cut changes no bit of its gradients. This is an MLP of eight layers, of which each rank has
# one stage:


# %%
def gradients(comm, sizes):
    stages, _ = split_model(MLP([8] * 9, dtype=np.float64), comm.size, [comm.rank], sizes)
    plan = get_schedule("1f1b").plan(comm.size, 3)
    parts = [np.random.default_rng(i).normal(size=(2, 8)) for i in range(3)]
    Pipeline(comm, plan, stages, lambda y, x: (y * Tensor(x)).sum()).step(parts, parts)
    return {q.name: q.grad.copy() for stage in stages for q in stage.flat.parameters}


def of_all_stages(sizes):
    ranks = SimWorld(len(sizes)).run(gradients, sizes)
    return {name: array for own in ranks for name, array in own.items()}


# %% [markdown]
# Both cuts against the whole model on one rank:

# %%
whole = of_all_stages([8])
for sizes in ([2, 2, 2, 2], best):
    parts = of_all_stages(sizes)
    off = max(np.abs(parts[name] - gradient).max() for name, gradient in whole.items())
    print(f"{sizes}: max |g_parallel - g_single| = {off:g}")
    assert off == 0

# %% [markdown]
# ## 6 Break it
#
# Fill stage after stage, and go on to the next one when the average of a stage would be exceeded. That is fast,
# and the last stage gets what is left. How much that costs depends on the layers: six of 6 ms each have an average
# of 9 ms on four stages, so only one of them fits into a stage:


# %%
def filled(costs, stages):
    sizes = [0]
    total = 0
    for cost in costs:
        if sizes[-1] and total + cost > sum(costs) / stages and len(sizes) < stages:
            sizes.append(0)
            total = 0
        sizes[-1] += 1
        total += cost
    return sizes


for costs in (COSTS, [6] * 6):
    print(f"layers of {costs} ms on four stages:")
    optimal = [stage.last - stage.first + 1 for stage in by_slowest(costs, 4)]
    for name, sizes in (("filled", filled(costs, 4)), ("best", optimal)):
        slowest, step = max(stages_of(costs, sizes)), timed(sizes, costs).makespan
        print(f"{name:6} {sizes}: the slowest stage takes {slowest:2} ms, a step {step:.0f} ms")

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
# ## 8 Takeaway
#
# - **All stages wait for the slowest one, in every micro-batch**: measure the layers, and cut so that the
#   slowest stage is as fast as can be.
# - With m micro-batches a step takes **m x slowest**, and what the slowest stage waits at both ends.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/6_pipeline/profile_and_partition.py
#     mpiexec -n 2 python mpi_examples/6_pipeline/repartition.py
#     minidist profile --layers 6 --width 16 --data random:8000 -o profile.json
#     minidist partition profile.json --machines 2 --method time --json > stages.json
#     mpiexec -n 2 minidist train --layers 6 --width 16 --data random:8000 --pp 2 --partition stages.json --steps 2
#
# The first example measures layers and cuts, the second one cuts again while it trains. `profile` times each
# layer, here of a model whose head over 8,000 words is slow; `partition` finds the cut; `train` uses it.

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `minidist partition --method time`, min-max cuts | DeepSpeed `partition_balanced`; PipeDream's optimizer, which also replicates stages |
# | `--method gpipe`, stages whose times differ least | GPipe's partitioner; torchgpipe `balance_by_time` |
# | `minidist profile` | PipeDream's profiler; DeepSpeed's flops profiler |
#
# Stages and layers cut the model. A long text needs another cut, along its tokens.
#
# Next: [22 Long context](22_long_context.ipynb). All lessons are in the [index](README.md).
