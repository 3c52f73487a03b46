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
# A small GPT writes a text, one token after the other; its context is 64 tokens, two layers of
# width 32. For the 50th token it reads the whole text again, 53 tokens, and multiplies every one of
# them with all weights. But the *keys* and *values* of attention (lesson 22) that belong to earlier
# tokens do not change when a token is added. So they can be stored.
#
# How many times less work is the 50th token then? And how many bytes do the stored keys and values
# take, in float32?

# %%
import hashlib
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

from minidist import GPT, FlopCounter, GPTConfig, SimWorld, TrainConfig, UsageError
from minidist.base.cache import content_hash, key_of
from minidist.commands.generation import generate
from minidist.course.lesson import check, expect, predict, reveal, solution
from minidist.data import (
    GlobalBatchSampler,
    PrefetchingSampler,
    WorkerSampler,
    cached,
    load_dataset,
)
from minidist.data.workers import open_sampler
from minidist.job.train.trainer import train
from minidist.nn.kv_cache import KeyValueCache, kv_cache_bytes
from minidist.report import draw, show
from minidist.report.frame import new_figure

# %% [markdown]
# ## 2 Predict
#
# In every layer a token has a key and a value of 32 numbers each.

# %%
work_guess = predict("times less work for the 50th token", example=10)
bytes_guess = predict("bytes of the keys and values of 53 tokens", example=1000, unit="B")

# %% [markdown]
# ## 3 The idea and its picture
#
# Compute nothing twice, and do not wait for data: **store each result under a name that says
# exactly what it is, and make the next batch while this one trains**. What it saves: tokens,
# features and a teacher's logits are made once for all ranks, epochs and runs, and the keys and
# values of a text's tokens are computed once. What it costs: disk and memory, and an exact answer
# to the question whether a stored result is still the right one. A cache that is wrong about this
# makes a model train on other data, and no error is raised.
#
# The work for each token that a GPT writes, with and without stored keys and values, until its
# context of 64 tokens is full and the window slides.

# %%
model = GPT(GPTConfig(256, 64, 32, 2, 4), seed=0).eval()
prompt = np.frombuffer(b"The ", np.uint8)


def written(kv_cache):
    """(tokens, FLOPs of each) of 70 tokens."""
    with FlopCounter() as counter:
        steps = generate(model, prompt, 70, 64, temperature=1.0, seed=1, kv_cache=kv_cache)
        pairs = [(token, sum(flops for flops, _ in counter.take())) for token in steps]
    return [token for token, _ in pairs], [flops for _, flops in pairs]


with_cache, without = written(True), written(False)
figure = new_figure(6, 3)
axes = figure.add_subplot()
axes.plot(without[1], color="#AA3377", label="the whole text for each token")
axes.plot(with_cache[1], color="#4477AA", label="keys and values kept")
axes.set_yscale("log")
axes.set_title("work per token, with and without stored keys and values", fontsize=10, loc="left")
axes.set_xlabel("token")
axes.set_ylabel("FLOPs")
axes.legend()
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
# **Keys and values.** Under causal attention the keys and values of earlier tokens never change, so
# only the query of the new token is multiplied with all keys
# ([kv_cache.py](../minidist/nn/kv_cache.py)).

# %% [markdown]
# **Loading ahead.** The rows that a rank needs are known for the whole job. Worker i mod N makes
# request i, and the results are taken in the order of the requests, so the speed of a worker
# changes nothing ([workers.py](../minidist/data/workers.py)).

# %% [markdown]
# ## 5 Check
#
# The tokens are the same, and the work is what you have predicted:

# %%
assert with_cache[0] == without[0]
ratio = without[1][49] / with_cache[1][49]
work_guess.judge(ratio, within=0.25)
cache = KeyValueCache(model, 64)
cache.extend(list(prompt) + with_cache[0][:49])
bytes_guess.judge(cache.nbytes)
assert cache.nbytes == kv_cache_bytes(layers=2, tokens=53, kv_heads=4, head_size=8, itemsize=4)
assert ratio > 20

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
# - Under causal attention earlier keys and values never change. With them in memory a token costs
#   **2 P + 4 L t D** FLOPs instead of about t times as many, and they take **2 L t D** numbers.
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
# | `KeyValueCache` | Hugging Face `DynamicCache` (`past_key_values`); vLLM's paged attention stores it in pages |
# | `--loader-workers N --prefetch-batches P` | PyTorch `DataLoader(num_workers=N, prefetch_factor=P / N, multiprocessing_context="spawn", in_order=True)` |
# | `--data 'cifar:DIR \| crop:4 \| flip'` | torchvision `RandomCrop(32, padding=4)`, `RandomHorizontalFlip()`; `tf.data` `map` |
# | `shuffle:B` | MosaicML StreamingDataset `shuffle_algo="py1b"`; `tf.data` `shuffle(buffer_size)` |
# | `--teacher-cache` | offline distillation; stored soft labels (Shen and Xing, FKD, 2022) |
#
# Next: [09 Mixed precision](09_mixed_precision.ipynb). All of them are in the [index](README.md).
