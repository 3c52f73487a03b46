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
# *40 minutes. Before it: 06 and 14.*
#
# ## 1 The case
#
# A text of 512 tokens is too long for one rank, so four ranks have 128 tokens each, one part after
# the other. In attention a token looks at all tokens before it and at itself, at none after it.
# Rank 0's tokens see little; rank 3's see almost everything. All ranks wait for the busiest before
# the next layer.
#
# What part of the time are the ranks idle, on average? And if each rank has two pieces of 64 tokens
# instead, number r from the front and number r from the back (*zig-zag*)?

# %% [markdown]
# ## 2 Predict
#
# Count pairs of a token and a token that it sees, in a triangle of four columns.

# %%
from minidist.course.lesson import check, picture, predict, reveal, solution

guess = {
    "contiguous": predict("idle with one part per rank, in percent", example=10, unit="%"),
    "zigzag": predict("idle with zig-zag, in percent", example=10, unit="%"),
}

# %%
import numpy as np

from minidist import (
    SGD,
    DistributedDataParallel,
    FlopCounter,
    LinkModel,
    Llama,
    LlamaConfig,
    RingAttention,
    SimWorld,
    Tensor,
    UlyssesAttention,
    batch_coordinates,
    gradient_axes,
    init_device_mesh,
    sequence_positions,
)
from minidist.course.story import story
from minidist.parallel.context import AllGatherAttention, document_ids, documents
from minidist.report import show

# %% [markdown]
# ## 3 The idea and its picture
#
# Train on sequences that are too long for one rank: **each rank keeps its part of the tokens, and
# in attention keys and values are passed round the ring**, merged by an online softmax. Every other
# operation in a transformer works token by token. What it saves: all activations are divided by P,
# and no rank ever holds all keys or all scores. What it costs: keys and values go round once
# in forward, and once more in backward, together with their gradients; weights are replicated, so
# their gradients are summed.
#
# Ring attention on four ranks, forward and backward. In each round a rank computes with the keys
# that are here (F), while they are already being sent to its right neighbour. In backward (B) the
# gradients of keys and values follow them round; only their last hop, back to their owner, does not
# overlap with computing:

# %%
BATCH, LENGTH, HEADS, SIZE = 1, 512, 4, 16


def attend(comm, kind="ring", order="zigzag", backward=True):
    """Attention over LENGTH tokens; this rank has its part of them."""
    make = {"ring": RingAttention, "ulysses": UlyssesAttention, "all-gather": AllGatherAttention}[
        kind
    ]
    mine = sequence_positions(LENGTH, comm.rank, comm.size, order)
    x = (
        np.random.default_rng(0)
        .normal(size=(BATCH, LENGTH, 3 * HEADS * SIZE))[:, mine]
        .astype(np.float32)
    )

    # What was counted becomes time on the clock.
    with FlopCounter() as counter:
        y = make(comm, LENGTH)(Tensor(x, requires_grad=True), HEADS)
        comm.compute(counter.take(), name="forward")
        if backward:
            y.backward(np.ones_like(y.data))
            comm.compute(counter.take(), name="backward")


world = SimWorld(4, links=LinkModel(alpha=1e-6, beta=1e-11, flops=1e12, memory_bandwidth=1e11))
world.run(attend)
picture("space-time", world, "part 3 of lesson 22", name="ring attention")

# %% [markdown]
# The ring, message by message, with 2 numbers in place of a block of K and V: every rank sees every
# block once, and holds one at a time.

# %%
from minidist import report


def blocks_go_round(comm):
    block, incoming = np.arange(2.0) + 10 * comm.rank, np.empty(2)
    for _ in range(comm.size - 1):
        comm.sendrecv(block, (comm.rank + 1) % comm.size, incoming, (comm.rank - 1) % comm.size)
        block[...] = incoming


show(report.step(blocks_go_round, 4), "A block of keys and values goes round a ring of 4 ranks.")

# %% [markdown]
# ## 4 The code
#
# Softmax needs the sum over *all* keys, and a rank sees one block at a time. So it keeps, for each
# query, the largest score so far m, the sum z of exp(score - m), and the output o, not yet divided.
# A new block may raise m; then what was accumulated so far was shifted by too little, and is
# scaled:
#
#     m' = max(m, m_block)    z' = z exp(m - m') + z_block    o' = o exp(m - m') + o_block
#
# Here are both halves, each alone. First the merge of two blocks of keys, on one device; it is the
# softmax over all of them:


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
(m1, z1, o1), (m2, z2, o2), (m, z, o) = (
    block_of(q, k[:3], v[:3]),
    block_of(q, k[3:], v[3:]),
    block_of(q, k, v),
)
top = np.maximum(m1, m2)
first, second = np.exp(m1 - top), np.exp(m2 - top)  # by how much each block was shifted too little
merged = (o1 * first + o2 * second) / (z1 * first + z2 * second)
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
#
# **Ulysses** is the other way: an all-to-all before attention turns "some tokens, all heads" into
# "all tokens, some heads", attention runs as on one device, and an all-to-all turns it back. It
# needs as many (key-value) heads as ranks; a ring works with any number of heads. (Both at once is
# **Ulysses x ring**, in part 10.)
#
# **All-gather** is the simplest, and Llama 3's: gather all keys and values, and let each rank's
# queries meet those that they see. A rank then has all keys of one layer, which are few when query
# heads share them, and no message overlaps with computing. But any mask will do. Long sequences are
# filled with many documents, and no token may see another document's.

# %% [markdown]
# ## 5 Check
#
# The work of each rank: pairs of a query and a key that it sees. (This library computes the other
# pairs too and masks them. Kernels such as FlashAttention skip blocks of keys that no query sees,
# and wait as counted here.)

# %%
P = 4
answer = {}
for order in ("contiguous", "zigzag"):
    pairs = [int((sequence_positions(LENGTH, rank, P, order) + 1).sum()) for rank in range(P)]
    answer[order] = 1 - sum(pairs) / (P * max(pairs))
    print(f"{order:10}: pairs {pairs}, idle share {answer[order]:.3f}")
    guess[order].judge(100 * answer[order], within=0.07)
assert answer["zigzag"] < 0.001

# %% [markdown]
# The bytes, next to the formulas: a ring sends 2 (P-1) N/P h numbers forward; Ulysses 4 N h/P
# (P-1)/P. With more ranks Ulysses sends less, and the ring more, up to 2 N h. All-gather sends what a
# ring sends forward, and as much backward, where a ring sends keys and values with their gradients:

# %%
width = HEADS * SIZE
for ranks in (2, 4):
    for kind, order in (("ring", "zigzag"), ("ulysses", "contiguous")):
        world = SimWorld(ranks)
        world.run(attend, kind, order)
        sent = world.traces[0].bytes_by_purpose()
        numbers = (
            2 * (ranks - 1) * LENGTH // ranks * width
            if kind == "ring"
            else 4 * LENGTH * width // ranks * (ranks - 1) // ranks
        )
        print(
            f"{ranks} ranks, {kind:7}: forward {sent['tensor_forward']:,} B, the formula says "
            f"{4 * numbers:,} B; backward {sent['tensor_backward']:,} B"
        )
        assert sent["tensor_forward"] == 4 * numbers

for ranks in (2, 4, 8, 16):
    total = {}
    for kind in ("ring", "all-gather"):
        world = SimWorld(ranks)
        world.run(attend, kind)
        total[kind] = sum(world.traces[0].bytes_by_purpose().values())
    share = total["all-gather"] / total["ring"]
    print(f"{ranks:2} ranks: all-gather sends {share:.2f} times a ring's bytes, both ways")
    assert abs(share - 2 * (ranks - 1) / (3 * ranks - 2)) < 1e-9

# %% [markdown]
# Is it the same training? A Llama, whose rotary positions are those of the whole text; 22 tokens,
# ragged over any ranks, with dropout of attention's weights, whose masks belong to (sample, head,
# query, key):

# %%
TOKENS = 22


def train(comm, kind="ring", order="zigzag", restart=False, steps=5):
    mesh = init_device_mesh(comm, (1, comm.size), ("dp", "cp"))
    kinds = {"ring": RingAttention, "ulysses": UlyssesAttention, "all-gather": AllGatherAttention}
    attention = kinds[kind](mesh["cp"], TOKENS)
    mine = sequence_positions(TOKENS, comm.rank, comm.size, order)

    # An ordinary model with another attention. It gets this rank's tokens and their positions.
    config = LlamaConfig(13, 24, 48, 2, 4, 4, TOKENS, attention_dropout=0.1)
    model = Llama(config, np.float64, seed=3, attention_fn=attention)
    # Summed over dp *and* cp.
    parallel = DistributedDataParallel(model, gradient_axes(mesh), reduction="sum")
    optimizer = SGD(parallel.flat, lr=0.1, momentum=0.9)
    for step in range(steps):
        text = np.random.default_rng(step).integers(0, 13, (2, TOKENS + 1))
        parallel.flat.zero_grad()
        with batch_coordinates(step, positions=mine, length=TOKENS):
            places = np.arange(len(mine)) if restart else mine
            parallel(
                text[:, :-1][:, mine], text[:, 1:][:, mine], 2 * TOKENS, positions=places
            ).backward()
        optimizer.step()
    return parallel.flat.data.copy()


single = SimWorld(1).run(train)[0]
for ranks, kind, order in (
    (2, "ring", "zigzag"),
    (3, "ring", "zigzag"),
    (4, "ring", "zigzag"),
    (4, "ulysses", "contiguous"),
    (3, "all-gather", "zigzag"),
):
    off = np.abs(SimWorld(ranks).run(train, kind, order)[0] - single).max()
    print(f"{ranks} ranks, {kind}: max |w_parallel - w_single| = {off:.1e}")
    assert off < 1e-12

# %% [markdown]
# Documents. The same queries and keys, once as one text and once as five documents: what a token's
# output depends on.

# %%
tokens = np.array([[4, 2, 0, 7, 7, 1, 0, 3, 0, 5, 6, 0, 8, 8, 8, 8]])
ids = document_ids(tokens, 0)
print("documents", ids[0])


def outputs(comm, ids, shift):
    """Attention of this rank's tokens, after the keys of the first three tokens are shifted."""
    mine = sequence_positions(16, comm.rank, comm.size)
    q, k, v = (np.random.default_rng(i).normal(size=(1, 16, 2, 4)) for i in range(3))
    k[:, :3] += shift
    with documents(ids):
        return mine, AllGatherAttention(comm, 16)(*(Tensor(x[:, mine]) for x in (q, k, v))).data


for name, which in (("one text", None), ("documents", ids)):
    before, after = (SimWorld(4).run(outputs, which, shift) for shift in (0, 1))
    moved = [
        int(place)
        for (places, old), (_, new) in zip(before, after, strict=True)
        for place in places[np.any(old != new, axis=(0, 2, 3))]
    ]
    print(f"{name:9}: outputs that depend on the keys of tokens 0..2: {sorted(moved)}")
assert max(moved) == 2

# %% [markdown]
# ## 6 Break it
#
# Each rank numbers its own tokens from 0, as a model written for one device does. Nothing crashes:
# rotary angles (or rows of the position table) are just those of other tokens.

# %%
wrong = SimWorld(2).run(train, restart=True)[0]
off = np.abs(wrong - single).max()
print(f"positions restart on each rank: max |w_parallel - w_single| = {off:.1e}")
assert off > 1e-6

# %% [markdown]
# Another known bug: gradients are summed over the data axis only, and it has one rank. Each rank
# then trains its own model on its own tokens. `gradient_axes(mesh)` above is dp *and* cp.

# %% [markdown]
# ## 7 Exercise: merge what arrives round the ring
#
# Without a mask, one head: `q`, `k`, `v` are this rank's (rows, d); `rows` lists the number of rows
# of every rank. Return the output for your queries, softmax(Q K^T / sqrt(d)) V over the keys of all
# ranks. Scores may be hundreds. Send K and V once round, n - 1 messages, with
# `comm.sendrecv(outgoing, dest, incoming, source)`.


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
# And the mask of all-gather attention: rank `rank` of `ranks` has the queries of two chunks of 2 x
# ranks, number rank from the front and number rank from the back. Return bools (its queries, all
# keys): which keys each query sees. A token `separator` ends a document, to which it belongs.


# %%
def visible(tokens, separator, rank, ranks):
    mine = np.array_split(np.arange(len(tokens)), ranks)[rank]
    return np.arange(len(tokens)) <= mine[:, None]


check("22.visible", visible)

# %%
reveal("22.visible")
check("22.visible", solution("22.visible"))

# %% [markdown]
# ## 8 Takeaway
#
# - **K and V go round, softmaxes merge**: m, z and o are all that a query remembers. 2 (P-1) N/P h
#   numbers forward.
# - **All-gather**: half of a ring's bytes on two ranks, two thirds on many; all keys on every rank for
#   one layer, and any mask: documents.
# - Causal work is a triangle: distribute it in **zig-zag**, or (P-1)/(2P-1) of the time is idle.
#   Positions are global.

# %% [markdown]
# The job of the course so far, a model of 7 billion parameters on cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with parameters of 2 B, gradients
# added up in float32 (4 B) and 12 B for Adam in every row:

# %%
story("22")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/5_context_and_experts/context_parallel_llama.py
#     mpiexec -n 2 python mpi_examples/5_context_and_experts/context_parallel_llama.py --ulysses
#     mpiexec -n 2 python mpi_examples/5_context_and_experts/context_parallel_llama.py --all-gather
#     mpiexec -n 2 minidist train --model llama --cp 2 --attention all-gather --document-separator 10 --steps 5
#     mpiexec -n 2 minidist compare --model llama --cp 2 --attention ring --precision fp64 --steps 3

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `RingAttention`, `--cp` | Megatron-LM `--context-parallel-size`; PyTorch `context_parallel()`; ring attention (Liu et al.) |
# | `UlyssesAttention`, `--attention ulysses` | DeepSpeed-Ulysses `DistributedAttention`; Megatron-LM `--cp-comm-type a2a` |
# | `AllGatherAttention`, `--attention all-gather` | Llama 3's context parallelism; Megatron-LM `--cp-comm-type all_gather` |
# | `documents(ids)`, `--document-separator` | document mask, `cu_seqlens` of FlashAttention, Megatron-LM `--reset-attention-mask` |
# | `UlyssesRingAttention`, `--attention ulysses-ring --ulysses 2` | USP, LoongTrain's 2D-Attention; Megatron-LM `--cp-comm-type a2a+p2p` |
# | `sequence_positions(..., "zigzag")` | Megatron-LM `get_batch_on_this_cp_rank`; PyTorch's head-tail load balancer |
# | `positions=` of a model | `position_ids` in Transformers |
# | `gradient_axes(mesh)` | Megatron-LM `get_data_parallel_group(with_context_parallel=True)` |
#
# Next: [26 It will fail](26_it_will_fail.ipynb). All of them are in the [index](README.md).
