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
# A sequence of 32,768 tokens is seldom one text. It is filled with many short *documents*, each but perhaps
# the last with a separator at its end, and no token may see another document's. These 16 tokens are five
# documents, and 0 is the separator:
#
#     4 2 0 | 7 7 1 0 | 3 0 | 5 6 0 | 8 8 8 8
#
# The text is cut over four ranks, as in lesson 22. Which keys a rank's queries see depends now on where the
# documents end, and a ring would carry many blocks to ranks that see nothing of them (the library's ring refuses
# documents). Llama 3 gathers the keys and values of all ranks, and lets a mask decide. All ranks keep them until
# backward, so that only their gradients travel then, summed by a reduce-scatter.
#
# How many times as many bytes as a ring does an all-gather send, both ways together? And how many GB of keys and
# values do the 32 layers of Llama 3.1 8B keep until backward? Each has 8 heads of them, with 128 numbers of 2 B.

# %% [markdown]
# ## 2 Predict
#
# Count blocks on P = 4 ranks: keys, values, or the gradients of either. In lesson 22 a ring sent 2 (P-1) of them forward
# and, with their gradients and the last hop, 2 (2P-1) backward. For the second number, a layer has keys and values,
# of 32,768 tokens.

# %%
from minidist.course.lesson import check, predict, reveal, small_job, solution

bytes_guess = predict("bytes of all-gather attention over a ring's, 4 ranks", example=1.5)
memory_guess = predict("gathered keys and values of all layers", example=50, unit="GB")

# %%
import numpy as np
from matplotlib.colors import ListedColormap

from minidist import (
    FlopCounter,
    LinkModel,
    RingAttention,
    SimWorld,
    Tensor,
    all_gather,
    sequence_positions,
)
from minidist.job.equality.compare import compare_rank
from minidist.parallel.context import AllGatherAttention, document_ids
from minidist.report import show
from minidist.report.frame import new_figure
from minidist.report.palette import RANKS

# %% [markdown]
# ## 3 The idea and its picture
#
# **Gather all keys and values, and mask what may not be seen.** Any mask is possible, and bytes are saved in
# backward. The price: every layer keeps the keys and values of all tokens until its backward, and here no
# message overlaps with computing.
#
# Which pairs are seen? The number of a token's document is the number of separators before it. A query sees
# a key at or before its own place that is in the same document; a separator belongs to the document that it
# ends:

# %%
tokens = np.array([4, 2, 0, 7, 7, 1, 0, 3, 0, 5, 6, 0, 8, 8, 8, 8])
ends = tokens == 0
ids = np.cumsum(ends) - ends
print(ids)
places = np.arange(len(tokens))
causal = places <= places[:, None]
sees = causal & (ids == ids[:, None])
assert np.array_equal(ids, document_ids(tokens[None], 0)[0])

# %% [markdown]
# A row of the picture is a query, a column is a key, and a coloured square is a pair that is seen. Each
# document is a small triangle. The colour is the rank that has the query; it has two chunks of two tokens,
# by the zig-zag of lesson 22.

# %%
owner = np.zeros(16, int)
for rank in range(4):
    owner[sequence_positions(16, rank, 4, "zigzag")] = rank
axes = (figure := new_figure(5, 4)).add_subplot()
axes.imshow(sees * (owner[:, None] + 1), cmap=ListedColormap(["#FFFFFF", *RANKS[:4]]))
axes.set_xticks(range(16), tokens)
axes.set_yticks(range(16), [f"rank {rank}" for rank in owner], fontsize=8)
axes.set_xticks(places[1:] - 0.5, minor=True)
axes.set_yticks(places[1:] - 0.5, minor=True)
axes.grid(which="minor", color="#DDDDDD", linewidth=0.6)
axes.tick_params(which="minor", length=0)
axes.set_xlabel("key: the token")
axes.set_ylabel("query: the rank that has it")
axes.set_title("which query sees which key", fontsize=10, loc="left")
show(figure)

# %% [markdown]
# With documents zig-zag balances the work no longer. Ten texts of 512 tokens on four ranks, in which a separator ends a
# document after 40 tokens on average; the number of keys that each query sees is the work. The remedy is a cut where
# a quarter of the work ends, for each text another one:

# %%
idle = {"contiguous": [], "zigzag": [], "by work": []}
for seed in range(10):
    ends = np.random.default_rng(seed).random(512) < 1 / 40
    begins = np.maximum.accumulate(np.where(np.r_[True, ends[:-1]], np.arange(512), 0))
    keys_seen = np.arange(512) - begins + 1
    for order, shares in idle.items():
        if order == "by work":  # contiguous, cut at the quarters of all pairs
            rank_of = (np.cumsum(keys_seen) - 1) * 4 // keys_seen.sum()
            pairs = np.bincount(rank_of, keys_seen)
        else:
            pairs = [keys_seen[sequence_positions(512, r, 4, order)].sum() for r in range(4)]
        shares.append(1 - np.mean(pairs) / max(pairs))
for order, shares in idle.items():
    print(
        f"{order:10}: idle {np.mean(shares):.0%} on average, {min(shares):.0%} to {max(shares):.0%}"
    )

# %% [markdown]
# ## 4 The code
#
# Attention on one device, with a mask:


# %%
def attention(q, k, v, mask):
    scores = np.where(mask, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ v


# %% [markdown]
# And on ranks. A rank has some of the rows of q, k, v, here one part after the other. It gathers all rows of
# k and v, and takes its own rows of the mask. Nothing is sent for the mask, because all ranks read the same
# tokens:


# %%
def on_a_rank(comm, q, k, v, mask):
    mine = np.array_split(np.arange(len(q)), comm.size)[comm.rank]
    keys = all_gather(comm, k[mine].ravel()).reshape(k.shape)
    values = all_gather(comm, v[mine].ravel()).reshape(v.shape)
    return attention(q[mine], keys, values, mask[mine])


q, k, v = np.random.default_rng(0).normal(size=(3, 16, 4))
outputs = np.concatenate(SimWorld(4).run(on_a_rank, q, k, v, sees))
print(f"max |4 ranks - one device| = {np.abs(outputs - attention(q, k, v, sees)).max():.0e}")

# %% [markdown]
# The library's mask is [document_mask.py](../minidist/parallel/context/document_mask.py), and its attention
# [all_gather_attention.py](../minidist/parallel/context/all_gather_attention.py).

# %% [markdown]
# ## 5 Check
#
# The bytes of both ways, with the library's attention on 512 tokens, forward and backward:


# %%
def attend(comm, kind):
    mine = sequence_positions(512, comm.rank, comm.size, "zigzag")
    qkv = np.random.default_rng(0).normal(size=(1, 512, 3 * 64))[:, mine]
    with FlopCounter() as counter:
        y = kind(comm, 512)(Tensor(qkv, requires_grad=True), 4)  # 4 heads of 16 numbers
        comm.compute(counter.take(), name="forward")
        y.backward(np.ones_like(y.data))
        comm.compute(counter.take(), name="backward")


# %% [markdown]
# With P ranks the all-gather sends 4 (P-1) blocks and the ring 2 (P-1) + 2 (2P-1). How long a step waits for messages is
# the time on the links of lesson 22 less that on links that take none:

# %%
for ranks in (2, 4, 8, 16):
    sent, waits = {}, {}
    for kind in (AllGatherAttention, RingAttention):
        ends = []
        for alpha, beta in ((0.0, 0.0), (1e-6, 1e-11)):
            links = LinkModel(alpha=alpha, beta=beta, flops=1e12, memory_bandwidth=1e11)
            world = SimWorld(ranks, links=links)
            world.run(attend, kind)
            ends.append(1e6 * world.end_time)
        waits[kind] = ends[1] - ends[0]
        sent[kind] = sum(world.traces[0].bytes_by_purpose().values())
    share = sent[AllGatherAttention] / sent[RingAttention]
    print(
        f"{ranks:2} ranks: all-gather sends {share:.2f} times a ring's bytes, both ways; ", end=""
    )
    print(f"waits {waits[AllGatherAttention]:.1f} µs, the ring {waits[RingAttention]:.1f} µs")
    assert abs(share - 2 * (ranks - 1) / (3 * ranks - 2)) < 1e-9
    if ranks == 4:
        bytes_guess.judge(share, within=0.05)

# %% [markdown]
# The share goes from a half to two thirds. And still the all-gather waits longer on few ranks, because the ring's
# messages travel while it computes; on 16 ranks a block is computed faster than it travels.
#
# What the layers of Llama 3.1 8B keep, with as many heads of keys and values as of queries, and with its 8. Few heads
# make gathering cheap, in bytes and in memory:

# %%
for heads in (32, 8):
    layer = 2 * 32_768 * heads * 128 * 2 / 1e9
    print(f"{heads:2} heads: {layer:.2f} GB in a layer, {32 * layer:.1f} GB in 32 layers")
memory_guess.judge(32 * layer, within=0.05)

# %% [markdown]
# To keep nothing one gathers them once more in backward. Megatron-LM's `all_gather` does that. That is 6 (P-1)
# blocks, 18 on 4 ranks, where a ring sends 6P - 4, 20.

# %% [markdown]
# A small Llama trains what one device trains. The separator is one of the tokens of the data:

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
# Forget the documents, and nothing raises: the mask is the usual one. So look at what an output depends on.
# The key of the very first token is changed; whose outputs change?

# %%
changed = k.copy()
changed[0] += 1
for name, mask in (("documents", sees), ("forgotten", causal)):
    before, after = (
        np.concatenate(SimWorld(4).run(on_a_rank, q, keys, v, mask)) for keys in (k, changed)
    )
    moved = np.flatnonzero((before != after).any(axis=1))
    print(f"{name}: outputs that change: {moved.tolist()}")
    assert (moved.max() == 2) == (name == "documents")

# %% [markdown]
# With the mask only the first document changes. (Token 0 sees no key but its own, whose weight is 1 whatever
# the key is.) Without it the first document changes all later ones.

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
# - **All keys on every rank, and the mask of the text.** Each layer keeps them until its backward.
# - It sends 2 (P-1)/(3P-2) of a ring's bytes, a half on two ranks and two thirds on many, and hides none of them
#   behind computing.

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
# | `AllGatherAttention`, `--attention all-gather` | Llama 3's context parallelism; Megatron-LM `--cp-comm-type all_gather`, which gathers again in backward |
# | `documents(ids)`, `--document-separator` | document mask, `cu_seqlens` of FlashAttention, Megatron-LM `--reset-attention-mask` |
#
# The job runs on many cards for a long time, and some of them will fail.
#
# Next: [26 It will fail](26_it_will_fail.ipynb). All lessons are in the [index](README.md).
