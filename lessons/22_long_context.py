# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 22 Long context
#
# *30 minutes. Before it: 06 and 14.*
#
# ## 1 The case
#
# The next texts have 32,768 tokens, sixteen times as many as before, and on the layout of lesson 20
# their activations no longer fit on a card (part 8 prints by how much). So a text is cut: each of four ranks
# has a quarter of its tokens. All layers but one work token by token. Attention does not: a token looks at the keys
# and values of all tokens before it and at its own, and most of these are on other ranks.
#
# What does it cost to see them all, when a rank has no room for the keys and values of all four? Take a
# text of 512 tokens, 128 on each rank, one part after the other, with 64 numbers of 4 B in a key
# and as many in a value. How many bytes does a rank send in the forward pass of one layer? And
# rank 0's tokens see little, rank 3's almost everything: what part of the time are the ranks idle,
# on average, when all wait for the busiest?

# %% [markdown]
# ## 2 Predict
#
# Each rank needs the keys and values of three others, and they are passed on from rank to rank. For the second
# number count pairs of a token and a token that it sees, in a triangle of four columns.

# %%
from minidist.course.lesson import check, predict, reveal, small_job, solution

bytes_guess = predict("bytes that a rank sends in forward", example=65536, unit="B")
idle_guess = predict("idle with one part after the other, in percent", example=10, unit="%")

# %%
from unittest.mock import patch

import numpy as np

from minidist import (
    FlopCounter,
    LinkModel,
    RingAttention,
    SimWorld,
    Tensor,
    report,
    sequence_positions,
)
from minidist.course.story import spent, story
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.nn.llama import RotaryEmbedding
from minidist.report import draw, show

# %% [markdown]
# ## 3 The idea and its picture
#
# **Keys and values are passed round a ring, and each rank's queries meet one block of them after
# the other.** All activations are divided by the P ranks, and no rank ever holds all keys or all
# scores. But keys and values go round once in forward, and once more in backward, together with
# their gradients; and weights are replicated, so their gradients are summed.
#
# Here it is on four ranks, with 2 numbers in place of a block of keys and values. Step through it:
# every rank sees every block once, and holds two: one to compute with, and one that arrives.


# %%
def blocks_go_round(comm):
    block, incoming = np.arange(2.0) + 10 * comm.rank, np.empty(2)
    for _ in range(comm.size - 1):
        comm.sendrecv(block, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
        block[...] = incoming


show(report.step(blocks_go_round, 4), "A block of keys and values goes round a ring of 4 ranks.")

# %% [markdown]
# The library's attention, forward and backward. What it computes is counted, and becomes time on
# the clock: `counter.take()` returns what was computed since the last call. (A rank has its tokens in "zigzag": one
# piece from the front of the text and one from the back, for a reason that part 5 gives.)

# %%
LENGTH, HEADS, SIZE = 512, 4, 16


def attend(comm):
    """Attention over LENGTH tokens; this rank has its part of them."""
    mine = sequence_positions(LENGTH, comm.rank, comm.size, "zigzag")
    x = np.random.default_rng(0).normal(size=(1, LENGTH, 3 * HEADS * SIZE))[:, mine]
    with FlopCounter() as counter:
        qkv = Tensor(x.astype(np.float32), requires_grad=True)
        y = RingAttention(comm, LENGTH)(qkv, HEADS)
        comm.compute(counter.take(), name="forward")
        y.backward(np.ones_like(y.data))
        comm.compute(counter.take(), name="backward")


# %% [markdown]
# In each of four rounds a rank computes with the keys that are here (F), while they are already on their way to its right
# neighbour. A number begins a round. An arrow ends when the receiver takes the block, after its own F. (The first F
# also copies q, k and v, and so it is the longest.) In backward (B) the gradients of keys and values follow them
# round; only their last hop, back to their owner, does not overlap with computing, and the last B puts the gradients
# of q, k and v into one array:

# %%
world = SimWorld(4, links=LinkModel(alpha=1e-6, beta=1e-11, flops=1e12, memory_bandwidth=1e11))
world.run(attend)
header = {"name": "ring attention", "command": "part 3 of lesson 22"}
figure = draw("space-time", world.traces, header)
for trace in world.traces:
    ends = [1e6 * span.end for span in trace.spans]  # in µs
    figure.axes[0].vlines(ends, trace.rank - 0.17, trace.rank + 0.17, color="white", zorder=2.5)
    for name in ("forward", "backward"):
        rounds = [span for span in trace.spans if span.name == name][:4]
        for number, span in enumerate(rounds, 1):
            place = 1e6 * (span.start + span.end) / 2, trace.rank
            figure.axes[0].text(*place, number, color="white", ha="center", va="center", fontsize=7)
show(figure)

# %% [markdown]
# ## 4 The code
#
# Softmax needs the sum over *all* keys, and a rank sees one block at a time. So it keeps, for each
# query, the largest score so far m, the sum z of exp(score - m), and the output o, not yet divided.
# A new block may raise m. From m = 2 to m' = 5, for example, each term exp(score - 2) must become
# exp(score - 5), so z and o are multiplied by exp(2 - 5). And the block counts from its own largest score:
#
#     m' = max(m, m_block)
#     z' = z exp(m - m') + z_block exp(m_block - m')
#     o' = o exp(m - m') + o_block exp(m_block - m')
#
# First the merge of two blocks of keys, on one device; it is the softmax over all of them:


# %%
def block_of(q, k, v):
    """(m, z, o) of one block of keys: the largest score, the sum of exponentials, the output
    times z.
    """
    scores = q @ k.T / np.sqrt(q.shape[1])
    m = scores.max(axis=1, keepdims=True)
    weights = np.exp(scores - m)
    return m, weights.sum(axis=1, keepdims=True), weights @ v


rng = np.random.default_rng(0)
q, k, v = rng.normal(size=(2, 4)), rng.normal(size=(6, 4)), rng.normal(size=(6, 4))
m1, z1, o1 = block_of(q, k[:3], v[:3])
m2, z2, o2 = block_of(q, k[3:], v[3:])
top = np.maximum(m1, m2)
first, second = np.exp(m1 - top), np.exp(m2 - top)  # exp(m - m'), exp(m_block - m')
merged = (o1 * first + o2 * second) / (z1 * first + z2 * second)
_, z, o = block_of(q, k, v)
print(f"max |merged - softmax over all keys| = {np.abs(merged - o / z).max():.1e}")

# %% [markdown]
# Then the way round the ring, with every message. This one finds only the largest score of each
# query, over the keys of all ranks:


# %%
def largest_scores(comm, q, k):
    """q, k: this rank's rows. Every block of keys visits every rank once."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    best, block = np.full(len(q), -np.inf), k
    for step in range(comm.size):
        best = np.maximum(best, (q @ block.T).max(axis=1))
        if step < comm.size - 1:
            incoming = np.empty_like(block)
            comm.sendrecv(block, right, incoming, left)
            block = incoming
    return best


# %% [markdown]
# Six rows of queries and keys on three ranks:

# %%
rows = np.random.default_rng(1).integers(-5, 6, (2, 6, 4)).astype(float)
parts = SimWorld(3).run(
    lambda comm: largest_scores(comm, *np.split(rows, 3, axis=1)[comm.rank].copy())
)
print(
    "equal to one device:", np.array_equal(np.concatenate(parts), (rows[0] @ rows[1].T).max(axis=1))
)

# %% [markdown]
# To put the two together is your exercise. The library's is
# [context_parallel.py](../minidist/core/parallel/context_parallel.py).

# %% [markdown]
# ## 5 Check
#
# A text of N tokens is on P ranks, and a key or a value has h numbers (heads times their size). A rank
# sends P - 1 times a block of N/P keys and values. With more ranks there are more blocks and they are
# smaller, up to 2 N h numbers in all. In backward the
# gradients travel too, and one hop further:

# %%
width = HEADS * SIZE
for ranks in (2, 4, 8):
    world = SimWorld(ranks)
    world.run(attend)
    sent = world.traces[0].bytes_by_purpose()
    forward = 4 * 2 * (ranks - 1) * LENGTH // ranks * width
    backward = 4 * 2 * (2 * ranks - 1) * LENGTH // ranks * width
    print(
        f"{ranks} ranks: forward {sent['tensor_forward']:,} B, by the formula {forward:,} B; "
        f"backward {sent['tensor_backward']:,} B, by the formula {backward:,} B"
    )
    assert (sent["tensor_forward"], sent["tensor_backward"]) == (forward, backward)
    if ranks == 4:
        bytes_guess.judge(sent["tensor_forward"])

# %% [markdown]
# The work of each rank is the number of pairs of a query and a key that it sees. With one part after the
# other these are as 1 : 3 : 5 : 7, on P ranks up to 2P - 1, and P on average; so P - 1 of 2P - 1 parts of the
# time are idle, 3/7 here. The remedy is *zig-zag*: a rank has two pieces of 64 tokens, number r from the front
# and number r from the back, so that a short row and a long one come together:

# %%
P = 4
for order in ("contiguous", "zigzag"):
    pairs = [int((sequence_positions(LENGTH, rank, P, order) + 1).sum()) for rank in range(P)]
    idle = 1 - sum(pairs) / (P * max(pairs))
    print(f"{order:10}: pairs {pairs}, idle share {idle:.3f}")
    if order == "contiguous":
        idle_guess.judge(100 * idle, within=0.07)
assert idle < 0.001

# %% [markdown]
# Is it the same training? A small Llama, two steps, compared with one device. (Llama tells attention a token's
# place by turning pairs of numbers of its q and k by angles proportional to the place. So each rank is told the
# places of its tokens in the whole text.)

# %%
job = small_job(model="llama", heads=4, context=16, precision="fp64", steps=2)
for ranks in (2, 3, 4):
    settings = {"cp": ranks, "attention": "ring"}
    verdict = SimWorld(ranks).run(compare_rank, job.model_copy(update=settings))[0]
    print(f"{ranks} ranks: max |w_parallel - w_single| = {verdict.max_difference['weights']:.1e}")
    assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# A bug that trains. The small Llama of part 5 counts the tokens of each rank from 0 on, not from the front of
# the text. Which of the two losses is lower after 40 steps, by how much? (`patch.object` replaces the library's function
# for the time of a run.)

# %%
right = RotaryEmbedding.forward
job = job.model_copy(update={"cp": 4, "attention": "ring", "steps": 40, "lr": 0.01})
for name, angles in (
    ("in the text", right),
    ("on the rank", lambda self, places: right(self, np.arange(len(places)))),
):
    with patch.object(RotaryEmbedding, "forward", angles):
        losses = SimWorld(4).run(train, job)[0].losses
        verdict = SimWorld(4).run(compare_rank, job.model_copy(update={"steps": 2}))[0]
    print(
        f"places {name}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after 40 steps; "
        f"max |w_parallel - w_single| = {verdict.max_difference['weights']:.0e} after 2"
    )
assert not verdict.equal

# %% [markdown]
# The losses differ in the third decimal, because so small a model hardly needs places, and the ranks agree with each
# other. Only one device shows that it is another model, in which tokens on two ranks have the same place.

# %% [markdown]
# ## 7 Exercise: merge what arrives round the ring
#
# Without a mask, one head: `q`, `k`, `v` are this rank's (rows, d); `rows` lists the number of rows
# of every rank, which differ and are at least 1. Return the output for your queries, softmax(Q K^T /
# sqrt(d)) V over the keys of all ranks. Scores may be hundreds. Use `comm.sendrecv(outgoing, dest,
# incoming, source)`. Judged: the output, messages and bytes. K and V go once round the n ranks, in n - 1
# messages from each of them.


# %%
def ring_attention(comm, q, k, v, rows):
    outputs, block = [], np.stack([k, v])
    for step in range(comm.size):
        scores = q @ block[0].T / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        outputs.append(weights / weights.sum(axis=1, keepdims=True) @ block[1])
        if step < comm.size - 1:
            incoming = np.empty((2, rows[(comm.rank - step - 1) % comm.size], q.shape[1]))
            comm.sendrecv(block, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
            block = incoming
    return np.mean(outputs, axis=0)


check("22.ring_attention", ring_attention)

# %%
reveal("22.ring_attention")
check("22.ring_attention", solution("22.ring_attention"))

# %% [markdown]
# ## 8 Takeaway
#
# - **K and V go round, softmaxes merge**: m, z and o are all that a query remembers. 2 (P-1) N/P h
#   numbers per layer in forward.
# - Causal work is a triangle: distribute it in **zig-zag**, or (P-1)/(2P-1) of the time is idle.
#   Positions are those of the whole text.

# %% [markdown]
# The job of the course so far, since lesson 12 a model of 65 billion parameters on 64 cards of 80 GB (85 x 10^9 B), as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with 2^20 tokens per step. In row 22 eight cards share a
# text and two cut each layer. ZeRO 3 divides the states. A step has as many tokens as before, but each of them sees
# sixteen times as many others: a token takes 6 N + 6 L h s operations, with N parameters, L layers, width h and texts
# of s tokens, 1.3 times as many as before. The planner counts twice the time, because attention reaches a smaller part
# of a card's peak than matrix products do (its 18 % are pessimistic: FlashAttention-3 reaches up to 75 %). And a rank
# waits for keys and values, whose ring crosses two nodes of eight cards, and for the weights that ZeRO 3 gathers. The
# last line is the layout of lesson 20, with these texts:

# %%
story("22")
spent("22")
spent("22", schedule="zb-h1", dp=4, zero=1, tp=2, pp=8, sequence_parallel=True)

# %% [markdown]
# There are no stages in row 22: each of four replicas has eight texts, and all eight would be alive on the
# first of eight stages, 397.8 GB. In time that layout would be about as fast.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/5_context_and_experts/context_parallel_llama.py
#     mpiexec -n 2 minidist compare --model llama --cp 2 --attention ring --precision fp64 --steps 3

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `RingAttention`, `--cp` | Megatron-LM `--context-parallel-size`; PyTorch `context_parallel()`; ring attention (Liu et al. 2023) |
# | merging m, z and o | online softmax (Milakov and Gimelshein 2018), FlashAttention |
# | `sequence_positions(..., "zigzag")` | Megatron-LM `get_batch_on_this_cp_rank`; PyTorch's head-tail load balancer |
# | `positions=` of a model | `position_ids` in Transformers |
#
# The job runs on many cards for a long time, and some of them will fail.
#
# Next: [26 It will fail](26_it_will_fail.ipynb). Side rooms: [22b Heads instead of
# tokens](22b_heads_instead_of_tokens.ipynb), [22c Documents](22c_documents.ipynb). All of
# them are in the [index](README.md).
