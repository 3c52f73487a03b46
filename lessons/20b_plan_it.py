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
# *30 minutes. Before it: 05, 17 and 20.*
#
# ## 1 The case
#
# Eight ranks of 20 GFLOP/s, joined by links of 1 GB/s with a latency of 5 µs, train a GPT with
# eight layers of width 64 on eight samples of 32 tokens. There are ten ways to write 8 as pp x dp x
# tp: pipeline stages, data-parallel replicas, tensor-parallel parts. To try all of them on a real
# machine is expensive. Which one takes the least time for a step?
#
# Every mesh divides the work equally, about 4 ms for each rank. What differs is the waiting. Data
# parallelism sends the gradient once per step. Tensor parallelism sends activations four times per
# layer. A pipeline sends little, and waits at both ends of the step.

# %% [markdown]
# ## 2 Predict
#
# The model has 403,072 parameters in float32, and an activation of one sample has 32 x 64 numbers.
# Into how many tensor-parallel parts does the fastest mesh cut a layer: 1, 2, 4 or 8?

# %%
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution

tp_guess = predict("tp of the fastest mesh", example=1)

# %%
from functools import cache

from minidist import FlopCounter, LinkModel, SimWorld, get_schedule
from minidist.base.trace_file import only_steps
from minidist.job.config.train_config import resolve_batches
from minidist.job.equality.compare import compare_rank
from minidist.job.train.job import build
from minidist.job.train.trainer import train
from minidist.pipeline.times import Times
from minidist.pipeline.timing import time_plan

# %% [markdown]
# ## 3 The idea and its picture
#
# **Count the work once, and predict the time of a step for every mesh from four numbers**: FLOP/s,
# latency, bandwidth, and the FLOPs of one sample. What it saves: trying. What it costs: a model of the
# machine, which is as good as its four numbers.
#
# The job and the machine of the case:

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


# %% [markdown]
# So that the paper can be checked, the very code that trains also runs on every mesh, on the virtual
# clock of a simulated world:


# %%
@cache
def measured(pp, dp, tp):
    """Seconds of the second step, and its trace."""
    world = SimWorld(RANKS, links=LINKS)
    world.run(train, job_of(pp, dp, tp))
    first, second = (
        max(span.end for trace in world.traces for span in trace.spans if span.name == f"step {i}")
        for i in (0, 1)
    )
    return second - first, only_steps(world.traces, 1, 2)


# %% [markdown]
# The job on its eight ranks, on the three meshes of one axis. Red waits for a message that has not been
# sent yet; grey is a message on its way, or nothing to do. Each axis loses its time in another place: at both ends of the step, after backward, or
# in every layer.

# %%
for layout in ((8, 1, 1), (1, 8, 1), (1, 1, 8)):
    seconds, traces = measured(*layout)
    title = f"pp, dp, tp = {layout}: {1e3 * seconds:.2f} ms"
    picture("gantt", traces, "part 3 of lesson 20b", title=title)

# %% [markdown]
# ## 4 The code
#
# The FLOPs of one sample are counted once, by running the model with a counter:

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

# %% [markdown]
# The rest is lesson 05's time of a ring, for the sums of tensor parallelism and for the gradients, and
# lesson 17's time of a schedule, for the bubble:


# %%
def ring(n, nbytes, links):
    """All-reduce round a ring: 2 (n-1) messages of 1/n of the bytes, one after the other."""
    return 2 * (n - 1) * (links.alpha + nbytes / n * links.beta)


# %% [markdown]
# What a micro-batch of a stage takes. On tp, activations are summed twice per layer and direction, and a
# stage has 1/pp of the layers:


# %%
def micro_batches(pp, dp):
    return SAMPLES // dp if pp > 1 else 1


def boundary(pp, dp):
    """Bytes of a micro-batch's activations between two layers."""
    return SAMPLES // dp // micro_batches(pp, dp) * LENGTH * WIDTH * 4


def work(flops_of_a_sample, pp, dp, tp, links):
    return SAMPLES // dp // micro_batches(pp, dp) * flops_of_a_sample / pp / tp / links.flops


def sums(pp, dp, tp, links):
    return LAYERS / pp * 2 * ring(tp, boundary(pp, dp), links)


# %% [markdown]
# On pp, a stage waits at both ends of the step. The bubble is what the schedule takes beyond its m
# forwards and backwards, where a backward is in two halves of equal time:


# %%
def bubble(pp, dp, tp, links):
    m, each = micro_batches(pp, dp), sums(pp, dp, tp, links)
    F, B = (work(flops, pp, dp, tp, links) + each for flops in (forward, backward))
    hop = links.alpha + boundary(pp, dp) * links.beta
    times = Times([F] * pp, [B / 2] * pp, [B / 2] * pp, [hop] * (pp - 1))
    return time_plan(get_schedule("1f1b").plan(pp, m), times).makespan - m * (F + B)


# %% [markdown]
# On dp, a rank's share of the gradient is summed once, after backward. A step is the work and the three:


# %%
def predicted(pp, dp, tp, links=LINKS):
    """Seconds of a step, by what they are for."""
    m = micro_batches(pp, dp)
    return {
        "work": m * work(forward + backward, pp, dp, tp, links),
        "tp": m * 2 * sums(pp, dp, tp, links),
        "pp": bubble(pp, dp, tp, links),
        "dp": ring(dp, parameters / pp / tp * 4, links),
    }


# %% [markdown]
# ## 5 Check
#
# All ten meshes, on paper and on the clock:

# %%
layouts = [
    (pp, dp, RANKS // pp // dp)
    for pp in (1, 2, 4, 8)
    for dp in (1, 2, 4, 8)
    if RANKS % (pp * dp) == 0
]
parts = {layout: predicted(*layout) for layout in layouts}
paper = {layout: sum(seconds.values()) for layout, seconds in parts.items()}
clock = {layout: measured(*layout)[0] for layout in layouts}

# %% [markdown]
# In milliseconds, the fastest first: the parts on paper, their sum, and the virtual clock. On paper no
# mesh is off by more than 12 %, and the best one is the best:

# %%
print("(pp, dp, tp)   work + tp sums + bubble + gradients = on paper   clock")
for layout in sorted(layouts, key=paper.get):
    row = [1e3 * seconds for seconds in parts[layout].values()]
    print(
        f"{layout}    {row[0]:7.2f} {row[1]:9.2f} {row[2]:8.2f} {row[3]:11.2f}"
        f" {1e3 * paper[layout]:10.2f} {1e3 * clock[layout]:7.2f}"
    )
best = min(layouts, key=paper.get)
print(f"best on paper {best}, best on the clock {min(layouts, key=clock.get)}")
tp_guess.judge(best[2])
assert best == min(layouts, key=clock.get)
assert all(abs(paper[layout] / clock[layout] - 1) < 0.12 for layout in layouts)

# %% [markdown]
# The best mesh mixes two axes: two tensor halves save more of the gradients' time than their sums
# cost. Eight of them do not, because a ring of eight sends seven times as many messages, each with
# its latency. The prediction leaves out the all-reduces of the split vocabulary and the losses. So it is
# most wrong where tp is large:

# %%
for layout in ((1, 8, 1), (1, 1, 8)):
    print(f"{layout}: {1e3 * (clock[layout] - paper[layout]):.2f} ms are missing on paper")

# %% [markdown]
# A plan belongs to one machine. Another machine takes a second to try on paper:

# %%
for alpha, beta in ((5e-6, 1e-9), (5e-7, 1e-10), (5e-5, 1e-9), (5e-6, 1e-8)):
    other = LinkModel(alpha=alpha, beta=beta, flops=2e10, memory_bandwidth=1e18)
    there = min(layouts, key=lambda layout, links=other: sum(predicted(*layout, links).values()))
    print(f"latency {1e6 * alpha:4g} µs, {1e-9 / beta:4g} GB/s: best (pp, dp, tp) = {there}")

# %% [markdown]
# With a long latency the sums inside the layers are too many messages. On slow links the gradients
# are too many bytes, and a pipeline sends neither.
#
# The chosen mesh still trains what one device trains:

# %%
verdict = SimWorld(RANKS).run(compare_rank, job_of(*best, precision="fp64"))[0]
print(f"max |w_parallel - w_single| = {verdict.max_difference['weights']:.1e}")
assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# A model of the machine is only as good as its numbers. Suppose that messages take no time, and the model
# cannot tell four meshes from each other. On the clock one of them is the best, and one nearly the worst:

# %%
free = LinkModel(alpha=0.0, beta=0.0, flops=2e10, memory_bandwidth=1e18)
naive = {layout: sum(predicted(*layout, free).values()) for layout in layouts}
least = min(naive.values())
seem_best = [layout for layout in layouts if naive[layout] < 1.001 * least]
for layout in seem_best:
    print(
        f"{layout}: {1e3 * naive[layout]:.2f} ms on paper, "
        f"{1e3 * clock[layout]:5.2f} ms on the clock"
    )
assert len(seem_best) == 4
assert best in seem_best
assert max(clock[layout] for layout in seem_best) > 1.7 * clock[best]

# %% [markdown]
# ## 7 Exercise: the fastest mesh
#
# n ranks are dp replicas of tp tensor parts each, without a pipeline. `activation` are the bytes of the
# whole batch's activation between two layers, of which a replica has 1/dp. Each of the layers has four
# sums of that over the tp ranks, as above. `gradient` are the bytes of the gradient of the whole model,
# of which a tensor part has 1/tp; it is summed once over the dp ranks. All sums go round a ring, and
# nothing overlaps. Return (dp, tp). Judged: how long that mesh waits; no other may wait less.


# %%
def fastest_mesh(n, layers, activation, gradient, alpha, beta):
    return n, 1


check("20b.fastest_mesh", fastest_mesh)

# %%
reveal("20b.fastest_mesh")
check("20b.fastest_mesh", solution("20b.fastest_mesh"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Count the work once, then divide.** With p stages, t tensor parts and d replicas: the work of a
#   replica's samples over p t, and what t, p and d add to it: ring all-reduces in every layer, a bubble,
#   and a ring of the gradients. Ten meshes take a second on paper; measure the one that you choose.
# - `minidist plan` does the same for GPUs, where memory decides first which layouts fit.
#   [docs/planner.md](../docs/planner.md) compares it with published measurements.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 8 minidist train --pp 2 --dp 2 --tp 2 --layers 8 --steps 5
#
# A plan for 64 GPUs:
#
#     minidist plan --model llama-3.1-70b --seq 8192 --ranks 64 --global-batch 512 -o frontier.svg

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `minidist plan` | Calculon, vTrain (simulators of a step); Hugging Face `accelerate estimate-memory`; NeMo's and DeepSpeed's auto-tuners, which run layouts |
# | all meshes by a cost model | Alpa (inter- and intra-operator plans); Galvatron; Megatron-LM's rules of thumb ("Efficient Large-Scale Language Model Training", section 3) |
# | `time_plan` | Zero Bubble's simulator |
#
# Next: [20c Stages of equal time](20c_stages_of_equal_time.ipynb). All of them are in the [index](README.md).
