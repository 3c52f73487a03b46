# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09 Mixed precision
#
# *30 minutes. Before it: 02 and 06.*
#
# ## 1 The case
#
# A small GPT computes the gradient of 512 tokens; its loss is divided by the 1,048,576 = 2^20 tokens of a
# whole training step. In float32 (4 bytes) every entry of the gradient is there. Now every number
# is stored in float16 (2 bytes), whose smallest positive number is 2^-24, about 0.00000006. What is
# at most half of that rounds to zero.
#
# The last layer gives each of 256 words a score, its *logit*, and the softmax turns the scores into
# probabilities p. The first array that backward computes is the gradient of the logits: p / 2^20 for
# each word, and (p - 1) / 2^20 for the word that came. An untrained model gives every word a p near
# 1/256. What part of this array is zero in float16?
#
# The cure is to multiply the loss by a power of two before backward. Which is the smallest power of two with
# which hardly any entry (less than 1 %) is zero?

# %% [markdown]
# ## 2 Predict
#
# For both compare p / 2^20, with p = 1/256 = 2^-8, with half of the smallest number, 2^-25.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, small_job, solution

zeros_guess = predict("zeros in the logits' gradient in float16", example=50, unit="%")
scale_guess = predict("smallest power of two with which less than 1 % are zero", example=2)

# %%
import numpy as np

from minidist import (
    GPT,
    DeadlockError,
    FlatParameters,
    GPTConfig,
    SimWorld,
    all_gather,
    all_reduce,
    load_dataset,
    quiet_overflow,
)
from minidist.base.exponents import count_exponents
from minidist.base.half import named_dtype
from minidist.course.story import story
from minidist.data import GlobalBatchSampler
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train as train_job
from minidist.report import show
from minidist.report.frame import finish, line, new_panel, plain_numbers
from minidist.report.palette import PALETTE

# %% [markdown]
# ## 3 The idea and its picture
#
# Store parameters, gradients and activations in **2 bytes instead of 4**, and train to nearly
# the same loss. That is about half of the activations and half of every message. Processors with 16-bit matrix
# units are also several times as fast. Training in 16 bits costs a float32 copy of the parameters, and, in float16, a
# factor of the loss, the *loss scale*: the loss is multiplied by it before backward, and the gradient is
# divided by it afterwards, in float32. The scale is needed because **float16 runs out of range long
# before it runs out of digits**.
#
# The gradient of the logits, computed in float64 from the formula of the case:

# %%
TOKENS = 2**20
sampler = GlobalBatchSampler(load_dataset("pydoc"), 8, 64, seed=0)
inputs, targets = sampler.batch(0, 0, 8)
model = GPT(GPTConfig(256, 64, 64, 2, 4))
logits = model(inputs).data.astype(np.float64)
p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
of_logits = (p - np.eye(256)[targets]) / TOKENS

# %% [markdown]
# In the picture every bar is the share of the entries of one size, as a power of two. The shaded part is what float16
# can hold without a scale. In the lighter shade are its subnormal numbers, those below 2^-14, which have fewer digits
# the smaller they are; the shade begins at 2^-25, from where on a number rounds up to 2^-24. The red bars, around
# 2^-28, lie to the left of it and are flushed (rounded) to zero. The words that came, near 2^-20, are one entry in 256,
# a bar that is hardly seen. Most of the shaded range, to the right, is not used. The second picture is that of a loss
# scale of 1,024 = 2^10: float16 holds what is ten powers of two smaller, and no bar is red.

# %%
counts = count_exponents([of_logits])
for scale in (1.0, 1024.0):
    shown = {"gradient_exponents": counts, "loss_scale": scale}
    picture("exponents", [], "part 3 of lesson 09", **shown)

# %% [markdown]
# The share of zeros with each scale, and the smallest scale with less than 1 %:

# %%
zeros = {s: 100 * np.mean(np.float16(of_logits * s) == 0) for s in (1, 2, 4, 8, 16, 32)}
for scale, percent in zeros.items():
    print(f"scale {scale:2}: {percent:5.1f} % of the logits' gradient are zero")
zeros_guess.judge(zeros[1], within=0.005)
scale_guess.judge(min(scale for scale, percent in zeros.items() if percent < 1))

# %% [markdown]
# Without a scale, 2^-28 becomes zero for 255 of 256 words. What is left is -2^-20 at each word that came. With 8
# a p of 1/256 becomes 2^-25, which still rounds to zero, and so does every smaller p: about half of them.

# %% [markdown]
# ## 4 The code
#
# The products that follow are smaller. Backward multiplies the gradient of the logits by the word embeddings,
# whose numbers are near 0.02, and computes every layer's gradient from the result. "Off" is the length of the
# difference over the length of the right array:

# %%
words = model.transformer.wte.weight.data
exact_output = of_logits @ words
for scale in (1, 16, 1024):
    first = np.float16(of_logits * scale)
    second = np.float16(np.float32(first) @ words)
    off = np.linalg.norm(second / np.float64(scale) - exact_output) / np.linalg.norm(exact_output)
    print(f"scale {scale:5,}: {np.mean(second == 0):5.1%} are zero; the product is {off:5.1%} off")

# %% [markdown]
# So the scale has to be larger than the logits alone ask for. And a larger one is better, until an entry is larger than
# 65,504, the largest number of float16, and becomes infinite. So the scale is found by trial: where a gradient is
# infinite or NaN the step is skipped and the scale is halved; after many good steps it doubles
# ([loss_scale.py](../minidist/optim/loss_scale.py)).
#
# Not every operation computes in 16 bits. Products do; sums, statistics and losses are float32 inside, and
# what is kept for backward is rounded to 16 bits ([precision.py](../minidist/nn/ops/precision.py)).

# %% [markdown]
# ## 5 Check
#
# How far off is the gradient of all parameters in the end? This function computes it with any loss scale
# (`named_dtype` is NumPy's data type of that name, or for bfloat16, which NumPy does not have, ours):


# %%
def gradient(dtype, scale=1.0):
    """The gradient of 8 x 64 tokens, computed with the loss times `scale`, and divided by it."""
    model = GPT(GPTConfig(256, 64, 64, 2, 4), dtype=named_dtype(dtype))
    flat = FlatParameters(model.parameters())
    (model(inputs, targets, float(TOKENS)) * scale).backward()
    return flat.grad.astype(np.float64) / scale


exact = gradient("float32")

# %% [markdown]
# The first row rounds the finished float32 gradient; in the others every array of backward is float16:

# %%
gradients = {"rounded at the end": np.float16(exact).astype(np.float64)}
gradients |= {f"scale {2**k:7,}": gradient("float16", 2.0**k) for k in range(0, 19, 2)}
off = {}
for name, small in gradients.items():
    off[name] = np.linalg.norm(small - exact) / np.linalg.norm(exact)
    if name in ("rounded at the end", "scale       1", "scale   1,024", "scale  65,536"):
        print(
            f"{name:18}: {off[name]:6.2%} off, {np.mean(small[exact != 0] == 0):6.2%} became zero"
        )
assert off["scale       1"] > 0.5
assert off["scale   1,024"] < 0.001

figure, axes = new_panel(8, 3)
axes.plot(
    [2**k for k in range(0, 19, 2)],
    [100 * part for part in list(off.values())[1:]],
    "o-",
    color=PALETTE["F"],
)
axes.axhline(100 * off["rounded at the end"], color=PALETTE["other"], linestyle=":")
axes.set(xscale="log", yscale="log", xlabel="loss scale", ylabel="gradient off by [%]")
plain_numbers(axes.xaxis)
plain_numbers(axes.yaxis)
handles = [line(PALETTE["F"], "computed in float16", marker="o")]
handles.append(line(PALETTE["other"], "rounded at the end", linestyle=":"))
show(finish(figure, handles, "part 5 of lesson 09", "how far off the gradient is"))

# %% [markdown]
# Rounding the finished gradient costs 0.3 %. What destroys it is rounding the first arrays of backward: without a
# scale three quarters of the entries are not zero, but they are computed from what is left of those arrays.
#
# Does it train? Three ranks take twenty steps in float32, in float16 and in bfloat16. bfloat16 has
# float32's exponents and 7 bits of fraction (float16 has 10): it needs no scale, and loses digits instead.
# `small_job` returns the settings of a training job with a small GPT. The first scale of fp16, 2^18, is too large on
# purpose:


# %%
def job_in(precision):
    scale = {"loss_scale": 2.0**18} if precision == "fp16" else {}
    shape = {"layers": 2, "width": 32, "heads": 4, "context": 32, "data": "pydoc"}
    return small_job(**shape, dp=3, global_batch=12, steps=20, precision=precision, **scale)


runs, worlds = {}, {}
for precision in ("fp32", "fp16", "bf16"):
    worlds[precision] = SimWorld(3)
    runs[precision] = run = worlds[precision].run(train_job, job_in(precision))[0]
    first, last = run.losses[0], run.losses[-1]
    print(f"{precision}: loss {first:.3f} -> {last:.3f}, steps skipped: {run.skipped}")
scale = runs["fp16"].measured["loss_scale"]["scale"]
print(f"the loss scale of fp16 after the run: 2^{np.log2(scale):.0f}")

# %% [markdown]
# float16 is two steps behind. In every step a rank sends half of the bytes, and with a loss scale one byte more, on
# which the ranks agree (part 6 says what for):

# %%
for precision in runs:
    sent = worlds[precision].traces[0].bytes_by_purpose()
    print(f"{precision}: gradients {sent['gradient_reduce']:,} B,", end=" ")
    print(f"overflow {sent.get('overflow', 0)} B, in twenty steps")

# %% [markdown]
# The memory of the states is the same, 16 B per parameter: 4 + 4 + 8 in float32, and 2 + 2 + 12 in 16 bits, where the
# optimizer has Adam's two averages (8 B) and the float32 copy of the parameters, the masters (4 B). They are needed
# because a step that is smaller than half of the last digit of a 16-bit weight is lost. A thousand steps of 0.0001:

# %%
alone, master = np.float16(1), np.float32(1)
for _ in range(1000):
    alone, master = np.float16(alone + np.float16(1e-4)), master + np.float32(1e-4)
print(f"float16 alone: {alone}; a float32 master, rounded to float16: {np.float16(master)}")
assert alone == 1
for precision, run in runs.items():
    held = [run.held[kind] for kind in ("parameter", "gradient", "optimizer")]
    per_parameter = [nbytes // (runs["fp32"].held["parameter"] // 4) for nbytes in held]
    assert per_parameter == ([4, 4, 8] if precision == "fp32" else [2, 2, 12])

# %% [markdown]
# Is it the training of one device? `compare_rank` trains a job on these ranks and on one device, and compares the
# losses, and every gradient, parameter and optimizer state of each step, bit for bit. The one device computes the
# micro-batches of the ranks one after the other and adds them in the order of the ranks (lesson 04b); as one matrix
# product over all rows it would have other last bits.

# %%
verdict = SimWorld(3).run(compare_rank, job_in("fp16"))[0]
print(f"fp16, two steps of it skipped: the bits of one device: {verdict.equal}")
assert runs["fp16"].skipped == 2
assert verdict.equal
assert set(verdict.max_difference.values()) == {0}

# %% [markdown]
# ## 6 Break it
#
# An overflow on one rank must be one on all of them. In plain data parallelism the all-reduce carries the infinity
# to every rank. From lesson 11 on a rank sees only a part of the summed gradient, steps that part, and gathers the
# other new weights. This program does the same. On rank 1 an entry is too large for float16. Without `agree` each rank
# decides by its own part whether it makes the step (`minidist museum 15a` shows it in a training job):


# %%
def one_step(comm, agree):
    """Return whether the step was skipped."""
    with quiet_overflow():
        gradient = np.float16([40_000, 1]) * np.float16(2 if comm.rank == 1 else 1)
    overflow = np.array([not np.isfinite(gradient).all()], np.uint8)
    if agree:
        all_reduce(comm, overflow, "max")
    shard = np.ones(2, np.float16)
    if not overflow[0]:
        shard -= np.float16(0.5)
        all_gather(comm, shard)
    return bool(overflow[0])


with expect(DeadlockError):
    SimWorld(3).run(one_step, False)

# %% [markdown]
# Ranks 0 and 2 wait for rank 1, which has skipped the step. The cure is one byte: every rank says whether it
# has seen an overflow, and the maximum over the ranks decides for all of them
# ([overflow.py](../minidist/parallel/overflow.py)):

# %%
print(f"the ranks skip the step: {SimWorld(3).run(one_step, True)}")

# %% [markdown]
# ## 7 Exercise: a scaler whose overflow flag is agreed on
#
# `backward(scale)` gives this rank's part of the gradient times `scale`, in float16;
# `step(gradient)` makes a step with an unscaled float32 gradient and gathers the new values from
# all ranks. Run `steps` steps: start with scale 65,536; when a gradient of *any* rank is not
# finite, halve the scale and skip the step on *all* ranks; after 3 good steps in a row double it. Return
# the scale after the last step. Judged: right scales and steps; bytes (par: one byte agreed on per step).


# %%
def scaled_training(comm, steps, backward, step):
    scale = 2.0**16
    for _ in range(steps):
        gradient = backward(scale)
        if np.isfinite(gradient).all():
            step(gradient.astype(np.float32) / scale)
        else:
            scale = scale / 2
    return scale


check("09.scaled_training", scaled_training)

# %%
reveal("09.scaled_training")
check("09.scaled_training", solution("09.scaled_training"))

# %% [markdown]
# ## 8 Takeaway
#
# - **16 bits to store and to send, float32 to add up**: 2 + 2 + 12 B per parameter with Adam, half
#   of the bytes on every wire.
# - float16 rounds what is at most 2^-25 to zero: **multiply the loss by S, divide in float32**, and let all
#   ranks agree, in one byte, on whether a step overflowed. bfloat16 needs no S.

# %% [markdown]
# The job of the course so far, a model of 7 billion parameters on cards of 80 GB, as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with parameters of 2 B and 12 B for Adam in
# every row. Its gradients are added up over micro-batches (lesson 10), so they are float32, 4 B in place of 2:

# %%
story("09")

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --dp 4 --zero 1 --precision fp16 --steps 5
#     mpiexec -n 2 minidist compare --dp 2 --precision bf16 --steps 3
#     mpiexec -n 4 minidist compare --dp 2 --tp 2 --precision bf16 --steps 4
#     mpiexec -n 4 python mpi_examples/7_more/mixed_precision.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `DynamicLossScaler` | PyTorch `torch.amp.GradScaler`; Megatron-LM `DynamicGradScaler`, `--initial-loss-scale`, `--loss-scale-window`, `--hysteresis`; DeepSpeed `"fp16": {"initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"}` |
# | a 16-bit model with float32 masters in the optimizer | Micikevicius et al. 2018; DeepSpeed `"fp16": {"enabled": true}`; Megatron-LM `--fp16`, `--bf16`; Apex `O2` |
# | products in 16 bits, sums and losses in float32 | PyTorch `torch.autocast`: lists of operations that run in float16, in float32, in the widest input type |
# | `agree_on_overflow` | Megatron-LM: `found_inf`, an all-reduce (max) over the model-parallel group; DeepSpeed `has_overflow`; PyTorch `ShardedGradScaler` |
#
# In 16 bits the job still needs 130.5 GB per card, and a card has 85 (lesson 00). The activations are a part of these
# bytes that need not be kept.
#
# Next: [10 Accumulate and recompute](10_accumulate_and_recompute.ipynb). Side rooms: [09b
# Eight bits](09b_eight_bits.ipynb), [09c Pruning](09c_pruning.ipynb), [09d
# Distillation](09d_distillation.ipynb). All lessons are in the [index](README.md).
