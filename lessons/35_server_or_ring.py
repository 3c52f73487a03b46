# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 35 Server or ring
#
# *25 minutes. Before it: 04 and 08.*
#
# ## 1 The case
#
# Eight workers train one model of 100,000 numbers, 800,000 B; every worker has its own part of the
# batch, and a gradient takes each of them 2 ms. All links are alike, 1 GB/s. There are two ways to
# add the eight gradients and to have the new weights everywhere:
#
# - a *server*: a ninth rank, to which every worker sends its gradient, and which sends the new
#   weights to every worker;
# - a *ring* of the eight workers (lesson 04).
#
# How much time of a step is communication, with the server, over that with the ring? And how many
# bytes leave a worker, with the server over with the ring? (The answers point in opposite
# directions.)

# %%
import inspect

import numpy as np

from minidist import SGD, LinkModel, SimWorld, UsageError, all_reduce
from minidist.course.lesson import check, expect, predict, solution
from minidist.report import draw, show
from minidist.techniques import parameter_server as ps

# %% [markdown]
# ## 2 Predict
#
# Count what goes through the busiest port. A quarter off is good enough for the time, a tenth for the bytes.

# %%
time_guess = predict("time of communication in a step, server over ring", example=2.0)
bytes_guess = predict("bytes that leave a worker, server over ring", example=2.0)

# %% [markdown]
# ## 3 The idea and its picture
#
# **The same sum, through one port or round a ring.** A server's port carries the gradient of every
# worker in, and the weights for every worker out: its time grows with the number of workers. The
# ring's does not. What a server has that a ring has not: workers need not wait for each other
# (lesson 08), and one that dies takes nothing with it.
#
# The same step on three workers, through a server (rank 0), then round a ring:

# %%
SIZE, SECONDS = 100_000, 2e-3
LINKS = LinkModel(alpha=5e-6, beta=1e-9)


def gradient(worker, clock, weights):
    """Pulls all weights towards the worker's number; whole numbers, so that sums are exact."""
    return {"w": np.full(SIZE, float(worker + clock))}


def by_server(comm, servers, steps, seconds=SECONDS):
    """Returns the weights after `steps` updates; the first ranks serve."""
    config = ps.ServerConfig(servers, "bsp", lambda slices: SGD(slices, lr=0.5))
    first = {f"w{i}": part for i, part in enumerate(np.array_split(np.zeros(SIZE), servers))}

    def parts(worker, clock, weights):
        whole = gradient(worker, clock, weights)["w"]
        return {f"w{i}": part for i, part in enumerate(np.array_split(whole, servers))}

    result = ps.run(comm, config, first, parts, steps, lambda worker, clock: seconds)
    return np.concatenate([result.weights[f"w{i}"] for i in range(servers)])


def by_ring(comm, steps, seconds=SECONDS):
    """The same, without servers."""
    weights = np.zeros(SIZE)
    for clock in range(steps):
        comm.compute(seconds=seconds, name=f"gradient {clock}")
        weights -= 0.5 * all_reduce(
            comm, gradient(comm.rank, clock, weights)["w"], algorithm="ring"
        )
    return weights


for name, ranks, program in (
    ("server", 4, lambda comm: by_server(comm, 1, 1)),
    ("ring", 3, lambda comm: by_ring(comm, 1)),
):
    world = SimWorld(ranks, links=LINKS)
    world.run(program)
    header = {"name": name, "command": "part 3 of lessons/35_server_or_ring.py"}
    show(draw("space-time", world.traces, header))

# %% [markdown]
# ## 4 The code
#
# A server in a few lines, with every message. Rank 0 holds the weights:


# %%
def toy(comm, weights, mine, steps):
    """mine: this worker's gradient. Returns the weights at the end."""
    for _ in range(steps):
        if comm.rank == 0:
            total, part = np.zeros_like(weights), np.empty_like(weights)
            for worker in range(1, comm.size):
                comm.recv(part, worker)  # push
                total += part
            weights = weights - 0.5 * total
            for worker in range(1, comm.size):
                comm.send(weights, worker)  # pull
        else:
            comm.send(mine, 0)
            weights = weights.copy()
            comm.recv(weights, 0)
    return weights


print(SimWorld(4).run(lambda comm: toy(comm, np.zeros(2), np.full(2, float(comm.rank)), 2))[3])

# %% [markdown]
# The library's servers are in [parameter_server/](../minidist/techniques/parameter_server); there may
# be several, each with a part of the weights, and workers need not wait for each other.
#
# ## 5 Check
#
# Two runs of the same job, each with computing and without; the difference of steps 2 and 1 leaves
# out the start.

# %%
WORKERS = 8


def step_of(ranks, program):
    """(seconds, bytes that leave the last worker) of one step: a run of three steps less one of
    two.
    """
    ends, sent = [], []
    for steps in (2, 3):
        world = SimWorld(ranks, links=LINKS)
        world.run(program, steps)
        ends.append(world.end_time)
        sent.append(sum(m.nbytes for m in world.traces[-1].sent() if m.purpose != "startup"))
    return ends[1] - ends[0], sent[1] - sent[0]


server_time, server_bytes = step_of(WORKERS + 1, lambda comm, steps: by_server(comm, 1, steps))
ring_time, ring_bytes = step_of(WORKERS, by_ring)
print(f"server: {1e3 * server_time:.2f} ms per step, {server_bytes:,} B leave a worker")
print(f"ring:   {1e3 * ring_time:.2f} ms per step, {ring_bytes:,} B leave a worker")
time_guess.judge((server_time - SECONDS) / (ring_time - SECONDS), within=0.3)
bytes_guess.judge(server_bytes / ring_bytes, within=0.1)
n = WORKERS
print(
    f"on paper: 2 n Ψ beta over 2 (n-1)/n Ψ beta = n²/(n-1) = {n * n / (n - 1):.2f}; Ψ over 2 "
    f"(n-1)/n Ψ = {n / (2 * (n - 1)):.2f}"
)

# %% [markdown]
# (It is less than on paper, because the workers that get their weights first begin the next
# gradient while the others still receive.)
#
# More servers share the port's work. With as many servers as workers the time is about the ring's,
# for twice the ranks. (Put a server on every worker, and push and pull *are* a reduce-scatter and
# an all-gather: that is the `ordered` all-reduce of lesson 36.)

# %%
for servers in (1, 2, 4, 8):
    seconds, nbytes = step_of(
        WORKERS + servers, lambda comm, steps, s=servers: by_server(comm, s, steps)
    )
    print(
        f"{servers} servers: {1e3 * (seconds - SECONDS):6.2f} ms of communication, {nbytes:,} B "
        "leave a worker"
    )
print(
    f"ring:      {1e3 * (ring_time - SECONDS):6.2f} ms of communication, {ring_bytes:,} B leave "
    "a worker"
)

# %% [markdown]
# The weights are those of one device:

# %%
single = np.zeros(SIZE)
for clock in range(3):
    single -= 0.5 * sum(gradient(worker, clock, None)["w"] for worker in range(WORKERS))
served = SimWorld(WORKERS + 2).run(lambda comm: by_server(comm, 2, 3))[-1]
ringed = SimWorld(WORKERS).run(by_ring, 3)[0]
print(f"server: max |w_parallel - w_single| = {np.abs(served - single).max():g}")
print(f"ring:   max |w_parallel - w_single| = {np.abs(ringed - single).max():g}")
assert np.array_equal(served, single)
assert np.array_equal(ringed, single)

# %% [markdown]
# ## 6 Break it
#
# One worker is slow. In the ring all ranks wait for it, as they do with a server that waits for all.
# A server that does not wait (`asp`) goes on. These are the gradients per second of all workers,
# when one of three needs four times as long:


# %%
def gradients_per_second(consistency):
    config = ps.ServerConfig(1, consistency, lambda slices: SGD(slices, lr=0.1))
    world = SimWorld(4, links=LinkModel(alpha=1e-3, beta=0.0))
    seconds = lambda worker, clock: 4.0 if worker == 2 else 1.0  # noqa: E731
    pushes = [0]

    def count(worker, clock, weights):
        pushes[0] += 1
        return {"w": np.zeros(1)}

    world.run(
        ps.run, config, {"w": np.zeros(1)}, count, lambda comm, clock: comm.time() >= 40, seconds
    )
    return pushes[0] / world.end_time


for consistency in ("bsp", "asp"):
    print(f"{consistency}: {gradients_per_second(consistency):.2f} gradients per second")

# %% [markdown]
# And a job without workers is refused:

# %%
with expect(UsageError):
    SimWorld(1).run(by_server, 1, 1)

# %% [markdown]
# ## 7 Exercise: a sum through servers
#
# The first `servers` ranks are servers, the others workers. Server i owns part i of the array, as
# `np.array_split(gradient, servers)` cuts it. Return on a worker the sum of all workers' gradients,
# on a server the sum of its part. A server has no gradient: its `gradient` has the same size and holds nan. Use
# `comm.send` and `comm.recv`; a worker may send no more than its gradient.


# %%
def through_servers(comm, servers, gradient):
    if comm.rank >= servers:
        for server, part in enumerate(np.array_split(gradient, servers)):
            comm.send(part, server)
        return gradient
    total = np.zeros_like(np.array_split(gradient, servers)[comm.rank])
    for worker in range(servers, comm.size):
        part = np.empty_like(total)
        comm.recv(part, worker)
        total = total + part
    return total


check("35.through_servers", through_servers)

# %%
print(inspect.getsource(solution("35.through_servers")))
check("35.through_servers", solution("35.through_servers"))

# %% [markdown]
# ## 8 Takeaway
#
# - Through one server a step sends **n Ψ in and n Ψ out of one port**: n²/(n-1) times a ring's
#   time, for about half of the bytes from a worker.
# - With n servers both are alike. What decides then is not bytes but waiting: a server need not
#   wait for the slowest.
#
# ## 9 The same code under mpiexec
#
#     mpiexec -n 5 minidist train --strategy ps --servers 1 --consistency bsp --steps 5
#     mpiexec -n 4 minidist train --dp 4 --steps 5
#     mpiexec -n 4 python mpi_examples/2_data_parallel/parameter_server.py
#
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | a server for some of the weights | PS-Lite, BytePS; TensorFlow `ParameterServerStrategy` |
# | a ring of workers | Horovod, PyTorch DDP, NCCL; TensorFlow `MultiWorkerMirroredStrategy` |
# | servers on the workers' machines | BytePS's colocated mode; ZeRO's owners of shards |
#
# Next: [36 The order of additions](36_order_of_additions.ipynb). All of them are in the
# [index](README.md).
