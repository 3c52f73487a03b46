# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 27 For real
#
# *30 minutes. Before it: 05, 06 and 25. With an MPI (`pip install 'minidist[mpi]'`) it measures
# processes, without one it measures this process alone.*
#
# ## 1 The case
#
# A ping-pong between two processes on your machine: one sends 8 bytes, the other sends them back. A
# training step of a GPT with two layers of width 64, in NumPy on one core. And one process that
# sends hundreds of short messages to another one and waits for no answer.
#
# How long does one message of the ping-pong take? How many GFLOP/s does the step get? And how long
# is the receiver busy with each of many messages, as a part of that latency?

# %%
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from minidist import FlopCounter, LinkModel, SimWorld, TrainConfig
from minidist.base.process import tune_process
from minidist.course.lesson import check, expect, predict, solution
from minidist.course.lesson.mpi_leg import mpiexec
from minidist.job.config.train_config import resolve_batches
from minidist.job.train.job import build
from minidist.job.train.trainer import train
from minidist.report import draw, show

tune_process()
JOB = {"layers": 2, "width": 64, "heads": 4, "context": 64, "steps": 12, "global_batch": 8}

# %% [markdown]
# ## 2 Predict
#
# Everything before this lesson ran on a virtual clock; these numbers are your machine's, and they
# differ from day to day.

# %%
latency_guess = predict("latency of a short message", example=10.0, unit="µs")
rate_guess = predict("GFLOP/s of a training step on one core", example=50.0)
overhead_guess = predict("overhead of a receive, as a part of the latency", example=1.0)

# %% [markdown]
# ## 3 The idea and its picture
#
# Here **you measure your machine's numbers (latency, overhead, bandwidth, FLOP/s), predict the time
# of a job from them, and then run it**. What it saves: guesses. What it costs: an honest look at
# what the model leaves out. The digits below are of the machine on which this notebook was built;
# yours will differ, so nothing here is compared with anything.
#
# The same job on two ranks, as the virtual clock sees it, with invented numbers:

# %%
world = SimWorld(2, links=LinkModel(alpha=1e-6, beta=1e-10, flops=5e9))
world.run(train, TrainConfig.make(**{**JOB, "steps": 2}, dp=2))
command = "minidist train --dp 2 --steps 2 --trace t.jsonl; minidist report t.jsonl --picture gantt"
header = {"name": "two ranks, invented numbers", "command": command}
show(draw("gantt", world.traces, header))

# %% [markdown]
# ## 4 The code
#
# Ping-pong: half of a round trip, the best of many, for a few sizes. This is the whole program:

# %%
PING_PONG = """
import json, time
import numpy as np
from minidist import launch

def main(comm):
    rows = []
    for size in (8, 64, 1024, 16384, 65536, 262144, 1048576):
        array, best = np.zeros(size, np.uint8), 1.0
        for _ in range(60):
            comm.barrier()
            start = time.perf_counter()
            for _ in range(4):
                if comm.rank == 0:
                    comm.send(array, 1); comm.recv(array, 1)
                else:
                    comm.recv(array, 0); comm.send(array, 0)
            best = min(best, (time.perf_counter() - start) / 8)
        rows.append((size, best))
    if comm.rank == 0:
        print(json.dumps(rows), flush=True)

launch(main)
"""


def relative_fit(sizes, seconds):
    """Alpha and beta with the least squares of relative errors: an equation divided by its time."""
    rows = np.stack([np.ones(len(sizes)), sizes], axis=1) / np.array(seconds)[:, None]
    scale = rows.max(axis=0)  # bytes and seconds differ by many decades
    return np.linalg.lstsq(rows / scale, np.ones(len(sizes)), rcond=None)[0] / scale


# %%
def run(program, ranks):
    """What a program prints on `ranks` processes; on virtual ranks where there is no MPI."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program)
        launcher = mpiexec()
        command = (
            [launcher, "-n", str(ranks), sys.executable, str(path)]
            if launcher
            else [sys.executable, str(path), "--ranks", str(ranks)]
        )
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout


rows = json.loads(run(PING_PONG, 2).strip().splitlines()[-1])
alpha, beta = relative_fit([n for n, _ in rows], [s for _, s in rows])
for n, seconds in rows:
    print(f"{n:>9,} B  {1e6 * seconds:9.2f} µs   on the line {1e6 * (alpha + beta * n):9.2f} µs")
latency_guess.judge(1e6 * alpha, within=0.25)
print(f"alpha = {1e6 * alpha:.2f} µs, beta = {beta:.2e} s/B = {1e-9 / beta:.2f} GB/s")

# %% [markdown]
# The overhead: how long a rank is busy with a message (lesson 00). Rank 1 sends many short messages
# as fast as it can; rank 0 receives them one after the other. What limits them is no longer the
# latency, which the messages spend on their way side by side. (In the model the overhead is a part
# of the latency. Where it comes out larger, sender and receiver compete for something: a lock, a
# cache line, or a core.)

# %%
STREAM = """
import json, time
import numpy as np
from minidist import launch

def main(comm, count=16):
    array, best = np.zeros(8, np.uint8), 1.0
    for _ in range(200):
        comm.barrier()
        start = time.perf_counter()
        for _ in range(count):
            if comm.rank == 1:
                comm.send(array, 0)
            else:
                comm.recv(array, 1)
        best = min(best, (time.perf_counter() - start) / count)
    if comm.rank == 0:
        print(json.dumps(best), flush=True)

launch(main)
"""
overhead = json.loads(run(STREAM, 2).strip().splitlines()[-1])
print(
    f"a message every {1e6 * overhead:.2f} µs; LinkModel(alpha, beta, overhead=...) takes this "
    "number"
)
overhead_guess.judge(overhead / alpha, within=0.25)

# %% [markdown]
# FLOP/s: not a peak, but what this model's own step gets: the operations that the counter counts,
# over the time that they take on one device.


# %%
def one_device(samples):
    """(seconds, FLOPs) of one forward and backward of so many samples; the best of several."""
    config = TrainConfig.make(**{**JOB, "global_batch": samples}, dp=1)
    job = build(config, resolve_batches(config, 1))
    best, flops = float("inf"), 0.0
    for _ in range(6):
        with FlopCounter() as counter:
            start = time.perf_counter()
            job.loss(*job.micro_batch(0, 0)).backward()
            best = min(best, time.perf_counter() - start)
            flops = sum(count for count, _ in counter.take())
        for parameter in job.model.parameters():
            parameter.zero_grad()
    return best, flops


(half, flops), (whole, _) = one_device(4), one_device(8)
rate = flops / half
print(
    f"{flops:.3g} FLOPs in {1e3 * half:.2f} ms: {1e-9 * rate:.2f} GFLOP/s (twice the samples "
    f"take {whole / half:.2f} times as long)"
)
rate_guess.judge(1e-9 * rate, within=0.25)

# %% [markdown]
# ## 5 Check
#
# The prediction, before the run: the samples of one rank, a ring over the gradients, and the
# optimizer (measured, too: it moves bytes rather than computing).

# %%
config = TrainConfig.make(**JOB, dp=2)
job = build(config, resolve_batches(config, 2))
size = sum(parameter.size for parameter in job.model.parameters())
start = time.perf_counter()
for _ in range(5):
    w, m, v, g = np.zeros((4, size), np.float32)
    m += 0.1 * (g - m)
    v += 0.1 * (g * g - v)
    w -= m / (np.sqrt(v) + 1e-8)
update = (time.perf_counter() - start) / 5
parts = {"compute": flops / rate, "ring": 2 * (alpha + size * 4 / 2 * beta), "optimizer": update}
predicted = sum(parts.values())
print(
    "predicted a step: "
    + ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in parts.items())
    + f"; together {1e3 * predicted:.2f} ms"
)

# %%
TRAIN = f"""
import time, json
from minidist import launch
from minidist import TrainConfig
from minidist.job.train.trainer import train

def main(comm):
    times = []
    config = TrainConfig.make(**{JOB!r}, dp=2)
    train(comm, config, [lambda state: times.append(time.perf_counter())])
    if comm.rank == 0:
        steps = sorted(b - a for a, b in zip(times, times[1:]))
        print(json.dumps(steps[len(steps) // 2]), flush=True)

launch(main)
"""
measured = json.loads(run(TRAIN, 2).strip().splitlines()[-1])
print(
    f"measured a step: {1e3 * measured:.2f} ms; measured / predicted = "
    f"{measured / predicted:.2f} (within 25 % is good)"
)

# %% [markdown]
# Whatever the times are, the numbers are those of one device: the same job, two ranks, in the
# simulated world, beside one.

# %%
exact = {**JOB, "steps": 2, "precision": "fp64"}
two = SimWorld(2).run(train, TrainConfig.make(**exact, dp=2))[0].losses
one = SimWorld(1).run(train, TrainConfig.make(**exact, dp=1))[0].losses
print(
    "max |loss_parallel - loss_single| = "
    f"{max(abs(a - b) for a, b in zip(two, one, strict=True)):.1e}"
)

# %% [markdown]
# ## 6 Break it
#
# Fit the line the way a spreadsheet does, by least squares of the seconds. Let another program slow the largest
# message down to twice its time: a microsecond is nothing beside its error, and the latency comes out as whatever
# is left over.

# %%
disturbed = [*rows[:-1], (rows[-1][0], 2 * rows[-1][1])]
slope, intercept = np.polyfit([n for n, _ in disturbed], [s for _, s in disturbed], 1)
print(
    f"latency by plain least squares: {1e6 * intercept:.2f} µs; the smallest message took "
    f"{1e6 * rows[0][1]:.2f} µs"
)
with expect(AssertionError):
    assert abs(intercept - rows[0][1]) < 0.01 * rows[0][1], "the line misses the small messages"

# %% [markdown]
# ## 7 Exercise: fit a line through six decades
#
# `fit(sizes, seconds)`: (alpha, beta) of seconds = alpha + beta * size, so that *relative* errors
# are small for small and for large messages. The measurements have a few percent of noise; some
# took twice as long because another program used the machine.


# %%
def fit(sizes, seconds):
    beta, alpha = np.polyfit(sizes, seconds, 1)
    return alpha, beta


check("27.fit_a_line", fit)

# %%
check("27.fit_a_line", solution("27.fit_a_line"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Three numbers predict a step**: FLOPs / rate + 2 (n-1) (alpha + Ψ beta / n) + the optimizer's bytes.
# - Measure the rate on the model's own step. When the prediction misses, find what the model has left out: more
#   processes than cores, caches, memory bandwidth that the ranks share, a header before each message.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 minidist train --dp 2 --layers 2 --width 64 --steps 12
#     minidist bench collectives --ranks 2
#     mpiexec -n 2 python mpi_examples/7_more/device.py            # --device cuda: with CuPy and a GPU
#     mpiexec -n 2 python mpi_examples/1_messages/ping_pong.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | ping-pong | OSU micro-benchmarks `osu_latency`, `osu_bw`; nccl-tests |
# | alpha, beta, overhead | Hockney's model; LogP's and LogGP's L, o, g and G |
# | the counter's FLOPs over the time | model FLOPs utilization (PaLM, appendix B); Megatron-LM's "TFLOP/s per GPU" |
#
# Next: [28 The museum of bugs](28_the_museum.ipynb). All of them are in the [index](README.md).
