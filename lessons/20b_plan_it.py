# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 20b Plan it
#
# *35 minutes. Before it: 05, 17 and 20.*
#
# ## 1 The case
#
# Llama 3.1 with 70 billion parameters is to be trained on 64 GPUs of type H100, on 512 sequences of
# 8,192 tokens per step. Sixteen bytes per parameter are 1.1 TB, and a GPU has 85 GB. Thousands of
# layouts are possible: degrees of data, tensor, context and pipeline parallelism, ZeRO stages,
# micro-batches, recomputation. Which of them fit, and which one is the fastest? Renting 64 GPUs to
# try them is expensive; `minidist plan` counts them all in a few seconds.
#
# How far can such a plan be trusted? A small case can be planned and measured. Eight ranks of 20
# GFLOP/s, joined by links of 1 GB/s with a latency of 5 µs, train a GPT with
# eight layers of width 64 on eight samples of 32 tokens. There are ten ways to write 8 as pp x dp x
# tp: pipeline stages, data-parallel replicas, tensor-parallel parts. Which of them takes the least
# time for a step?
#
# Data parallelism sends the gradient once per step; tensor parallelism sends activations four times
# per layer; a pipeline sends little, and waits at both ends of the step.

# %% [markdown]
# ## 2 Predict
#
# Of the large job: into how many parts does the fastest layout divide each layer (tp)? Of the small
# one: the degrees of data and of tensor parallelism of the fastest mesh; pp is what is left of 8.

# %%
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution

large_tp_guess = predict("tp of the fastest layout of the large job", example=8)
dp_guess = predict("dp of the fastest mesh", example=2)
tp_guess = predict("tp of the fastest mesh", example=1)

# %%
from dataclasses import replace
from functools import cache

from minidist import FlopCounter, LinkModel, SimWorld, get_schedule
from minidist.base.trace_file import only_steps
from minidist.job.config.train_config import resolve_batches
from minidist.job.equality.compare import compare_rank
from minidist.job.train.job import build
from minidist.job.train.trainer import train
from minidist.pipeline.partition import Layer, partition
from minidist.pipeline.times import Times
from minidist.pipeline.timing import time_plan
from minidist.planning.architecture import named
from minidist.planning.cluster.gpus import machine_of
from minidist.planning.cluster.layout import Job
from minidist.planning.cluster.search import plan_layout, search
from minidist.report import show
from minidist.report.frontier import frontier

# %% [markdown]
# ## 3 The idea and its picture
#
# Choose the mesh on paper. **Predict the time of a step for each of them from four numbers**
# (FLOP/s, latency, bandwidth, the work of one device) and take the best. What it saves: trying.
# What it costs: a model of the machine, which is as good as its four numbers.
#
# `minidist plan` does so for the large job. Memory is counted from shapes; the time of a step from
# the FLOPs of its products, the bytes of its other operations and of its messages. What no formula
# gives (the share of its peak that a GPU reaches, the latency of a message) are about twenty numbers,
# fitted to published measurements. Each point is a layout that fits; on the line is the fastest one
# for each amount of memory.

# %%
LARGE = Job(named("llama-3.1-70b"), 8192, 512, "bf16", 64)
found = search(LARGE, machine_of("h100"), {})
print(
    f"{len(found.plans):,} layouts fit, {len(found.too_large):,} do not,"
    f" {len(found.impossible):,} are impossible"
)
show(
    frontier(
        [plan.as_dict() for plan in found.plans],
        title="Llama 3.1 70B on 64 H100",
        command="minidist plan --model llama-3.1-70b --seq 8192 --ranks 64 --global-batch 512"
        " -o frontier.svg",
    )
)

# %% [markdown]
# Now the small job on its eight ranks, on three of its meshes. Red is waiting.

# %%
RANKS, LAYERS, WIDTH, LENGTH, SAMPLES = 8, 8, 64, 32, 8
SHAPE = {"layers": LAYERS, "width": WIDTH, "heads": 8, "context": LENGTH, "reduction": "ring"}
SHAPE |= {"global_batch": SAMPLES, "steps": 2, "optimizer": "sgd"}
# The memory is so fast that only FLOPs count.
LINKS = LinkModel(alpha=5e-6, beta=1e-9, flops=2e10, memory_bandwidth=1e18)


def job_of(pp, dp, tp, **settings):
    """A pipeline takes its samples one by one, others take all at once."""
    passes = SAMPLES // dp if pp > 1 else 1
    return small_job(**SHAPE, pp=pp, dp=dp, tp=tp, accumulation=passes, **settings)


@cache
def measured(pp, dp, tp):
    """Seconds of the second step in the simulated world, and its trace: the very code that
    trains, on a virtual clock.
    """
    world = SimWorld(RANKS, links=LINKS)
    world.run(train, job_of(pp, dp, tp))
    first, second = (
        max(span.end for trace in world.traces for span in trace.spans if span.name == f"step {i}")
        for i in (0, 1)
    )
    return second - first, only_steps(world.traces, 1, 2)


for layout in ((1, 8, 1), (8, 1, 1), (2, 2, 2)):
    seconds, traces = measured(*layout)
    title = f"pp, dp, tp = {layout}: {1e3 * seconds:.2f} ms"
    picture("gantt", traces, "part 3 of lesson 20b", title=title)

# %% [markdown]
# ## 4 The code
#
# A plan of the large job is two functions. What a pipeline rank holds of the model, and how long a
# collective takes: a ring, with a latency per step, over links inside a node and adapters between
# nodes ([memory.py](../minidist/planning/cluster/memory.py), [step_time.py](../minidist/planning/cluster/step_time.py)).
#
# For the small job the same model of a step fits on half a page. The work of one device is counted
# once, by running one sample through the model with a FLOP counter:

# %%
alone = job_of(1, 1, 1)
job = build(alone, resolve_batches(alone, 1))
with FlopCounter() as counter:
    loss = job.loss(*job.micro_batch(0, 0))
    forward = sum(flops for flops, _ in counter.take()) / 8  # of one of the 8 samples
    loss.backward()
    backward = sum(flops for flops, _ in counter.take()) / 8
parameters = sum(parameter.size for parameter in job.model.parameters())
print(f"forward {forward:.3g} FLOPs per sample, backward {backward:.3g}; {parameters:,} parameters")


# %%
def ring(n, nbytes):
    """All-reduce round a ring: 2 (n-1) messages of 1/n of the bytes, one after the other."""
    return 2 * (n - 1) * (LINKS.alpha + nbytes / n * LINKS.beta)


def predicted(pp, dp, tp):
    """Seconds of a step: the timing tool for the pipeline, alpha-beta for what travels."""
    m = SAMPLES // dp if pp > 1 else 1
    samples = SAMPLES // dp // m  # of a micro-batch
    boundary = samples * LENGTH * WIDTH * 4  # bytes between two layers
    # Two all-reduces per layer and direction.
    in_layers = LAYERS / pp * 2 * ring(tp, boundary) if tp > 1 else 0.0
    F = samples * forward / pp / tp / LINKS.flops + in_layers
    B = samples * backward / pp / tp / LINKS.flops + in_layers
    hop = LINKS.alpha + boundary * LINKS.beta
    times = Times([F] * pp, [B / 2] * pp, [B / 2] * pp, [hop] * (pp - 1))
    pipeline = time_plan(get_schedule("1f1b").plan(pp, m), times).makespan
    return pipeline + (ring(dp, parameters / pp / tp * 4) if dp > 1 else 0.0)


# %% [markdown]
# ## 5 Check
#
# All ten meshes of the small job, on paper and on the virtual clock:

# %%
layouts = [
    (pp, dp, RANKS // pp // dp)
    for pp in (1, 2, 4, 8)
    for dp in (1, 2, 4, 8)
    if RANKS % (pp * dp) == 0
]
paper = {layout: predicted(*layout) for layout in layouts}
clock = {layout: measured(*layout)[0] for layout in layouts}
print("(pp, dp, tp)    on paper   on the clock")
for layout in sorted(layouts, key=paper.get):
    print(f"{layout!s:14} {1e3 * paper[layout]:8.2f} ms {1e3 * clock[layout]:8.2f} ms")
best = min(layouts, key=paper.get)
print(f"best on paper {best}, best on the clock {min(layouts, key=clock.get)}")
dp_guess.judge(best[1])
tp_guess.judge(best[2])
assert clock[best] <= 1.1 * min(clock.values())

# %% [markdown]
# And the chosen mesh still trains what one device trains:

# %%
verdict = SimWorld(RANKS).run(compare_rank, job_of(*best, precision="fp64"))[0]
print(f"max |w_parallel - w_single| = {verdict.max_difference['weights']:.1e}")
assert verdict.equal

# %% [markdown]
# Now the large job: the five layouts that `minidist plan` puts first. Its seconds are ranges, because
# a machine reaches more or less of its peak, so layouts whose ranges overlap are equal on paper. What
# they have in common tells more: tensor parallelism stays inside a node of 8 GPUs, and no layout
# without a pipeline or tensor parallelism is among them.

# %%
print("seconds of a step   fullest GPU   tp  pp  cp  dp")
for plan in found.plans[:5]:
    of, (low, high) = plan.layout, plan.seconds_range
    fullest = plan.fullest.peak / 1e9
    print(f"{low:8.0f} to {high:3.0f} {fullest:12.0f} GB {of.tp:4} {of.pp:3} {of.cp:3} {of.dp:3}")
first = found.plans[0]
large_tp_guess.judge(first.layout.tp)
assert first.fit.fits
assert all(plan.layout.tp <= first.machine.gpus_per_node for plan in found.plans[:5])

# %% [markdown]
# **Where to cut the stages.** The planner gives each stage as many layers as the others. Where layers
# differ, the slowest stage sets the pace of all. Eight layers of unequal costs, in milliseconds, on
# four stages with twelve micro-batches; GPipe's method makes the variance of the stages' costs least:

# %%
costs = [1, 2, 3, 16, 2, 2, 2, 4]
layers = [Layer("", cost / 3, cost * 2 / 3, 1e5, 1e7) for cost in costs]
for method in ("uniform", "gpipe", "time"):
    stages = partition(layers, method, 4).stages
    sums = [sum(costs[stage.first : stage.last + 1]) for stage in stages]
    third = [total / 3 for total in sums]  # of F, of I and of W
    timing = time_plan(get_schedule("gpipe").plan(4, 12), Times(third, third, third, [0] * 3))
    print(f"{method:8} stages of {sums!s:14} ms: a step takes {timing.makespan:.0f} ms")

# %% [markdown]
# ## 6 Break it
#
# A model of the machine is only as good as its numbers. Take messages as free, and another mesh seems best:

# %%
real, LINKS = LINKS, LinkModel(alpha=0.0, beta=0.0, flops=2e10, memory_bandwidth=1e18)
naive = {layout: predicted(*layout) for layout in layouts}
LINKS = real
wrong = min(layouts, key=naive.get)
print(
    f"with free messages {wrong} seems best, {1e3 * naive[wrong]:.2f} ms; on the clock it takes "
    f"{1e3 * clock[wrong]:.2f} ms, the best {1e3 * min(clock.values()):.2f} ms"
)
assert clock[wrong] > 1.3 * min(clock.values())

# %% [markdown]
# The same of the large job. Let the GPUs of a node be joined by PCI Express 3, 12 GB/s in place of
# NVLink's 450, and keep the layout that was planned for NVLink:

# %%
pcie = replace(machine_of("h100"), name="h100 without NVLink", link=12e9)
kept = plan_layout(first.layout, first.job, pcie)
right = search(LARGE, pcie, {}).plans[0]
print(f"planned for NVLink: {kept.time.seconds:.0f} s, {kept.layout}")
print(f"planned for PCIe:   {right.time.seconds:.0f} s, {right.layout}")
assert right.time.seconds < 0.9 * kept.time.seconds
assert right.layout.tp == 1  # its messages are those that suffer

# %% [markdown]
# ## 7 Exercise: layers that are not alike
#
# A pipeline is as fast as its slowest stage. `cut(times, stages)`: how many consecutive layers each
# stage gets, so that the longest stage is as short as can be. Every stage has at least one layer;
# there are at least as many layers as stages.


# %%
def cut(times, stages):
    each = len(times) // stages
    return [each] * (stages - 1) + [len(times) - each * (stages - 1)]


check("20b.min_max_split", cut)

# %%
reveal("20b.min_max_split")
check("20b.min_max_split", solution("20b.min_max_split"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Count the work once, then divide**: F/(p t), plus 4 ring all-reduces per layer and micro-batch
#   for t > 1, plus the plan's bubble for p > 1, plus one ring of Ψ/(p t) for d > 1. Ten meshes take
#   a second to try on paper.
# - `minidist plan` does the same for GPUs: memory from shapes decides what fits, then tensor
#   parallelism stays inside a node, and ZeRO, stages and recomputation pay for memory with time.
#   [docs/planner.md](../docs/planner.md) compares it with published measurements.
# - Every prediction is a range: compare two layouts with a plan, measure the one that you choose.
# - Where the paper is off, one can say what it left out: here the all-reduces of the split
#   vocabulary, and the losses.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 8 minidist train --pp 2 --dp 2 --tp 2 --layers 8 --steps 5
#     mpiexec -n 2 python mpi_examples/6_pipeline/profile_and_partition.py
#     mpiexec -n 2 python mpi_examples/6_pipeline/repartition.py
#     mpiexec -n 2 python mpi_examples/7_more/device.py            # --device cuda: with CuPy and a GPU
#     minidist train --config mpi_examples/job.toml

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `minidist plan` | Calculon, vTrain (simulators of a step); Hugging Face `accelerate estimate-memory`; NeMo's and DeepSpeed's auto-tuners, which run layouts |
# | all meshes by a cost model | Alpa (inter- and intra-operator plans); Galvatron; Megatron-LM's rules of thumb ("Efficient Large-Scale Language Model Training", section 3) |
# | `minidist partition`, min-max cuts | GPipe's and PipeDream's partitioners; torchgpipe `balance_by_time` |
# | `time_plan` | Zero Bubble's simulator; DeepSpeed's autotuning measures instead |
#
# Next: [22 Long context](22_long_context.ipynb). All of them are in the [index](README.md).
