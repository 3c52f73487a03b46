# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 19b Two stages per rank
#
# *35 minutes. Before it: 19.*
#
# ## 1 The case
#
# Four ranks train a model of eight layers, eight micro-batches per step. In 1F1B rank 0 has layers
# 0 and 1 as one stage, rank 1 has layers 2 and 3, and so on. Instead each layer may be a stage of
# its own, so that a rank has two short stages:
#
# - in a **loop**, rank r has layers r and r + 4: the second half of the model begins on rank 0
#   again;
# - in a **V**, rank r has layers r and 7 - r: the second half goes back up, and rank 0 has the last
#   layer and the loss.
#
# A short stage fills the pipeline in half the time. But activations cross more boundaries between
# ranks. With 1F1B they cross 3. How many times as many do they cross in the loop?
#
# And where a micro-batch lives for a shorter time, fewer of them are alive at once, and activations
# need less memory. 1F1B keeps up to p micro-batches alive on p ranks. There is a V-shaped schedule,
# V-Half, in which they live half as long. How many micro-batches does it keep alive on 32 ranks?

# %% [markdown]
# ## 2 Predict
#
# Count the boundaries between two stages that are on different ranks.

# %%
from minidist.course.lesson import check, expect, predict, reveal, solution

traffic_guess = predict("activations sent in the loop, over 1F1B's", example=2)
alive_guess = predict("micro-batches alive with V-Half on 32 ranks", example=32)

# %%
import numpy as np

from minidist import (
    MLP,
    LinkModel,
    Pipeline,
    SimWorld,
    Tensor,
    UsageError,
    get_schedule,
    split_model,
)
from minidist.pipeline.times import uniform
from minidist.pipeline.timing import time_plan
from minidist.report import show
from minidist.report.gantt import gantt

# %% [markdown]
# ## 3 The idea and its picture
#
# **A schedule is a block that repeats: how far apart the passes of one micro-batch start decides
# how long its activations live, and so the memory.** With two stages per rank there is a choice.
# What it saves: idle time or memory. What it costs: messages at more boundaries.
#
# F, I and W of a half stage take 0.5 each. Above the loop (Megatron-LM's *interleaving*), below the
# V with no idle time (*ZB-V*). Light and dark rows of a rank are its two stages:

# %%
p, m = 4, 8
HALF = uniform(2 * p, 0.5, 0.5, 0.5)
shown = {name: get_schedule(name).plan(p, m) for name in ("interleaved", "zb-v")}
show(
    gantt(
        [time_plan(plan, HALF, spans=True) for plan in shown.values()],
        command="minidist schedule interleaved zb-v --stages 4 --microbatches 8 --format svg -o "
        "chunks.svg",
    )
)

# %% [markdown]
# ## 4 The code
#
# A toy: one forward pass through stages that are placed on ranks, with every message. Where two
# stages that follow each other are on one rank, nothing is sent:


# %%
def forward(comm, rank_of_stage):
    """Pass one number through all stages; each stage adds 1 in half a second."""
    message = np.zeros(1)
    for stage, rank in enumerate(rank_of_stage):
        if comm.rank != rank:
            continue
        if stage > 0 and rank_of_stage[stage - 1] != rank:
            comm.recv(message, rank_of_stage[stage - 1])
        message += 1
        comm.compute(seconds=0.5, name=f"stage {stage}")
        if stage + 1 < len(rank_of_stage) and rank_of_stage[stage + 1] != rank:
            comm.send(message, rank_of_stage[stage + 1])
    return message[0]


for name, places in (("loop", [0, 1, 2, 3, 0, 1, 2, 3]), ("V", [0, 1, 2, 3, 3, 2, 1, 0])):
    world = SimWorld(4, links=LinkModel(0.0, 0.0))
    result = world.run(forward, places)[places[-1]]
    sent = sum(len(trace.sent()) for trace in world.traces)
    print(f"{name:5} {sent} messages; {result:.0f} stages, the last one on rank {places[-1]}")

# %% [markdown]
# ## 5 Check
#
# The whole step in the library. All schedules give the same gradients, bit for bit:

# %%
WIDTH, ROWS = 16, 4
batches = [np.random.default_rng(i).normal(size=(ROWS, WIDTH)) for i in range(m)]


def loss(y, target):
    return (y * Tensor(target)).sum()


def step(comm, plan):
    stages, _ = split_model(
        MLP([WIDTH] * 9, dtype=np.float64), plan.stages, plan.stages_of(comm.rank)
    )
    Pipeline(comm, plan, stages, loss).step(batches, batches)
    gradients = {q.name: q.grad.copy() for s in stages for q in s.flat.parameters}
    return gradients, comm.trace.bytes_by_purpose().get("pipeline_activation", 0)


sent, gradients = {}, {}
for name in ("1f1b", "interleaved", "zb-v", "v-half", "v-min"):
    results = SimWorld(p).run(step, get_schedule(name).plan(p, m))
    gradients[name] = {key: array for own, _ in results for key, array in own.items()}
    sent[name] = sum(nbytes for _, nbytes in results)
    off = max(
        np.abs(gradients[name][key] - first).max() for key, first in gradients["1f1b"].items()
    )
    print(f"{name:12} {sent[name]:7,} B of activations; max |g - g of 1f1b| = {off:g}")
    assert off == 0
traffic_guess.judge(sent["interleaved"] / sent["1f1b"], within=0.02)

# %% [markdown]
# In the loop there are 8 stages with 7 boundaries. In the V the middle boundary is inside rank 3.
#
# Now the memory. In the picture of ZB-V a micro-batch's four passes, F down, F up, I up and I down,
# come every 6 units. That is its *building block*. How far a pass starts from one rank to the next
# is its offset. On every rank the lifetimes of the two stages add up to about (p-1) times the sum
# of the four offsets, and a rank begins two stages every 6 units:
#
# | schedule | offsets of F down, F up, I up, I down | half stages alive | in micro-batches |
# |---|---|---|---|
# | `v-min` | 1, 1, 1, 1 | about 4p/6 | (p+4)//3 |
# | `v-half` | 2, 1, 2, 1 | about 6p/6 | (p+2)//2 |
# | `zb-v` | 4, 2, 4, 2 | about 12p/6 | p |
#
# Repeat the block, then run every pass as early as it can, with W where a rank would wait. A pass
# whose input is there may run before the one that it follows. Each micro-batch that V-Half or V-Min
# keeps less than p costs one repetition, 6 passes of a half stage, once per step:

# %%
three = {name: get_schedule(name).plan(p, m) for name in ("zb-v", "v-half", "v-min")}
show(
    gantt(
        [time_plan(plan, HALF, spans=True) for plan in three.values()],
        command="minidist schedule zb-v v-half v-min --stages 4 --microbatches 8 --format svg -o "
        "v.svg",
    )
)
print("  p   1f1b idle, alive   zb-v         v-half       v-min")
for ranks in (4, 8, 16, 32):
    row = [time_plan(get_schedule("1f1b").plan(ranks, 2 * ranks))]
    row += [
        time_plan(get_schedule(name).plan(ranks, 2 * ranks), uniform(2 * ranks, 0.5, 0.5, 0.5))
        for name in three
    ]
    alive = [max(row[0].peak), *(max(timing.peak) / 2 for timing in row[1:])]
    print(
        f"{ranks:3}  ", *(f"{max(t.idle):8.1f}, {a:2.0f}" for t, a in zip(row, alive, strict=True))
    )
alive_guess.judge(alive[2])
assert alive[2:] == [(32 + 2) // 2, (32 + 4) // 3]

# %% [markdown]
# On many ranks V-Half waits for half as long as 1F1B and V-Min for two thirds, on few for less, with
# a half and a third of its memory. The offsets assume that F, I and W take the same time. Where they do not, V-Min's passes
# fit less well:

# %%
for times in ((0.5, 0.5, 0.5), (0.5, 1.0, 0.5)):
    idle = {name: max(time_plan(plan, uniform(2 * p, *times)).idle) for name, plan in three.items()}
    print(f"F, I, W take {times}: idle {idle}")

# %% [markdown]
# ## 6 Break it
#
# In the loop a rank takes a group of at least p micro-batches through its first stage before it
# turns to its second one: just then the first of them comes round. The groups must be equal, and 9
# micro-batches do not make two equal groups:

# %%
with expect(UsageError):
    get_schedule("interleaved").plan(p, 9)

# %% [markdown]
# The V has no such rule, but with few micro-batches its idle time is not zero: W has nothing to
# fill before there are enough of them.

# %%
for count in (4, 5, 6, 7):
    timing = time_plan(get_schedule("zb-v").plan(p, count), HALF)
    print(f"zb-v, {count} micro-batches: idle {max(timing.idle):g}")

# %% [markdown]
# ## 7 Exercise: the building block of a V
#
# On a rank a micro-batch has six passes, F, I and W of two stages, so a block repeats every 6 units. Two
# passes that start 6 units apart therefore fall on each other, those of one micro-batch on those of the
# next one. W takes the units that are free. Here are two blocks of one rank, by the unit of the six:


# %%
def six_units(starts):
    """What a rank does in each of the 6 units, when the four passes start at `starts`."""
    passes = list(zip(("F down", "F up", "I up", "I down"), starts, strict=True))
    return [" + ".join(name for name, at in passes if at % 6 == unit) or "W" for unit in range(6)]


for starts in ((1, 3, 5, 7), (1, 3, 5, 8)):
    print(f"starts {starts}:", *six_units(starts), sep=" | ")

# %% [markdown]
# In the first one a rank would do two things at once; one unit of waiting at a turn mends it.
#
# Given p and the four offsets, return for each rank when F down, F up, I up and I down of the first
# micro-batch start (each takes 1). Each of the four moves from rank to rank by its offset, they
# follow one another, and when the block repeats every 6 units no rank does two things at once. Of
# all such blocks return one in which the two stages of rank 0 live as short as possible, from F to
# I.


# %%
def my_block(p, offsets):
    f_down, f_up, i_up, i_down = offsets
    rows = []
    for r in range(p):
        turn, loss, back = (
            f_down * (p - 1) + 1,
            (f_down + f_up) * (p - 1) + 2,
            (f_down + f_up + i_up) * (p - 1) + 3,
        )
        rows.append(
            (f_down * r, turn + f_up * (p - 1 - r), loss + i_up * r, back + i_down * (p - 1 - r))
        )
    return rows


check("19b.building_block", my_block)

# %%
reveal("19b.building_block")
check("19b.building_block", solution("19b.building_block"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Interleaving**: v stages per rank, 1F1B's bubble / v, and (v p - 1)/(p - 1) times its
#   activations; micro-batches go in equal groups of at least p.
# - **A schedule is a block that repeats, and lifetimes are memory**: ZB-V has no idle time and
#   1F1B's memory, V-Half keeps (p+2)//2 micro-batches alive and V-Min (p+4)//3, where 1F1B keeps p.
#
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/6_pipeline/schedules.py --schedule interleaved
#     mpiexec -n 2 minidist compare --pp 2 --layers 4 --schedule v-half --microbatches 4 --steps 2
#
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `interleaved` | Megatron-LM "virtual pipeline"; PyTorch `ScheduleInterleaved1F1B` |
# | `zb-v` | ZBV; PyTorch `ScheduleZBVZeroBubble` |
# | `v-min`, `v-half` | V-Min, V-Half, and ZB-V is V-ZB in "Pipeline Parallelism with Controllable Memory" |
# | `dualpipe`, `dualpipev` | DeepSeek's DualPipe: two streams that meet; `minidist schedule dualpipe --stages 4 --microbatches 8` |
#
# Next: [20 The 3-D mesh](20_the_3d_mesh.ipynb). All of them are in the [index](README.md).
