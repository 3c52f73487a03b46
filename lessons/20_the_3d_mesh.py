# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 20 The 3-D mesh
#
# *30 minutes. Before it: 06, 14 and 17.*
#
# ## 1 The case
#
# Eight ranks train a GPT as 2 x 2 x 2: two pipeline stages (pp), in each of them two data-parallel
# replicas (dp), in each of them two tensor-parallel halves (tp). Rank r has the place (pp, dp, tp)
# with r = 4 pp + 2 dp + tp. Neighbours in pp exchange the activations at one boundary, neighbours
# in dp their gradients once per step, and neighbours in tp sum activations four times per layer and
# micro-batch.
#
# Rank 5 has the place (1, 0, 1). How many times as many bytes does it send to its neighbour in tp
# as to its neighbour in pp? And two ranks at a time share a node; a link between nodes is twenty
# times as slow as one inside. How many times as long does a step take when not the tp neighbours
# but the pp neighbours share a node?

# %% [markdown]
# ## 2 Predict
#
# The model has four layers, so a stage has two, and eight samples are four micro-batches for each
# replica. A sum over two ranks sends an activation's bytes once from each. For the second number: with
# messages that cost nothing a step takes 3.4 ms. A message between nodes takes 20 µs and 4 ns for each
# byte. Rank 5 sends 96 messages of about 3 kB in tp, one after the other, and in dp two of 53 kB. A
# guess within a third is good enough.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, small_job, solution

bytes_guess = predict("bytes from rank 5 to its neighbour in tp, over those in pp", example=4)
slower_guess = predict("time of a step with pp inside a node, over tp inside", example=20)

# %%
import numpy as np

from minidist import LinkModel, SimWorld, UsageError, all_gather
from minidist.course.story import story
from minidist.job.config.train_config import resolve_batches
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.parallel.fitting_dims import dims_of
from minidist.planning.architecture import named
from minidist.planning.cluster.gpus import machine_of
from minidist.planning.cluster.layout import Job
from minidist.planning.cluster.search import search
from minidist.planning.volumes import closed_form_bytes

# %% [markdown]
# ## 3 The idea and its picture
#
# Put data, tensor and pipeline parallelism together: ranks in a grid, one axis for each kind, and
# **the axis that sends most on the fastest link**. What it saves: each kind alone stops paying off
# at some number of ranks; their product continues to. What it costs: three kinds of messages, and a
# placement that decides what they cost.
#
# Eight ranks as pp 2 x dp 2 x tp 2. The last axis is the fastest: its neighbours have neighbouring
# numbers.

# %%
picture("mesh", [], "part 3 of lesson 20", name="8 ranks", mesh={"pp": 2, "dp": 2, "tp": 2})

# %% [markdown]
# One training step of a small GPT on that mesh, and how much each rank sent to which:


# %%
def job_of(steps, **layout):
    shape = {"layers": 4, "width": 32, "heads": 4, "context": 32, "precision": "fp64"}
    return small_job(**shape, global_batch=8, micro_batch=1, steps=steps, **layout)


job = job_of(1, pp=2, dp=2, tp=2)
world = SimWorld(8)
results = world.run(train, job)
picture("bytes-matrix", world, "part 3 of lesson 20", name="pp 2, dp 2, tp 2")

# %% [markdown]
# ## 4 The code
#
# The degrees are checked in one place, and a slice of the grid along an axis is a communicator. The
# recipe, one page in [parallelize.py](../minidist/core/train/parallelize.py), applies the axes to
# the model in a fixed order: expert and tensor parallelism cut layers, data parallelism lays out
# what is left of them as flat arrays, and the pipeline does so stage by stage.

# %%
grid = np.arange(8).reshape(2, 2, 2)  # pipeline, data, tensor
p, d, t = np.argwhere(grid == 5)[0]
by_hand = {"tp": grid[p, d, :], "dp": grid[p, :, t], "pp": grid[:, d, t]}
dims = dims_of(8, pp=2, tp=2)
print(dims)


# %%
def members(comm, axis):
    """Return the numbers of all ranks on the axis."""
    return all_gather(dims.axes(comm)[axis], np.array([float(comm.rank)])).astype(int).tolist()


groups = {axis: SimWorld(8).run(members, axis)[5] for axis in ("tp", "dp", "pp")}
print("rank 5 belongs to", groups)
assert groups == {axis: ranks.tolist() for axis, ranks in by_hand.items()}

# %% [markdown]
# ## 5 Check
#
# What rank 5 sent in that step, to whom, counted from its messages:

# %%
sent = {}
for message in world.traces[5].sent():
    if message.purpose not in ("startup", "metrics"):
        sent[message.peer] = sent.get(message.peer, 0) + message.nbytes
for axis, group in groups.items():
    (peer,) = (rank for rank in group if rank != 5)
    print(f"{axis}: rank 5 sends {sent[peer]:>7,} B per step to rank {peer}")
bytes_guess.judge(sent[4] / sent[1], within=0.34)
assert sorted(sent) == [1, 4, 7]  # one neighbour on each axis
assert max(sent, key=sent.get) == 4

# %% [markdown]
# By purpose, next to the closed forms of the single techniques: together they send the sum.

# %%
closed = closed_form_bytes(job, resolve_batches(job, 8), [result.sizes for result in results])
picture(
    "bytes-by-purpose", world, "part 5 of lesson 20", name="pp 2, dp 2, tp 2", closed_form=closed
)

# %% [markdown]
# And it trains what one device trains, in every loss, gradient, weight and optimizer state of every
# step:

# %%
for layout in (
    {"pp": 2, "dp": 2, "tp": 2},
    {"pp": 2, "dp": 4, "zero": 1},
    {"tp": 2, "cp": 2, "dp": 2},
):
    config = job_of(2, **layout)
    verdict = SimWorld(8).run(compare_rank, config)[0]
    print(f"{layout}: max |w_parallel - w_single| = {verdict.max_difference['weights']:.1e}")
    assert verdict.equal, verdict.first_difference

# %% [markdown]
# ## 6 Break it
#
# Degrees whose product is not the number of ranks:

# %%
with expect(UsageError):
    dims_of(8, pp=2, dp=3)

# %% [markdown]
# A placement that is right, and slow. Four nodes with two ranks each; a link between nodes is
# twenty times slower than one inside. With nodes {0,1}, {2,3}, ... the tensor axis stays inside;
# with nodes {0,4}, {1,5}, ... the pipeline axis does.


# %%
def seconds(node_of):
    """Virtual time of the second step when rank r runs on node node_of[r]."""
    near, far = (1e-6, 2e-10), (2e-5, 4e-9)
    links = LinkModel(
        flops=5e9,
        memory_bandwidth=1e10,
        link=lambda a, b: near if node_of[a] == node_of[b] else far,
    )
    timed = SimWorld(8, links=links)
    timed.run(train, job.model_copy(update={"steps": 2}))
    first, second = (
        max(span.end for trace in timed.traces for span in trace.spans if span.name == f"step {i}")
        for i in (0, 1)
    )
    return second - first


inside = {
    "tp": [0, 0, 1, 1, 2, 2, 3, 3],
    "dp": [0, 1, 0, 1, 2, 3, 2, 3],
    "pp": [0, 1, 2, 3, 0, 1, 2, 3],
}
times = {axis: seconds(node_of) for axis, node_of in inside.items()}
for axis, value in times.items():
    print(f"{axis} inside a node: {1e3 * value:6.2f} ms per step")
slower_guess.judge(times["pp"] / times["tp"], within=0.34)
assert times["tp"] == min(times.values())

# %% [markdown]
# ## 7 Exercise: ranks to nodes
#
# `place(shape, traffic, node_size)`: a mesh of `shape`, last axis fastest, in which any two ranks
# that differ on axis a only exchange `traffic[a]` bytes. Return for each rank, in the order of its
# number, the node that it runs on: nodes 0, 1, 2, ... with `node_size` ranks each. Send as few
# bytes between nodes as the rule "the axis with most bytes inside" gives.


# %%
def place(shape, traffic, node_size):
    return [rank // node_size for rank in range(int(np.prod(shape)))]


check("20.place_ranks", place)

# %%
reveal("20.place_ranks")
check("20.place_ranks", solution("20.place_ranks"))

# %% [markdown]
# `minidist plan` places ranks by this rule: tensor parallelism fastest, so that its groups lie
# inside nodes. Take Llama 3.1 70B on 64 GPUs in nodes of 8. The best layout for each degree of
# tensor parallelism, and the seconds of a step in which its messages are not hidden:

# %%
large = Job(named("llama-3.1-70b"), 8192, 512, "bf16", 64)
for tp in (1, 2, 4, 8, 16):
    plan = search(large, machine_of("h100"), {"tp": tp, "cp": 1}).plans[0]
    exposed = plan.time.exposed.get("tp", 0.0)
    print(
        f"tp {tp:2}: {plan.time.seconds:6.1f} s, {exposed:5.1f} s of tensor parallelism's messages;"
        f" {plan.layout}"
    )

# %% [markdown]
# With 16 a group needs two nodes, and its messages take more than a third of the step. But a group of
# 8, a whole node, is not the best either: with 4 the step computes more (a part of the activations
# again) and still takes less time, because the messages that it waits for take 9.5 s less.

# %% [markdown]
# ## 8 Takeaway
#
# - **ranks = pp x dp x tp**; a slice of the mesh along an axis is a communicator, and each
#   technique sees only its own.
# - Numbers per step and rank: tensor 8 b s h (t-1)/t per layer and micro-batch, data 2 (n-1)/n N/(p t)
#   once for N parameters, pipeline b s h per stage boundary, micro-batch and direction. In bytes: times
#   those of a number. **Tensor inside the node**, then data, pipeline across.

# %% [markdown]
# The job of the course so far, a model of 7 billion parameters on cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with parameters of 2 B, gradients
# added up in float32 (4 B) and 12 B for Adam in every row:

# %%
story("20")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 8 minidist train --pp 2 --dp 2 --tp 2 --layers 4 --steps 20
#     mpiexec -n 8 python mpi_examples/5_context_and_experts/three_axes.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `ParallelDims`, `init_device_mesh` | torchtitan `ParallelDims`; PyTorch `init_device_mesh((2, 2, 2), ("pp", "dp", "tp"))`; Megatron-LM `initialize_model_parallel` |
# | `--pp --dp --tp` | Megatron-LM `--pipeline-model-parallel-size`, `--tensor-model-parallel-size` (dp is what is left); DeepSpeed `PipeModelDataParallelTopology` |
# | last axis fastest | Megatron-LM `--use-tp-pp-dp-mapping` and its rank order "tp-cp-ep-dp-pp" |
#
# Next: [22 Long context](22_long_context.ipynb). Side room: [20b Plan it](20b_plan_it.ipynb). All
# of them are in the [index](README.md).
