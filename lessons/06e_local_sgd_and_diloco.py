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
# *40 minutes. Before it: 06d.*
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
# drift apart between two averages, and the longer they are alone the further.
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
    """Return w after so many steps; the two ranks average it at each `every`-th step."""
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
# Each rank has come to its own best value, and the average of these is not the best of the sum.
# With real data the ranks want nearly the same, so a small H changes little. Digits on four ranks,
# 120 steps; the loss is that of the average, on all rows:

# %%
images, labels = glyphs().rows(np.arange(480))


def train(comm, every, steps=120):
    """Return the averaged weights and this rank's last loss on its own rows."""
    mine = slice(comm.rank * 480 // comm.size, (comm.rank + 1) * 480 // comm.size)
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


def loss_of(weights):
    flat = FlatParameters((model := MLP([images.shape[1], 64, 10])).parameters())
    np.copyto(flat.data, weights)
    return cross_entropy(model(Tensor(images)), labels).item()


for every in (1, 4, 10):
    world = SimWorld(4)
    results = world.run(train, every)
    sent = sum(m.nbytes for m in world.traces[0].sent("parameter_gather")) // 120
    print(
        f"averaged every {every:2} steps: {sent:6,} B per step; loss of the average "
        f"{loss_of(results[0][0]):.3f}, of a rank on its own rows {results[0][1]:.3f}"
    )

# %% [markdown]
# **DiLoCo** goes on from there: the way from the average back to the last common weights is taken
# for a gradient, and an *outer optimizer* makes a step with it, SGD with Nesterov's momentum. It
# sends the same bytes, and with AdamW inside H may be in the hundreds. The job equals its replay on
# one device, bit for bit:


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
# **One fragment at a time.** The exchange still stops all ranks while the link is busy. *Streaming
# DiLoCo* cuts the weights into *fragments* and sends one of them after each step, in turn. The ranks
# make the next step while it travels, and take it in one step late. All steps together send the
# same bytes, never more than one fragment at once, and what travels behind a step costs no time. A
# fragment that comes back is late, so a rank does not replace its weights by the common ones: it
# keeps a share alpha of its own. Two ranks, 4,000 numbers, steps of 1 s and a link of 10 kB/s:


# %%
def stream(comm, fragments, delay, alpha=0.5, steps=8, every=4, size=4000):
    """Each fragment is exchanged at every `every`-th step; it is taken in `delay` steps later."""
    other, on_the_way = 1 - comm.rank, []
    common = list(np.zeros((fragments, size // fragments)))
    own = [part.copy() for part in common]
    for step in range(steps):
        comm.compute(seconds=1.0, name=f"step {step}")
        for part in own:
            part += 1.0 + comm.rank  # what this rank learns in a step
        for f in range(fragments):
            if (step + 1) % every == f * (every // fragments):
                way, others = common[f] - own[f], np.empty_like(own[f])
                requests = [comm.isend(way, other), comm.irecv(others, other)]
                on_the_way.append((step + delay, f, way, others, requests))
        while on_the_way and (on_the_way[0][0] <= step or step == steps - 1):
            _, f, way, others, requests = on_the_way.pop(0)
            comm.waitall(requests)
            common[f] = common[f] - (way + others) / 2  # the outer step, with a learning rate of 1
            own[f] = alpha * own[f] + (1 - alpha) * common[f]
    return [float(part[0]) for part in common]


for name, fragments, delay in (("DiLoCo", 1, 0), ("four fragments, one step late", 4, 1)):
    world = SimWorld(2, links=LinkModel(alpha=0.0, beta=1e-4))
    common = world.run(stream, fragments, delay)
    sizes = [message.nbytes for message in world.traces[0].sent()]
    print(
        f"{name}: {world.end_time:.1f} s, {sum(sizes):,} B from rank 0, at most {max(sizes):,} B "
        "at once"
    )
    title = f"{name}: {world.end_time:.1f} s"
    command = "part 5 of lesson 06e"
    picture("lanes", world, command, title=title)

# %% [markdown]
# In the library, with a model, AdamW inside and Nesterov's momentum outside:

# %%
late = {"dp": 4, "outer_optimizer": "nesterov", "outer_fragments": 3, "outer_mixing": 0.5}
against_its_replay("three fragments", outer_delay=1, **late)

# %% [markdown]
# ## 6 Break it
#
# An outer step with a rank's own way in place of the average's. It looks as harmless as it is
# wrong: the ranks' common weights are not common any more.


# %%
def own_way(comm, rounds=3):
    common = np.zeros(1)
    for _ in range(rounds):
        weights = common + 1.0 + comm.rank  # what a round of local steps makes of them
        common = common - 0.7 * (common - weights)
    return common[0]


print("common weights of the ranks:", [f"{w:.1f}" for w in SimWorld(4).run(own_way)])

# %% [markdown]
# ## 7 Exercise: DiLoCo's outer step
#
# All ranks began the round with the weights `common`; `weights` are yours after it. Return the new
# common weights and the new momentum: with d the way from the average of all ranks' weights back to
# `common`, momentum = mu momentum + d, and a step of `lr` by d + mu momentum.


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
# - Local SGD sends **2 (n-1)/n Ψ every H steps**. Between two averages ranks drift towards what
#   their own rows want, so H is a matter of convergence.
# - DiLoCo takes the average's way for a gradient and gives it to an outer optimizer with momentum:
#   the same bytes, and a larger H.
# - Fragments: the same bytes per H steps, and **1/F of them at once**, behind the steps. What is late
#   is mixed, not copied: own = alpha own + (1 - alpha) common.
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
