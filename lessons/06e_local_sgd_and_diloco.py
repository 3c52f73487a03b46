# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06e Local SGD and DiLoCo
#
# *30 minutes. Before it: 06d.*
#
# ## 1 The case
#
# Four ranks are in four places, with slow links between them. The model has 5,000 parameters of 4
# bytes. Data parallelism sums a gradient of 20,000 B in every step. Instead each rank may train
# alone for 4 steps, and then the ranks average their weights, with a ring.
#
# How many bytes leave a rank per step, on average?
#
# And what does training alone change? Take two ranks with one weight w. Rank 0's data pulls w to 0
# with the loss w²/2; rank 1's data pulls it to 10, four times as strongly, with the loss
# 4 (w - 10)²/2. The sum of both losses is least at w = 8, where data parallelism ends. Where does w
# end when the ranks average only every 50 steps?

# %% [markdown]
# ## 2 Predict
#
# Where is each of the two ranks after 50 steps alone?

# %%
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution

bytes_guess = predict("bytes that leave a rank per step", example=30_000, unit="B")
end_guess = predict("w, averaged every 50 steps", example=8.0)

# %%
import numpy as np

from minidist import (
    MLP,
    SGD,
    FlatParameters,
    LinkModel,
    SimWorld,
    Tensor,
    all_reduce,
    cross_entropy,
    glyphs,
)
from minidist.job.equality.compare import compare_rank
from minidist.techniques.local_sgd.averaging import PeriodicModelAverager

# %% [markdown]
# ## 3 The idea and its picture
#
# **Send rarely: train alone for H steps, then average the weights.** That is *local SGD*. What it
# saves: bytes and waiting, by a factor of H. What it costs: equality with one device. The ranks
# drift apart between two averages, and the longer they train alone the further.
#
# Four steps with a message in each, then four steps with one message at the end:

# %%
LINKS = LinkModel(alpha=2e-5, beta=1e-8)


def four_steps(comm, every):
    weights = np.zeros(5000, np.float32)
    for step in range(1, 5):
        comm.compute(seconds=4e-4, name=f"step {step}")
        if step % every == 0:
            all_reduce(comm, weights, "avg", algorithm="ring")


for every, what in ((1, "a sum in every step"), (4, "an average every 4 steps")):
    world = SimWorld(4, links=LINKS)
    world.run(four_steps, every)
    title = f"{what}: {world.end_time * 1e3:.1f} ms"
    command = "part 3 of lesson 06e"
    picture("lanes", world, command, title=title)

# %% [markdown]
# ## 4 The code
#
# The case as a toy, with its only message:


# %%
def local_sgd(comm, every, steps=400, lr=0.1):
    """Return w after `steps` steps; the two ranks average it at each `every`-th step."""
    strength, best = ((1.0, 0.0), (4.0, 10.0))[comm.rank]
    w, others = np.zeros(1), np.empty(1)
    for step in range(1, steps + 1):
        w = w - lr * strength * (w - best)
        if step % every == 0:
            comm.sendrecv(w, 1 - comm.rank, others, 1 - comm.rank)
            w = (w + others) / 2
    return w[0]


ends = {every: SimWorld(2).run(local_sgd, every)[0] for every in (1, 2, 5, 50)}
for every, end in ends.items():
    print(f"averaged every {every:2} steps: w ends at {end:.2f}")

# %% [markdown]
# ## 5 Check

# %%
world = SimWorld(4, links=LINKS)
world.run(four_steps, 4)
bytes_guess.judge(sum(message.nbytes for message in world.traces[0].sent()) / 4)
end_guess.judge(ends[50], within=0.02)

# %% [markdown]
# After 50 steps alone each rank is at the best value for its data, 0 and 10. Their average is 5, and
# how strongly each of them pulls is forgotten. So what matters is how different the ranks' data is.
# Digits on four ranks, 120 steps: first each rank has pictures of all digits, then the rows are sorted,
# so that each rank has two or three digits only. A rank's training, with one call more per step:

# %%
images, labels = glyphs().rows(np.arange(480))


def train(comm, every, rows, steps=120):
    """Return the averaged weights and this rank's last loss on its part of the rows."""
    mine = rows[comm.rank * 480 // comm.size : (comm.rank + 1) * 480 // comm.size]
    model = MLP([images.shape[1], 64, 10])
    flat = FlatParameters(model.parameters())
    averager, optimizer = PeriodicModelAverager(flat, comm, every), SGD(flat, lr=0.5)
    for _ in range(steps):
        flat.zero_grad()
        loss = cross_entropy(model(Tensor(images[mine])), labels[mine])
        loss.backward()
        optimizer.step()
        averager.step()
    return flat.data.copy(), loss.item()


# %% [markdown]
# The loss is that of the average on all rows, and that of rank 0 on its part of the rows:


# %%
def loss_of(weights):
    flat = FlatParameters((model := MLP([images.shape[1], 64, 10])).parameters())
    np.copyto(flat.data, weights)
    return cross_entropy(model(Tensor(images)), labels).item()


losses = {}
for name, rows in (("mixed ", np.arange(480)), ("sorted", np.argsort(labels, kind="stable"))):
    for every in (1, 4, 10):
        world = SimWorld(4)
        results = world.run(train, every, rows)
        sent = sum(m.nbytes for m in world.traces[0].sent("parameter_gather")) // 120
        losses[name, every] = loss_of(results[0][0])
        print(
            f"{name} rows, averaged every {every:2} steps: {sent:6,} B per step; loss of the "
            f"average {losses[name, every]:.3f}, of rank 0 {results[0][1]:.3f}"
        )
assert losses["sorted", 10] > losses["sorted", 1] + 0.3 > losses["mixed ", 10] + 0.3

# %% [markdown]
# With mixed rows the ranks want nearly the same, and a tenth of the bytes costs nothing. With sorted
# rows each rank learns its digits, unlearns the others, and the average suffers. Rank 0's loss
# falls nevertheless.

# %% [markdown]
# **DiLoCo** treats the difference between the last common weights and the average as a gradient, and an
# *outer optimizer* makes a step with it, SGD with Nesterov's momentum. It sends the same bytes, and
# with AdamW inside H may be in the hundreds. One device that replays the steps of all ranks gets the
# same bits:


# %%
def against_its_replay(name, **settings):
    """Compare a job on four ranks with its replay on one device."""
    config = small_job(lr=0.01, steps=12, local_steps=3, micro_batch=2, **settings)
    verdict = SimWorld(4).run(compare_rank, config)[0]
    print(f"{name:16} loss {verdict.losses[-1]:.3f}; equal to its replay: {verdict.equal}")
    assert verdict.equal


against_its_replay("averages", dp=4)
against_its_replay("DiLoCo", dp=4, outer_optimizer="nesterov")

# %% [markdown]
# *Streaming DiLoCo* cuts the weights into *fragments* and exchanges one of them after each step, in
# turn, while the ranks make the next step. The same bytes travel, but behind the steps, and never more
# than one fragment at once. A fragment comes back one step late, so a rank mixes it with what it has
# learned since: (1 - alpha) of the common values and alpha of the rank's values.

# %%
late = {"dp": 4, "outer_optimizer": "nesterov", "outer_fragments": 3, "outer_mixing": 0.5}
against_its_replay("three fragments", outer_delay=1, **late)

# %% [markdown]
# ## 6 Break it
#
# An outer step with the difference to a rank's weights in place of the average. Each rank makes a
# plausible step and its loss falls. No rank waits for a message, so nothing hangs. But the ranks'
# common weights are not common any more:


# %%
def without_the_average(comm, rounds=3):
    common = np.zeros(1)
    for _ in range(rounds):
        weights = common + 1.0 + comm.rank  # what a round of local steps makes of them
        common = common - 0.7 * (common - weights)
    return common[0]


print("common weights of the ranks:", [f"{w:.1f}" for w in SimWorld(4).run(without_the_average)])

# %% [markdown]
# ## 7 Exercise: DiLoCo's outer step
#
# All ranks began the round with the weights `common`; `weights` are this rank's after it. With
# d = `common` - the average of all ranks' weights, the new momentum is mu momentum + d, and the step is
# `lr` times (d + mu times the new momentum), against d. Return the new common weights and the new
# momentum.


# %%
def outer_step(comm, common, weights, momentum, lr, mu):
    gradient = common - weights
    momentum = mu * momentum + gradient
    return common - lr * (gradient + mu * momentum), momentum


check("06e.outer_step", outer_step)

# %%
reveal("06e.outer_step")
check("06e.outer_step", solution("06e.outer_step"))

# %% [markdown]
# ## 8 Takeaway
#
# - Local SGD sends **2 (n-1)/n Ψ every H steps**. Between two averages each rank drifts to the optimum
#   of its rows, so H may be the larger, the more the ranks' rows resemble each other.
# - DiLoCo treats common - average as a gradient and gives it to an outer optimizer with momentum: the
#   same bytes, and a larger H.
#
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist compare --dp 4 --steps 5 --local-steps 2
#     mpiexec -n 4 minidist train --dp 4 --steps 20 --local-steps 5 --outer-optimizer nesterov
#     mpiexec -n 4 minidist train --dp 4 --steps 20 --local-steps 4 --outer-optimizer nesterov --outer-fragments 2 --outer-delay 1
#     mpiexec -n 4 python mpi_examples/2_data_parallel/local_sgd.py --every 10
#
# A replica may also be several ranks that shard one model (lessons 11 and 12). Each rank then averages its
# shards with the rank of the other replica that has the same ones:
#
#     mpiexec -n 4 minidist compare --dp 4 --dp-replicate 2 --zero 3 --steps 6 --local-steps 3 --outer-optimizer nesterov
#
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `PeriodicModelAverager(every=H)` | PyTorch `PostLocalSGDOptimizer`, `PeriodicModelAverager(period=H)` |
# | `OuterOptimizer`, `--outer-optimizer nesterov` | DiLoCo (Douillard et al. 2023); torchft `DiLoCo`; with one rank, Lookahead |
# | `StreamingOuterOptimizer`, `--outer-fragments` | Streaming DiLoCo (Douillard et al. 2025); torchft `DiLoCo(fragment_sync_delay, fragment_update_alpha)` |
# | ranks drift apart | "client drift" in federated learning |
#
# Next: [06f Loading data](06f_loading.ipynb). All of them are in the
# [index](README.md).
