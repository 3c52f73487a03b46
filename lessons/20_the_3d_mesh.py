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
# By now there are three ways to cut a job, and many cards can use all three at once. Lesson 19 ended with
# 16 stages, too many to be equal and to be busy at both ends of a step. If two cards share each layer, eight
# stages are enough. But which axis goes on which cards?
#
# Eight ranks train a GPT as 2 x 2 x 2: two pipeline stages (pp), in each of them two data-parallel
# replicas (dp), in each of them two tensor-parallel halves (tp). Rank r has the place (pp, dp, tp)
# with r = 4 pp + 2 dp + tp. Neighbours in pp exchange the activations at one boundary, neighbours
# in dp their gradients once per step, and neighbours in tp sum activations four times per layer and
# micro-batch.
#
# Two ranks at a time share a node, and a link between nodes is twenty times as slow as one inside. Rank 5
# has the place (1, 0, 1). How many times as many bytes does it send to its neighbour in tp as to its
# neighbour in pp? And how many times as long does a step take when not the tp neighbours but the pp
# neighbours share a node?

# %% [markdown]
# ## 2 Predict
#
# The model has four layers, so a stage has two, and eight samples are four micro-batches for each
# replica. A sum over two ranks sends an activation's bytes once from each. A guess within a third is good enough.

# %%
from minidist.course.lesson import check, predict, reveal, small_job, solution

bytes_guess = predict("bytes from rank 5 to its neighbour in tp, over those in pp", example=4)

# %% [markdown]
# For the second number: with messages that cost nothing a step takes 3.2 ms. A message between nodes takes 20 µs
# and 4 ns for each byte. Rank 5 sends 96 messages of about 3 kB in tp and two of 53 kB in dp, one after the
# other; those in pp are few.

# %%
slower_guess = predict("time of a step with pp inside a node, over tp inside", example=20)

# %%
from dataclasses import replace

import numpy as np

from minidist import LinkModel, SimWorld, all_gather
from minidist.course.story import spent, story
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.parallel.fitting_dims import dims_of
from minidist.report import show
from minidist.report.frame import new_figure

# %% [markdown]
# ## 3 The idea and its picture
#
# **Ranks are a grid with one axis for each kind of parallelism, and the axis that sends most lies
# on the fastest link.** It costs three kinds of messages, and a placement that decides what they cost.
#
# One training step of a small GPT on eight ranks, pp 2 x dp 2 x tp 2. What is sent once at the start, and the
# loss's few bytes, are left out:


# %%
def job_of(steps, **layout):
    shape = {"layers": 4, "width": 32, "heads": 4, "context": 32, "precision": "fp64"}
    return small_job(**shape, global_batch=8, micro_batch=1, steps=steps, **layout)


job = job_of(1, pp=2, dp=2, tp=2)
world = SimWorld(8)
world.run(train, job)
LEFT_OUT = "startup", "metrics"
traces = [
    replace(trace, messages=[m for m in trace.messages if m.purpose not in LEFT_OUT])
    for trace in world.traces
]
bytes_between = np.zeros((8, 8))
for message in (message for trace in traces for message in trace.sent()):
    bytes_between[message.rank, message.peer] += message.nbytes

# %% [markdown]
# A grey box is a node. A line joins two neighbours on an axis, and its width is proportional to the bytes that
# one sends to the other: the thick lines of tp stay inside the nodes.

# %%
grid = np.arange(8).reshape(2, 2, 2)  # pipeline, data, tensor
COLOURS = {"pp": "#4477AA", "dp": "#228833", "tp": "#AA3377"}


def wires(inside):
    """Draw the ranks on four nodes, with the neighbours on one axis, pp or tp, in each node."""
    axes = (figure := new_figure(6, 2.6)).add_subplot()
    axes.barh([-0.3, -0.3, -1.9, -1.9], 2, 1.3, left=[-0.5, 2.5] * 2, color="#DDDDDD")
    at = {}
    for (p, d, t), rank in np.ndenumerate(grid):
        across, within = (p, t) if inside == "tp" else (t, p)
        at[rank] = 3 * across + within, -1.6 * d - 0.6 * within
    for i, (name, colour) in enumerate(COLOURS.items()):
        for number, (a, b) in enumerate(np.moveaxis(grid, i, -1).reshape(4, 2).tolist()):
            x, y = zip(at[a], at[b], strict=True)
            width = max(bytes_between[a, b], bytes_between[b, a]) / 50_000
            axes.plot(x, y, linewidth=width, color=colour, label="" if number else name)
    for rank, (x, y) in at.items():
        circle = {"boxstyle": "circle", "color": "white"}
        axes.text(x, y, rank, ha="center", va="center", bbox=circle)
    axes.set_title(f"8 ranks on four nodes, {inside} inside a node", fontsize=10, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    axes.set_axis_off()
    return figure


figure = wires("tp")
show(figure)

# %% [markdown]
# The same ranks with the same messages, and the two stages of a pipeline in each node. Now all that is thick leaves
# the nodes:

# %%
figure = wires("pp")
show(figure)

# %% [markdown]
# ## 4 The code
#
# A slice of the grid along an axis is a communicator, and each technique sees only its own. Rank 5's
# slices by hand, and the degrees as the library takes them: dp is what the others leave of 8. (The
# axes cp and ep are those of lessons 22 and 14c.)

# %%
p, d, t = np.argwhere(grid == 5)[0]
by_hand = {"tp": grid[p, d, :], "dp": grid[p, :, t], "pp": grid[:, d, t]}
dims = dims_of(8, pp=2, tp=2)
print(dims)

# %% [markdown]
# Which ranks share a node depends on the order in which the grid is read. `np.moveaxis` makes an axis the
# last one, so that its neighbours follow each other. Each pair of numbers is a node:

# %%
nodes = {}
for i, axis in enumerate(("pp", "dp", "tp")):
    nodes[axis] = np.moveaxis(grid, i, -1).reshape(4, 2)
    print(f"{axis} neighbours share a node: {nodes[axis].tolist()}")

# %% [markdown]
# `dims.axes(comm)` makes the communicators, one for each axis. Those of rank 5 have the members found by hand.
# The recipe that applies the axes to a model, one page, is
# [parallelize.py](../minidist/core/train/parallelize.py): tensor parallelism cuts the layers of a stage, and
# data parallelism sums the gradients of what a rank then has.


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
sent, count = {}, {}
for message in traces[5].sent():
    sent[message.peer] = sent.get(message.peer, 0) + message.nbytes
    count[message.peer] = count.get(message.peer, 0) + 1
for axis, group in groups.items():
    (peer,) = (rank for rank in group if rank != 5)
    print(f"{axis}: rank 5 sends {sent[peer]:>7,} B in {count[peer]} messages to rank {peer}")
bytes_guess.judge(sent[4] / sent[1], within=0.34)
assert sorted(sent) == [1, 4, 7]  # one neighbour on each axis
assert max(sent, key=sent.get) == 4

# %% [markdown]
# By hand: an activation of one sample has 32 x 32 numbers of 8 B.

# %%
activation = 32 * 32 * 8
print(f"tp: 4 micro-batches x 2 layers x 4 sums: {4 * 2 * 4 * activation:,} B")
print(f"pp: 4 micro-batches: {4 * activation:,} B")

# %% [markdown]
# So tp sends eight times as much as pp. The rest in tp is for the vocabulary, which is cut too (14b):
# 32,768 B are the gradients at the input of the output matrix, and 3,072 B the loss's three numbers per token.
# The rest in pp, 2,048 B, is one message for the embedding: it is also the output matrix, so the first and
# the last stage add its two gradients. That makes 8.56.

# %% [markdown]
# And it trains what one device trains. `verdict.equal` compares every loss, gradient, weight and optimizer
# state of every step; the difference of the weights is printed:

# %%
for layout in ({"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "dp": 4, "zero": 1}, {"tp": 4, "dp": 2}):
    config = job_of(2, **layout)
    verdict = SimWorld(8).run(compare_rank, config)[0]
    print(f"{layout}: max |w_parallel - w_single| = {verdict.max_difference['weights']:.1e}")
    assert verdict.equal, verdict.first_difference

# %% [markdown]
# ## 6 Break it
#
# A placement that is right, and slow. `near` and `far` are the seconds per message and per byte inside a node
# and between two. The time of the second step, by the ranks of each node:


# %%
def seconds(nodes, near=(1e-6, 2e-10), far=(2e-5, 4e-9)):
    node_of = {rank: node for node, ranks in enumerate(nodes.tolist()) for rank in ranks}

    def link(a, b):
        return near if node_of[a] == node_of[b] else far

    timed = SimWorld(8, links=LinkModel(flops=5e9, memory_bandwidth=1e10, link=link))
    timed.run(train, job.model_copy(update={"steps": 2}))
    spans = [span for trace in timed.traces for span in trace.spans]
    first, second = (max(s.end for s in spans if s.name == name) for name in ("step 0", "step 1"))
    return second - first


# %% [markdown]
# Without the time of messages, and with the three placements of part 4:

# %%
print(f"messages cost nothing: {1e3 * seconds(nodes['tp'], (0, 0), (0, 0)):5.2f} ms per step")
times = {axis: seconds(pairs) for axis, pairs in nodes.items()}
for axis, value in times.items():
    print(f"{axis} inside a node: {1e3 * value:6.2f} ms per step")
slower_guess.judge(times["pp"] / times["tp"], within=0.34)
assert times["tp"] == min(times.values())

# %% [markdown]
# Between nodes the 96 messages of tp take 96 x (20 µs + 3 kB x 4 ns) = 3.1 ms. Each micro-batch has a quarter
# of them, and a stage waits for one micro-batch more in the other stage, so a step is longer by 5/4 of that,
# 3.9 ms. The two of dp take 0.5 ms. So a step takes a little more than 3.2 + 0.5 ms with tp inside, a little
# more than 3.2 + 3.9 ms with dp inside, and about 3.2 + 3.9 + 0.5 ms with pp inside.

# %% [markdown]
# ## 7 Exercise: ranks to nodes
#
# `place(shape, traffic, node_size)`: a mesh of `shape`, last axis fastest, in which two
# ranks whose places differ in one axis a, and in no other, exchange `traffic[a]` bytes. Return for each
# rank, in the order of its number, the node that it runs on: nodes 0, 1, 2, ... with `node_size` ranks
# each. The bytes of two axes differ by a factor of ten or more, so the axis with the most bytes goes into the
# node first, then the next. Judged: the bytes between nodes, which must be as few as with the axes in the best
# order.


# %%
def place(shape, traffic, node_size):
    return [rank // node_size for rank in range(int(np.prod(shape)))]


check("20.place_ranks", place)

# %%
reveal("20.place_ranks")
check("20.place_ranks", solution("20.place_ranks"))

# %% [markdown]
# ## 8 Takeaway
#
# - **ranks = pp x dp x tp**: tensor parallelism inside the node, then data, and pipeline outermost.
# - Numbers that a rank sends in a step, with b samples of s tokens in a micro-batch, width h and N
#   parameters on p stages x n replicas x t tensor parts: tensor 8 b s h (t-1)/t per layer and micro-batch;
#   data 2 (n-1)/n N/(p t) once; pipeline b s h per stage boundary, micro-batch and direction.

# %% [markdown]
# The job of the course so far, since lesson 12 a model of 65 billion parameters on 64 cards of 80 GB (85 x 10^9 B), as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with 2^20 tokens per step. In row 20
# two cards of a node cut each layer; eight such pairs are the stages, with ZB-H1 as in row 19; and there are
# four replicas, with ZeRO 1. (Row 14 has cut layers alone.) The last line is row 20 with ZeRO 2:

# %%
story("20")
spent("14")
spent("19")
spent("20")
spent("20", schedule="zb-h1", dp=4, zero=2, tp=2, pp=8, sequence_parallel=True)

# %% [markdown]
# | seconds | row 19 | row 20 | difference | because |
# |---|---|---|---|---|
# | computing | 13.19 | 12.82 | -0.37 | eight stages are less unequal than 16 |
# | waiting for other stages | 0.50 | 0.24 | -0.26 | there are fewer of them |
# | sums in the cut layers | | 0.55 | +0.55 | |
# | sums of gradients | 0.27 | 0.00 | -0.26 | ZeRO 1 sums them once per step, not in every micro-batch, and inside a node: 4 replicas x 2 parts are its 8 cards |
# | messages between stages | 0.27 | 0.16 | -0.11 | |
#
# ZeRO 1 keeps whole gradients; the last line is how much less a card would hold with ZeRO 2.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 8 minidist train --pp 2 --dp 2 --tp 2 --layers 4 --steps 20
#     mpiexec -n 8 python mpi_examples/5_context_and_experts/three_axes.py
#     minidist train --config mpi_examples/job.toml          # a job in a file

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `ParallelDims`, `init_device_mesh` | torchtitan `ParallelDims`; PyTorch `init_device_mesh((2, 2, 2), ("pp", "dp", "tp"))`; Megatron-LM `initialize_model_parallel` |
# | `--pp --dp --tp` | Megatron-LM `--pipeline-model-parallel-size`, `--tensor-model-parallel-size` (dp is what is left); DeepSpeed `PipeModelDataParallelTopology` |
# | last axis fastest | Megatron-LM's default order `tp-cp-ep-dp-pp`, the first one the fastest; `--use-tp-pp-dp-mapping` exchanges the last two |
#
# In row 20 all tokens of a text are on the same cards, and a text that is sixteen times as long does not fit.
#
# Next: [22 Long context](22_long_context.ipynb). Side rooms: [20b Plan it](20b_plan_it.ipynb),
# [20c Stages of equal time](20c_stages_of_equal_time.ipynb). All lessons are in the
# [index](README.md).
