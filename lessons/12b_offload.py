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
# *25 minutes. Before it: 06b, 10 and 12.*
#
# ## 1 The case
#
# A *device* is a card that computes. It is plugged into a computer, its *host*, whose memory is much larger
# and lies behind a link that is much slower than the device's memory. A device computes a step of a
# network of 132,096 parameters in float32. The optimizer's state does not fit on it and lies on the
# host: after backward every gradient crosses the link to the host, the host steps, and every new value
# crosses back. Down and up can go at once, layer after layer.
#
# The link is slow: for the bytes of a step, down and up one after the other, it would need twice as long
# as the device computes. How many times as long as without offloading does a step take? And how many bytes
# cross for one parameter in a step, both ways together?

# %% [markdown]
# ## 2 Predict
#
# The host itself is quick. The transfers begin when backward has ended. A quarter off is good enough for the
# time.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, small_job, solution

time_guess = predict("time of a step, over one without offloading", example=3.0)
bytes_guess = predict("bytes that cross per parameter and step", example=16)

# %%
import numpy as np

from minidist import (
    MLP,
    Adam,
    FlatParameters,
    FlopCounter,
    LinkModel,
    SimWorld,
    Tensor,
    UnwaitedRequestError,
    cross_entropy,
)
from minidist.job.train.trainer import train as train_job
from minidist.parallel import HostPool
from minidist.report import show
from minidist.report.frame import new_figure
from minidist.techniques.offload.optimizer import OffloadedOptimizer

# %% [markdown]
# ## 3 The idea and its picture
#
# **Move what is needed rarely, and move it while something computes**: the optimizer's state is
# used once per step, a block's input once in forward and once in backward. It saves 8 of 16 B per
# parameter here in float32 (in mixed precision 12 of 16; ZeRO-Offload, Ren et al. 2021, keeps the gradients on the
# host, too: 14 of 16), or all activations but one block's. It
# costs bytes on the link, and time wherever nothing runs meanwhile.
#
# A network of eight layers, whose Adam is on the device or on the host behind a link:

# %%
LAYERS, WIDTH, ROWS = 8, 128, 512
rng = np.random.default_rng(0)
rows, targets = rng.normal(size=(ROWS, WIDTH)), rng.integers(0, WIDTH, ROWS)
links = LinkModel(flops=5e10, memory_bandwidth=2e11)

# %% [markdown]
# The training is an ordinary one. `HostPool` is the host's memory with the link:


# %%
def train(comm, bandwidth=None, steps=2, offloaded=OffloadedOptimizer):
    """Returns weights, the host's pool and the loss. Without a bandwidth nothing is offloaded."""
    model = MLP([WIDTH] * (LAYERS + 1), dtype=np.float32)
    flat, pool = FlatParameters(model.parameters()), None
    if bandwidth is not None:
        pool = HostPool(comm, bandwidth, host_bandwidth=4e9)
    optimizer = offloaded(flat, Adam, pool, lr=1e-3) if pool else Adam(flat, lr=1e-3)
    for _ in range(steps):
        flat.zero_grad()
        with FlopCounter() as counter:
            loss = cross_entropy(model(Tensor(rows.astype(np.float32))), targets)
            comm.compute(counter.take(), name="forward")
            loss.backward()
            comm.compute(counter.take(), name="backward")
        optimizer.step()
    return flat.data.copy(), pool, float(loss.data)


# %% [markdown]
# One step, rank 0's streams. After backward the gradients go down layer by layer; the host steps a layer as
# soon as its gradient has arrived; its new values go up while the next layer steps:

# %%
world = SimWorld(1, links=links)
world.run(train, 2e8, steps=1)
own = [s for s in world.traces[0].spans if s.name in ("forward", "backward")]
waits = world.end_time - sum(s.end - s.start for s in own)
title = f"the device waits {1e3 * waits:.1f} ms of {1e3 * world.end_time:.1f} ms"
picture("lanes", world, "part 3 of lesson 12b", title=title)

# %% [markdown]
# ## 4 The code
#
# A transfer runs in a separate stream, one per direction, like a gather in lesson 12. So the
# program begins it and waits where it needs the result
# ([optimizer.py](../minidist/techniques/offload/optimizer.py)). What this saves: here the whole step takes
# 48 ms to come down, 32 ms on the host and 48 ms to go up again, in one piece or in equal slices:


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
    print(f"slices: {slices:2}; {toy_end(slices, 48 / slices, 32 / slices, 48 / slices):3.0f} ms")

# %% [markdown]
# In k equal slices the whole takes what one slice needs from end to end, and k - 1 times the slowest of the three: with
# many slices little more than 48 ms.

# %% [markdown]
# ## 5 Check
#
# The time of a step for links of several speeds, over that without offloading. Down and up together would take
# `times` as long as computing:


# %%
def seconds(bandwidth=None):
    world = SimWorld(1, links=links)
    ((weights, pool, _),) = world.run(train, bandwidth)
    return world.end_time / 2, weights, pool


plain, single, _ = seconds()
longer = {}
for times in (0.25, 0.5, 1, 2, 4):
    slow, weights, pool = seconds(2 * single.nbytes / (times * plain))
    longer[times] = slow / plain
    part = (longer[times] - 1) / times
    print(f"times = {times:4}: a step takes {longer[times]:.2f} times as long, ", end="")
    print(f"longer by {part:.2f} of the transfers")
time_guess.judge(longer[2], within=0.25)
bytes_guess.judge((pool.to_host + pool.to_device) / 2 / single.size)
print(f"max |w_offloaded - w_single| = {np.abs(weights - single).max()}")
assert np.array_equal(weights, single)

# %% [markdown]
# Down and up overlap with each other and with the host, so the step becomes longer by little more than half of what
# they would take one after the other. They do not overlap with backward here: all gradients go down
# after it. (DeepSpeed's ZeRO-Offload sends each one as soon as it is computed.)
#
# The optimizer is not the only thing that is used rarely:
#
# - `--offload activations` moves what an operation saves for backward, and brings it back when backward
#   comes near.
# - `--offload parameters` keeps the weights on the host: with ZeRO 3 a layer is gathered just before it
#   computes (lesson 12), and on one device that gather comes from the host.
#
# No bit of the training changes. The link carries 16 GB/s in each direction:

# %%
shape = {"layers": 6, "width": 64, "heads": 4, "context": 32, "micro_batch": 4, "steps": 2}
digests, plain_seconds, bars = {}, {}, {}
for zero, what in (
    (0, "none"),
    (0, "optimizer"),
    (0, "activations"),
    (3, "none"),
    (3, "parameters"),
):
    world = SimWorld(1)
    (result,) = world.run(train_job, small_job(**shape, zero=zero, offload=what))
    host = result.measured.get("host", {"to_host": 0, "to_device": 0})
    travel = (host["to_host"] + host["to_device"]) / 2 / 16e9
    added = (world.end_time - plain_seconds.setdefault(zero, world.end_time)) / 2
    bars[f"ZeRO {zero}, --offload {what}"] = result.peak_bytes / 1e6, travel * 1e6, added * 1e6
    assert result.digest == digests.setdefault(zero, result.digest)
device, link, longer_by = zip(*bars.values(), strict=True)
left, right = (figure := new_figure(9, 2.6)).subplots(1, 2, sharey=True)
left.barh(list(bars), device, color="#4477AA")
left.invert_yaxis()
left.set_title("peak on the device, MB", fontsize=10, loc="left")
right.barh(list(bars), link, color="#DDBBCC", label="on the link")
right.barh(list(bars), longer_by, color="#AA3377", height=0.4, label="added to the step")
right.legend(fontsize=8)
right.set_title("µs in a step", fontsize=10, loc="left")
show(figure)

# %% [markdown]
# The optimizer's bytes travel when nothing else runs, only down and up at once, so about half of their time is added.
# Activations travel while layers compute, and a quarter of theirs is added. ZeRO 3 alone needs more than ZeRO 0: one
# device has all shards (there is nothing to divide), and a layer that is gathered lies there a second time, with its
# gradient.
#
# [docs/three_sizes.md](../docs/three_sizes.md) walks one model from a card that holds it to a card
# that does not hold even its weights.

# %% [markdown]
# ## 6 Break it
#
# Begin the next step before all new values have come up. The lesson's training, with an optimizer whose `step()`
# returns while the values of the last layers are still on the link; they arrive during the next backward:


# %%
class Careless(OffloadedOptimizer):
    late = ()

    def step(self):
        for piece, values in self.late:  # of the step before: they have arrived by now
            piece.data[...] = values
        before = [piece.data.copy() for piece in self.device]
        super().step()
        half = len(before) // 2
        self.late = [(piece, piece.data.copy()) for piece in self.device[half:]]
        for (piece, _), old in zip(self.late, before[half:], strict=True):
            piece.data[...] = old  # not there yet


# %% [markdown]
# The loss of the twentieth step, and how far the first half of the weights is off, which always arrives:

# %%
half = single.size // 2
results = {}
for optimizer in (OffloadedOptimizer, Careless):
    ((weights, _, loss),) = SimWorld(1).run(train, 2e8, steps=20, offloaded=optimizer)
    results[optimizer] = weights[:half]
    print(f"{optimizer.__name__:18}: loss {loss:.4f}")
off = np.abs(results[Careless] - results[OffloadedOptimizer]).max()
print(f"max |w_careless - w_offloaded| = {off:.0e}")
assert off > 1e-4

# %% [markdown]
# Nothing fails. In minidist a transfer that nobody waits for is an error, which names the transfer (to the
# device) and its line:


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
# `up` return something whose `wait()` must be called. Step all `pieces`. What is judged: that every piece is
# stepped and waited for, the time, and that at most two gradients are on the host.


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
# - **Keep on the host what is used rarely**, and move it while something computes. Down, step and up run at
#   the same time, piece after piece, so only the slowest of the three counts.
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
# | pieces on their way while others step | DeepSpeed `"pin_memory"`; from and to a disk (NVMe) `"pipeline_read"`, `"pipeline_write"` |
#
# Next: [14 Tensor parallel](14_tensor_parallel.ipynb). All lessons are in the [index](README.md).
