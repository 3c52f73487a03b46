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
# *30 minutes. Before it: 11 and 12.*
#
# ## 1 The case
#
# Llama 3 was trained on 16,384 cards, and in 54 days 419 failures stopped the job: one in three hours. After
# a failure the job begins again from its last save. But a rank may also die in the middle of a save. What
# must be on the disk, so that a failure at any moment costs no more than the work since the last save?
#
# Here is a save of three files, which a job writes over the files of the save before, one after the other.
# The job may die in the middle of each write, or right after it; these are six moments. At how many of them
# is there no whole checkpoint on the disk, neither the old one nor the new one?

# %% [markdown]
# ## 2 Predict
#
# A file that is half written is lost. A whole checkpoint has three files of the same save.

# %%
from minidist.course.lesson import check, predict, reveal, small_job, solution

lost_guess = predict("moments of six without a whole checkpoint", example=3)

# %%
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap

from minidist import MinidistError, SimWorld, UsageError
from minidist.course.lesson.exercises.e26_checkpoints import Disk
from minidist.course.story import story
from minidist.job.checkpoint import Checkpoint, CheckpointShard, Storage, save
from minidist.job.train.trainer import train
from minidist.report import show
from minidist.report.frame import new_figure

# %% [markdown]
# ## 3 The idea and its picture
#
# **A save has happened, or it has not.** All files are written into a new folder. When all of them are on the
# disk, one rename gives the folder its name, and a second one replaces the file `latest`. Only the second one
# counts. A failure then costs nothing but the work since the last save. The price is a disk with room for two
# checkpoints, and two moments at which all ranks wait for each other.
#
# Both ways to save three files, moment by moment: blue is an old file, grey one that is half written, green a new
# one. When the files are overwritten, the rows have different colours from moment 1 to 5. Below, the old files
# stay. At moment 7 a rename gives the folder `.saving` the name `step-2`. The black line is `latest`, the name of the
# checkpoint that counts, which the other rename moves at moment 8:

# %%
OLD, HALF, NEW, NONE = range(4)
moments = np.arange(9)
file = np.arange(3)[:, None]
over = np.where(moments <= 2 * file, OLD, np.where(moments == 2 * file + 1, HALF, NEW))
new_folder = np.concatenate([np.full((3, 9), OLD), np.where(over == OLD, NONE, over)])
rows, rows_of_the_new_folder = (
    [f"{name}/part-{i}" for i in range(3)] for name in ("step-1", ".saving")
)
figure = new_figure(7, 3.4)
top, bottom = figure.subplots(2, height_ratios=[1, 2])
colours = ListedColormap(["#77AADD", "#BBBBBB", "#44BB99", "#FFFFFF"])
for axes, states, names, title in (
    (top, over, rows, "overwritten"),
    (bottom, new_folder, rows + rows_of_the_new_folder, "a new folder and two renames"),
):
    axes.imshow(states, cmap=colours, vmin=OLD, vmax=NONE, aspect="auto")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xticks(moments)
    axes.set_yticks(range(len(states)), names)
bottom.plot([6.5, 6.5], [2.5, 5.5], ":", color="black")
bottom.text(6.6, 5.2, "now step-2")
bottom.plot([-0.5, 7.5, 7.5, 8.5], [1, 1, 4, 4], color="black")
bottom.text(0, 0.9, "latest")
bottom.set_xlabel("moment")
show(figure)

# %% [markdown]
# ## 4 The code
#
# The case on a toy disk, which records its files after each operation and in the middle of each write. The
# save writes over the old files:


# %%
def overwrite(disk, parts):
    for part, data in parts.items():
        disk.write(part, data)


old = {f"part-{i}": b"old old " for i in range(3)}
new = {f"part-{i}": b"new new " for i in range(3)}
disk = Disk(old)
overwrite(disk, new)

# %% [markdown]
# What is on the disk before the save, moment 0, and at each of the six moments, and whether it is a whole
# checkpoint:

# %%
lost = 0
for moment, files in enumerate(disk.states):
    whole = files in (old, new)
    lost += not whole
    print(moment, list(files.values()), "whole" if whole else "lost")
lost_guess.judge(lost)

# %% [markdown]
# After the second file there are three complete files, and they are of two different saves. Only the last
# moment is whole again. So files must be made where nobody reads them, and be renamed. On one file system a
# rename is atomic: there is no moment in the middle of it, also when a folder with many files is renamed.
# (`exists` returns whether there is such a file or folder, and `remove` removes either.)

# %%
disk = Disk({})
disk.write(".saving/part-0", b"new new ")
disk.rename(".saving", "step-2")
for moment, files in enumerate(disk.states):
    print(moment, files)
print(disk.exists(".saving"), disk.exists("step-2"))
disk.remove("step-2")

# %% [markdown]
# A small file, `latest`, holds the name of the newest folder. It must be replaced by a rename, too, and older
# folders are removed only after that. On a real disk one thing more: what a program has written is on the disk
# only after the system call fsync. The library calls it for each file before the rename, and for the folder
# after it. Its version is [directory.py](../minidist/job/checkpoint/directory.py).

# %% [markdown]
# ## 5 Check
#
# Three ranks have a third of a tensor `w` each, and save it with the library. A piece has the name and the
# shape of the *whole* tensor, the rank's numbers, and the range in which they belong. (The `{}` is for what
# a job saves besides its tensors, such as the number of the step.) When every rank has written its file, rank 0
# renames the folder; ranks wait for each other before and after it:

# %%
folder = Path("runs") / "lesson-26"
shutil.rmtree(folder, ignore_errors=True)


def piece_of_w(comm):
    first = 8 * comm.rank
    return CheckpointShard("w", (8 * comm.size,), np.full(8, float(comm.rank)), first, first + 8)


def save_w(comm, step, storage=None):
    save(comm, folder, step, [piece_of_w(comm)], {}, storage)


_ = SimWorld(3).run(save_w, 1)

# %% [markdown]
# Kill a rank in the middle of such a save. The library writes through a `Storage`. This one belongs to a rank
# that dies when it has written half of a file, namely its file number `at`, counted from 0:


# %%
class Dies(Storage):
    """at: the number of the write, or "between", for the moment between the two renames."""

    def __init__(self, comm, at):
        self.comm, self.left, self.between = comm, 99 if at == "between" else at, at == "between"

    def rename(self, source, target):
        if self.between and target.name == "latest":
            self.comm.world.kill(self.comm.rank)
        super().rename(source, target)

    def write(self, path, data):
        self.left -= 1
        if self.left < 0:
            path.write_bytes(data[: len(data) // 2])
            self.comm.world.kill(self.comm.rank)
        super().write(path, data)


def save_and_die(comm, at):
    dying = 0 if at == "between" else 1
    save_w(comm, 2, Dies(comm, at) if comm.rank == dying else None)


# %% [markdown]
# Rank 0 makes both renames; here it dies between them, when the folder has its new name and `latest` has not. Rank 1
# writes two files in a save, its pieces and a list of them. Whenever a rank dies, `latest` is step 1. A third write of
# rank 1 does not exist, so the last save completes (as `.1`, because a folder `step-00000002` is there already):

# %%
for at in ("between", 0, 1, 2):
    try:
        SimWorld(3, on_failure="isolate").run(save_and_die, at)
        fate = "the save completes"
    except MinidistError as error:
        fate = f"rank {error.rank} dies"
    moment = "between the renames" if at == "between" else f"write {at} of rank 1"
    print(f"{moment}: {fate}; latest is {(folder / 'latest').read_text()}")

# %% [markdown]
# And a job goes on from its last save as if nothing had happened. Four ranks with ZeRO 3 train a small GPT
# for 4 steps, save, and are started again for two more. The same job without an interruption is `whole`:


# %%
def losses(ranks, zero, **settings):
    results = SimWorld(ranks).run(train, small_job(zero=zero, global_batch=8, **settings))
    return np.array(results[0].losses)


shutil.rmtree(folder)
whole = losses(4, 3, steps=6)
_ = losses(4, 3, steps=4, every=4, save=str(folder))

# %% [markdown]
# After a failure there may be fewer cards. A piece names the whole tensor and its range, so any number of
# ranks can load it, with any kind of ZeRO, and each reads the ranges that it needs. Four ranks repeat the
# losses to the last bit. On other numbers of ranks gradients are added in another order, so they differ by
# rounding:

# %%
for ranks, zero in ((4, 3), (2, 1), (1, 0), (8, 2)):
    copy = shutil.copytree(folder, f"{folder}-{ranks}")
    resumed = losses(ranks, zero, steps=6, save=str(copy), resume=True)
    off = np.abs(resumed - whole).max()
    print(f"ranks: {ranks}, ZeRO {zero}: max |loss - loss without an interruption| = {off:.0e}")
    assert off < 1e-5
    shutil.rmtree(copy)

# %% [markdown]
# ## 6 Break it
#
# The same save in place: each file is written over the one of the last save. Rank 1 dies at the same writes as in
# part 5, and then the checkpoint is read:


# %%
class InPlace(Dies):
    def write(self, path, data):
        super().write(folder / (folder / "latest").read_text() / path.name, data)


def save_in_place_and_die(comm, at):
    piece = piece_of_w(comm)
    piece = replace(piece, array=piece.array + 10)  # the weights after one more step
    save(comm, folder, 2, [piece], {}, InPlace(comm, at if comm.rank == 1 else 99))


for at in (0, 1):
    shutil.rmtree(folder)
    SimWorld(3).run(save_w, 1)
    try:
        SimWorld(3, on_failure="isolate").run(save_in_place_and_die, at)
    except MinidistError as error:
        print(f"write {at} of rank {error.rank} is cut in half; ", end="")
    try:
        Checkpoint(folder).read("w")
    except UsageError as error:
        print(str(error).partition(": ")[2].partition(";")[0])

# %% [markdown]
# At write 0 a file is half there. At write 1 all files of `w` are whole, but they are not those whose checksums the
# old save has noted. Whenever rank 1 dies, the old checkpoint is lost and there is no new one.

# %%
shutil.rmtree(folder)

# %% [markdown]
# ## 7 Exercise: save at any moment
#
# `disk` is the toy disk of part 4, with `write`, `rename`, `remove` and `exists`. As on a real disk, a rename
# onto a folder that has files in it raises an error. `parts` are files by name. Save them in a folder `name`,
# or, if that name is taken (for example by a `step-2` that an earlier run has left), in a folder with a similar
# name that is free; and let the file `latest` hold the folder's name. If the folder that you write to first
# exists already, it has the files of a save that died. Judged: at every moment `latest` names a whole
# checkpoint, with nothing else in it, and at the end it names the new one.


# %%
def save_parts(disk, name, parts):
    disk.write("latest", name.encode())
    for part, data in parts.items():
        disk.write(f"{name}/{part}", data)


check("26.save", save_parts)

# %%
reveal("26.save")
check("26.save", solution("26.save"))

# %% [markdown]
# ## 8 Takeaway
#
# - **A save is whole or not there**: write everything into a new folder, wait until all ranks have written,
#   and rename it.
# - A checkpoint has named pieces of whole tensors, from every rank, so any number of ranks can load it.
# - Disk = 2 x (bytes of the state); work that a failure costs < the time between two saves.

# %% [markdown]
# The job of the course so far, since lesson 12 a model of 65 billion parameters on 64 cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with 2^20 tokens per step. A checkpoint has
# 12 B per parameter, the float32 weights and Adam's two averages: 0.78 TB, 12 GB from each card. If a card writes
# 0.2 GB in a second, all wait for a minute; how often to do that is the question of lesson 26b.

# %%
story("26")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --dp 4 --zero 3 --steps 4 --every 2 --save runs/checkpoints
#     mpiexec -n 2 minidist train --dp 2 --zero 1 --steps 8 --save runs/checkpoints --resume --global-batch 16
#     mpiexec -n 4 python mpi_examples/7_more/checkpoint_reshard.py
#
# (Without `--global-batch` each rank takes 4 samples in a step, which are 16 on four ranks and 8 on two.)

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `save`, `Checkpoint` | PyTorch `torch.distributed.checkpoint` (DCP); DeepSpeed Universal Checkpointing; Megatron-LM `--ckpt-format torch_dist` |
# | a piece of a global tensor | DCP `DTensor` / `ShardedTensor` with `WriteItem`; Orbax `TensorStore` arrays |
# | the folder `.saving`, then a rename | Orbax on a file system; DCP writes `.metadata` last, and Orbax a commit file on object stores, which rename no folders |
#
# A state that is saved and loaded to the last bit may still be that of a wrong training.
#
# Next: [28 The museum of bugs](28_the_museum.ipynb). Side room: [26b How often to
# save](26b_how_often_to_save.ipynb). All lessons are in the [index](README.md).
