# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 Tensor parallel
#
# *30 minutes. Before it: 02, 04 and 06.*
#
# ## 1 The case
#
# ZeRO 3 gathers the weights of every layer, in forward and again in backward. Could the weights stay where
# they are, and the activations travel in their place?
#
# A transformer block has an MLP with two matrices, y = gelu(x A) B, and an attention with two, Q|K|V and
# the projection. Give each of four ranks a quarter of the *columns* of the first matrix and a quarter of
# the *rows* of the second. Then x A can be computed column by column without a message, and the four
# products with the rows of B only have to be added up: one all-reduce for the MLP, one for the attention,
# and as many in backward.
#
# The activations are 4 x 16 x 64 numbers of 4 B, 16,384 B. With ring all-reduces (lesson 04), how
# many bytes does a rank send in one forward and backward of the block? And what part of the block's
# parameters does it hold?

# %% [markdown]
# ## 2 Predict
#
# The norms and two of the biases are whole on every rank. 5 % off is good enough.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, small_job, solution

bytes_guess = predict("bytes that a rank sends in forward and backward", example=16_384, unit="B")
share_guess = predict("parameters that a rank holds, in percent", example=50, unit="%")

# %%
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np

from minidist import (
    Block,
    FlopCounter,
    GPTConfig,
    LinkModel,
    SimWorld,
    Tensor,
    gpt_plan,
    parallelize_module,
)
from minidist.course.story import spent, story
from minidist.job.equality.compare import compare_rank
from minidist.report import show
from minidist.report.tiles import model_tiles, tiles_figure

# %% [markdown]
# ## 3 The idea and its picture
#
# Train a layer whose matrices do not fit on one rank: **cut the first matrix into columns and the
# second into rows, and one all-reduce each way is the only communication.** Parameters, gradients,
# optimizer state and the inner activations are divided by the number of ranks t. It costs four
# all-reduces of the activations per layer and micro-batch, for which all ranks wait; so t stays
# within the fastest links.
#
# A small GPT of one layer on four ranks. The colour shows which rank holds a tile; grey is held by all.
# The attention's matrices are `c_attn` (Q, K and V side by side) and `attn.c_proj`. Each of the three
# is cut, so that a rank has whole heads. The MLP's are `c_fc` and `mlp.c_proj`: look how the columns of
# the first meet the rows of the second. Before the layer are the embeddings, `wte` of the tokens, which
# is cut too, and `wpe` of the positions, which is not. The norms and the biases of both `c_proj` are whole,
# and not drawn.

# %%
tiles = model_tiles("gpt", tp=4, width=16, heads=4)
show(
    tiles_figure(
        tiles,
        title="a GPT layer on 4 ranks",
        command="minidist tiles --tp 4 --width 16 --heads 4 -o tiles.svg",
    )
)

# %% [markdown]
# One such block on several ranks. Every rank draws the whole block from the same seed, and keeps its tiles.
# `FlopCounter` counts the operations of a computation, and `comm.compute` lets the clock run for them. (The
# library's layers let it run before each all-reduce for what has been counted so far.)

# %%
BATCH, LENGTH, WIDTH, HEADS = 4, 16, 64, 4
BLOCK = "transformer.h.*."  # the plan of a whole GPT says how each layer is cut
PLAN = {name.removeprefix(BLOCK): cut for name, cut in gpt_plan(2).items() if BLOCK in name}


def one_block(comm):
    """Forward and backward of a GPT block; returns how many parameters this rank holds."""
    block = Block(GPTConfig(n_embd=WIDTH, n_head=HEADS), np.float32).initialize(0)
    block = parallelize_module(block, comm, PLAN)
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
    with FlopCounter() as counter:
        y = block(Tensor(x, requires_grad=True))
        comm.compute(counter.take(), name="forward")
        y.backward(np.ones_like(y.data))
        comm.compute(counter.take(), name="backward")
    return sum(p.size for p in block.parameters())


# %% [markdown]
# In the row of each rank F and B are computation; the arrows are the all-reduces, two in forward and two in
# backward:

# %%
world = SimWorld(2, links=LinkModel(alpha=2e-6, beta=1e-10, flops=2e11, memory_bandwidth=1e11))
world.run(one_block)
picture("space-time", world, "part 3 of lesson 14", name="a block on 2 ranks")

# %% [markdown]
# ## 4 The code
#
# Two functions do all of it: in forward or in backward they pass on what they get, and in the other they
# sum it over the ranks. Megatron calls them **f** and **g**; each is the other one backwards:
#
# | | forward | backward |
# |---|---|---|
# | f, `copy_to_tensor_parallel_region`, before the columns | nothing | all-reduce |
# | g, `reduce_from_tensor_parallel_region`, after the rows | all-reduce | nothing |
#
# Why an all-reduce in f's backward? All ranks' columns read x, so each rank has only its part of
# x's gradient. The library's layers are in
# [tensor_parallel.py](../minidist/core/parallel/tensor_parallel.py).
#
# Between f and g is what can be computed column by column: GELU, or ReLU as in this example, or
# attention, head by head. That is why the two cuts come in pairs. The bias of the second layer is
# added after the sum. Without the library, with two ranks:

# %%
rng = np.random.default_rng(1)
x, a, b = rng.integers(-3, 4, (2, 4)), rng.integers(-3, 4, (4, 6)), rng.integers(-3, 4, (6, 4))
whole = np.maximum(x @ a, 0) @ b
parts = [np.maximum(x @ a[:, columns], 0) @ b[columns] for columns in (slice(0, 3), slice(3, 6))]
print("columns, then rows: the parts add up:", np.array_equal(sum(parts), whole))
assert np.array_equal(sum(parts), whole)

# %% [markdown]
# The other order does not work, because the ReLU of a part of a sum is not a part of the ReLU:

# %%
parts = [np.maximum(x[:, rows] @ a[rows], 0) @ b for rows in (slice(0, 2), slice(2, 4))]
print("rows, then columns: the parts add up:", np.array_equal(sum(parts), whole))
assert not np.array_equal(sum(parts), whole)

# %% [markdown]
# Backward, with columns first again: from the gradient of the result each rank's columns give a part of the
# gradient of x, and the all-reduce in f adds the parts up:

# %%
dy = rng.integers(-3, 4, whole.shape)
right = ((dy @ b.T) * (x @ a > 0)) @ a.T
parts = [((dy @ b[c].T) * (x @ a[:, c] > 0)) @ a[:, c].T for c in (slice(0, 3), slice(3, 6))]
print("the parts of x's gradient add up:", np.array_equal(sum(parts), right))
assert np.array_equal(sum(parts), right)

# %% [markdown]
# ## 5 Check
#
# Counted from the trace. An activation of b texts with s tokens of h numbers is b s h numbers; an all-reduce
# over t ranks sends 2 (t-1)/t of them from each rank, and there are four: 8 b s h (t-1)/t.

# %%
ranks = 4
world = SimWorld(ranks)
held = world.run(one_block)
purposes = world.traces[0].bytes_by_purpose()
formula = 8 * BATCH * LENGTH * WIDTH * (ranks - 1) // ranks * 4
print(", ".join(f"{purpose} {nbytes:,} B" for purpose, nbytes in purposes.items()))
print(f"8 b s h (t-1)/t x 4 B = {formula:,} B")
bytes_guess.judge(sum(purposes.values()))
assert sum(purposes.values()) == formula

# %% [markdown]
# The parameters of a rank are a little more than a quarter: the norms and two biases are whole on every rank.

# %%
whole = SimWorld(1).run(one_block)[0]
print(f"parameters: {held[0]:,} of {whole:,}")
share_guess.judge(100 * held[0] / whole, within=0.05)

# %% [markdown]
# Is it the same training? A GPT with two layers, against one device; the tiles are gathered for the
# comparison:


# %%
def job(ranks, **settings):
    return small_job(tp=ranks, layers=2, width=24, heads=12, steps=3, precision="fp64", **settings)


for ranks in (2, 3, 4):
    verdict = SimWorld(ranks).run(compare_rank, job(ranks))[0]
    print(f"{ranks} ranks: max |w_parallel - w_single| = {verdict.max_difference['weights']:.1e}")
    assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# Leave out f on all ranks: each keeps only the part of x's gradient that comes from its columns. Every shape
# fits and the loss falls. But what lies before the columns and is whole on all ranks, the norms, the biases of
# both `c_proj` and the embedding of the positions, now gets another gradient on each rank, and the replicas
# drift apart. The loss is printed after 40 steps, the largest difference of a weight from one device's after 3.
# (`patch.object` replaces f for the time of a run.)

# %%
from minidist import MismatchError
from minidist.core.parallel import tensor_parallel
from minidist.job.train.trainer import train

long = job(2).model_copy(update={"steps": 40, "lr": 0.01})
LEAVE_OUT = patch.object(tensor_parallel, "copy_to_tensor_parallel_region", lambda x, comm: x)
for name, during in (("with f", nullcontext()), ("without f", LEAVE_OUT)):
    with during:
        losses = SimWorld(2).run(train, long)[0].losses
        off = SimWorld(2).run(compare_rank, job(2))[0].max_difference["weights"]
    print(
        f"{name:9}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after {long.steps} steps; ",
        end="",
    )
    print(f"max |w_parallel - w_single| = {off:.0e} after 3")
assert off > 1e-4

# %% [markdown]
# The loss tells nothing: by chance it even ends lower without f. `--check-replicas` compares what should be
# equal on all ranks, and names the first parameter that is not. It is the embedding of the positions, the
# first in the model of those that are whole:

# %%
with LEAVE_OUT, expect(MismatchError):
    SimWorld(2).run(train, job(2, check_replicas=True))

# %% [markdown]
# ## 7 Exercise: an MLP in tiles
#
# The MLP y = relu(x A) B + bias, forward and backward. Every rank gets the whole x, *its columns* of A,
# *its rows* of B, the bias, and the gradient of y (the same on all ranks). Return y and the gradient of
# x, on every rank. `all_reduce(comm, array)` of lesson 04 is there by `from minidist import all_reduce`.
#
# Judged: both arrays, on every rank, and the bytes of two all-reduces.


# %%
def parallel_mlp(comm, x, a, b, bias, gradient):
    return np.maximum(x @ a, 0) @ b + bias, gradient


check("14.parallel_mlp", parallel_mlp)

# %%
reveal("14.parallel_mlp")
check("14.parallel_mlp", solution("14.parallel_mlp"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Columns, then rows**: between them nothing travels. f sums in backward, g in forward; the bias
#   comes after g.
# - A layer sends **8 b s h (t-1)/t** numbers per rank and micro-batch (b texts of s tokens with h numbers,
#   t ranks), whatever the size of the weights: best for few tokens and huge layers.

# %% [markdown]
# The job of the course so far, since lesson 12 a model of 65 billion parameters on 64 cards of 80 GB (85 x 10^9 B),
# as `minidist plan` counts it ([story.py](../minidist/course/story.py)), with 2^20 tokens per step. In row 14
# four cards of a node cut each layer, and ZeRO 2 divides gradients and optimizer state over the 16 such
# groups. What is whole in a layer, such as the inputs of the norms, is cut by tokens (side room
# [14b](14b_sequence_and_vocabulary.ipynb)):

# %%
story("14")
spent("12")
spent("14")

# %% [markdown]
# Weights are gathered once per step, after the update, and no longer in every micro-batch. Of the 2.52 s
# for messages, 1.64 s are the sums in the layers, and 0.88 s are gradients and updated weights.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/4_tensor_parallel/tensor_parallel_gpt.py
#     mpiexec -n 2 minidist compare --tp 2 --precision fp64 --steps 3
#     mpiexec -n 4 minidist compare --dp 2 --tp 2 --precision bf16 --steps 4
#     mpiexec -n 4 python mpi_examples/4_tensor_parallel/bf16_tensor_parallel.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `ColumnParallelLinear`, `RowParallelLinear` | the same in Megatron-LM; PyTorch `ColwiseParallel`, `RowwiseParallel` |
# | `copy_to_tensor_parallel_region` (f), `reduce_from_...` (g) | the same in Megatron-LM `tensor_parallel/mappings.py` |
# | `parallelize_module(model, mesh["tp"], plan)` | the same in `torch.distributed.tensor.parallel` |
# | `--tp 2` | Megatron-LM `--tensor-model-parallel-size 2`; DeepSpeed `tensor_parallel.autotp_size`, for inference `tensor_parallel.tp_size`; vLLM `--tensor-parallel-size` |
# | `Layout` of a parameter | PyTorch `DTensor` placements `[Shard(0)]`, `[Replicate()]` |
#
# Each layer now waits for two sums in forward and for two in backward, 1.6 s of a step in row 14, so t stays
# within the fastest links of a node. Between two layers less would have to travel.
#
# Next: [16 Naive pipeline and GPipe](16_naive_pipeline_and_gpipe.ipynb). Side rooms: [14b Sequence and
# vocabulary](14b_sequence_and_vocabulary.ipynb), [14c Experts](14c_experts.ipynb). All of them are in the
# [index](README.md).
