# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 33 A DeepSpeed file, line by line
#
# *25 minutes. Before it: 06, 09 and 11.*
#
# ## 1 The case
#
# Somebody hands you a job and this file, `mpi_examples/ds_config.json`. It says how a large
# framework would train, in eleven numbers and a few words:
#
#     "train_batch_size": 16
#     "train_micro_batch_size_per_gpu": 2
#     "optimizer": AdamW, lr 3e-3, betas 0.9 and 0.999, eps 1e-8, weight_decay 0.01
#     "scheduler": WarmupLR, warmup_max_lr 3e-3, warmup_num_steps 2, warmup_type linear
#     "zero_optimization": stage 2, reduce_bucket_size 20000, overlap_comm, contiguous_gradients
#     "gradient_clipping": 1.0
#     "steps_per_print": 10
#
# It runs on four ranks. The number of micro-batches per step is not in the file, but it follows.
# Stage 2 keeps no whole gradient (lesson 11), so it has to send the gradient of every micro-batch,
# where stage 1 sends it once per step. And with WarmupLR the learning rate rises from 0 to 3e-3 over
# two steps. DeepSpeed computes it when a step has ended: i/2 of the full rate after step number i,
# where the first step is number 0. Before the first step it is 0.
#
# How many micro-batches has a rank per step? How many bytes does a step send, over those of stage
# 1? And how many steps at the beginning change no weight at all?

# %%
import inspect
import json

from minidist import SimWorld, TrainConfig, UsageError
from minidist.course.lesson import check, expect, predict, solution
from minidist.course.lesson.shipped import example
from minidist.job.config.deepspeed import Translation, read_deepspeed, translate
from minidist.job.config.train_config import resolve_batches
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.optim.schedule import DeepSpeedWarmup
from minidist.report import draw, show

# %% [markdown]
# ## 2 Predict
#
# For the bytes: a gradient's reduce-scatter and the parameters' all-gather send (n-1)/n Ψ each.

# %%
micro_guess = predict("micro-batches of a rank per step", example=4)
bytes_guess = predict("bytes of a step with stage 2, over stage 1's", example=1.0)
still_guess = predict("steps at the beginning with a learning rate of 0", example=0)

# %% [markdown]
# ## 3 The idea and its picture
#
# **A configuration file is a list of answers to questions that you know from other lessons.** Read
# it line by line: each line is a number of rows, of bytes or of steps, or it changes nothing. What
# reading it saves: a job that trains something else than its file says. What it costs: every key
# has a default, and a key that is absent is an answer, too.
#
# One step of that job on four ranks, on the virtual clock:

# %%
FILE = example("ds_config.json")  # of mpi_examples
MODEL = {"model": "gpt", "layers": 2, "width": 32, "heads": 2, "context": 16, "data": "markov"}


def job(**changes):
    """The job of the file, on a small GPT.

    DeepSpeed's defaults first; what the file says goes before them.
    """
    said = read_deepspeed(FILE)
    return TrainConfig.make(**{**MODEL, **said.defaults, **said.settings, "steps": 1, **changes})


world = SimWorld(4)
world.run(train, job())
command = "minidist train --deepspeed mpi_examples/ds_config.json --dp 4 --steps 1 --trace t.jsonl"
header = {"name": "a step by the file", "command": f"{command}; minidist report t.jsonl"}
show(draw("lanes", world.traces, header))

# %% [markdown]
# ## 4 The code
#
# What a line becomes. The first column is the file's, the last a flag of `minidist train`:

# %%
said = read_deepspeed(FILE)
for key, value, flags in said.applied:
    print(f"{key:45} {value!s:14} {flags}")
for key, why in said.ignored:
    print(f"{key:45} does not apply: {why}")

# %% [markdown]
# Line by line:
#
# - `train_batch_size` 16 rows make one step, on all ranks together (lesson 06).
#   `train_micro_batch_size_per_gpu` 2 rows go through the model at once (lesson 10). What is left
#   is accumulation: 16 = 2 x accumulation x 4 ranks.
# - `optimizer`: AdamW divides by sqrt(v) + eps and shrinks weights by lr x 0.01 in each step. Its
#   `lr` is overruled by the scheduler's `warmup_max_lr`.
# - `scheduler`: WarmupLR rises, then stays. There is no decay in it.
# - `zero_optimization`: stage 2 (lesson 11). `reduce_bucket_size` counts *elements*: a bucket of
#   20,000 (lesson 07). `overlap_comm` sends while backward runs, and `contiguous_gradients` keeps
#   gradients in one array: minidist does both in any case.
# - `gradient_clipping`: the norm of the *whole* gradient is at most 1.0 (lesson 11, part 6).
# - `steps_per_print` changes no number of the training.
#
# The translation is one function per section, [deepspeed.py](../minidist/job/config/deepspeed.py), and
# one table of keys, [docs/deepspeed.md](../docs/deepspeed.md). A key becomes a setting, or is what
# minidist does anyway, or is listed with the reason why it does not apply:

# %%
print(inspect.getsource(Translation.apply))
print(inspect.getsource(Translation.ignore))

# %% [markdown]
# ## 5 Check
#
# The batch follows from the file and the number of ranks. The bytes are counted in the record of a
# step, with stage 2 and with stage 1. (The buckets of stage 2 are sent once for each micro-batch.)

# %%
micro_guess.judge(resolve_batches(job(), 4).accumulation)


def sent_bytes(stage):
    """Bytes of gradients and parameters that leave all ranks in a step."""
    world = SimWorld(4)
    world.run(train, job(zero=stage))
    sums = [trace.bytes_by_purpose() for trace in world.traces]
    return sum(one["gradient_reduce"] + one["parameter_gather"] for one in sums)


bytes_guess.judge(sent_bytes(2) / sent_bytes(1), within=0.02)

# %% [markdown]
# The learning rate. The formula of the file's schedule, and what the job does: where the rate is 0,
# half of it changes nothing.

# %%
rate = DeepSpeedWarmup(2, curve="linear")
print("part of the full rate in steps 0 to 4:", [rate(step) for step in range(5)])
still_guess.judge(sum(rate(step) == 0 for step in range(5)))


def weights_after(steps, lr):
    """A number that names the weights of all ranks at the end of a job."""
    return SimWorld(4).run(train, job(steps=steps, lr=lr))[0].digest


for steps in (2, 3):
    alike = weights_after(steps, 3e-3) == weights_after(steps, 1.5e-3)
    print(
        f"{steps} steps with the full rate and with half of it end with the same weights: {alike}"
    )
    assert alike == (steps == 2)

# %% [markdown]
# Is it the training of one device, in every gradient, weight and optimizer state?

# %%
verdict = SimWorld(4).run(compare_rank, job(steps=3, reduction="ordered"))[0]
print(f"{verdict.sentence()}; max |w_parallel - w_single| = {verdict.max_difference['weights']:g}")
assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# A default is a setting that the file does not show. Leave out the two lines that say how the
# scheduler warms up: DeepSpeed's warm-up is then logarithmic, and takes 1,000 steps.

# %%
content = json.loads(FILE.read_text())
for key in ("warmup_type", "warmup_num_steps"):
    del content["scheduler"]["params"][key]
for key, value, flags in translate(content).applied:
    if key.endswith("(default)"):
        print(f"{key:45} {value!s:6} {flags}")
slow = DeepSpeedWarmup(1000, curve="log")
print(
    "part of the full rate in steps 3, 30 and 300:", [round(slow(step), 2) for step in (3, 30, 300)]
)

# %% [markdown]
# And three batch sizes that contradict each other are an error, here as there:

# %%
content = json.loads(FILE.read_text())
content["gradient_accumulation_steps"] = 3
with expect(UsageError):
    wrong = translate(content)
    resolve_batches(TrainConfig.make(**{**MODEL, **wrong.defaults, **wrong.settings}), 4)

# %% [markdown]
# ## 7 Exercise: the three batch sizes
#
# A file has any of `train` (train_batch_size), `micro` (train_micro_batch_size_per_gpu) and `steps`
# (gradient_accumulation_steps); what is missing is None. Return all three as DeepSpeed does, or
# None when they do not fit: train = micro x steps x ranks. Where only train or only micro is given,
# steps is 1; steps alone determines nothing.


# %%
def batch_sizes(ranks, train, micro, steps):
    steps = steps or 1
    micro = micro or train // steps
    return micro * steps, micro, steps


check("33.batch_sizes", batch_sizes)

# %%
print(inspect.getsource(solution("33.batch_sizes")))
check("33.batch_sizes", solution("33.batch_sizes"))

# %% [markdown]
# ## 8 Takeaway
#
# - **train_batch_size = micro-batch x accumulation x data-parallel ranks**: two of them and the
#   ranks determine the third.
# - Stage 2 with k micro-batches sends **(k + 1) (n-1)/n Ψ** per step, stage 1 sends 2 (n-1)/n Ψ.
# - Absent keys have values. Print what a file becomes before you train by it.
#
# ## 9 The same code under mpiexec
#
#     minidist explain mpi_examples/ds_config.json --dp 4
#     mpiexec -n 4 minidist train --dp 4 --deepspeed mpi_examples/ds_config.json --steps 4
#     mpiexec -n 2 python mpi_examples/7_more/deepspeed_file.py
#
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `--global-batch`, `--micro-batch`, `--accumulation` | DeepSpeed's three keys; Megatron-LM `--global-batch-size`, `--micro-batch-size`; Hugging Face `per_device_train_batch_size`, `gradient_accumulation_steps` |
# | `--warmup`, `--warmup-curve deepspeed-linear` | DeepSpeed `WarmupLR`; PyTorch `LinearLR` (which does not begin at 0) |
# | `minidist explain FILE` | DeepSpeed prints its configuration at the start (`dump_state`) |
#
# Next: [34 Two levels and topology](34_two_levels.ipynb). All of them are in the
# [index](README.md).
