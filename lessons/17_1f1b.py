# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17 1F1B
#
# *25 minutes. Before it: 16 and 02.*
#
# ## 1 The case
#
# GPipe, four stages and eight micro-batches: all forwards, then all backwards. When the last
# forward ends, every stage holds the activations of all eight micro-batches, and the memory is
# full.
#
# But stage 3 could run the backward of micro-batch 0 right after its forward; nothing else is
# missing. Then stage 2 could run its own, and so on. Let each stage begin no more micro-batches than
# it needs so that no later stage waits for it; after that it runs a backward before each new forward,
# even if it must wait for that backward. How many micro-batches are alive on stage 0 at the peak? And
# how many times as long as GPipe's does the step take?

# %% [markdown]
# ## 2 Predict
#
# From the start of F0 on stage 0 to the end of its B0, micro-batch 0 takes F + B on each of four stages. How
# many micro-batches does a stage that never waits finish in that time?

# %%
from minidist.course.lesson import check, picture, predict, reveal, solution

first_guess = predict("micro-batches alive on stage 0", example=8)
time_guess = predict("time of the step, over GPipe's", example=1.5)

# %%
from contextlib import contextmanager

import numpy as np

from minidist import (
    MLP,
    LinkModel,
    Pipeline,
    SimWorld,
    Tensor,
    cross_entropy,
    get_schedule,
    split_model,
)
from minidist.base.memory import account_memory
from minidist.core.pipeline.plan import Action
from minidist.course.story import spent, story
from minidist.pipeline.times import GivenTimes, uniform
from minidist.pipeline.timing import time_plan
from minidist.pipeline.validate import validate
from minidist.report import show
from minidist.report.gantt import as_traces, gantt

# %% [markdown]
# ## 3 The idea and its picture
#
# **Stage s of p begins at most p - s micro-batches before its first backward; then it runs a backward before
# each new forward, even if it must wait for it**, because a backward frees the activations of a
# micro-batch: one forward, one backward, in turn (*1F1B*). It saves memory, with GPipe's bubble. It costs
# only a more careful order, without which stages wait (part 6).
#
# GPipe and 1F1B on four stages with eight micro-batches. Look at the numbers on stage 0 (the top
# row): below, B0 runs before F4.

# %%
p, m = 4, 8
plans = {name: get_schedule(name).plan(p, m) for name in ("gpipe", "1f1b")}
timings = [time_plan(plan, spans=True) for plan in plans.values()]
titles = [
    f"{name}: a rank is idle for {timing.bubble_of_total:.0%} of the time"
    for name, timing in zip(("GPipe", "1F1B"), timings, strict=True)
]
show(
    gantt(
        timings,
        command="minidist schedule gpipe 1f1b --stages 4 --microbatches 8 --format svg -o "
        "pipes.svg",
        titles=titles,
    )
)

# %% [markdown]
# The same as a page to step through, one time after the other: watch where a rank turns from forward
# to backward.

# %%
show(as_traces(timings[-1]), "1F1B: what each rank computes.")

# %% [markdown]
# Those were plans. This function carries a plan out on four ranks, and an account counts the bytes
# of each rank's activations. On the clock F takes 1 s and B 2 s, as in the plans, and at the end of each F and B
# `noted` writes down what is alive:

# %%
ROWS, WIDTH, LAYERS = 64, 64, 8
rng = np.random.default_rng(0)
rows, targets = rng.normal(size=(ROWS, WIDTH)), rng.integers(0, WIDTH, ROWS)


def step(comm, plan):
    """One step; returns this rank's gradients by name, and its account of memory."""
    with account_memory() as account:

        @contextmanager
        def noted(action):
            yield  # here the pipeline runs the action
            now = {"activation": account.by_purpose["activation"]}
            comm.trace.memory.append((comm.time(), now))

        model = MLP([WIDTH] * (LAYERS + 1), dtype=np.float64)
        stages, _ = split_model(model, plan.stages, plan.stages_of(comm.rank))
        times = GivenTimes(comm, uniform(plan.stages))
        pipeline = Pipeline(comm, plan, stages, loss_of, observers=[noted, times])
        parts = (np.array_split(array, plan.microbatches) for array in (rows, targets))
        pipeline.step(*parts)
    gradients = {q.name: q.grad.copy() for stage in stages for q in stage.flat.parameters}
    return gradients, account


def loss_of(output, target):
    return cross_entropy(output, target, divisor=ROWS)


# %% [markdown]
# GPipe's memory and 1F1B's, at the same scale: a step up is the end of an F, and a step down the end of a B. With
# GPipe every rank's activations grow until its last forward; with 1F1B they stop growing after four, three, two and
# one micro-batch, and go up and down.

# %%
runs = {}
for name, plan in plans.items():
    world = SimWorld(p, links=LinkModel(0.0, 0.0))
    runs[name] = world.run(step, plan)
    title = f"{name}: bytes of activations"
    picture("memory", world, "part 3 of lesson 17", title=title, most_bytes=70_000)

# %% [markdown]
# ## 4 The code
#
# A stage is a list of actions, F3 for the forward of micro-batch 3 and B3 for its backward, and a
# loop that carries it out. The toy is that of lesson 16, where a stage multiplies by its weight; but
# its order is a list now. B frees what F has kept. Messages leave by `isend` (lesson 03), because a stage
# that waited for its neighbour to receive could not go on with its list:


# %%
def carry_out(comm, order, batches, weight):
    """Returns the gradient of this stage's weight, and the most micro-batches that were alive."""
    stage, last, sends = comm.rank, comm.size - 1, []
    alive, most, gradient = {}, 0, 0.0
    for action in order:
        kind, i = action[0], int(action[1:])
        if kind == "F":
            alive[i] = x = batches[i].copy()
            most = max(most, len(alive))
            if stage > 0:
                comm.recv(x, stage - 1)  # activations, from the stage before
            if stage < last:
                sends.append(comm.isend(weight * x, stage + 1))
        if kind == "B":
            g = np.ones_like(batches[i])
            if stage < last:
                comm.recv(g, stage + 1)  # the gradient of this stage's output
            gradient += float((g * alive.pop(i)).sum())
            if stage > 0:
                sends.append(comm.isend(weight * g, stage - 1))
    for request in sends:
        request.wait()
    return gradient, most


# %% [markdown]
# GPipe's list on two stages with weights 1 and 2. The gradient of a weight is the sum of all inputs,
# which is 6, times the other weight:

# %%
batches = [np.full(2, float(i)) for i in range(3)]
gpipes_list = ["F0", "F1", "F2", "B2", "B1", "B0"]
done = SimWorld(2).run(lambda comm: carry_out(comm, gpipes_list, batches, comm.rank + 1.0))
for stage, (gradient, most) in enumerate(done):
    print(f"stage {stage}: gradient {gradient:g}; at most {most} micro-batches alive")

# %% [markdown]
# Which list is 1F1B's is your exercise. The library's is in
# [schedules.py](../minidist/core/pipeline/schedules.py); its loop is
# [pipeline.py](../minidist/core/pipeline/runtime/pipeline.py).

# %% [markdown]
# ## 5 Check
#
# Alive micro-batches as the runs' accounts saw them. Stage 0 has two layers of the model; a
# micro-batch is 64 / 8 rows.

# %%
one = 8 * (ROWS // m) * WIDTH * (LAYERS // p)  # bytes that a micro-batch leaves on a stage
for name, results in runs.items():
    measured = [account.peak_by_purpose["activation"] / one for _, account in results]
    print(
        f"{name:6} measured {[round(value, 2) for value in measured]}, in the plan "
        f"{time_plan(plans[name]).peak}"
    )
alive = time_plan(plans["1f1b"]).peak
first_guess.judge(alive[0])
time_guess.judge(timings[1].makespan / timings[0].makespan)
assert alive == [min(m, p - s) for s in range(p)]

# %% [markdown]
# The last stage measures half a micro-batch more, for its loss. (The picture is noted at the ends of actions,
# when the loss is freed already.) The bubble is GPipe's, for any m; the
# memory does not grow with m:

# %%
print("  m   idle part: gpipe, 1f1b       alive on stage 0: gpipe, 1f1b")
for count in (2, 4, 8, 32, 128):
    both = [time_plan(get_schedule(name).plan(p, count)) for name in ("gpipe", "1f1b")]
    idle, held = [t.bubble_of_total for t in both], [t.peak[0] for t in both]
    print(f"{count:3}   {idle[0]:20.3f} {idle[1]:6.3f}   {held[0]:23} {held[1]:5}")
    assert idle[0] == idle[1]

# %% [markdown]
# So memory no longer forbids many micro-batches, and many micro-batches shrink the bubble. The
# gradient is the same:

# %%
model = MLP([WIDTH] * (LAYERS + 1), dtype=np.float64)
cross_entropy(model(Tensor(rows)), targets).backward()


def off_by(plan):
    """max |g_parallel - g_single| of a plan that is carried out."""
    results = SimWorld(plan.stages).run(step, plan)
    gradients = {key: array for own, _ in results for key, array in own.items()}
    return max(np.abs(gradients[q.name] - q.grad).max() for q in model.parameters())


for stages, count in ((4, 8), (3, 5), (8, 3), (2, 1)):
    off = off_by(get_schedule("1f1b").plan(stages, count))
    print(f"stages: {stages}, micro-batches: {count}; max |g_parallel - g_single| = {off:.1e}")
    assert off < 1e-12

# %% [markdown]
# ## 6 Break it
#
# Take the library's list, and exchange each forward of the pairs with the backward after it, on every stage but
# the last, where a B needs the F before it. Now one forward less runs at the start. Less memory is held, but the
# stages wait for each other. A test that looks at the gradients alone does not see it:


# %%
def backward_first(order):
    """The list of a stage with each B of its pairs of F and B before the F."""
    ahead = [Action(item).kind for item in order].index("B") - 1
    if ahead == 0:  # the last stage
        return order
    pairs = order[ahead : len(order) - ahead]
    exchanged = [item for f, b in zip(pairs[::2], pairs[1::2], strict=True) for item in (b, f)]
    return order[:ahead] + exchanged + order[len(order) - ahead :]


eager = get_schedule("1f1b").plan(p, m)
slow = type(eager)(
    "one forward less", [backward_first(list(order)) for order in eager.orders], p, m
)
validate(slow)
times = [time_plan(plan, spans=True) for plan in (eager, slow)]
titles = [f"{t.plan.name}: a rank is idle for {t.bubble_of_total:.0%} of the time" for t in times]
show(gantt(times, command="part 6 of lesson 17", titles=titles))
print(
    f"{times[1].makespan / times[0].makespan:.2f} times as long; alive {times[1].peak} instead "
    f"of {times[0].peak}; max |g_parallel - g_single| = {off_by(slow):.1e}"
)
assert off_by(slow) < 1e-12

# %% [markdown]
# ## 7 Exercise: 1F1B for every p and m
#
# As in lesson 16: for each of p stages the list of its actions on m micro-batches. F takes 1 and B
# takes 2. Mind m < p.
#
# Judged: no rank waits for ever, the whole takes no longer than 1F1B, and no more than min(m, p-s)
# micro-batches are alive on stage s.


# %%
def my_plan(p, m):
    return [[f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)] for stage in range(p)]


check("17.one_f_one_b", my_plan)

# %%
reveal("17.one_f_one_b")
check("17.one_f_one_b", solution("17.one_f_one_b"))

# %% [markdown]
# ## 8 Takeaway
#
# - **p-1-s forwards, then one forward and one backward in turn**: GPipe's bubble, (p-1)/(m+p-1) of the time, with
#   **min(m, p-s)** micro-batches alive on stage s instead of m. (p-s counts the forward of the first
#   pair.)
# - So take m much larger than p. What is left of the bubble: B split in two (lesson 19), or more
#   stages per rank (lesson 19b).

# %% [markdown]
# The job of the course so far, since lesson 12 a model of 65 billion parameters on 64 cards of 80 GB (85 x 10^9 B),
# as `minidist plan` counts it ([story.py](../minidist/course/story.py)), with 2^20 tokens per step. Row 17
# has the stages of row 16. Now at most 16 of a replica's 128 texts are alive, so that micro-batches can
# be small and many. Rows 14 and 17 wait for different things:

# %%
story("17")
spent("14")
spent("17")

# %% [markdown]
# In time, the gain over row 16 is that of 128 micro-batches instead of 16: GPipe would be as fast, if 128
# texts fitted. Row 17 is 0.2 s slower than row 14: it waits less for messages, and more for stages. The next
# lesson takes two thirds of that wait away.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --pp 4 --layers 4 --schedule 1f1b --microbatches 8 --steps 5
#     mpiexec -n 4 python mpi_examples/6_pipeline/one_f_one_b.py
#
# The second one is 1F1B with send and recv only, without the runtime.

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `get_schedule("1f1b")` | PyTorch `Schedule1F1B`; Megatron-LM `forward_backward_pipelining_without_interleaving`; DeepSpeed `TrainSchedule` |
# | 1F1B with one update per step | "PipeDream-Flush" (Narayanan et al. 2021); DAPPLE |
# | the p-1-s forwards before one forward and one backward in turn | Megatron-LM `num_warmup_microbatches` |
# | micro-batches alive | Megatron-LM: "in-flight microbatches" |
#
# What is left is the wait at both ends of a step, where a stage has nothing that it could run early.
#
# Next: [19 Zero bubble](19_zero_bubble.ipynb). Side rooms: [17b PipeDream and weight
# stashing](17b_pipedream_and_weight_stashing.ipynb), [17c Two versions of the
# weights](17c_two_versions.ipynb). All lessons are in the [index](README.md).
