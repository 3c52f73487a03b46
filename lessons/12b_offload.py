# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12b Offload
#
# *30 minutes. Before it: 06b, 10 and 12.*
#
# ## 1 The case
#
# A device computes a step of a network of 132,096 parameters in float32. The optimizer lives on the
# host, because its state does not fit on the device: after backward every gradient crosses the link
# to the host, the host steps, and every new value crosses back. Down and up can go at once, layer
# after layer.
#
# The link is slow: for the bytes of a step, down and up together, it needs twice as long as the
# device computes. How many times as long as without offloading does a step take? And how many bytes
# cross for one parameter in a step, both ways together?

# %% [markdown]
# ## 2 Predict
#
# The host itself is quick. A quarter off is good enough for the time.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, solution

time_guess = predict("time of a step, over one without offloading", example=3.0)
bytes_guess = predict("bytes that cross per parameter and step", example=16)

# %%
from functools import partial

import numpy as np

from minidist import (
    MLP,
    Adam,
    FlatParameters,
    FlopCounter,
    LinkModel,
    SimWorld,
    Tensor,
    TrainConfig,
    UnwaitedRequestError,
    cross_entropy,
    fully_shard,
)
from minidist.base.memory import account_memory
from minidist.job.train.trainer import train as train_job
from minidist.nn import checkpoint
from minidist.parallel import CPUOffloadPolicy, HostPool
from minidist.techniques.offload.activations import HostCopy
from minidist.techniques.offload.optimizer import OffloadedOptimizer

# %% [markdown]
# ## 3 The idea and its picture
#
# Train what does not fit on the device, with the help of the host's memory, which is larger and
# behind a slow link. **Move what is needed rarely, and move it while something computes**: the
# optimizer's state is used once per step, a block's input once in forward and once in backward.
# What it saves: 12 of 16 B per parameter (optimizer), or all activations but one block's. What it
# costs: bytes on the link, and time only where the link is slower than what hides it.
#
# A step of a network of eight layers whose optimizer lives on the host: rank 0's streams. After
# backward the gradients go down layer by layer; the host steps a layer as soon as its gradient has
# arrived; its new values go up while the next layer steps. This function made it.

# %%
LAYERS, WIDTH, ROWS = 8, 128, 512
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a layer's parameters in float32
rng = np.random.default_rng(0)
rows, targets = rng.normal(size=(ROWS, WIDTH)), rng.integers(0, WIDTH, ROWS)
links = LinkModel(flops=5e10, memory_bandwidth=2e11)


def train(comm, offload="none", bandwidth=2e8, steps=2, dtype=np.float32, prefetch=1):
    """Returns weights, the device's account, and the pool.

    The host's own memory does 7 passes at 4 GB/s for a step.
    """
    with account_memory() as account, FlopCounter() as counter:
        model = MLP([WIDTH] * (LAYERS + 1), dtype=dtype)
        pool = HostPool(comm, bandwidth, host_bandwidth=4e9, prefetch=prefetch)
        flat = FlatParameters(model.parameters())
        optimizer = (
            OffloadedOptimizer(flat, Adam, pool, lr=1e-3)
            if offload == "optimizer"
            else Adam(flat, lr=1e-3)
        )
        for _ in range(steps):
            flat.zero_grad()
            x = Tensor(rows.astype(dtype))
            for layer in model.layers:  # every layer is a segment: lesson 10
                x = checkpoint(
                    layer,
                    x,
                    pack=partial(HostCopy, pool=pool) if offload == "activations" else None,
                )
            loss = cross_entropy(x, targets)
            comm.compute(counter.take(), name="forward")
            loss.backward()
            comm.compute(counter.take(), name="backward")
            del x, loss
            optimizer.step()
    return flat.data.copy(), account, pool


world = SimWorld(1, links=links)
world.run(train, "optimizer", steps=1)
picture("lanes", world, "part 3 of lesson 12b", name="the optimizer on the host")

# %% [markdown]
# ## 4 The code
#
# A transfer runs in a separate stream, one per direction, like a gather in lesson 12. So the
# program begins it and waits where it needs the result
# ([optimizer.py](../minidist/techniques/offload/optimizer.py)). What this saves, for slices that take
# a given number of ms to come down, to step on the host and to go up again:


# %%
def toy_end(slices, down, step, up):
    """When the last slice is back: each of the three does one slice at a time, in order."""
    free = [0.0, 0.0, 0.0]
    for _ in range(slices):
        done = 0.0
        for place, seconds in enumerate((down, step, up)):
            done = free[place] = max(done, free[place]) + seconds
    return done


for slices in (1, 4, 16):
    print(f"{slices:2} slices: {toy_end(slices, 48 / slices, 32 / slices, 48 / slices):.0f} ms")

# %% [markdown]
# When the optimizer asks a slice on the host for its gradient, the slice waits for the transfer.
# The optimizer asks slice by slice, and knows nothing of transfers.

# %% [markdown]
# ## 5 Check
#
# Time of a step by the speed of the link, and bytes on the link from its own count.


# %%
def seconds(**settings):
    world = SimWorld(1, links=links)
    ((_, _, pool),) = world.run(train, steps=2, **settings)
    return world.end_time / 2, pool


plain, _ = seconds()
numel = LAYER // 4 * LAYERS
for times in (0.25, 0.5, 1, 2, 4):
    # Down and up together take `times` as long as computing.
    bandwidth = 2 * 4 * numel / (times * plain)
    slow, pool = seconds(offload="optimizer", bandwidth=bandwidth)
    print(f"a link that needs {times:4} of the step's time: {slow / plain:.2f} times as long")
    if times == 2:
        time_guess.judge(slow / plain, within=0.12)
        bytes_guess.judge((pool.to_host + pool.to_device) / 2 / numel)

# %% [markdown]
# Down and up overlap with each other and with the host, but not with backward here: all gradients
# go down after it. ZeRO-Offload sends each one as soon as it is computed; `fully_shard(...,
# offload_policy=CPUOffloadPolicy(pool))` does so, unit by unit.
#
# What is alive on the device, and on the host:

# %%
for offload in ("none", "optimizer", "activations"):
    ((_, account, pool),) = SimWorld(1).run(train, offload)
    device = ", ".join(
        f"{kind} {account.peak_by_purpose.get(kind, 0):9,} B"
        for kind in ("optimizer", "activation")
    )
    print(f"{offload:12} device: {device}; host at its peak {pool.account.peak:9,} B")

# %% [markdown]
# Is it the same training? Bits do not change on their way:

# %%
((single, _, _),) = SimWorld(1).run(train)
for offload in ("optimizer", "activations"):
    ((weights, _, _),) = SimWorld(1).run(train, offload)
    print(f"{offload}: max |w_offloaded - w_single| = {np.abs(weights - single).max()}")
    assert np.array_equal(weights, single)

# %% [markdown]
# Parameters: when not even one copy of the weights fits, the device holds the layer that runs and
# the next one, and swaps the others. With `fully_shard` on a single device no other rank takes
# a part, so the shard of a layer is the whole layer, and with `CPUOffloadPolicy` it lives on the host:
# it crosses before the layer's forward and before its backward, and its gradient crosses back.
#
# How long does the device wait? The virtual clock says it, for links that need a part of the time
# that a step computes, or a multiple of it, to bring the weights:


# %%
def swapped(comm, bandwidth, prefetch=1):
    """Returns seconds and bytes brought of a step, and the most bytes of whole layers at a time."""
    with account_memory() as account, FlopCounter() as counter:
        model, pool = MLP([WIDTH] * (LAYERS + 1), dtype=np.float32), HostPool(comm, bandwidth)
        policy = CPUOffloadPolicy(pool)
        for module in (*model.layers, model):
            fully_shard(module, mesh=comm, offload_policy=policy, prefetch=prefetch)
        # The first step learns the order of the layers, and brings none ahead.
        for _ in range(2):
            start, before = comm.time(), pool.to_device
            loss = cross_entropy(model(Tensor(rows.astype(np.float32))), targets)
            comm.compute(counter.take(), name="forward")
            loss.backward()
            comm.compute(counter.take(), name="backward")
    return comm.time() - start, pool.to_device - before, account.peak_by_purpose["unsharded"]


def on_one_device(*settings):
    return SimWorld(1, links=links).run(swapped, *settings)[0]


busy, brought, _ = on_one_device(1e18)  # a link that takes no time
for times in (0.25, 0.5, 1, 2, 4):
    results = {ahead: on_one_device(brought / (times * busy), ahead) for ahead in (0, 1)}
    waits = {ahead: 1 - busy / seconds for ahead, (seconds, _, _) in results.items()}
    layers = {ahead: held // LAYER for ahead, (_, _, held) in results.items()}
    print(
        f"a link that needs {times:4} of the step's time: idle {waits[0]:3.0%} with {layers[0]}"
        f" whole layer, {waits[1]:3.0%} with {layers[1]}"
    )

# %% [markdown]
# One layer ahead hides most of a link that is faster than the device. A slower one cannot be hidden:
# only a larger micro-batch helps, which computes for longer on the same bytes. The trainer does the
# same with `--zero 3 --offload parameters`; [docs/three_sizes.md](../docs/three_sizes.md) walks one
# model from a card that holds it to a card that does not hold even its weights.

# %% [markdown]
# Activations: on a link that is fast enough they cost next to no time. A block's input leaves while
# the next block computes, and comes back one block early. Without looking ahead every block waits
# for its input:

# %%
recomputed, _ = seconds()
for prefetch in (0, 1):
    time, pool = seconds(offload="activations", bandwidth=1e9, prefetch=prefetch)
    print(
        f"{prefetch} ahead: {time / recomputed:.2f} times as long as recomputing without offloading"
    )
world = SimWorld(1, links=links)
world.run(train, "activations", 1e9, steps=1)
picture("lanes", world, "part 5 of lesson 12b", name="activations on the host")

# %% [markdown]
# So far every layer is recomputed, and only its input leaves. Without recomputation all that
# operations save for backward can leave: `SavedOnHost` moves an array when the operation that saves
# it is recorded, and brings it back when backward visits its node, or one node earlier. More bytes
# cross, and nothing is computed twice ([activations.py](../minidist/techniques/offload/activations.py)).

# %%
GPT_JOB = {"layers": 6, "width": 64, "micro_batch": 4, "steps": 2}
results = {}
for offload in ("none", "activations"):
    config = TrainConfig.make(**GPT_JOB, offload=offload)
    (results[offload],) = SimWorld(1).run(train_job, config)
    peak = results[offload].peak_bytes
    crossed = results[offload].measured.get("host", {"to_host": 0})["to_host"] // GPT_JOB["steps"]
    print(
        f"--offload {offload:11} device {peak:10,} B at most; to the host {crossed:9,} B per step"
    )
assert results["activations"].digest == results["none"].digest
assert results["activations"].peak_bytes < 0.6 * results["none"].peak_bytes

# %% [markdown]
# ## 6 Break it
#
# A transfer that the program does not wait for. On a real device the kernel after it would now and
# then read an array that has half arrived. Here it is an error that names the line:


# %%
def careless(comm):
    pool = HostPool(comm)
    host = pool.copy(np.ones(1000), "parameter")
    transfer = pool.start_fetch(host, "parameter")
    return transfer.target.sum()  # without transfer.wait()


with expect(UnwaitedRequestError):
    SimWorld(1).run(careless)

# %% [markdown]
# ## 7 Exercise: a step on the host that keeps device, link and host busy
#
# `down(i)` begins to bring the gradient of piece i to the host, `step(i, gradient)` computes there
# and returns the piece's new values, `up(i, values)` begins to bring them to the device. `down` and
# `up` return something whose `wait()` must be called. Step all `pieces`, in the least time, with at
# most two gradients on the host.


# %%
def offloaded_step(comm, pieces, down, step, up):
    for piece in range(pieces):
        gradient = down(piece).wait()
        values = step(piece, gradient)
        up(piece, values).wait()


check("12b.offloaded_step", offloaded_step)

# %%
reveal("12b.offloaded_step")
check("12b.offloaded_step", solution("12b.offloaded_step"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Keep on the host what is used rarely**, and cross while something else works: down, step and
#   up are three stations, and a step of k equal pieces takes what one piece needs, and k - 1 times
#   the slowest station.
# - ZeRO-Offload moves **2 B + 2 B per parameter and step** in 16-bit training (4 + 4 in float32),
#   1/n of it on each of n ranks.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 minidist train --dp 2 --zero 2 --offload optimizer --steps 5
#     mpiexec -n 2 minidist compare --dp 2 --zero 3 --offload parameters --steps 3
#     mpiexec -n 2 minidist train --dp 2 --recompute sqrt --offload activations --steps 5
#     mpiexec -n 2 minidist compare --dp 2 --offload activations --reduction ordered --steps 3
#     mpiexec -n 2 python mpi_examples/3_sharding/offload.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `--offload optimizer`, `OffloadedOptimizer` | DeepSpeed `"offload_optimizer": {"device": "cpu"}` (ZeRO-Offload); Megatron-LM `--optimizer-cpu-offload` |
# | `--offload parameters`, `CPUOffloadPolicy(pool)` | PyTorch FSDP2 `CPUOffloadPolicy`; DeepSpeed `"offload_param"` (ZeRO-Infinity) |
# | `--offload activations` with recomputation, `checkpoint(..., pack=)` | DeepSpeed `cpu_checkpointing` |
# | `--offload activations` without it, `SavedOnHost` | PyTorch `torch.autograd.graph.save_on_cpu` |
# | pieces on their way while others step | DeepSpeed `"pin_memory"`, `"pipeline_read"`, `"pipeline_write"` |
#
# Next: [14 Tensor parallel](14_tensor_parallel.ipynb). All of them are in the [index](README.md).
