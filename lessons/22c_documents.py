# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 22c Documents
#
# *25 minutes. Before it: 22.*
#
# ## 1 The case
#
# A sequence of 32,768 tokens is seldom one text. It is filled with many short *documents*, each with
# a separator at its end, and no token may see another document's. These 16 tokens are five
# documents, and 0 is the separator:
#
#     4 2 0 | 7 7 1 0 | 3 0 | 5 6 0 | 8 8 8 8
#
# Now which blocks of keys a rank's queries see depends on the text, so a ring does not know which to
# skip. The way of Llama 3 is simpler: gather the keys and values of all ranks, and let each query
# meet those that it sees, by whatever mask.
#
# What does it cost to gather? A rank of P = 4 sends blocks of a rank's keys or values, or of their
# gradients:
#
# - a ring: keys and values in forward; in backward keys, values and their gradients, and a last hop of the
#   gradients;
# - all-gather: keys and values in forward; in backward the gradients only, summed by a reduce-scatter,
#   because keys and values of all ranks are still there.
#
# How many times as many bytes as a ring does it send, both ways together?

# %% [markdown]
# ## 2 Predict
#
# Count blocks: a ring sends 2 (P-1) of them forward and 2 (2P-1) backward.

# %%
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution

bytes_guess = predict("bytes of all-gather attention over a ring's, 4 ranks", example=1.5)

# %%
import numpy as np

from minidist import FlopCounter, LinkModel, RingAttention, SimWorld, Tensor, sequence_positions
from minidist.job.equality.compare import compare_rank
from minidist.parallel.context import AllGatherAttention, document_ids, documents

# %% [markdown]
# ## 3 The idea and its picture
#
# **Gather all keys and values, and mask whatever may not be seen.** What it saves: bytes in backward. (A
# ring can apply any mask too. But which blocks it may skip then depends on the text.) What it costs: each rank has the keys and values of all tokens for the
# time of one layer, which are few when many query heads share them; and no message overlaps with
# computing.
#
# The library's attention, forward and backward, with what it computes as time on the clock:

# %%
LENGTH, HEADS, SIZE = 512, 4, 16


def attend(comm, attention):
    """Attention over LENGTH tokens; this rank has its zig-zag part of them."""
    mine = sequence_positions(LENGTH, comm.rank, comm.size, "zigzag")
    x = np.random.default_rng(0).normal(size=(1, LENGTH, 3 * HEADS * SIZE))[:, mine]
    with FlopCounter() as counter:
        qkv = Tensor(x.astype(np.float32), requires_grad=True)
        y = attention(comm, LENGTH)(qkv, HEADS)
        comm.compute(counter.take(), name="forward")
        y.backward(np.ones_like(y.data))
        comm.compute(counter.take(), name="backward")


# %% [markdown]
# Four ranks. All messages of forward come before attention (F), and those of backward, which sum the
# gradients of keys and values, after it (B). No message overlaps with them. (The library's attention
# computes all pairs and then masks, which takes longer than in the ring of lesson 22.)

# %%
world = SimWorld(4, links=LinkModel(alpha=1e-6, beta=1e-11, flops=1e12, memory_bandwidth=1e11))
world.run(attend, AllGatherAttention)
picture("space-time", world, "part 3 of lesson 22c", name="all-gather attention")

# %% [markdown]
# ## 4 The code
#
# The number of a token's document is the number of separators before it, and a query sees a key that
# is not behind it and in the same document. A separator belongs to the document that it ends:

# %%
tokens = np.array([4, 2, 0, 7, 7, 1, 0, 3, 0, 5, 6, 0, 8, 8, 8, 8])
ends = tokens == 0
ids = np.cumsum(ends) - ends
places = np.arange(len(tokens))
sees = (places <= places[:, None]) & (ids == ids[:, None])
for row in sees:
    print("".join("#" if seen else "." for seen in row))
assert np.array_equal(ids, document_ids(tokens[None], 0)[0])

# %% [markdown]
# A rank with some of the queries takes their rows of this mask. The columns are those of all tokens,
# so every rank needs the whole text's separators. Nothing is sent for them, because all ranks read the
# same tokens. The library's mask is [document_mask.py](../minidist/parallel/context/document_mask.py), and
# the attention [all_gather_attention.py](../minidist/parallel/context/all_gather_attention.py).

# %% [markdown]
# ## 5 Check
#
# The bytes of both ways of attention. With P ranks the all-gather sends 4 (P-1) blocks and the ring
# 2 (P-1) + 2 (2P-1), which goes from a half to two thirds:

# %%
for ranks in (2, 4, 8, 16):
    sent = {}
    for attention in (AllGatherAttention, RingAttention):
        world = SimWorld(ranks)
        world.run(attend, attention)
        sent[attention] = sum(world.traces[0].bytes_by_purpose().values())
    share = sent[AllGatherAttention] / sent[RingAttention]
    print(f"{ranks:2} ranks: all-gather sends {share:.2f} times a ring's bytes, both ways")
    assert abs(share - 2 * (ranks - 1) / (3 * ranks - 2)) < 1e-9
    if ranks == 4:
        bytes_guess.judge(share, within=0.05)

# %% [markdown]
# And what a rank holds for one layer, of the case's 32,768 tokens. Llama 3.1 8B has 32 heads of queries,
# which share 8 heads of keys and values, of 128 numbers of 2 B:

# %%
for heads in (32, 8):
    print(f"{heads:2} heads of keys and values: {2 * 32_768 * heads * 128 * 2 / 1e9:.2f} GB")

# %% [markdown]
# Documents also change the work of the ranks. Zig-zag balances a triangle, and the mask of part 4 is none.
# The pairs of each of four ranks, without documents and with them:

# %%
causal = places <= places[:, None]
for name, mask in (("one text", causal), ("documents", sees)):
    pairs = [int(mask[sequence_positions(16, rank, 4, "zigzag")].sum()) for rank in range(4)]
    print(f"{name:9}: {sum(pairs):3} pairs, by rank {pairs}")

# %% [markdown]
# It trains what one device trains. The separator is one of the tokens of the data:

# %%
job = small_job(model="llama", heads=4, context=16, document_separator=3, precision="fp64", steps=2)
for ranks in (2, 3, 4):
    settings = {"cp": ranks, "attention": "all-gather"}
    verdict = SimWorld(ranks).run(compare_rank, job.model_copy(update=settings))[0]
    print(f"{ranks} ranks: max |w_parallel - w_single| = {verdict.max_difference['weights']:.1e}")
    assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# Forget the documents, and nothing raises: the mask is the usual one. So look at what an output
# depends on. On four ranks, the keys of the first document are changed; whose outputs change?


# %%
def outputs(comm, ids, shift):
    """Attention of this rank's tokens, after the keys of the first three tokens are shifted."""
    mine = sequence_positions(16, comm.rank, comm.size)
    q, k, v = (np.random.default_rng(i).normal(size=(1, 16, 2, 4)) for i in range(3))
    k[:, :3] += shift
    with documents(ids):
        return mine, AllGatherAttention(comm, 16)(*(Tensor(x[:, mine]) for x in (q, k, v))).data


# %% [markdown]
# Without the ids the tokens of all later documents depend on the first one. (Token 0 sees one key
# only, whose weight is 1 whatever the key is.)

# %%
for name, which in (("documents", ids[None]), ("forgotten", None)):
    before, after = (SimWorld(4).run(outputs, which, shift) for shift in (0, 1))
    moved = [
        int(place)
        for (mine, old), (_, new) in zip(before, after, strict=True)
        for place in mine[np.any(old != new, axis=(0, 2, 3))]
    ]
    print(f"{name}: outputs that depend on the keys of tokens 0..2: {sorted(moved)}")
    assert (max(moved) == 2) == (name == "documents")

# %% [markdown]
# ## 7 Exercise: a rank's rows of the mask
#
# The text is cut into 2 x `ranks` chunks, as `np.array_split` does it. Rank `rank` has the queries of two
# of them, in the order of the text: number `rank` from the front and number `rank` from the back, counted
# from 0. Return bools (its queries, all keys): which keys each query sees. A token `separator` ends a
# document and belongs to it. Judged: every entry of the mask.


# %%
def visible(tokens, separator, rank, ranks):
    mine = np.array_split(np.arange(len(tokens)), ranks)[rank]
    return np.arange(len(tokens)) <= mine[:, None]


check("22c.visible", visible)

# %%
reveal("22c.visible")
check("22c.visible", solution("22c.visible"))

# %% [markdown]
# ## 8 Takeaway
#
# - **All keys on every rank for one layer, and the mask of the text**: documents need only their ids.
# - Half of a ring's bytes on two ranks and two thirds on many, none of them hidden behind computing.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/5_context_and_experts/context_parallel_llama.py --all-gather
#     mpiexec -n 2 minidist train --model llama --cp 2 --attention all-gather --document-separator 10 --steps 5

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `AllGatherAttention`, `--attention all-gather` | Llama 3's context parallelism; Megatron-LM `--cp-comm-type all_gather` |
# | `documents(ids)`, `--document-separator` | document mask, `cu_seqlens` of FlashAttention, Megatron-LM `--reset-attention-mask` |
#
# Next: [26 It will fail](26_it_will_fail.ipynb). All of them are in the [index](README.md).
