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
# *40 minutes. Before it: 06, 14 and 15. You need no MPI, no GPU and no download.*
#
# ## 1 Goal
#
# Train on sequences that are too long for one rank: **each rank keeps its part of the tokens, and in attention keys
# and values are passed round the ring**, merged by an online softmax. Every other operation in a transformer works
# token by token.
#
# What it saves: all activations are divided by P, and no rank ever holds all keys or all scores. What it costs: keys
# and values go round once forward and their gradients besides in backward; weights are replicated, so their gradients
# are summed.

# %%
import inspect

import numpy as np

from minidist.autograd import FlopCounter, Tensor
from minidist.base.random import batch_coordinates
from minidist.comm import LinkModel, SimWorld, init_device_mesh
from minidist.lesson import check, solution
from minidist.nn import Llama, LlamaConfig
from minidist.optim import SGD
from minidist.parallel import DistributedDataParallel
from minidist.parallel.context import RingAttention, UlyssesAttention, gradient_axes, sequence_positions
from minidist.report import draw, show

# %% [markdown]
# ## 2 The picture first
#
# Ring attention on four ranks, forward and backward. In each round a rank computes with the keys that are here (F),
# while they are already being sent to its right neighbour. In backward (B) the gradients of keys and values follow
# them round; only their last hop, back to their owner, does not overlap with computing:

# %%
BATCH, LENGTH, HEADS, SIZE = 1, 512, 4, 16


def attend(comm, kind="ring", order="zigzag", backward=True):
    """Attention over LENGTH tokens of which this rank has its part."""
    make = {"ring": RingAttention, "ulysses": UlyssesAttention}[kind]
    mine = sequence_positions(LENGTH, comm.rank, comm.size, order)
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, 3 * HEADS * SIZE))[:, mine].astype(np.float32)
    with FlopCounter() as counter:
        y = make(comm, LENGTH)(Tensor(x, requires_grad=True), HEADS)
        comm.compute(counter.take(), name="forward")
        if backward:
            y.backward(np.ones_like(y.data))
            comm.compute(counter.take(), name="backward")


world = SimWorld(4, links=LinkModel(alpha=1e-6, beta=1e-11, flops=1e12, memory_bandwidth=1e11))
world.run(attend)
command = (
    "minidist train --model llama --cp 4 --attention ring --layers 1 --steps 1 --trace t.jsonl; minidist report t.jsonl"
)
show(draw("space-time", world.traces, {"command": command}))
show(draw("bytes-matrix", world.traces, {"command": f"{command} --picture bytes-matrix"}))

# %% [markdown]
# ## 3 Predict
#
# A causal query sees the keys before it. Four ranks, and each has a contiguous quarter of the tokens: what share of the
# time are the ranks idle, on average, when all wait for the busiest? And what share when a rank has two chunks of
# eighths, number r from the front and number r from the back (zig-zag)?

# %%
my_guess = {"contiguous": 0.0, "zigzag": 0.0}

# %% [markdown]
# ## 4 The code
#
# Softmax needs the sum over *all* keys, and a rank sees one block at a time. So it keeps, for each query, the largest
# score so far m, the sum z of exp(score - m), and the output o, not yet divided. A new block may raise m; then what
# was accumulated so far was shifted by too little, and is scaled:
#
#     m' = max(m, m_block)    z' = z exp(m - m') + z_block    o' = o exp(m - m') + o_block

# %%
print(inspect.getsource(RingAttention._ring_forward))
print(inspect.getsource(RingAttention._round))

# %% [markdown]
# **Ulysses** is the other way: an all-to-all before attention turns "some tokens, all heads" into "all tokens, some
# heads", attention runs as on one device, and an all-to-all turns it back. It needs as many (key-value) heads as ranks;
# a ring needs none.
#
# ## 5 Check
#
# The work of each rank: pairs of a query and a key that it sees.

# %%
P = 4
answer = {}
for order in ("contiguous", "zigzag"):
    pairs = [int((sequence_positions(LENGTH, rank, P, order) + 1).sum()) for rank in range(P)]
    answer[order] = 1 - sum(pairs) / (P * max(pairs))
    verdict = "right" if abs(my_guess[order] - answer[order]) < 0.03 else "off"
    print(f"{order:10}: pairs {pairs}, idle share {answer[order]:.3f}; your guess is {verdict}")
assert answer["zigzag"] < 0.001

# %% [markdown]
# The bytes, beside the formulas: a ring sends 2 (P-1) N/P h numbers forward; Ulysses 4 N h/P (P-1)/P. More ranks make
# Ulysses cheaper and leave the ring as it is.

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
            f"{ranks} ranks, {kind:7}: forward {sent['tensor_forward']:,} B, the formula says {4 * numbers:,} B; backward {sent['tensor_backward']:,} B"
        )
        assert sent["tensor_forward"] == 4 * numbers

# %% [markdown]
# Is it the same training? A Llama, whose rotary positions are those of the whole text; 22 tokens, ragged over any
# ranks, with dropout of attention's weights, whose masks belong to (sample, head, query, key):

# %%
TOKENS = 22


def train(comm, kind="ring", order="zigzag", restart=False, steps=5):
    mesh = init_device_mesh(comm, (1, comm.size), ("dp", "cp"))
    attention = {"ring": RingAttention, "ulysses": UlyssesAttention}[kind](mesh["cp"], TOKENS)
    mine = sequence_positions(TOKENS, comm.rank, comm.size, order)
    config = LlamaConfig(13, 24, 48, 2, 4, 4, TOKENS, attention_dropout=0.1)
    model = Llama(config, np.float64, seed=3, attention_fn=attention)
    parallel = DistributedDataParallel(model, gradient_axes(mesh), reduction="sum")  # summed over dp *and* cp
    optimizer = SGD(parallel.flat, lr=0.1, momentum=0.9)
    for step in range(steps):
        text = np.random.default_rng(step).integers(0, 13, (2, TOKENS + 1))
        parallel.flat.zero_grad()
        with batch_coordinates(step, positions=mine, length=TOKENS):
            places = np.arange(len(mine)) if restart else mine
            parallel(text[:, :-1][:, mine], text[:, 1:][:, mine], 2 * TOKENS, positions=places).backward()
        optimizer.step()
    return parallel.flat.data.copy()


single = SimWorld(1).run(train)[0]
for ranks, kind, order in (
    (2, "ring", "zigzag"),
    (3, "ring", "zigzag"),
    (4, "ring", "zigzag"),
    (4, "ulysses", "contiguous"),
):
    off = np.abs(SimWorld(ranks).run(train, kind, order)[0] - single).max()
    print(f"{ranks} ranks, {kind}: max |w_parallel - w_single| = {off:.1e}")
    assert off < 1e-12

# %% [markdown]
# ## 6 Break it
#
# Each rank numbers its own tokens from 0, as a model written for one device does. Nothing crashes: rotary angles (or
# rows of the position table) are just those of other tokens.

# %%
wrong = SimWorld(2).run(train, restart=True)[0]
print(f"positions restart on each rank: max |w_parallel - w_single| = {np.abs(wrong - single).max():.1e}")
assert np.abs(wrong - single).max() > 1e-6

# %% [markdown]
# Another known bug: gradients are summed over the data axis only, and it has one rank. Each rank then trains its own
# model on its own tokens. `gradient_axes(mesh)` above is dp *and* cp.
#
# ## 7 Exercise: merge what arrives round the ring
#
# Without a mask, one head: `q`, `k`, `v` are this rank's (rows, d); `rows` lists the number of rows of every rank.
# Return the output for your queries, softmax(Q K^T / sqrt(d)) V over the keys of all ranks. Scores may be hundreds.
# Send K and V once round, n - 1 messages, with `comm.sendrecv(outgoing, dest, incoming, source)`.


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
print(inspect.getsource(solution("22.ring_attention")))
check("22.ring_attention", solution("22.ring_attention"))

# %% [markdown]
# ## 8 Takeaway
#
# - **K and V go round, softmaxes merge**: m, z and o are all that a query remembers. 2 (P-1) N/P h numbers forward.
# - Causal work is a triangle: distribute it in **zig-zag**, or (P-1)/(2P-1) of the time is idle. Positions are
#   global.
#
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/context_parallel_llama.py
#     mpiexec -n 2 python mpi_examples/context_parallel_llama.py --ulysses
#     mpiexec -n 2 minidist compare --model llama --cp 2 --attention ring --precision fp64 --steps 3
#
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `RingAttention`, `--cp` | Megatron-LM `--context-parallel-size`; PyTorch `context_parallel()`; ring attention (Liu et al.) |
# | `UlyssesAttention`, `--attention ulysses` | DeepSpeed-Ulysses `DistributedAttention`; Megatron-LM `--cp-comm-type a2a` |
# | `sequence_positions(..., "zigzag")` | Megatron-LM `get_batch_on_this_cp_rank`; PyTorch's head-tail load balancer |
# | `positions=` of a model | `position_ids` in Transformers |
# | `gradient_axes(mesh)` | Megatron-LM `get_data_parallel_group(with_context_parallel=True)` |
#
# Next: [23 Fewer bytes](23_fewer_bytes.ipynb).
