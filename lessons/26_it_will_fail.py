# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 26 It will fail
#
# *35 minutes. Before it: 11 and 12.*
#
# ## 1 The case
#
# A job has a thousand hours of work to do, on a machine that fails every 20 hours on average. A rank
# may die at any moment, also while it writes its part of a save. What must be on the disk, so that a
# failure never costs more than the work since the last save?
#
# That work is lost, so the other question is how often to save. A save takes 6 minutes. With a save
# every 12 minutes a third of the time goes into saving; with one every 10 hours a failure costs five
# hours on average. After how many hours of work should the job save?

# %% [markdown]
# ## 2 Predict
#
# Per hour of work: what do the saves cost, what do the failures cost, and when is the sum least? A
# fifth off is good enough.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, small_job, solution

WORK, SAVE, MTBF = 1000.0, 0.1, 20.0  # hours of work, of one save, and between failures
interval_guess = predict("best interval between two saves", example=1.0, unit="h")

# %%
import re
import shutil
from pathlib import Path

import numpy as np

from minidist import MinidistError, SimWorld, UsageError
from minidist.course.story import story
from minidist.job.checkpoint import Checkpoint, CheckpointShard, Storage, save
from minidist.job.train.trainer import train
from minidist.report import show
from minidist.report.frame import new_figure, tidy

# %% [markdown]
# ## 3 The idea and its picture
#
# **State is a set of named global tensors**, not one file per rank; **and a save either has
# happened or has not**, whenever a rank dies. It saves everything but the work since the last save,
# on any number of ranks. It costs a save now and then; how often is a formula.
#
# One simulated job with random failures, which saves after every `interval` hours of work:


# %%
def duration(interval, rng):
    """Hours until WORK is done; after each failure the job begins again from the last save."""
    now, done, failure = 0.0, 0.0, rng.exponential(MTBF)
    while done < WORK:
        segment = min(interval, WORK - done)
        end = now + segment + SAVE
        if end <= failure:
            now, done = end, done + segment
        else:  # it dies in this segment and is started again at once
            now, failure = failure, failure + rng.exponential(MTBF)
    return now


# %% [markdown]
# 40 jobs for each of 25 intervals. The formula, which part 5 explains, is for W hours of work with a save
# of C hours after every T hours of work, and a failure every M hours:

# %%
intervals = np.geomspace(0.2, 20, 25)
jobs = [
    [duration(interval, np.random.default_rng([seed, i])) for seed in range(40)]
    for i, interval in enumerate(intervals)
]
young = np.sqrt(2 * SAVE * MTBF)
formula = WORK * (1 + SAVE / intervals + intervals / (2 * MTBF))

# %% [markdown]
# How long the job takes, by the hours between two saves. Who saves seldom repeats much; who saves
# often has little time for work. Each dot is one simulated job. On the right the jobs take longer than by
# the formula, which assumes that T is small against M.

# %%
figure = new_figure(8, 3.2)
axes = figure.add_subplot()
axes.plot(np.repeat(intervals, 40), np.ravel(jobs), ".", color="#BBBBBB", markersize=3)
axes.plot(intervals, np.mean(jobs, axis=1), color="#4477AA", label="mean of 40 jobs")
axes.plot(intervals, formula, color="#228833", linestyle="--", label="W (1 + C/T + T/2M)")
axes.axvline(young, color="#AA3377", label="sqrt(2 C M)")
axes.legend(fontsize=8)
axes.set_title("1,000 hours of work, a failure every 20 hours", fontsize=10, loc="left")
axes.set_xscale("log")
axes.set_ylim(1000, 2000)
axes.set_xlabel("hours between two saves")
axes.set_ylabel("hours")
tidy(axes)
show(figure)

# %% [markdown]
# ## 4 The code
#
# A rank writes its pieces, each with the name, shape and range of the *global* tensor that it
# belongs to. Everything is written into a folder under a temporary name. When all is on disk, one
# rename gives it its final name, and another one makes it `latest`.


# %%
class Shown(Storage):
    """A disk that prints what is written and renamed, with NNN for the number of the save."""

    def write(self, path, data):
        print("write ", self.name(path))
        super().write(path, data)

    def rename(self, old, new):
        print("rename", self.name(old), "to", self.name(new))
        super().rename(old, new)

    def name(self, path):
        return re.sub(r"[0-9a-f]{9,}", "NNN", str(path.relative_to(folder)))


# %% [markdown]
# A save of one tensor of 8 elements, on one rank:


# %%
def whole_tensor(comm):
    save(comm, folder, 2, [CheckpointShard("w", (8,), np.arange(8.0), 0, 8)], {}, Shown())


folder = Path("runs") / "lesson-26"
shutil.rmtree(folder, ignore_errors=True)
_ = SimWorld(1).run(whole_tensor)

# %% [markdown]
# The library's version is [directory.py](../minidist/job/checkpoint/directory.py).

# %% [markdown]
# ## 5 Check
#
# The interval first. T hours of work cost C for the save, and a failure, every M hours, costs T/2
# on average: per hour of work C/T + T/2M, least where both are equal. The curve is flat there, so
# chance decides which of the neighbouring intervals is best in 40 simulated jobs:

# %%
simulated = intervals[np.argmin(np.mean(jobs, axis=1))]
more = 100 * (formula[np.argmin(np.mean(jobs, axis=1))] / formula.min() - 1)
print(
    f"sqrt(2 C M) = {young:.2f} h; the best of the simulated intervals is {simulated:.2f} h, whose "
    f"jobs are {more:.1f} % longer by the formula"
)
interval_guess.judge(young, within=0.2)
print(f"with four times the failures: {np.sqrt(2 * SAVE * MTBF / 4):.2f} h")

# %% [markdown]
# Four times as many machines fail four times as often, and *half* the interval is best. Now a real job: 4 ranks with ZeRO 3 train 4 steps and
# save every 2. These are the files on the disk. (When a save completes, the ranks' .json files of part 4
# are in metadata.json and are removed. A rank's shard begins at a multiple of 1,024 elements, counted in the
# flat array of all parameters, so in a model as small as this one the shards are not equal.)

# %%
shutil.rmtree(folder)


def run(ranks, **settings):
    return SimWorld(ranks).run(train, small_job(layers=2, global_batch=8, **settings))


whole = run(4, zero=3, steps=6)
run(4, zero=3, steps=4, every=2, save=str(folder))
for path in sorted(folder.rglob("*")):
    if path.is_file() and path.name != ".lock":
        size = f"  {path.stat().st_size:,} B" if path.suffix == ".safetensors" else ""
        print(f"{path.relative_to(folder)}{size}")

# %% [markdown]
# No tensor is known by the rank that wrote it, but by its name and shape in the whole model. This one
# lies in two files:

# %%
checkpoint = Checkpoint(folder)
name = "optimizer/transformer.h.0.mlp.c_fc.weight/exp_avg"
print(f"{len(checkpoint.tensors)} global tensors")
print(f"{name}: shape {checkpoint.tensors[name]['shape']}, pieces")
for piece in checkpoint.tensors[name]["pieces"]:
    print(f"  elements {piece['range']} in {piece['file']}")

# %% [markdown]
# On the same ranks the next steps have the bits of the run that was never interrupted. On other
# ranks each reads the ranges that it needs, whichever rank wrote them; what differs is the order in
# which gradients of more or fewer ranks are added. (`digest` is a hash of the weights and optimizer
# states of a rank: it is equal when all their bits are.)

# %%
for ranks, zero in ((4, 3), (2, 1), (1, 0), (8, 2)):
    copy = Path(shutil.copytree(folder, folder.with_name(folder.name + f"-{ranks}-{zero}")))
    resumed = run(ranks, zero=zero, steps=6, save=str(copy), resume=True)
    same = [r.digest for r in resumed] == [r.digest for r in whole]
    loss = max(abs(a - b) for a, b in zip(resumed[0].losses, whole[0].losses, strict=True))
    print(
        f"ranks: {ranks}, ZeRO {zero}, after step {resumed[0].first_step}: largest difference of "
        f"a loss {loss:.0e}; bit for bit: {same}"
    )
    assert same == (ranks == 4)
    assert loss < 1e-5
    shutil.rmtree(copy)


# %% [markdown]
# Kill a rank in the middle of a save. This disk is that of a rank which dies when half of a file is
# written:


# %%
class Dies(Storage):
    """The disk of a rank that dies at operation number `at`, half a file written."""

    def __init__(self, comm, at):
        self.comm, self.left = comm, at

    def write(self, path, data):
        self.left -= 1
        if self.left < 0:
            path.write_bytes(data[: len(data) // 2])
            self.comm.world.kill(self.comm.rank)
        super().write(path, data)


# %% [markdown]
# Rank 1 writes twice in a save. Whichever write it dies at, `latest` is the step before. A third write
# does not exist, so the last save is finished:


# %%
def mine(comm):
    """This rank's 8 elements of a tensor w."""
    return CheckpointShard(
        "w", (8 * comm.size,), np.full(8, float(comm.rank)), 8 * comm.rank, 8 * comm.rank + 8
    )


def save_and_die(comm, at):
    save(comm, folder, 99, [mine(comm)], {}, Dies(comm, at) if comm.rank == 1 else None)


for at in range(3):
    world = SimWorld(3, on_failure="isolate")
    try:
        world.run(save_and_die, at)
        fate = "finished"
    except MinidistError as error:
        fate = f"{type(error).__name__}: rank {error.rank} died"
    print(
        f"rank 1 dies at its write number {at}: {fate}; latest is {(folder / 'latest').read_text()}"
    )

# %% [markdown]
# In the save that was finished, rank 0 tells the others the folder's name (16 B). Two barriers of empty
# messages follow: every rank has written; the save is complete.

# %%
picture("space-time", world, "part 5 of lesson 26", name="a save")

# %% [markdown]
# ## 6 Break it
#
# The classic: "rank 0 saves". But other ranks hold parts of the state, and ranks then wait for each
# other for ever:


# %%
def rank_0_saves(comm):
    if comm.rank == 0:
        save(comm, folder, 100, [mine(comm)], {})


with expect(MinidistError):
    SimWorld(2).run(rank_0_saves)

# %% [markdown]
# And a bit that flips on the disk. A checksum detects it and reports the names of file and tensor,
# before anything is loaded:

# %%
(folder / "latest").write_text("step-00000004")
path = sorted(Checkpoint(folder).path.glob("rank-*.safetensors"))[1]
data = bytearray(path.read_bytes())
data[-1] ^= 1
path.write_bytes(data)
with expect(UsageError):
    run(4, zero=3, steps=6, save=str(folder), resume=True)
shutil.rmtree(folder)

# %% [markdown]
# ## 7 Exercise: a save, and a load
#
# `disk.write(path, data)` writes a file (for a moment there is half of it),
# `disk.rename(old, new)` renames a file or a folder atomically (onto a folder with files in it it
# raises), `disk.remove(path)` removes either, `disk.exists(path)` is true or false. `parts` are
# files by name. Save them in a folder `name`, or a free name like it, and let the file `latest` hold
# its name. An earlier save may have died and left its files. Judged: at every moment `latest` names a
# whole checkpoint, with nothing else in it.


# %%
def save_parts(disk, name, parts):
    disk.write("latest", name.encode())
    for part, data in parts.items():
        disk.write(f"{name}/{part}", data)


check("26.save", save_parts)

# %% [markdown]
# And the other way: a tensor of `size` elements lies on disk as `pieces`, ranges [start, stop) in any
# order; `read(i)` returns piece i and takes time. Return this rank's chunk, whose sizes are
# `chunk_sizes(size, comm.size)` of `minidist.core.base.layout`. Judged: the chunk, and the time: read no
# piece that you do not need.


# %%
def load_chunk(comm, size, pieces, read):
    whole = np.concatenate([read(i) for i in range(len(pieces))])
    return np.array_split(whole, comm.size)[comm.rank]


check("26.load", load_chunk)

# %%
for exercise in ("26.save", "26.load"):
    reveal(exercise)
    check(exercise, solution(exercise))

# %% [markdown]
# ## 8 Takeaway
#
# - **A checkpoint is named global tensors with slices**, so it belongs to no layout; it appears in
#   one rename, so it is whole or not there; and it has checksums.
# - **Save every sqrt(2 C M) hours** (Young 1974), C for a save, M between failures; M falls with
#   the number of machines.

# %% [markdown]
# The job of the course so far, since lesson 12 a model of 65 billion parameters on 64 cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with 2^20 tokens per step:

# %%
story("26")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --dp 4 --zero 3 --steps 4 --every 2 --save runs/checkpoints
#     mpiexec -n 2 minidist train --dp 2 --zero 1 --steps 8 --save runs/checkpoints --resume --global-batch 16
#     mpiexec -n 4 python mpi_examples/7_more/checkpoint_reshard.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `save`, `Checkpoint` | PyTorch `torch.distributed.checkpoint` (DCP); DeepSpeed Universal Checkpointing; Megatron-LM `--ckpt-format torch_dist` |
# | a piece of a global tensor | DCP `DTensor` / `ShardedTensor` with `WriteItem`; Orbax `TensorStore` arrays |
# | the folder `.saving`, then a rename | DCP and Orbax write `.metadata` or a commit file last |
# | `--every` | torchtitan `checkpoint.interval`; Megatron-LM `--save-interval` |

#
# Next: [28 The museum of bugs](28_the_museum.ipynb). All lessons are in the [index](README.md).
