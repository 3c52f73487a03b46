# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06f Data: caching and loading
#
# *30 minutes. Before it: 06.*
#
# ## 1 The case
#
# A step of a training computes for 30 ms. The batch for it takes 50 ms: pictures are decoded, cropped
# and mirrored. The rank makes its batches itself, so in each step of 80 ms it computes for 30. A
# second process, a *loader*, could make the next batch while this one trains, and several loaders
# several batches.
#
# For how much of the time does the training still wait with one loader? And how many loaders are
# needed until it does not wait any more?

# %% [markdown]
# ## 2 Predict
#
# A loader makes one batch after the other.

# %%
from minidist.course.lesson import check, expect, predict, reveal, solution

waits_guess = predict("of the time with one loader is waiting", example=60, unit="%")
loaders_guess = predict("loaders until no step waits", example=4)

# %%
import hashlib
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from minidist import SimWorld, TrainConfig, UsageError
from minidist.base.cache import content_hash, key_of
from minidist.data import (
    GlobalBatchSampler,
    PrefetchingSampler,
    WorkerSampler,
    cached,
    load_dataset,
)
from minidist.data.workers import open_sampler
from minidist.job.train.trainer import train
from minidist.report import draw, show
from minidist.report.frame import new_figure

# %% [markdown]
# ## 3 The idea and its picture
#
# Compute nothing twice, and do not wait for data: **store each result under a name that says
# exactly what it is, and make the next batch while this one trains**. What it saves: tokens,
# features and a teacher's logits are made once for all ranks, epochs and runs, and a step does not
# wait for its batch. What it costs: disk, memory and cores, and an exact answer to the question
# whether a stored result is still the right one. A cache that is wrong about this makes a model
# train on other data, and no error is raised.
#
# The first 400 ms without a loader, with one and with two. A loader works ahead; batch i is made by
# loader i mod N, and the batches are used in their order.

# %%
MAKE, STEP = 50, 30  # ms


def job(loaders, steps):
    """(start, end) of each step; (loader, start, end) of each batch, number 0 if there is none."""
    free, trained, batches, now = [0] * max(1, loaders), [], [], 0
    for i in range(steps):
        number = i % len(free)
        start = free[number] if loaders else now
        free[number] = start + MAKE
        batches.append((number, start, free[number]))
        begins = max(now, free[number])
        now = begins + STEP
        trained.append((begins, now))
    return trained, batches


figure = new_figure(8, 4.5)
for loaders, title in enumerate(("no loader", "one loader", "two loaders")):
    axes = figure.add_subplot(3, 1, loaders + 1)
    axes.set_title(f"{title}: blue trains, yellow makes a batch", fontsize=9, loc="left")
    trained, batches = job(loaders, 20)
    axes.broken_barh([(a, b - a - 1) for a, b in trained], (-0.4, 0.8), color="#4477AA")
    for number, a, b in batches:
        row = -0.4 if loaders == 0 else number + 0.6
        axes.broken_barh([(a, b - a - 1)], (row, 0.8), color="#CCBB44")
    names = ["training", *(f"loader {number}" for number in range(loaders))]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xlim(0, 400)
axes.set_xlabel("ms")
show(figure)

# %% [markdown]
# ## 4 The code
#
# **Names.** An entry's key is a hash of the content, of what is made of it, and of every parameter;
# it contains no path and no time stamp. An entry is written to a temporary file, synchronised to
# the disk, and renamed. A reader sees the whole entry or none, even when a writer is killed.


# %%
def toy_cached(folder, content, what, make):
    key = hashlib.sha256(repr((content, what)).encode()).hexdigest()
    entry = Path(folder) / f"{key}.npy"
    if not entry.exists():
        temporary = entry.with_suffix(".new.npy")
        np.save(temporary, make())
        temporary.replace(entry)  # a reader sees all of it or nothing
    return np.load(entry, mmap_mode="r")


made = []
with tempfile.TemporaryDirectory() as place:
    for what in ("tokens", "tokens", "lengths"):
        toy_cached(place, b"to be", what, lambda what=what: made.append(what) or np.arange(5))
print("made:", made)

# %% [markdown]
# The library's version ([cache.py](../minidist/base/cache.py)) also has the version of the code and every
# parameter in the key, and checks what it reads.
#
# **Loading ahead.** The rows that a rank needs are known for the whole job. Worker i mod N makes
# request i, and the results are taken in the order of the requests, so the speed of a worker
# changes nothing ([workers.py](../minidist/data/workers.py)).

# %% [markdown]
# ## 5 Check
#
# The time of a step, once the first batches are made. With N loaders it is the longer one of the
# training and 1/N of making a batch:

# %%
periods = {}
for loaders in (0, 1, 2, 3):
    trained, _ = job(loaders, 100)
    periods[loaders] = (trained[-1][1] - trained[49][1]) / 50
    waits = 100 * (1 - STEP / periods[loaders])
    print(f"{loaders} loaders: a step takes {periods[loaders]:.0f} ms, {waits:.0f} % of it waiting")
waits_guess.judge(100 * (1 - STEP / periods[1]))
loaders_guess.judge(min(loaders for loaders, ms in periods.items() if ms == STEP))
assert all(periods[n] == max(STEP, MAKE / n) for n in (1, 2, 3))

# %% [markdown]
# A student learns from a teacher whose logits are stored: the first run computes each sample once, the second one
# nothing, and every weight has the same bits.

# %%
folder = tempfile.TemporaryDirectory()
JOB = {
    "model": "gpt",
    "layers": 1,
    "width": 16,
    "heads": 2,
    "context": 16,
    "data": "markov",
    "micro_batch": 4,
}
teacher = str(Path(folder.name) / "teacher")
SimWorld(1).run(
    train, TrainConfig.make(**{**JOB, "width": 32, "layers": 2}, steps=20, save=teacher)
)
student = TrainConfig.make(
    **JOB,
    dp=2,
    steps=8,
    distill_from=teacher,
    teacher_cache=str(Path(folder.name) / "logits"),
    reduction="ordered",
)
worlds = [SimWorld(2), SimWorld(2)]
runs = [world.run(train, student) for world in worlds]
for name, results in zip(("first", "second"), runs, strict=True):
    counts = [result.measured["teacher"] for result in results]
    print(
        f"{name} run: {sum(c['asked'] for c in counts)} samples asked, "
        f"{sum(c['computed'] for c in counts)} computed"
    )
assert runs[0][0].digest == runs[1][0].digest
assert sum(result.measured["teacher"]["computed"] for result in runs[1]) == 0

# %% [markdown]
# The second run has no forward passes of the teacher, and is shorter by their time:

# %%
command = (
    "minidist train --dp 2 --steps 8 --distill-from runs/teacher --teacher-cache runs/logits "
    "--trace t.jsonl;"
    " minidist report t.jsonl --picture lanes"
)
for name, world in zip(("first run", "second run"), worlds, strict=True):
    show(
        draw(
            "lanes",
            world.traces,
            {"command": command, "title": f"{name}: {1e3 * world.end_time:.2f} ms"},
        )
    )
assert worlds[1].end_time < worlds[0].end_time

# %% [markdown]
# A thread and a worker process make the batches that the rank would have made itself:

# %%
make = partial(open_sampler, "pydoc", False, 8, 64, 0)
sampler, requests = make(), [(step, 0, 8) for step in range(6)]
with (
    PrefetchingSampler(make(), requests) as thread,
    WorkerSampler(make, sampler, requests, workers=1) as process,
):
    for request in requests:
        batches = [source.batch(*request) for source in (sampler, thread, process)]
        assert all(
            np.array_equal(one, other)
            for batch in batches
            for one, other in zip(batches[0], batch, strict=True)
        )
print(
    f"a thread made {thread.served} batches, a worker {process.served}: bit for bit those of the "
    "rank"
)

# %% [markdown]
# Images are usually cropped and mirrored at random, so that no epoch shows the same pixels twice.
# Stages behind the data do it where batches are made. What a stage draws is a function of the seed
# and the place of the sample in the job's endless list of samples: neither the number of workers
# nor the number of ranks changes a bit, and the next epoch draws anew.

# %%
data = "glyphs | crop:2 | flip | shuffle:16"
make = partial(open_sampler, data, False, 8, 1, 0)
sampler = make()
with WorkerSampler(make, sampler, [(step, 0, 8) for step in range(6)], workers=2) as processes:
    pairs = [(processes.batch(step, 0, 8), sampler.batch(step, 0, 8)) for step in range(6)]
print("two workers, equal:", all(np.array_equal(one[0], other[0]) for one, other in pairs))

visits = GlobalBatchSampler(load_dataset(data), sampler.samples, 1, seed=0)  # a batch is an epoch
first, second = (
    dict(zip(batch.indices.tolist(), batch[0], strict=True))
    for batch in (visits.batch(0, 0, sampler.samples), visits.batch(1, 0, sampler.samples))
)
same = sum(np.array_equal(first[number], second[number]) for number in first)
print(f"{len(first)} samples; in the next epoch {same} of them have the same pixels")

# %% [markdown]
# `shuffle:16` is the last of the stages. An order of all samples is an array as long as the data,
# and it reads all over the file. Here blocks of 16 neighbouring samples are permuted, and then the
# samples inside windows of 16 blocks: nothing is longer than a window or the number of blocks.

# %% [markdown]
# ## 6 Break it
#
# Leave a parameter out of the key. The vocabulary changes, and the cache returns the old tokens. No
# error is raised, and the model trains on other tokens than it was told to.

# %%
place, text = Path(folder.name) / "cache", np.frombuffer(b"to be or not to be", np.uint8)


def tokens(most):
    return np.minimum(text, most)


forgotten = [cached(text, "tokens", lambda most=most: tokens(most), place) for most in (120, 100)]
named = [
    cached(text, "tokens", lambda most=most: tokens(most), place, most=most) for most in (120, 100)
]
print(
    f"largest token, asked for at most 100: {forgotten[1].max()} without the parameter in the "
    f"key, {named[1].max()} with"
)
assert forgotten[1].max() == 116
assert named[1].max() == 100

# %% [markdown]
# A parameter that has no exact text form is refused. A damaged entry is reported and made again:

# %%
with expect(UsageError):
    key_of(content_hash(text), "tokens", most=float("nan"))
entry = next(place.iterdir())
entry.write_bytes(entry.read_bytes()[:-1] + b"?")
assert cached(text, "tokens", lambda: tokens(120), place).size == text.size
folder.cleanup()

# %% [markdown]
# ## 7 Exercise: loaders in order
#
# Rank 0 trains, and the other ranks load. `make(i)` returns batch i, an array of 2 numbers. It is
# slow, so every loader makes an equal share of the `batches`; rank 0 makes batches itself only when
# it is the only rank. Return, on rank 0, all batches in their order, of shape (batches, 2), and on
# a loader an empty array of shape (0, 2). The order of the batches must not depend on which loader
# is fastest.


# %%
def in_order(comm, batches, make):
    if comm.rank > 0:
        return np.zeros((0, 2))
    return np.array([make(i) for i in range(batches)]).reshape(batches, 2)


check("06f.in_order", in_order)

# %%
reveal("06f.in_order")
check("06f.in_order", solution("06f.in_order"))

# %% [markdown]
# ## 8 Takeaway
#
# - **The key is a hash of (content, what, parameters, version)**, and an entry is written,
#   synchronised to the disk and renamed. Then two writers at once, a writer that is killed and a
#   changed file need no special code when an entry is read.
# - A step takes **max(train, make / N)** with N loaders, and train + make without one.
# - Worker **i mod N** makes request i, and the results are taken in the order of the requests. All
#   workers make batches at the same time, and the batches have the same bits as without workers.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/7_more/caching.py
#     mpiexec -n 2 python mpi_examples/7_more/efficient_loading.py --workers 2
#     mpiexec -n 2 python mpi_examples/7_more/data_stages.py
#     mpiexec -n 4 python mpi_examples/7_more/distillation.py
#     mpiexec -n 2 minidist train --dp 2 --loader-workers 2 --prefetch-batches 8 --steps 20

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `cached` | Hugging Face `datasets` fingerprints; git's objects; Bazel's action cache |
# | `--loader-workers N --prefetch-batches P` | PyTorch `DataLoader(num_workers=N, prefetch_factor=P / N, multiprocessing_context="spawn", in_order=True)` |
# | `--data 'cifar:DIR \| crop:4 \| flip'` | torchvision `RandomCrop(32, padding=4)`, `RandomHorizontalFlip()`; `tf.data` `map` |
# | `shuffle:B` | MosaicML StreamingDataset `shuffle_algo="py1b"`; `tf.data` `shuffle(buffer_size)` |
# | `--teacher-cache` | offline distillation; stored soft labels (Shen and Xing, FKD, 2022) |
#
# Next: [09 Mixed precision](09_mixed_precision.ipynb). All of them are in the [index](README.md).
