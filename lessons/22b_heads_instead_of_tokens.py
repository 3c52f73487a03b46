# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 22b Heads instead of tokens
#
# *30 minutes. Before it: 22.*
#
# ## 1 The case
#
# A ring of lesson 22 on 16 ranks sends every block of keys and values 15 times. A rank sends 2 (P-1)
# N/P h numbers in the forward pass of a layer, nearly 2 N h, however many ranks there are.
#
# But the heads of attention do not look at each other. A head needs its columns of all tokens, and
# nothing of other heads. Before attention a rank has some tokens of all heads. It gives them away, and
# gets all tokens of some heads; it computes attention as on one device; and the outputs go back. This is
# *Ulysses*. A rank has N/P tokens of h numbers of queries, keys, values and outputs, and keeps one of
# P parts of each.
#
# Keys and values have as many heads as queries. How many times as many numbers as Ulysses does the ring
# send on 16 ranks?

# %% [markdown]
# ## 2 Predict
#
# Write both counts down for P = 16, and divide.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, small_job, solution

ratio_guess = predict("numbers that a ring sends on 16 ranks, over those of Ulysses", example=2)

# %%
from functools import partial
from unittest.mock import patch

import numpy as np

from minidist import (
    FlopCounter,
    LinkModel,
    RingAttention,
    SimWorld,
    Tensor,
    UlyssesAttention,
    UsageError,
    all_to_all,
    report,
    sequence_positions,
)
from minidist.core.autograd import reshape
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.nn import concatenate
from minidist.parallel.context import UlyssesRingAttention
from minidist.report import show

# %% [markdown]
# ## 3 The idea and its picture
#
# **An all-to-all turns some tokens of all heads into all tokens of some heads, and another one
# turns the output back.** In an all-to-all every rank has a part for every other rank, and sends it there.
# It saves bytes, which shrink as 1/P, and attention itself is that of one
# device, whatever its mask or its kernel. But no message overlaps with computing, and the number of
# heads must be a multiple of the number of ranks.
#
# Four ranks, each with one token of four heads. The tens are the token, the ones the head. Step
# through the exchange: rank r begins with a row of the table and ends with a column.


# %%
def one_token_each(comm):
    all_to_all(comm, 10.0 * comm.rank + np.arange(4.0))


show(report.step(one_token_each, 4), "Tokens are exchanged for heads on 4 ranks.")

# %% [markdown]
# And with time on the clock: queries, keys and values go in one exchange, attention computes for 15 µs, and the outputs
# go back. Messages go between all pairs of ranks at once, and none of them while a rank computes:

# %%
LENGTH, HEADS, SIZE = 512, 16, 4


def forward_only(comm):
    own = np.ones((3, LENGTH // comm.size, HEADS * SIZE), np.float32)  # q, k, v
    all_to_all(comm, own.ravel())
    comm.compute(seconds=15e-6, name="forward")
    all_to_all(comm, own[0].ravel())


links = LinkModel(alpha=1e-6, beta=1e-11, flops=1e12, memory_bandwidth=1e11)
world = SimWorld(4, links=links)
world.run(forward_only)
picture("space-time", world, "part 3 of lesson 22b", name="Ulysses")

# %% [markdown]
# ## 4 The code
#
# The exchange in one direction. Rank r is sent the columns of its heads; what comes from rank r are
# that rank's tokens, so the pieces are joined along the tokens:


# %%
def to_heads(comm, x):
    """(own tokens, all heads, size) -> (all tokens, own heads, size); all parts are equal."""
    pieces = np.split(x, comm.size, axis=1)
    arrived = all_to_all(comm, np.concatenate([piece.ravel() for piece in pieces]))
    return arrived.reshape(-1, *pieces[0].shape[1:])


# %% [markdown]
# Six tokens of three heads on three ranks, again with tens for the token and ones for the head:

# %%
table = 10 * np.arange(6)[:, None, None] + np.arange(3)[None, :, None]
own = np.split(table, 3)  # two tokens on each rank
for rank, heads in enumerate(SimWorld(3).run(lambda comm: to_heads(comm, own[comm.rank]))):
    print(f"rank {rank}: {own[rank][..., 0].tolist()} becomes {heads.ravel().tolist()}")
    assert np.array_equal(heads[:, 0], table[:, rank])

# %% [markdown]
# The library's is [ulysses.py](../minidist/parallel/context/ulysses.py). Its tokens may be any number.

# %% [markdown]
# ## 5 Check
#
# A rank sends four arrays of N/P tokens and h numbers, (P-1)/P of each: 4 N h (P-1)/P² in forward.
# With as many heads of keys and values as of queries, as here, the ring sends P/2 times as many. The library's
# attention of both kinds:

# %%
width = HEADS * SIZE
KINDS = {"ring": (RingAttention, "zigzag"), "ulysses": (UlyssesAttention, "contiguous")}


def attend(comm, attention, order, heads=HEADS, size=SIZE):
    """Attention over LENGTH tokens; returns the places of this rank's tokens, and their outputs."""
    mine = sequence_positions(LENGTH, comm.rank, comm.size, order)
    x = np.random.default_rng(0).normal(size=(1, LENGTH, 3 * heads * size))[:, mine]
    with FlopCounter() as counter:
        qkv = Tensor(x.astype(np.float32), requires_grad=True)
        y = attention(comm, LENGTH)(qkv, heads)
        comm.compute(counter.take(), name="forward")
        y.backward(np.ones_like(y.data))
        comm.compute(counter.take(), name="backward")
    return mine, y.data


def sent_by(ranks, program):
    """Return the bytes that rank 0 sends in forward with each kind of attention."""
    sent = {}
    for kind, (attention, order) in KINDS.items():
        world = SimWorld(ranks)
        world.run(program, attention, order)
        sent[kind] = world.traces[0].bytes_by_purpose()["tensor_forward"]
    return sent


for ranks in (2, 4, 8, 16):
    sent = sent_by(ranks, attend)
    print(
        f"{ranks:2} ranks: a ring sends {sent['ring']:,} B, Ulysses {sent['ulysses']:,} B; "
        f"{sent['ring'] / sent['ulysses']:g} times as many"
    )
    assert sent["ulysses"] == 4 * 4 * LENGTH * width * (ranks - 1) // ranks**2
ratio_guess.judge(sent["ring"] / sent["ulysses"])

# %% [markdown]
# Fewer bytes are not always less time. Forward and backward on four ranks, on the links of lesson 22, with heads of 64
# numbers in all. In the last two rows access to memory takes no time:

# %%
for heads, size, memory in ((16, 4, 1e11), (4, 16, 1e11), (16, 4, np.inf)):
    for kind, (attention, order) in KINDS.items():
        links = LinkModel(alpha=1e-6, beta=1e-11, flops=1e12, memory_bandwidth=memory)
        world = SimWorld(4, links=links)
        world.run(attend, attention, order, heads, size)
        name = f"{heads:2} heads of {size:2}, memory {memory:5g} B/s, {kind:7}"
        print(f"{name}: {1e6 * world.end_time:6.2f} µs")

# %% [markdown]
# All make the same products. The library's ring writes the scores of a block, one set per head, to memory and reads
# them again; its Ulysses is counted as one kernel that keeps its scores on the chip, as rings in use do, too. That is
# why Ulysses is faster with 16 heads here: without the time of memory the order is reversed, because a ring hides its
# messages behind its products, and Ulysses, which sends fewer bytes, hides none.
#
# In Llama 3.1 8B, 32 heads of queries share 8 heads of keys and values. A ring sends keys and values only;
# Ulysses sends queries and outputs too, which are four times as many. With g queries to a key the ratio is
# P/(1+g), so a ring sends fewer numbers on few ranks:


# %%
def llama_heads(comm, attention, order):
    rows = len(sequence_positions(32, comm.rank, comm.size, order))
    q, kv = (Tensor(np.ones((1, rows, heads, 2), np.float32)) for heads in (32, 8))
    attention(comm, 32)(q, kv, kv)


for ranks in (2, 4, 8):
    sent = sent_by(ranks, llama_heads)
    print(
        f"{ranks} ranks: a ring sends {sent['ring'] / sent['ulysses']:.1f} times as many as Ulysses"
    )
    assert 5 * sent["ring"] == ranks * sent["ulysses"]

# %% [markdown]
# On 16 ranks a head of keys would have to go to two ranks, which this library refuses.
#
# More ranks than heads need both: groups of U neighbours exchange heads among themselves, and rings
# of P/U ranks, one from each group, pass keys and values of the same heads round. On 16 ranks with 8 heads the
# ring alone is U = 1, and Ulysses alone, U = 16, is refused; every other choice computes the same outputs:

# %%
((_, whole),) = SimWorld(1).run(attend, *KINDS["ring"], 8)
for U in (1, 2, 4, 8):
    order = f"zigzag/{U}"  # zig-zag over the groups of U ranks, contiguous inside a group
    world = SimWorld(16)
    parts = world.run(attend, partial(UlyssesRingAttention, ulysses=U), order, 8)
    off = max(np.abs(y - whole[:, mine]).max() for mine, y in parts)
    sent = world.traces[0].bytes_by_purpose()["tensor_forward"]
    print(f"U = {U:2}: {sent:7,} B in forward; max |y_parallel - y_single| = {off:.0e}")
    assert off < 1e-5
with expect(UsageError):
    SimWorld(16).run(attend, partial(UlyssesRingAttention, ulysses=16), "zigzag/16", 8)

# %% [markdown]
# So when the ranks are more than 1 + g, take Ulysses as far as the heads go, on the fast links inside a node,
# and a ring for the rest. It trains what one device trains, with Ulysses and with both:

# %%
for layout in (
    {"cp": 4, "attention": "ulysses"},
    {"cp": 4, "attention": "ulysses-ring", "ulysses": 2},
):
    verdict = SimWorld(4).run(
        compare_rank, small_job(heads=4, precision="fp64", steps=2, **layout)
    )[0]
    print(f"{layout}: max |w_parallel - w_single| = {verdict.max_difference['weights']:.1e}")
    assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# The way back, as one writes it first: what arrives is reshaped to own tokens and all heads. Every
# number is there and the shape is right. But it comes rank by rank, and each piece has all own
# tokens of that rank's heads. So the pieces must be joined along the heads:


# %%
def wrongly(comm, x):
    """(all tokens, own heads, size) -> (own tokens, all heads, size)."""
    arrived = all_to_all(comm, x.ravel())  # the pieces of the ranks lie one after the other already
    return arrived.reshape(len(x) // comm.size, -1, x.shape[2])


def to_tokens(comm, x):
    pieces = all_to_all(comm, x.ravel()).reshape(comm.size, len(x) // comm.size, *x.shape[1:])
    return np.concatenate(pieces, axis=1)


for way in (wrongly, to_tokens):
    back = SimWorld(3).run(lambda comm, way=way: way(comm, to_heads(comm, own[comm.rank])))
    print(f"{way.__name__}: {own[0][..., 0].tolist()} has become {back[0][..., 0].tolist()}")
    assert sorted(back[0].ravel()) == sorted(own[0].ravel())
assert np.array_equal(back, own)

# %% [markdown]
# The next layer multiplies these numbers by a weight matrix of the right shape, so nothing raises. Now train with
# that mistake, a small GPT on four ranks with two tokens and one head each. Which program has the lower loss after 40
# steps? (`patch.object` replaces the library's way back for the time of a run.)

# %%
right_way = UlyssesAttention.to_tokens


def wrong_way(self, x):
    y, P = right_way(self, x), self.comm.size
    heads = y.shape[2] // P
    pieces = [y[:, :, r * heads : (r + 1) * heads] for r in range(P)]
    return reshape(concatenate(pieces, axis=1), y.shape)  # one rank's piece after the other


job = small_job(cp=4, attention="ulysses", heads=4, precision="fp64", steps=40, lr=0.01)
for name, way in (("right way back", right_way), ("wrong way back", wrong_way)):
    with patch.object(UlyssesAttention, "to_tokens", way):
        losses = SimWorld(4).run(train, job)[0].losses
        verdict = SimWorld(4).run(compare_rank, job.model_copy(update={"steps": 3}))[0]
    print(
        f"{name}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after 40 steps; "
        f"max |w_parallel - w_single| = {verdict.max_difference['weights']:.0e} after 3"
    )
assert losses[-1] < 1.6
assert not verdict.equal

# %% [markdown]
# The wrong program has the lower loss. A token is given outputs of the rank's later tokens, which have seen the
# word that it must predict. A model that writes a text has no later words to look at.
# %% [markdown]
# ## 7 Exercise: attention between two exchanges
#
# `q`, `k`, `v` are this rank's: (own tokens, heads, size) each. `rows` lists the number of tokens of
# every rank, which may differ; heads are a multiple of the ranks, and rank 0 takes the first ones.
# `attend(q, k, v)` is attention on one device, of arrays of that form with any number of heads.
# Return the outputs of your tokens, (own tokens, heads, size).
#
# `all_to_all(comm, array, send_counts=..., receive_counts=...)` is told how many numbers go to each rank and come
# from each: when three ranks have 1, 2 and 3 tokens of three heads of one number, rank 1 sends 2 to each rank, and
# gets 1, 2 and 3. Messages will do, too.
#
# Judged: the outputs, messages and bytes. n - 1 messages there and n - 1 back are enough, so
# `q`, `k` and `v` go in one exchange (`np.stack`), and no more numbers than the heads need.


# %%
def ulysses(comm, q, k, v, rows, attend):
    return attend(q, k, v)


check("22b.ulysses", ulysses)

# %%
reveal("22b.ulysses")
check("22b.ulysses", solution("22b.ulysses"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Some tokens of all heads become all tokens of some heads**, and back: 4 N h (P-1)/P² numbers per
#   layer in forward. A ring sends P/2 times as many, or P/(1+g) times when g heads of queries share one of
#   keys.
# - More ranks than heads: Ulysses inside groups, a ring between them.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/5_context_and_experts/context_parallel_llama.py --ulysses
#     mpiexec -n 4 minidist train --cp 4 --attention ulysses-ring --ulysses 2 --heads 4 --steps 5

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `UlyssesAttention`, `--attention ulysses` | DeepSpeed-Ulysses `DistributedAttention`; Megatron-LM `--cp-comm-type a2a` |
# | `UlyssesRingAttention`, `--attention ulysses-ring --ulysses 2` | USP, LoongTrain's 2D-Attention; Megatron-LM `--cp-comm-type a2a+p2p` |
#
# Ring and Ulysses take one mask for all tokens. Documents that share a text need another one.
#
# Next: [22c Documents](22c_documents.ipynb). All lessons are in the [index](README.md).
