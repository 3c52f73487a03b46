# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16 Naive pipeline and GPipe
#
# *30 minutes. Before it: 03 and 06.*
#
# ## 1 The case
#
# A model that is cut inside its layers sends two sums per layer in each direction (lesson 14), and all
# ranks wait for them. So cut it between layers: four ranks have a quarter of the layers each, a *stage*. A
# batch goes from stage to stage and its gradient comes back: while one stage works, three wait. That is
# why the batch is cut into 12 *micro-batches*. As soon as stage 0 has finished the first one, it sends the
# output to stage 1 and takes the second; when all have gone forward, they come back one after the other.
#
# On a stage one micro-batch takes 1 ms forward and 2 ms backward. Now several stages work at
# once. A stage waits before its first action, between its last forward and its first backward, and after
# its last action. What part of the time between the first action of a step and its last is a rank idle?

# %% [markdown]
# ## 2 Predict
#
# Draw it for one micro-batch, then for two: how many columns does the picture have, and how many of
# them does a stage fill? Draw F and B equally wide: a stage waits for p - 1 of each, so the part does not change.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, solution

idle_guess = predict("idle part of the time, 4 stages and 12 micro-batches", example=0.75)

# %%
import numpy as np

from minidist import (
    MLP,
    LinkModel,
    Pipeline,
    PlanError,
    SimWorld,
    Tensor,
    cross_entropy,
    get_schedule,
    split_model,
)
from minidist.course.story import spent, story
from minidist.pipeline.schedules import from_cells
from minidist.pipeline.times import GivenTimes, uniform
from minidist.pipeline.timing import time_plan
from minidist.pipeline.validate import validate
from minidist.report import show
from minidist.report.gantt import as_traces, gantt

# %% [markdown]
# ## 3 The idea and its picture
#
# **Put the stages of a model on ranks, and keep them all busy with micro-batches.** Each rank holds
# 1/p of the model, and messages are few: activations and gradients at p - 1 stage boundaries. But
# stages wait, the *bubble*: the last one before its forwards and after its backwards, the first one between
# them. And activations of many micro-batches are alive.
#
# Four stages, four micro-batches. Above, the naive pipeline: a micro-batch goes through all stages
# and back before the next one starts, so one stage works and three wait. Below, GPipe: while stage
# 1 has micro-batch 0, stage 0 has micro-batch 1. GPipe takes the newest micro-batch back first; the
# oldest first takes as long.

# %%
p, m = 4, 4
plans = [get_schedule(name).plan(p, m) for name in ("naive", "gpipe")]
timings = [time_plan(plan, spans=True) for plan in plans]
titles = [
    f"{name}, {m} micro-batches: a rank is idle for {timing.bubble_of_total:.0%} of the time"
    for name, timing in zip(("naive", "GPipe"), timings, strict=True)
]
show(
    gantt(
        timings,
        command="minidist schedule naive gpipe --stages 4 --microbatches 4 --format svg -o "
        "pipes.svg",
        titles=titles,
    )
)

# %% [markdown]
# GPipe's plan as a page to step through, one time after the other:

# %%
show(as_traces(timings[1]), "gpipe: what each rank computes.")

# %% [markdown]
# That was a plan. To run it, each rank takes its stage of the model and carries out its part of the
# plan. The clock gives every forward 1 ms and every backward 2 ms:

# %%
ROWS = 24
rng = np.random.default_rng(0)
rows, targets = rng.normal(size=(ROWS, 16)), rng.integers(0, 10, ROWS)


def loss_of(output, target):
    # The rows of the whole batch: micro-batches are summed.
    return cross_entropy(output, target, divisor=ROWS)


def step(comm, plan, loss=loss_of):
    """One step; returns the losses of the micro-batches, and this rank's gradients by name."""
    model = MLP([16] * 8 + [10], dtype=np.float64)
    stages, _ = split_model(model, plan.stages, plan.stages_of(comm.rank))
    # A backward is I + W, together 2 ms; lesson 19 separates them.
    times = GivenTimes(comm, uniform(plan.stages, F=1e-3, I=1e-3, W=1e-3))
    pipeline = Pipeline(comm, plan, stages, loss, observers=[times])
    parts = (np.array_split(array, plan.microbatches) for array in (rows, targets))
    losses = pipeline.step(*parts)
    return losses, {q.name: q.grad.copy() for stage in stages for q in stage.flat.parameters}


# %% [markdown]
# The same GPipe on four ranks. An arrow down carries the activations of a micro-batch to the next
# stage, an arrow up the gradient back:

# %%
world = SimWorld(p, links=LinkModel(alpha=1e-6, beta=1e-10))
world.run(step, plans[1])
for trace in world.traces:  # without those of the start and of the loss
    trace.messages = [m for m in trace.messages if m.purpose.startswith("pipeline")]
picture("space-time", world, "part 3 of lesson 16", name="GPipe, 4 micro-batches")

# %% [markdown]
# ## 4 The code
#
# Every message of a pipeline, in a toy: a stage multiplies what it gets by its weight. It sends its
# output to the next stage, and in backward the gradient of its input to the stage before.


# %%
def toy(comm, batches, weight):
    """One stage of y = w3 w2 w1 w0 x; the loss is the sum of y.

    Returns the gradient of its weight.
    """
    stage, last, inputs, gradient = comm.rank, comm.size - 1, [], 0.0
    for batch in batches:
        x = batch.copy()
        if stage > 0:
            comm.recv(x, stage - 1)  # activations, from the stage before
        inputs.append(x)
        if stage < last:
            comm.send(weight * x, stage + 1)
    for x in reversed(inputs):  # the newest first, as GPipe does
        g = np.ones_like(x)
        if stage < last:
            comm.recv(g, stage + 1)  # the gradient of this stage's output
        gradient += float((g * x).sum())
        if stage > 0:
            comm.send(weight * g, stage - 1)
    return gradient


# %% [markdown]
# Three micro-batches on four stages with the weights 1, 2, 3 and 4. On one device the gradient of a
# weight is the sum of the inputs times the other three weights:

# %%
batches = [np.full(2, float(i)) for i in range(3)]
print("gradients", SimWorld(4).run(lambda comm: toy(comm, batches, comm.rank + 1.0)))
print("on one device", [sum(2 * i for i in range(3)) * 24 / w for w in (1, 2, 3, 4)])

# %% [markdown]
# In the library a schedule is data: for each rank the list of what it does. Later steps insert the
# sends and early receives, and the runtime executes the list:
# [schedules.py](../minidist/core/pipeline/schedules.py), and `_forward` and `_backward` in
# [pipeline.py](../minidist/core/pipeline/runtime/pipeline.py).

# %% [markdown]
# ## 5 Check
#
# The answer from a run's trace: what the ranks computed, and the time from their first to their
# last action.


# %%
def idle_of_total(name, m, p=4):
    world = SimWorld(p, links=LinkModel(alpha=0.0, beta=0.0))
    world.run(step, get_schedule(name).plan(p, m))
    spans = [span for trace in world.traces for span in trace.spans if span.category == "compute"]
    window = max(s.end for s in spans) - min(s.start for s in spans)
    return 1 - sum(s.end - s.start for s in spans) / (p * window)


for m in (1, 4, 12, 24):
    naive, idle = idle_of_total("naive", m), idle_of_total("gpipe", m)
    print(
        f"micro-batches: {m:2}; naive {naive:.3f}, gpipe {idle:.3f}; (p-1)/(m+p-1) = "
        f"{(p - 1) / (m + p - 1):.3f}"
    )
    assert abs(idle - (p - 1) / (m + p - 1)) < 1e-9
idle_guess.judge(idle_of_total("gpipe", 12), within=0.1)

# %% [markdown]
# More micro-batches, less bubble. Three things stop you: a micro-batch needs at least one row, small
# products are slow on real devices, and all m micro-batches are *alive* at the end of the forwards,
# on every stage, because their activations are kept for the backward:

# %%
for m in (4, 12, 24):
    alive = time_plan(get_schedule("gpipe").plan(4, m)).peak
    print(f"micro-batches: {m:2}; alive on each stage {alive}")

# %% [markdown]
# Is the gradient that of one device?

# %%
model = MLP([16] * 8 + [10], dtype=np.float64)
loss_of(model(Tensor(rows)), targets).backward()
for name, stages, m in (("naive", 4, 2), ("gpipe", 4, 4), ("gpipe", 3, 5), ("gpipe", 8, 2)):
    world = SimWorld(stages)
    results = world.run(step, get_schedule(name).plan(stages, m))
    gradients = {key: array for _, own in results for key, array in own.items()}
    off = max(np.abs(gradients[q.name] - q.grad).max() for q in model.parameters())
    print(f"{name}, {stages} stages, {m} micro-batches: max |g_parallel - g_single| = {off:.1e}")
    assert off < 1e-12

# %% [markdown]
# And what does rank 1 send to its two neighbours, with one micro-batch and with many?

# %%
for m in (1, 24):
    world = SimWorld(4)
    world.run(step, get_schedule("gpipe").plan(4, m))
    sent = world.traces[1].bytes_by_purpose()
    down, up = sent["pipeline_activation"], sent["pipeline_gradient"]
    print(f"micro-batches: {m:2}; activations {down:,} B, gradients {up:,} B")
    assert down == up == ROWS * 16 * 8  # rows x width x 8 B

# %% [markdown]
# The bytes depend on the rows of the batch and the width of the boundary, and neither on the number of
# micro-batches nor on the layers of a stage.

# %% [markdown]
# GPipe's own remedy for the memory is that of lesson 10. With `--recompute full` a stage keeps only
# what arrived at its border, and runs its forward again before the backward. That costs a second
# forward; lesson 17 has a remedy that costs nothing.

# %% [markdown]
# ## 6 Break it
#
# Two stages. Stage 0 wants the gradient of micro-batch 0 before it sends micro-batch 1; stage 1
# wants micro-batch 1 before it starts any backward. Each list looks reasonable alone. A validator
# finds it before anything runs. (0F1 is stage 0, forward, micro-batch 1.)

# %%
mixed = from_cells([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B1", "1B0"]], "mixed")
with expect(PlanError):
    validate(mixed)

# %% [markdown]
# A silent bug: every micro-batch divides by its own rows. Each loss looks like that of a batch, but
# the step's loss is their sum, and the gradient is m times too large, here 6. (The losses are rounded.)


# %%
def loss_of_own_rows(output, target):
    return cross_entropy(output, target, divisor=len(target))


plan = get_schedule("gpipe").plan(4, 6)
right, wrong = (SimWorld(4).run(step, plan, loss) for loss in (loss_of, loss_of_own_rows))
for name, ((losses, gradients), *_) in (("right", right), ("wrong", wrong)):
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    print(f"{name}: losses {np.round(losses, 2)}, sum {sum(losses):5.2f}; max |g| {largest:.1e}")

# %% [markdown]
# ## 7 Exercise: write the plan as lists
#
# Return for each of p stages the list of its actions on m micro-batches: "F0" is the forward, "B0"
# the backward of micro-batch 0. F takes 1 and B takes 2.
#
# Judged: each stage runs each micro-batch forward and backward, no rank waits for ever, and the whole
# takes no longer than GPipe.


# %%
def my_plan(p, m):
    return [[name for i in range(m) for name in (f"F{i}", f"B{i}")] for stage in range(p)]


check("16.gpipe", my_plan)

# %%
reveal("16.gpipe")
check("16.gpipe", solution("16.gpipe"))

# %% [markdown]
# ## 8 Takeaway
#
# - Stages on ranks, micro-batches in flight: idle **(p-1)/(m+p-1) of the time**, which is (p-1)/m
#   of the work, where all stages take the same time; naive: (p-1)/p.
# - A rank sends activations to the next stage and gradients to the one before, rows x width numbers a
#   step each; **all m micro-batches are alive** under GPipe. Lesson 17 fixes that.

# %% [markdown]
# The job of the course so far, since lesson 12 a model of 65 billion parameters on 64 cards of 80 GB (85 x 10^9 B),
# as `minidist plan` counts it ([story.py](../minidist/course/story.py)), with 2^20 tokens per step. In row 16
# each of four replicas is a pipeline of 16 cards and cuts its 128 texts into 16 micro-batches of 8. With
# smaller micro-batches the stages would wait less, but the same 128 texts would be kept. With recomputation
# (lesson 10) they would fit, at the price of a second forward pass; lesson 17 has a remedy without one.

# %%
story("16")
spent("16")
spent("16", dp=4, zero=2, pp=16, micro_batch=8, recompute="full")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --pp 4 --layers 4 --schedule gpipe --microbatches 8 --steps 5
#     mpiexec -n 3 python mpi_examples/6_pipeline/naive_model_parallel.py
#
# `mpi_examples/6_pipeline/gpipe.py` is the same as a program of one page. Look at any plan with
# your own p and m: `minidist schedule gpipe --stages 8 --microbatches 32`.

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `get_schedule("gpipe")` | PyTorch `torch.distributed.pipelining.ScheduleGPipe`; "AFAB", all forward, all backward |
# | `PipelineStage`, `split_model` | PyTorch `PipelineStage`, `pipeline(module, mb_args, split_spec)`; DeepSpeed `PipelineModule(layers=..., num_stages=...)` |
# | `--microbatches` | PyTorch `n_microbatches`; DeepSpeed `gradient_accumulation_steps`; Megatron-LM `--global-batch-size` / (`--micro-batch-size` x dp) |
# | `--pp` | Megatron-LM `--pipeline-model-parallel-size` |
#
# Under GPipe the activations of all micro-batches fill the memory, though a backward could free each of them early.
#
# Next: [17 1F1B](17_1f1b.ipynb). Side room: [16b Batch norm and
# micro-batches](16b_batch_norm.ipynb). All lessons are in the [index](README.md).
