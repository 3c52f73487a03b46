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
# *25 minutes. Before it: 19.*
#
# ## 1 The case
#
# 1F1B on 32 ranks keeps 32 micro-batches alive on rank 0. Cut each stage in half, and put the halves on the
# ranks in a **V**: the first 32 from rank 0 to rank 31, the others from rank 31 back to rank 0, which then has the
# first layers, and the last ones with the loss. F, I and W of a half stage take 1 unit each, so a rank computes 6
# units for a micro-batch, and every 6 units the next one begins.
#
# In the schedule V-Half a micro-batch goes through all ranks four times: **F1**, forward through the first halves,
# from rank 0 to rank 31; **F2**, forward through the second halves, from rank 31 back to rank 0, where the loss is;
# then the input gradients, **I2** from rank 0 to rank 31, and **I1** back to rank 0. From one rank to the next F1 and I2
# take 2 units, F2 and I1 take 1. How many micro-batches does V-Half keep alive on rank 0? (Two half stages count as
# one micro-batch.)

# %% [markdown]
# ## 2 Predict
#
# How long are the activations of a micro-batch alive in rank 0's first half stage? (In its other one they
# live for a few units, around the loss.) How many half stages begin in that time?

# %%
from minidist.course.lesson import check, predict, reveal, solution

half_guess = predict("micro-batches alive with V-Half on 32 ranks", example=32)

# %%
import numpy as np

from minidist import MLP, LinkModel, Pipeline, SimWorld, Tensor, get_schedule, split_model
from minidist.core.pipeline.plan import Action
from minidist.pipeline.times import GivenTimes, uniform
from minidist.pipeline.timing import time_plan
from minidist.report import show
from minidist.report.frame import new_panel
from minidist.report.gantt import gantt

# %% [markdown]
# ## 3 The idea and its picture
#
# **A schedule is a block that repeats, and how long an activation lives in the block decides the
# memory.** The V saves memory, and idle time as well where F, I and W take equally long. It costs messages
# at more boundaries.
#
# Four ranks, from above: 1F1B; a loop, in which the second halves begin at rank 0 again (Megatron-LM calls it
# *interleaving*); and V-Half. A B is I and W together. Light and dark bars of a rank are its two stages, and the
# strip under a schedule counts what is alive, in 1F1B whole stages. In the loop look at rank 0, which takes four
# micro-batches through its first stage before it begins its second one:

# %%
p, m = 4, 8


def times_of(plan, F=1.0, I=1.0, W=1.0):
    """Seconds of half a stage. A whole stage takes twice as long."""
    halves = 2 if plan.stages == plan.ranks else 1
    return uniform(plan.stages, halves * F, halves * I, halves * W)


def timed(name, p, m):
    """The schedule on paper."""
    plan = get_schedule(name).plan(p, m)
    return time_plan(plan, times_of(plan), spans=True)


timings = [timed(name, p, m) for name in ("1f1b", "interleaved", "v-half")]
titles = [
    f"{name}: a rank waits at most {max(timing.idle):.0f} units"
    for name, timing in zip(("1F1B", "a loop", "V-Half"), timings, strict=True)
]
show(gantt(timings, command="part 3 of lesson 19b", titles=titles))

# %% [markdown]
# ## 4 The code
#
# Follow one micro-batch through V-Half, in the middle of a long step. Dark bars are a rank's first half stage, light ones
# its second one, and the grey line says that an activation of this micro-batch is alive:


# %%
def of_microbatch(timing, k):
    """For each rank (stage, kind, start, end) of what it computes for micro-batch k, in order."""
    done = [[(Action(item), *times) for item, *times in spans] for spans in timing.spans]
    return [[(a.stage, a.kind, *t) for a, *t in row if a.microbatch == k] for row in done]


COLOURS = {"F": "#4477AA", "I": "#66CCEE", "W": "#CCBB44"}
rows = of_microbatch(timed("v-half", p, 24), 12)
first = rows[0][0][2]
figure, axes = new_panel(8, 2)
for rank, passes in enumerate(rows):
    axes.plot(
        [passes[0][2] - first, passes[-1][3] - first], [rank, rank], color="#BBBBBB", zorder=0
    )
    for stage, kind, start, _ in passes:
        alpha = 1.0 if stage < p else 0.5
        axes.barh(rank, 1, left=start - first, align="center", color="white")
        axes.barh(rank, 1, left=start - first, color=COLOURS[kind], alpha=alpha)
        name = kind + "12"[stage >= p]
        axes.text(start - first + 0.5, rank, name, ha="center", va="center", fontsize=8)
axes.set_yticks(range(p), [f"rank {rank}" for rank in range(p)])
axes.invert_yaxis()
axes.set_xlabel("unit")
axes.set_title("V-Half: one micro-batch on four ranks", fontsize=10, loc="left")
show(figure)

# %% [markdown]
# That is the *building block*; the next micro-batch's block begins 6 units later, because a rank
# has F, I and W of two stages to compute for each. So two passes that start 6 units apart fall on the
# same unit, those of one micro-batch on those of the next one. W takes the units that are free. Here
# are two blocks of one rank, by the unit of the six:


# %%
def six_units(starts):
    """What a rank does in each of the 6 units, when the four passes start at `starts`."""
    passes = list(zip(("F1", "F2", "I2", "I1"), starts, strict=True))
    return [" + ".join(name for name, at in passes if at % 6 == unit) or "W" for unit in range(6)]


for starts in ((1, 3, 5, 7), (1, 3, 5, 8)):
    print(f"starts {starts}:", *six_units(starts), sep=" | ")

# %% [markdown]
# In the first one a rank would do **two things at once**; one unit of waiting at a turn mends it. The three turns are
# where one of the four passes has gone through all ranks and the next one begins: F1 to F2, F2 to I2, I2 to I1.
#
# A rank begins two activations every 6 units. If both together live for L units, then about **L / 6**
# half stages are alive at any time. L is the sum of two lifetimes, each from F to W:


# %%
def lifetimes(timing, k):
    """For each rank how long the activations of micro-batch k live, one number per stage."""
    result = []
    for passes in of_microbatch(timing, k):
        stages = sorted({stage for stage, *_ in passes})
        own = [[row for row in passes if row[0] == stage] for stage in stages]
        result.append([int(rows[-1][3] - rows[0][2]) for rows in own])
    return result


# %% [markdown]
# ## 5 Check
#
# Micro-batch 12 of 24: how long its activations live, L / 6, and the most half stages that were counted
# on each rank:

# %%
print(f"{'':12} {'rank 0':>8} {'rank 3':>8}  {'L / 6':22} counted")
for name in ("1f1b", "interleaved", "v-half"):
    timing = timed(name, p, 24)
    lives = lifetimes(timing, 12)
    both = [" + ".join(map(str, lives[rank])) for rank in (0, p - 1)]
    halves = 2 if name == "1f1b" else 1  # 1F1B's one stage is two half stages
    alive = ", ".join(f"{halves * sum(row) / 6:4.1f}" for row in lives)
    counted = [halves * n for n in timing.peak]
    print(f"{name:12} {both[0]:>8} {both[1]:>8}  {alive:22} {counted}")

# %% [markdown]
# 32 + 4 units are 6 half stages. In the loop rank 0 has both stages that begin early, and their activations live
# long: a loop keeps more than 1F1B. In a V the first half lives long where the second one lives briefly, so all
# ranks keep the same.
#
# How long that is can be chosen, by the *offsets*: how many units later a pass starts on the next rank, for F1, F2, I2
# and I1. V-Half's are 2, 1, 2 and 1, and L is (p-1) times their sum, 6, and 18 units more for the turns. (Where a unit
# is taken a pass starts later, as I2 does on rank 2 in part 4.)
#
# | p | 6 (p-1) | turns | L | L / 6 = p + 2 half stages |
# |---|---|---|---|---|
# | 4 | 18 | 18 | 36 | 6 |
# | 8 | 42 | 18 | 60 | 10 |
# | 16 | 90 | 18 | 108 | 18 |
#
# The clock, with idle times in units, and alive in whole micro-batches:

# %%
names = ("1f1b", "interleaved", "v-half")
print("  p  ", *(f"{name + ' idle, alive':>23}" for name in names), "   V-Half's L")
for ranks in (4, 8, 16, 32):
    timings = [timed(name, ranks, 6 * ranks) for name in names]
    alive = [max(t.peak) * ranks / t.plan.stages for t in timings]  # whole micro-batches
    row = [f"{max(t.idle):17.0f}, {a:4g}" for t, a in zip(timings, alive, strict=True)]
    units = sum(lifetimes(timings[2], 3 * ranks)[0])  # in the middle of the step
    print(f"{ranks:3}  ", *row, f"{units:12}")
    assert (alive[2], units) == ((ranks + 2) // 2, 6 * (ranks + 2))
half_guess.judge(alive[2], within=0.1)

# %% [markdown]
# On many ranks V-Half waits about as long as the loop, with half of 1F1B's memory. (Half of 32 is 16; the 17th
# micro-batch comes from the turns.)
#
# The gradients do not change, and the messages do: 8 stages have 7 boundaries in the loop, 6 in the V,
# whose middle boundary is inside rank 3, and 4 stages have 3.

# %%
batches = [np.random.default_rng(i).normal(size=(4, 16)) for i in range(m)]


def step(comm, plan, *times):
    """A step of eight layers; this rank's gradients, bytes of activations sent, and its wait."""
    model = MLP([16] * 9, dtype=np.float64)
    stages, _ = split_model(model, plan.stages, plan.stages_of(comm.rank))
    clock = GivenTimes(comm, times_of(plan, *times))
    pipeline = Pipeline(comm, plan, stages, loss, observers=[clock])
    pipeline.step(batches, batches)
    gradients = {q.name: q.grad.copy() for s in stages for q in s.flat.parameters}
    sent = comm.trace.bytes_by_purpose().get("pipeline_activation", 0)
    done = [s for s in comm.trace.spans if s.name[:1].isdigit()]  # actions, such as 0F3
    return gradients, sent, done[-1].end - done[0].start - sum(s.end - s.start for s in done)


def loss(y, target):
    return (y * Tensor(target)).sum()


gradients = {}
for name in names:
    results = SimWorld(p).run(step, get_schedule(name).plan(p, m))
    own = gradients[name] = {key: array for part, *_ in results for key, array in part.items()}
    off = max(np.abs(own[key] - array).max() for key, array in gradients["1f1b"].items())
    sent = sum(nbytes for _, nbytes, _ in results)
    print(f"{name:12} {sent:7,} B of activations; max |g - g of 1f1b| = {off:g}")
    assert off == 0

# %% [markdown]
# ## 6 Break it
#
# **Take the block for granted where I takes longer than F.** It assumes that F, I and W take the same time. Let I take
# twice as long, as it does where
# texts are long. A rank then computes a third more, and 1F1B and the loop wait a third longer. But
# V-Half's passes no longer fit into one another: it waits more than twice as long, longer than the loop. The
# pipelines of part 5 on a clock with both times, and how long the rank waits that waits most:

# %%
for times in ((1, 1, 1), (1, 2, 1)):
    waits = {}
    for name in names:
        plan = get_schedule(name).plan(p, m)
        ranks = SimWorld(p, links=LinkModel(0.0, 0.0)).run(step, plan, *times)
        waits[name] = max(wait for *_, wait in ranks)
    print(f"F, I, W take {times}: waits {waits}")
assert waits["v-half"] > max(2 * 5, waits["interleaved"])

# %% [markdown]
# ## 7 Exercise: the building block of a V
#
# Given p and the four offsets, return for each rank when F1, F2, I2 and I1 of the first micro-batch start (each
# takes 1). Each of the four moves from rank to rank by exactly its offset, they
# follow one another, and when the block repeats every 6 units no rank does two things at once. So at each
# of the three turns try waits of 0 to 5 units: the four starts must differ modulo 6 on all ranks. W is not
# part of the answer: it takes the units that are free.
#
# Judged: these rules, and that the two stages of rank 0 together live as short as in any such block, here
# from F to I, as the answer has no W.


# %%
def my_block(p, offsets):
    f1, f2, i2, i1 = offsets
    turn, loss, back = f1 * (p - 1) + 1, (f1 + f2) * (p - 1) + 2, (f1 + f2 + i2) * (p - 1) + 3
    return [
        (f1 * r, turn + f2 * (p - 1 - r), loss + i2 * r, back + i1 * (p - 1 - r)) for r in range(p)
    ]


check("19b.building_block", my_block)

# %%
reveal("19b.building_block")
check("19b.building_block", solution("19b.building_block"))

# %% [markdown]
# ## 8 Takeaway
#
# - **A schedule is a block that repeats, and lifetimes are memory**: alive = lifetimes / 6. V-Half
#   keeps (p+2)//2 micro-batches, where 1F1B keeps p.
# - In a V a rank has a stage that keeps its activations long and one that keeps them briefly; in a loop
#   rank 0 has two that keep them long.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/6_pipeline/schedules.py --schedule interleaved
#     mpiexec -n 2 minidist compare --pp 2 --layers 4 --schedule v-half --microbatches 4 --steps 2

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `interleaved` | Megatron-LM "virtual pipeline"; PyTorch `ScheduleInterleaved1F1B` |
# | `v-half` | V-Half in "Pipeline Parallelism with Controllable Memory" |
# | `v-min`: (p+4)//3 micro-batches alive, and longer waits | V-Min, in the same paper |
# | `zb-v`: no idle time where F, I and W take the same, and 1F1B's memory | ZBV; V-ZB in the same paper; PyTorch `ScheduleZBVZeroBubble` |
# | `dualpipe`, `dualpipev` | DeepSeek's DualPipe: two streams that meet; `minidist schedule dualpipe --stages 4 --microbatches 8` |
#
# All these schedules still wait where stages are many; fewer stages need a second cut, and a place for each rank.
#
# Next: [20 The 3-D mesh](20_the_3d_mesh.ipynb). All lessons are in the [index](README.md).
