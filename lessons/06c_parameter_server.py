# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06c Parameter server
#
# *25 minutes. Before it: 03 and 06.*
#
# ## 1 The case
#
# Three machines train one model. Two need 1 s for a gradient; the third shares its processor and
# needs 3 s, always. In data parallelism every step takes 3 s, and two machines wait for two thirds
# of their time.
#
# In another way one more rank, the *server*, holds the weights. Each *worker* sends its gradient to
# the server (a *push*), and gets the weights back (a *pull*). There are three rules for the reply:
#
# - `bsp`, bulk synchronous: the server replies when the gradients of all workers have arrived;
# - `asp`, asynchronous: it replies at once;
# - `ssp:2`, stale synchronous: it replies at once, unless the worker is more than 2 steps ahead of the
#   slowest one.
#
# Messages take little time. How many gradients per second do the three machines compute with `ssp:2`,
# and how many with `asp`, where 1 means as many as with `bsp`?

# %%
import numpy as np

from minidist import ANY, SGD, LinkModel, SimWorld
from minidist.course.lesson import check, picture, predict, reveal, solution
from minidist.report import show
from minidist.report.bench.staleness import staleness_runs, table
from minidist.report.staleness import staleness
from minidist.techniques import parameter_server as ps

# %% [markdown]
# ## 2 Predict
#
# In a run of many steps, how many gradients does each of the three workers compute while the slow one
# computes one?

# %%
guess = {
    "ssp:2": predict("gradients per second with ssp:2, over those of bsp", example=2.0),
    "asp": predict("gradients per second with asp, over those of bsp", example=2.0),
}

# %% [markdown]
# ## 3 The idea and its picture
#
# **Workers of different speed need not wait for the slowest.** It saves the time that fast workers
# wait. It costs *staleness*: gradients are computed with weights which the server has changed since.
# It also costs bytes at the server, which receives every worker's gradient and sends the weights to every
# worker, like the root of lesson 04. And the network decides the order of the
# updates, no longer the program.
#
# Rank 0 is the server, ranks 1 to 3 are workers, and rank 3 is the slow one. (The library counts the workers from 0:
# `worker` is the rank minus 1.) A worker's *clock* is the number of its step. The functions below give `ps.run`, the
# library's server and workers, a gradient and the seconds that it takes. With several servers each has a part of the
# weights, its slices; `server` says that there is one, and with which optimizer it steps them. The first picture
# shows `bsp`, the second `asp`; red is time in which a rank waits for another.

# %%
SLOW = 3
targets = np.arange(1.0, 5.0)


def gradient(worker, clock, weights):
    """The gradient of a squared distance to the targets, with noise that depends on the worker."""
    return {"w": weights["w"] - targets - np.sin(clock + worker)}


def seconds(worker, clock):
    return float(SLOW) if worker == 2 else 1.0  # rank 3 is slow


def server(consistency):
    return ps.ServerConfig(1, consistency, lambda slices: SGD(slices, lr=0.1))


def run(consistency, steps=4):
    """Return the world and what each rank returned."""
    world, first = SimWorld(4, links=LinkModel(alpha=0.05, beta=0)), {"w": np.zeros(4)}
    return world, world.run(ps.run, server(consistency), first, gradient, steps, seconds)


for consistency in ("bsp", "asp"):
    world, _ = run(consistency, steps=lambda comm, clock: comm.time() >= 9)  # about 9 seconds
    picture("space-time", world, "part 3 of lesson 06c", name=consistency)

# %% [markdown]
# ## 4 The code
#
# This is `asp` with every message. The server receives a push from *any* worker, applies it, and
# replies to that worker at once. With `ANY` in place of a rank `recv` takes the message that arrives
# first. The loss of rank r is (w - r)^2 / 2, so its gradient is w - r. The function returns who pushed,
# in order, and on a worker the weight that it pulled last:


# %%
def asynchronous(comm, pushes, seconds, lr=0.1):
    weights, gradient, order = np.zeros(1), np.empty(1), []
    if comm.rank == 0:
        for _ in range(pushes * (comm.size - 1)):
            worker = comm.recv(gradient, ANY)  # push
            weights = weights - lr * gradient
            order.append(worker)
            comm.send(weights, worker)  # pull
        return order
    for _ in range(pushes):
        comm.compute(seconds=seconds[comm.rank - 1], name="gradient")
        gradient[:] = weights - comm.rank
        comm.send(gradient, 0)
        comm.recv(weights, 0)
    return weights[0]


order, *weights = SimWorld(4).run(asynchronous, 3, [1.0, 1.1, 3.0])
print("the server gets pushes of the ranks", *order)
print("ranks 1 to 3 end with the weights", *(f"{w:.3f}" for w in weights))

# %% [markdown]
# The library's server ([server.py](../minidist/techniques/parameter_server/server.py)) replies to every
# worker that may continue. bsp, ssp and asp are one program with another bound: 0, s and infinity. (In
# bsp it also makes *one* update of the gradients of a clock, added in the order of the workers.)

# %% [markdown]
# ## 5 Check
#
# A model trains with each of the three rules for 0.3 s of virtual time. It is a table of the
# probabilities of the next of 16 tokens, whose loss begins at ln 16 = 2.77; the tokens are drawn at
# random, and no model has a loss below their entropy ("entropy" in the picture). A gradient takes 1 ms here,
# and 3 ms on the slow worker; the ratios stay. The staleness of a gradient is the number of updates
# that its weights did not have yet. (An update of bsp is the sum of three gradients, and one of ssp
# and asp is one gradient, at the same learning rate: each gradient moves the weights equally far in all three.) The
# picture shows the gradients per second, which share of the gradients has which staleness, and the loss over time:


# %%
runs = staleness_runs(("bsp", "ssp:2", "asp"), slow=SLOW)
print(table(runs))
print(f"entropy {runs[0].entropy:.4f}")
rate = {run.consistency: run.gradients_per_second for run in runs}
for name, prediction in guess.items():
    prediction.judge(rate[name] / rate["bsp"], within=0.1)
title = "the last of 3 workers is 3 times slower"
show(staleness(runs, title=title, command="minidist staleness --slow 3 -o staleness.svg"))

# %% [markdown]
# Without the time of messages `asp` would compute (3 + 3 + 1) / 3 = 7/3 times as many gradients. A bound
# does not help against a worker that is *always* slow: once the others are two clocks ahead, all
# workers run at its speed. It gives more gradients when different workers are late at different times,
# as on machines that share their host:

# %%
late = staleness_runs(("bsp", "ssp:2", "asp"), slow=SLOW, who="anyone")
print(table(late))

# %% [markdown]
# The last loss of ssp:2 is higher than that of bsp in both tables. But that is the loss of one moment, and it swings
# by a hundredth from update to update, because every batch is small. The mean over the last 0.05 s says more:

# %%
ends = {}
for name, three in (("always the same worker", runs), ("by chance", late)):
    ends[name] = [np.mean([loss for at, loss in run.curve if at > 0.25]) for run in three]
    words = ", ".join(
        f"{r.consistency} {end:.3f}" for r, end in zip(three, ends[name], strict=True)
    )
    print(f"late is {name:23}: {words}")
bsp, ssp, asp = ends["by chance"]
assert asp < ssp < bsp

# %% [markdown]
# With the worker that is always slow ssp:2 gains nothing. With workers that are late by chance it computes 1.3
# times as many gradients as bsp, and its loss is lower. asp, with the most gradients, has the lowest loss in both.
#
# Is it the same training as on one device? For bsp it is, bit for bit:

# %%
single = np.zeros(4)
for clock in range(4):
    total = gradient(0, clock, {"w": single})["w"]
    for worker in (1, 2):
        total = total + gradient(worker, clock, {"w": single})["w"]
    single = single - 0.1 * total
_, results = run("bsp")
off = np.abs(results[0].weights["w"] - single).max()
print(f"bsp: max |w_parallel - w_single| = {off:g}")
assert off == 0

# %% [markdown]
# What ssp and asp compute depends on the order in which pushes arrive, and on *nothing else*. The trace
# has that order, and `ps.replay` computes the same bits from it on one device:

# %%
world, results = run("asp")
records = ps.read_records(world.traces, server("asp"))  # one per server
order = [f"{worker + 1}.{clock}" for ((worker, clock),) in records[0].updates]
replayed = ps.replay(records, server("asp"), {"w": np.zeros(4)}, gradient)["w"]
off = np.abs(results[0].weights["w"] - replayed).max()
print("asp, gradients as rank.clock in the order of the updates:", *order)
print(f"asp: max |w_parallel - w_replayed| = {off:g};", end=" ")
print(f"from the weights of bsp {np.abs(replayed - single).max():.2f}")
assert off == 0

# %% [markdown]
# ## 6 Break it
#
# A stale gradient is right, but late: after τ more updates the correction is still on its way, so it is made
# up to τ + 1 times, and must be a small one. For a loss λw²/2, a learning rate a and a delay of τ updates the
# steps w ← w - a λ w(τ updates ago) are stable only while
# **aλ < 2 sin(π / (4τ + 2))** (Levin and May 1976). For the losses of part 4 λ is 1. Four equal workers with `asp`
# have τ = 3, as each sees its weights again after the pushes of the other three. A learning rate just below the
# limit, and one just above it; the lowest point of the four losses together is at 2.5:

# %%
tau = 3
limit = 2 * np.sin(np.pi / (4 * tau + 2))
print(f"the limit for a delay of {tau}: {limit:.3f}")
for lr in (0.9 * limit, 1.1 * limit):
    order, *weights = SimWorld(5).run(asynchronous, 60, [1.0] * 4, lr)
    print(f"learning rate {lr:.3f}: the workers end with", *(f"{w:6.2f}" for w in weights))
    assert (max(weights) < 4) == (lr < limit)

# %% [markdown]
# Nothing waits, and no error is raised.

# %% [markdown]
# ## 7 Exercise: the SSP bound
#
# Write the server and the workers of `ssp`. Rank 0 is the server; it starts with weights 0, one number
# per worker. A worker, for each clock in `range(steps)`, calls `compute(clock, weights)`, which
# returns its gradient, and pushes it (one message). The server adds gradients to the weights as they
# arrive, and replies with the weights (one message). It must reply as soon as the worker may start its
# next clock c, which is when the slowest worker has made **at least c - bound pushes**, and not
# earlier. After its last push a worker does not pull. Rank 0 returns the final weights. Judged: the
# weights, that each reply comes neither too early nor too late, messages and bytes.


# %%
def ssp(comm, steps, bound, compute):
    weights = np.zeros(comm.size - 1)
    if comm.rank > 0:
        for clock in range(steps):
            comm.send(compute(clock, weights), 0)
            if clock + 1 < steps:
                comm.recv(weights, 0)
        return None
    pushes = np.zeros(comm.size, int)
    for _ in range(steps * (comm.size - 1)):
        gradient = np.empty_like(weights)
        worker = comm.recv(gradient, ANY)
        weights += gradient
        pushes[worker] += 1
        if pushes[worker] < steps:
            comm.send(weights, worker)
    return weights


check("06c.ssp", ssp)

# %%
reveal("06c.ssp")
check("06c.ssp", solution("06c.ssp"))

# %% [markdown]
# ## 8 Takeaway
#
# - With a parameter server **workers wait less, and their gradients are stale**; bsp, ssp:s and asp are
#   one server with the bounds 0, s and ∞, and bsp makes one update of a clock's gradients. The bytes of
#   a server grow with the number of workers.
# - With ssp:s the fastest worker is at most **s** clocks ahead of the slowest; at clock c it sees every
#   update **up to clock c - s - 1**. Stale gradients are stable while **aλ < 2 sin(π / (4τ + 2))**, with
#   τ = workers - 1 for equal workers in asp.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/2_data_parallel/parameter_server.py --consistency ssp:2
#     mpiexec -n 5 minidist train --strategy ps --servers 1 --consistency bsp --steps 5
#     mpiexec -n 5 minidist compare --strategy ps --servers 2 --consistency ssp:2 --steps 3
#     minidist staleness bsp ssp:2 asp --slow 3 -o staleness.svg

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | servers, workers | `ps` and `worker` tasks of TensorFlow's `ParameterServerStrategy`; `DMLC_ROLE=server` and `worker` of ps-lite and MXNet; BytePS |
# | `bsp` | MXNet `kvstore='dist_sync'`; TensorFlow 1 `SyncReplicasOptimizer` |
# | `asp` | MXNet `kvstore='dist_async'`; Hogwild! (Recht et al. 2011) on one machine; Downpour SGD (Dean et al. 2012) |
# | `ssp:s` | `staleness` of Petuum / Bösen; SSPTable (Ho et al. 2013) |
# | several servers, each with a part of the weights; on the workers' machines | BytePS's colocated mode; ZeRO's owners of shards |
# | bsp that does not wait for the last workers | backup workers (Chen et al. 2016) |
# | a smaller learning rate for a staler gradient | staleness-aware SGD (Zhang et al. 2016) |
#
# Next: [06d Fewer bytes](06d_fewer_bytes.ipynb). All lessons are in the [index](README.md).
