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
# parallelism sums the gradient once per step. Tensor parallelism sums activations four times per
# layer. A pipeline sends little, and its stages wait for the first micro-batch and for the last gradients.

# %% [markdown]
# ## 2 Predict
#
# The model has 403,072 parameters in float32, 1.6 MB, and the activation of one sample has 32 x 64 numbers,
# 8 kB. A sum over n ranks is 2 (n-1) messages of 1/n of the bytes, one after the other. Into how many
# tensor-parallel parts does the fastest mesh cut a layer: 1, 2, 4 or 8? Compare a sum of the gradient over
# eight ranks with one over four ranks, and with the 32 sums of activations in the layers.

# %%
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution

tp_guess = predict("tp of the fastest mesh", example=1)

# %%
from functools import cache

import numpy as np

from minidist import LinkModel, SimWorld
from minidist.base.trace_file import only_steps
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.report import show
from minidist.report.frame import new_figure

# %% [markdown]
# ## 3 The idea and its picture
#
# **Count the work once, and predict the time of a step for every mesh from three numbers of the machine**, FLOP/s,
# latency and bandwidth, and from the shapes of the model. It saves trying. It costs a model of the machine,
# which is as good as its three numbers.
#
# The job and the machine of the case:

# %%
RANKS, LAYERS, WIDTH, LENGTH, SAMPLES = 8, 8, 64, 32, 8
HUES = ("#4477AA", "#AA3377", "#DDDDDD", "#CCBB44")  # of what a step's time is for
SHAPE = {"layers": LAYERS, "width": WIDTH, "heads": 8, "context": LENGTH, "reduction": "ring"}
SHAPE |= {"global_batch": SAMPLES, "steps": 2, "optimizer": "sgd"}
# The memory is so fast that only FLOPs count.
LINKS = LinkModel(alpha=5e-6, beta=1e-9, flops=2e10, memory_bandwidth=1e18)


def job_of(pp, dp, tp, **settings):
    """A pipeline takes its samples one by one, others take all at once."""
    passes = SAMPLES // dp if pp > 1 else 1
    return small_job(**SHAPE, pp=pp, dp=dp, tp=tp, accumulation=passes, **settings)


# %% [markdown]
# The prediction will be compared with a simulated world. There the code that trains runs on every mesh, and
# its messages and its computing take virtual time. This returns the time of its second step, and the trace:


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
# The job on the three meshes of one axis. Red waits for a message that has not been sent yet; grey is a
# message on its way, or nothing to do. Each axis loses its time in another place. In a pipeline the first stage
# waits in the middle, until the first gradient is back, and the last one at both ends; dp waits after backward,
# and tp in every layer. (The red at the right ends is the sum of the loss.)

# %%
for layout in ((8, 1, 1), (1, 8, 1), (1, 1, 8)):
    seconds, traces = measured(*layout)
    title = f"pp, dp, tp = {layout}: {1e3 * seconds:.2f} ms"
    picture("gantt", traces, "part 3 of lesson 20b", title=title)

# %% [markdown]
# ## 4 The code
#
# The work first. In forward each parameter is multiplied once and added once for each token, and backward
# does twice as much: 6 FLOPs per parameter and token. The ranks share them equally on every mesh.

# %%
PARAMETERS = 403_072
assert SimWorld(1).run(train, job_of(1, 1, 1))[0].held["parameter"] == 4 * PARAMETERS  # bytes


def work(links):
    return 6 * PARAMETERS * SAMPLES * LENGTH / RANKS / links.flops


# %% [markdown]
# Then lesson 05's ring, by which activations and gradients are summed:


# %%
def ring(n, nbytes, links):
    """All-reduce: 2 (n-1) messages of 1/n of the bytes, one after the other."""
    return 2 * (n - 1) * (links.alpha + nbytes / n * links.beta)


# %% [markdown]
# On tp, the activations are summed four times in each layer of a rank, in each of its m micro-batches. On
# dp, the gradient of a rank's parameters is summed once:


# %%
def micro_batches(pp, dp):
    """A pipeline takes the samples of a replica one by one, other meshes take all at once."""
    return SAMPLES // dp if pp > 1 else 1


def activation(pp, dp):
    """Bytes between two layers in a micro-batch."""
    return SAMPLES // dp // micro_batches(pp, dp) * LENGTH * WIDTH * 4


def tensor(pp, dp, tp, links):
    return micro_batches(pp, dp) * LAYERS / pp * 4 * ring(tp, activation(pp, dp), links)


def data(pp, dp, tp, links):
    return ring(dp, PARAMETERS * 4 / pp / tp, links)


# %% [markdown]
# On pp, lesson 17's bubble: a stage waits for one micro-batch in each of the other pp - 1 stages, and for a
# message there and one back. A micro-batch takes 1/m of the work and of the sums:


# %%
def bubble(pp, dp, tp, links):
    one = (work(links) + tensor(pp, dp, tp, links)) / micro_batches(pp, dp)
    return (pp - 1) * (one + 2 * (links.alpha + activation(pp, dp) * links.beta))


def predicted(mesh, links=LINKS):
    """Seconds of a step, by what they are for."""
    return [work(links), tensor(*mesh, links), bubble(*mesh, links), data(*mesh, links)]


# %% [markdown]
# ## 5 Check
#
# All ten meshes, on paper and on the clock:

# %%
meshes = [
    (pp, dp, RANKS // pp // dp)
    for pp in (1, 2, 4, 8)
    for dp in (1, 2, 4, 8)
    if RANKS % (pp * dp) == 0
]
paper = {mesh: sum(predicted(mesh)) for mesh in meshes}
clock = {mesh: measured(*mesh)[0] for mesh in meshes}

# %% [markdown]
# The parts on paper, and the virtual clock as a black mark, the fastest mesh on top. On paper no mesh is off by more than
# 13 %, and the best one is the best:

# %%
order = sorted(meshes, key=paper.get, reverse=True)
left = np.zeros(len(order))
axes = (figure := new_figure(9, 3.6)).add_subplot()
parts = 1e3 * np.array([predicted(mesh) for mesh in order]).T
for name, colour, part in zip(("work", "tp sums", "bubble", "gradients"), HUES, parts, strict=True):
    axes.barh(range(len(order)), part, left=left, height=0.6, color=colour, label=name)
    left += part
axes.plot(
    [1e3 * clock[mesh] for mesh in order], range(len(order)), "k|", markersize=14, label="clock"
)
axes.set_yticks(range(len(order)), [str(mesh) for mesh in order])
axes.set_title("(pp, dp, tp): ms of a step, on paper and on the clock", fontsize=10, loc="left")
axes.legend(fontsize=8)
show(figure)
for mesh in order[::-1][:3]:
    print(f"{mesh}: {1e3 * paper[mesh]:.2f} ms on paper, {1e3 * clock[mesh]:.2f} ms on the clock")
best = min(meshes, key=paper.get)
print(f"best on paper {best}, best on the clock {min(meshes, key=clock.get)}")
tp_guess.judge(best[2])
assert best == min(meshes, key=clock.get)
assert all(abs(paper[mesh] / clock[mesh] - 1) < 0.13 for mesh in meshes)

# %% [markdown]
# The best mesh mixes two axes: two tensor halves save 1.65 ms of the gradients' time, and their sums cost
# 0.84 ms. Eight parts save all of it and cost 5.91 ms. A rank then takes all eight samples in place of two, cut
# into eight parts in place of two: a ring of eight sends seven times as many messages of the same size, 8 kB,
# each with its latency. The prediction leaves out attention and the sums over the split vocabulary, so it is
# always a little too low, and most where tp and a pipeline meet, because small micro-batches make the sums over
# the vocabulary many.
#
# A plan belongs to one machine. Another machine takes a second to try on paper:

# %%
for alpha, beta in ((5e-6, 1e-9), (5e-5, 1e-9), (5e-6, 1e-8)):
    other = LinkModel(alpha=alpha, beta=beta, flops=2e10, memory_bandwidth=1e18)
    there = min(meshes, key=lambda mesh, links=other: sum(predicted(mesh, links)))
    print(f"latency {1e6 * alpha:4g} µs, {1e-9 / beta:4g} GB/s: best (pp, dp, tp) = {there}")

# %% [markdown]
# With a long latency the sums inside the layers are too many messages. On slow links the gradients
# are too many bytes, and a pipeline sends few messages and few bytes.
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
naive = {mesh: sum(predicted(mesh, free)) for mesh in meshes}
seem_best = [mesh for mesh in meshes if naive[mesh] < 1.001 * min(naive.values())]
for mesh in seem_best:
    print(f"{mesh}: {1e3 * naive[mesh]:.2f} ms on paper, {1e3 * clock[mesh]:5.2f} ms on the clock")
assert len(seem_best) == 4
assert best in seem_best
assert max(clock[mesh] for mesh in seem_best) > 1.7 * clock[best]

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
# - **Count the work once, and add what each axis waits for**: rings in every layer (tp), a bubble (pp), and a
#   ring of the gradients (dp). Ten meshes take a second on paper; measure the one that you choose. Slow links ask
#   for stages, and fast links with a short latency ask for a mixture of dp and tp.
# - `minidist plan` does the same for GPUs, where memory decides first which layouts fit.
#   [docs/planner.md](../docs/planner.md) compares it with published measurements.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 8 minidist train --dp 4 --tp 2 --layers 8 --steps 5
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
#
# The plan takes all stages to be equally long. Layers are not.
#
# Next: [20c Stages of equal time](20c_stages_of_equal_time.ipynb). All lessons are in the [index](README.md).
