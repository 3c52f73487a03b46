# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 ZeRO 3 / FSDP
#
# *35 minutes. Before it: 11.*
#
# ## 1 The case
#
# With ZeRO 2 each rank still has all the weights. Let it keep a part of these, too.
#
# Eight equal layers of 65,536 B train on four ranks. Each rank has a quarter of every layer's
# weights. Just before a layer computes, its weights are gathered from all ranks, and right after it
# the other three quarters are dropped again; in forward, and once more in backward. In backward its
# gradient is then reduce-scattered.
#
# For a model of Ψ parameters a rank sends 2 (n-1)/n Ψ numbers in a step of data parallelism. How many does
# it send here? A gather takes time, so let it start one layer ahead, while the layer before computes. How
# many whole layers are in memory at the peak then?

# %% [markdown]
# ## 2 Predict
#
# Count gathers and reduce-scatters; each sends (n-1)/n of a layer from a rank.

# %%
from minidist.course.lesson import check, marked_step, memory_of, picture, predict, reveal, solution

traffic_guess = predict("numbers that a rank sends in a step, over (n-1)/n Ψ", example=2)
layers_guess = predict("whole layers at the peak, with one layer gathered ahead", example=1)

# %%
import numpy as np

from minidist import MLP, Adam, FlopCounter, LinkModel, SimWorld, Tensor, cross_entropy
from minidist.base.trace_file import only_steps
from minidist.collectives import all_gather, reduce_scatter
from minidist.course.story import spent, story
from minidist.report import show, step

LAYERS, WIDTH, RANKS, ROWS = 8, 128, 4, 256
LAYER = 4 * WIDTH * WIDTH  # bytes
rng = np.random.default_rng(0)
rows, targets = rng.normal(size=(ROWS, WIDTH)), rng.integers(0, WIDTH, ROWS)

# %% [markdown]
# ## 3 The idea and its picture
#
# Keep only 1/n of the *parameters* too. **A layer's weights are gathered just before it computes
# and dropped right after**, so all states of the model are divided by n. With Adam in
# mixed precision 16 B per parameter become 16/n. It costs more bytes on the links, for every
# micro-batch, and waiting for them unless the next gather runs while a layer computes.
#
# One gather, message by message: before it each rank has 2 of 8 weights, after it all of them. They are
# dropped again when the layer has computed.


# %%
def one_layer(comm):
    shard, layer = np.arange(2.0) + 2 * comm.rank, np.full(8, np.nan)
    all_gather(comm, shard, out=layer, algorithm="ring")


show(step(one_layer, 4), "A layer of 8 weights is gathered from 4 shards.")

# %% [markdown]
# Forward through the first four layers of the case, each of which computes for 70 µs. Every layer waits for
# its gather, the pale parts of the picture:


# %%
def forward_only(comm):
    for _ in range(4):
        all_gather(comm, np.ones(LAYER // 4 // 4, np.float32), algorithm="ring")
        comm.compute(seconds=70e-6, name="forward")


links = LinkModel(alpha=2e-6, beta=8e-10, flops=3e10, memory_bandwidth=1e11)
world = SimWorld(4, links=links)
world.run(forward_only)
picture("space-time", world, "part 3 of lesson 12", name="four layers, each gathered when needed")

# %% [markdown]
# ## 4 The code
#
# Forward and backward of layers y = x W, with every gather and every reduce-scatter. A rank has some of the
# rows of each W:


# %%
def toy(comm, shards, x):
    """Forward and backward of y = x W for each layer; a rank has the rows shards[i] of layer i."""
    weights, inputs = {}, []
    for shard in shards:
        whole = all_gather(comm, shard.reshape(-1))  # just in time ...
        inputs.append(x)
        x = x @ whole.reshape(x.shape[1], -1)
        del whole  # ... and dropped again
    g = np.ones_like(x)  # of the sum of all outputs
    for i in reversed(range(len(shards))):
        whole = all_gather(comm, shards[i].reshape(-1)).reshape(g.shape[1], -1)
        gradient = (inputs.pop().T @ g).reshape(-1)
        weights[i] = reduce_scatter(comm, gradient).reshape(shards[i].shape)
        g = g @ whole.T
        del whole
    return weights  # this rank's rows of each gradient, summed over the ranks


# %% [markdown]
# Two ranks with the same two rows of x, so their summed gradient must be twice that of one rank:

# %%
layers = [np.random.default_rng(i).integers(-2, 3, (4, 4)).astype(float) for i in range(3)]
x = np.ones((2, 4))
two = SimWorld(2).run(lambda comm: toy(comm, [np.split(w, 2)[comm.rank] for w in layers], x))
one = SimWorld(1).run(lambda comm: toy(comm, layers, x))[0]
both = [np.concatenate([part[i] for part in two]) for i in range(3)]
same = all(np.array_equal(both[i], 2 * one[i]) for i in range(3))
print("the shards of two ranks together are one rank's gradient, twice:", same)
assert same

# %% [markdown]
# How does a gather run while a layer computes? With `async_op=True` it is only started. It goes on in a *stream*, a
# second flow of control of the rank, while the main program computes. `wait()` returns the weights when they have
# arrived:


# %%
def one_layer_ahead(comm):
    started = all_gather(comm, np.ones(LAYER // 4 // 4, np.float32), async_op=True)
    comm.compute(seconds=70e-6, name="the layer before")
    return started.wait().nbytes


world = SimWorld(4, links=links)
nbytes, *_ = world.run(one_layer_ahead)
title = f"a gather of {nbytes:,} B, and 70 µs of computing: {world.end_time * 1e6:.1f} µs"
picture("lanes", world, "part 4 of lesson 12", title=title)

# %% [markdown]
# In the library a *unit* is the parameters of one layer in one flat array. `fully_shard` makes one, and from
# then on a rank keeps its shard; the unit gathers and reduces by itself, in streams, so that gathers overlap
# with computing ([fsdp.py](../minidist/core/parallel/fsdp.py), `start_gather`, `finish_gather`,
# `release` and `start_reduce`). The network of the case, sharded and for comparison with data parallelism:

# %%
from minidist import DistributedDataParallel, fully_shard, sharded_parameters, shards_of


def sharded(comm, model, *, prefetch=1, units=True):
    """Make the layers units; units=False: the whole model is one unit."""
    options = {"mesh": comm, "prefetch": prefetch, "reduction": "sum"}
    for layer in model.layers if units else []:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model, Adam(sharded_parameters(model), lr=1e-3)


def data_parallel(comm, model):
    parallel = DistributedDataParallel(model, comm, reduction="sum")
    return parallel, Adam(parallel.flat, lr=1e-3)


# %% [markdown]
# The training is an ordinary one. The optimizer of a sharded model sees only this rank's shards. `memory_of` counts
# the bytes that are alive, `FlopCounter` the operations, and `marked_step` marks a step in the trace, so that a
# picture can show it alone:


# %%
def train(comm, prepare, steps=3, dtype=np.float32, **options):
    """Returns the model, the account, and what is alive between two steps."""
    mine = slice(comm.rank * ROWS // comm.size, (comm.rank + 1) * ROWS // comm.size)
    with memory_of(comm) as account, FlopCounter() as counter:
        network = MLP([WIDTH] * (LAYERS + 1), bias=False, dtype=dtype)
        model, optimizer = prepare(comm, network, **options)
        for number in range(steps):
            with marked_step(comm, number):
                model.zero_grad()
                x = Tensor(rows[mine].astype(dtype))
                cross_entropy(model(x), targets[mine], divisor=ROWS).backward()
                comm.compute(counter.take(), name="backward")
                optimizer.step()
        return model, account, dict(account.by_purpose)


# %% [markdown]
# ## 5 Check
#
# The second step on rank 0: first with every gather when it is needed, then with one layer gathered
# ahead. The dark messages are gathers, the pale ones below them reduce-scatters. In the second picture they lie below
# the computing that hides them. Nothing hides three of them: the first gather, the last reduce-scatter, and between
# forward and backward the gather of the last layer, which has just been dropped (`reshard_after_forward=False` for this
# layer would keep it):

# %%
second, peak = {}, {}
for prefetch in (0, 1, 2):
    world = SimWorld(RANKS, links=links)
    (_, account, _), *_ = world.run(train, sharded, prefetch=prefetch)
    second[prefetch], peak[prefetch] = only_steps(world.traces, 1, 2), account.peak_by_purpose
for prefetch in (0, 1):
    name = f"prefetch {prefetch}"
    picture("lanes", second[prefetch], "part 5 of lesson 12", name=name, most_seconds=2.5e-3)

# %% [markdown]
# The time of that step, and the whole layers at the peak. The second layer ahead takes memory and gains
# nothing here: one gather is hidden as soon as it takes no longer than the computation of one layer.


# %%
def microseconds(traces):
    """As in the pictures: from the first rank's start to the end on rank 0."""
    began = min(span.start for trace in traces for span in trace.spans)
    return 1e6 * (max(span.end for span in traces[0].spans) - began)


for prefetch, traces in second.items():
    whole = peak[prefetch]["unsharded"] // LAYER
    print(f"prefetch {prefetch}: {microseconds(traces):,.0f} µs, {whole} of 8 layers whole")
layers_guess.judge(peak[1]["unsharded"] // LAYER)

# %% [markdown]
# The bytes that rank 0 sends in the step. Each layer is gathered twice, in forward and in backward, and its
# gradient is reduce-scattered once:

# %%
psi = LAYERS * WIDTH * WIDTH
sent = second[1][0].bytes_by_purpose()
print(", ".join(f"{purpose} {nbytes:,} B" for purpose, nbytes in sent.items()))
traffic_guess.judge(sum(sent.values()) / 4 / (psi * (RANKS - 1) / RANKS))

# %% [markdown]
# Memory of three steps, with data parallelism (above) and fully sharded (below), on one scale; to the right,
# allocations are counted, not time, so that the same three steps are longer below. ("unsharded" is what is whole for a
# moment, "workspace" are the arrays in which Adam computes; the first hump is the model that is made, its parameters and
# for a moment the flat array as well.) The states are parameters, gradients and the optimizer's averages, between two
# steps:

# %%
first_ranks, total = [], {}
for name, prepare in (("data parallelism", data_parallel), ("fully sharded", sharded)):
    world = SimWorld(RANKS)
    (_, account, held), *_ = world.run(train, prepare)
    first_ranks.append(world.traces[0])
    total[name] = account.peak
    states = sum(held[kind] for kind in ("parameter", "gradient", "optimizer"))
    print(f"{name}: states {states:,} B, {states / psi:g} B per parameter; peak {account.peak:,} B")
title = "rank 0 of data parallelism, and rank 0 fully sharded"
picture("memory", first_ranks, "part 5 of lesson 12", title=title)

# %% [markdown]
# And the training is the same. The shards of all ranks, put together, are the weights of one device:


# %%
def weights_of(models):
    """One array, from the shards that the ranks have of each unit."""
    units = zip(*map(shards_of, models), strict=True)
    parts = [(np.concatenate([s.data for s in unit]), unit[0].flat.numel) for unit in units]
    return np.concatenate([whole[:numel] for whole, numel in parts])


((single, _, _),) = SimWorld(1).run(train, data_parallel, dtype=np.float64)
for ranks, prefetch in ((2, 0), (3, 1), (4, 2)):
    results = SimWorld(ranks).run(train, sharded, prefetch=prefetch, dtype=np.float64)
    off = np.abs(weights_of([model for model, _, _ in results]) - single.flat.data).max()
    print(f"{ranks} ranks, prefetch {prefetch}: max |w_parallel - w_single| = {off:.1e}")
    assert off < 1e-9

# %% [markdown]
# Where memory suffices, `reshard_after_forward=False` keeps a layer whole from forward to backward. It is
# gathered once, so a rank sends 2 (n-1)/n Ψ numbers, and at the peak all weights are whole; gradients and optimizer
# state stay divided.

# %% [markdown]
# ## 6 Break it
#
# Forget to mark the layers as units. Then the whole model is one unit: everything is gathered at once,
# and at the peak all weights are whole, and all gradients in addition to the rank's quarter. No gather has a
# computation that hides it. It still trains, so the mistake is easy to miss:

# %%
world = SimWorld(RANKS, links=links)
(_, account, _), *_ = world.run(train, sharded, units=False)
second["one"], peak["one"] = only_steps(world.traces, 1, 2), account.peak_by_purpose
for name, run in (("eight units", 1), ("one unit", "one")):
    whole, gradients = peak[run]["unsharded"] // LAYER, peak[run]["gradient"]
    print(f"{name}: {microseconds(second[run]):,.0f} µs, {whole} of 8 layers whole, ", end="")
    print(f"gradients up to {gradients:,} B")
total["one unit"] = account.peak
print(", ".join(f"{name}: peak {nbytes:,} B" for name, nbytes in total.items()))
assert total["fully sharded"] < total["one unit"] < total["data parallelism"]

# %% [markdown]
# ## 7 Exercise: a prefetch that hides the gather
#
# `gather(i)` starts to gather layer i and returns something whose `wait()` gives its weights.
# `compute(i, weights, x)` returns the layer's output and takes some time. Run all `layers` in order
# and return the last output. `layers` may be 0: then return x.
#
# Judged: the output; bytes, time (par); at most two whole layers alive.


# %%
def forward(comm, layers, x, gather, compute):
    for layer in range(layers):
        x = compute(layer, gather(layer).wait(), x)
    return x


check("12.prefetch", forward)

# %%
reveal("12.prefetch")
check("12.prefetch", solution("12.prefetch"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Gather, compute, drop; in backward gather, compute, reduce-scatter, drop**: 16/n B per
#   parameter, d+1 whole layers when d are gathered ahead, and in backward their whole gradients.
# - It sends **3 (n-1)/n Ψ numbers per micro-batch**, where ZeRO 1 sends 2 (n-1)/n Ψ per step; one layer ahead hides it
#   if a layer computes as long as its gather travels (in backward twice as long, and hides a reduce-scatter, too).

# %% [markdown]
# The job of the course so far, a model of 7 billion parameters on cards of 80 GB (85 x 10^9 B), as `minidist plan`
# counts it ([story.py](../minidist/course/story.py)). "Fits" is decided by more than the GB of the table: half of
# what unfused norms and activation functions keep, and 1 GB for the device. Parameters have 2 B, gradients are
# added up in float32 (4 B), and Adam has 12 B. With ZeRO 3 a card's part of the weights is float32, and so
# its own master copy: 4 + 4 + 8 B per parameter, divided by n.
#
# Of the two rows 12 the first has 7 billion parameters, which need no ZeRO 3: on 8 cards it costs 1.5 s more than
# row 11 and frees 35 GB that are not needed. On 64 cards ZeRO 1 waits 0.01 s of 1.55 s for messages, so no other layout
# can gain 1 % by waiting less.
#
# From the second row 12 on the model has 65 billion parameters. On 64 cards they do not fit with ZeRO 2, and with
# ZeRO 3 the cards wait 3.79 s in a step for messages:

# %%
spent("11", dp=64, zero=1)
spent("12", dp=64, zero=2)
spent("12")
story("12")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --dp 4 --zero 3 --steps 5
#     mpiexec -n 4 minidist compare --dp 4 --zero 3 --steps 3
#     mpiexec -n 4 minidist compare --dp 4 --zero 3 --steps 3 --dp-replicate 2
#     minidist train --dp 4 --zero 3 --steps 3 --trace runs/fsdp.jsonl
#     minidist report runs/fsdp.jsonl --picture memory -o runs/saw-tooth.svg
#     mpiexec -n 4 python mpi_examples/3_sharding/fully_shard.py
#     mpiexec -n 4 python mpi_examples/3_sharding/hybrid_sharding.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `fully_shard(layer, mesh=comm)` | ZeRO stage 3 (Rajbhandari et al. 2020), FSDP (Zhao et al. 2023); PyTorch FSDP2 `fully_shard`; FSDP1 `FullyShardedDataParallel(auto_wrap_policy=...)`; DeepSpeed `"stage": 3` |
# | `reshard_after_forward` | the same in FSDP2; FSDP1 `FULL_SHARD` (True), `SHARD_GRAD_OP` (False) |
# | `prefetch` | FSDP2 `set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`; FSDP1 `forward_prefetch`, `backward_prefetch` (FSDP prefetches in backward by itself; these only change that); DeepSpeed `stage3_prefetch_bucket_size` |
# | `persistence_threshold`: smaller units stay whole | DeepSpeed `stage3_param_persistence_threshold` |
# | a mesh (replicate, shard), `--dp-replicate` | FSDP `HYBRID_SHARD`; DeepSpeed MiCS, `mics_shard_size`. `zero_hpz_partition_size` is another thing: a second copy of the weights per node, with all states still divided by n |
#
# Now all weights travel twice and all gradients once in every micro-batch. On slow links that is what limits
# a step, and it does not become less with fewer tokens in a micro-batch.
#
# Next: [14 Tensor parallel](14_tensor_parallel.ipynb). Side room: [12b Offload](12b_offload.ipynb).
# All lessons are in the [index](README.md).
