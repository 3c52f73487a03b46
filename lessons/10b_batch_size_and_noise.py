# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10b Batch size and noise, uneven ranks
#
# *35 minutes. Before it: 06.*
#
# ## 1 The case
#
# Three ranks train on 36 rows, twelve each. The machine of the third is four times as slow, so the
# other two wait for three quarters of every step. After two steps all tell each other how many
# seconds a row takes them, and share the 36 rows anew, in proportion to their speeds.
#
# How many rows does the slow rank get? And what part of its former time does a step take then?

# %%
import numpy as np

from minidist import LinkModel, SimWorld, TrainConfig
from minidist.course.lesson import check, predict, reveal, solution
from minidist.data import weighted_shards
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.report import draw, show
from minidist.techniques.adaptive_batch.noise_scale import estimate, estimate_of_shares

# %% [markdown]
# ## 2 Predict
#
# Everything else in a step takes a little time, too; a quarter off is good enough for the second.

# %%
rows_guess = predict("rows of the slow rank", example=9)
time_guess = predict("time of a step, over that with equal shares", example=0.75)

# %% [markdown]
# ## 3 The idea and its picture
#
# Let the job choose its batch: **how many rows**, from the noise of the gradient, and **whose
# rows**, from the speeds of the ranks. In both cases the step stays that of one device that is told
# the same batches. What it saves: samples that a noisy gradient is not worth, and the time for
# which fast ranks wait. What it costs: one number per step, and one per rank now and then. In a
# pipeline every rank sees all rows, so there the **layers** follow the speeds (section 5).
#
# Two steps with equal shares; then the ranks exchange their seconds per row, and two steps with
# shares in proportion to their speeds.

# %%
JOB = {
    "model": "gpt",
    "layers": 1,
    "width": 16,
    "heads": 2,
    "context": 8,
    "data": "markov",
    "reduction": "ordered",
}
SLOW = LinkModel(
    alpha=1e-6, flops=1e9, memory_bandwidth=1e9, slowdown=lambda rank: (1.0, 1.0, 4.0)[rank]
)
world = SimWorld(3, links=SLOW)
result = world.run(
    train, TrainConfig.make(**JOB, dp=3, global_batch=36, weights="measured:2", steps=4)
)[0]
command = (
    "minidist train --dp 3 --global-batch 36 --weights measured:2 --steps 4 --trace t.jsonl;"
    " minidist report t.jsonl --picture lanes"
)
show(
    draw(
        "lanes",
        world.traces,
        {"command": command, "title": "measured shares, rank 2 four times as slow"},
    )
)

# %% [markdown]
# ## 4 The code
#
# Every rank cuts the batch by the same weights, by largest remainders. The sum of shares of the
# gradient, each divided by the rows of the whole batch, is the gradient of the batch.


# %%
def rows_of(rows, speeds):
    exact = rows * np.array(speeds) / sum(speeds)
    counts = np.floor(exact).astype(int)
    short = rows - counts.sum()
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1  # the largest remainders
    return counts.tolist()


for speeds in ([1, 1, 1], [1, 1, 0.5], [3, 2, 2]):
    print(f"10 rows for speeds {speeds}: {rows_of(10, speeds)}")
    assert rows_of(10, speeds) == [count for _, count in weighted_shards(10, speeds)]

# %% [markdown]
# The gradient of B rows is the true one, G, plus noise: E|g|^2 = |G|^2 + tr(Sigma)/B. Two batch
# sizes give both numbers, and data parallelism has two at hand: a rank's share and the whole batch.
# tr(Sigma)/|G|^2 is the batch at which noise and gradient are equally long. With it the batch
# grows, by more micro-batches ([batch_plan.py](../minidist/data/batch_plan.py)).

# %%
squares = {4: 3.0, 16: 1.5}  # E|g|^2 of a share of 4 rows, and of the whole batch of 16
G, noise = np.linalg.solve([[1, 1 / batch] for batch in squares], list(squares.values()))
print(
    f"|G|^2 = {G:g}, tr(Sigma) = {noise:g}: the batch that the gradient is worth is {noise / G:g}"
)

# %% [markdown]
# ## 5 Check
#
# The shares, the time of a step, and both jobs against one device.

# %%
runs = [([sum(rows) for rows in shares.rows], steps) for shares, steps in result.runs]
print("rows of the ranks, for so many steps:", runs)
ends = [
    max(s.end for t in world.traces for s in t.spans if s.name == f"step {i}") for i in range(4)
]
share = (ends[3] - ends[2]) / (ends[1] - ends[0])
rows_guess.judge(runs[1][0][2])
time_guess.judge(share, within=0.25)
assert runs == [([12, 12, 12], 2), ([16, 16, 4], 2)]
assert share < 0.5

for values in (
    {"dp": 3, "global_batch": 36, "weights": "measured:2", "steps": 4},
    {"dp": 3, "global_batch": 8, "weights": "2,1,1", "zero": 3, "steps": 2},
    {
        "dp": 2,
        "global_batch": 2,
        "adaptive_batch": 16,
        "lr_scaling": "linear:2",
        "optimizer": "sgd",
        "lr": 0.5,
        "steps": 6,
    },
):
    sim = SimWorld(values["dp"], links=SLOW)
    verdict = sim.run(compare_rank, TrainConfig.make(**JOB, **values))[0]
    print(
        f"{verdict.sentence()}; max |w_parallel - w_single| = {verdict.max_difference['weights']:g}"
    )
    assert verdict.equal

# %% [markdown]
# The last one chose these batches, and with `--lr-scaling linear:2` the learning rate followed over
# two steps (Goyal et al. 2017: as many times larger as the batch, with a gradual warm-up).

# %%
for shares, steps in sim.run(train, TrainConfig.make(**JOB, **values))[0].runs:
    print(
        f"{shares.samples} samples, {shares.accumulation} micro-batches per rank, for {steps} steps"
    )

# %% [markdown]
# **How large a batch, and which rate?** McCandlish et al. 2018 answer both with the noise scale
# N = tr(Sigma)/|G|^2. A step along the gradient of B samples, at the best rate for it, gains a part
# 1 / (1 + N/B) of what the true gradient would gain, and that best rate is lr_max / (1 + N/B).
# So there are two regimes:
#
# - **B below N**: the best rate and the gain are nearly proportional to B. Twice the batch in half
#   of the steps: `--lr-scaling linear` (for Adam, which divides by the size of the noise, `sqrt`).
# - **B above N**: rate and gain hardly grow. More samples per step are mostly wasted, and a linear
#   rule overshoots.
#
# The job measures N, with the rate of a batch of 4 samples, and the table says what follows:

# %%
MEASURE = {**JOB, "dp": 2, "global_batch": 16, "noise_scale": True, "steps": 40}
MEASURE |= {"optimizer": "sgd", "lr": 0.2}
noise = SimWorld(2).run(train, TrainConfig.make(**MEASURE))[0].measured["noise_scale"]["samples"]
print(f"noise scale: {noise:.1f} samples")
gains = {}
for batch in (4, 8, 16, 32, 64, 256):
    gains[batch] = 1 / (1 + noise / batch)
    rate = gains[batch] / gains[4]
    print(
        f"batch {batch:3}: gain of a step {gains[batch]:4.0%} of the largest;"
        f" best rate x {rate:4.1f}, by the linear rule x {batch / 4:2.0f};"
        f" samples for the same progress x {batch / gains[batch] * gains[4] / 4:4.1f}"
    )
assert noise > 0
assert gains[256] / gains[4] < 256 / 4

# %% [markdown]
# A batch of N samples costs twice the samples of the smallest batch and twice the steps of the
# largest. That is where `--adaptive-batch` goes.
#
# A pipeline is as fast as its slowest stage, and a slow rank makes any stage slow. With
# `--repartition-every K` the ranks measure their layers, exchange the times, and choose the cut
# whose slowest stage is fastest. A layer's seconds are those on one rank; on another one it takes
# others, by the ratio of their seconds per FLOP ([cut.py](../minidist/techniques/repartition/cut.py)).
#
# Two stages of four layers, the second rank four times as slow. After three steps layers move to
# the fast rank, with their weights and Adam's two averages: one message. In the picture rank 0
# waits before, and hardly any more after it.

# %%
LAYERS = {
    **JOB,
    "layers": 8,
    "pp": 2,
    "microbatches": 8,
    "micro_batch": 1,
    "steps": 6,
    "repartition_every": 3,
}
SLOW_STAGE = LinkModel(
    alpha=1e-6, flops=1e9, memory_bandwidth=1e9, slowdown=lambda rank: (1.0, 4.0)[rank]
)
world = SimWorld(2, links=SLOW_STAGE)
cuts = world.run(train, TrainConfig.make(**LAYERS))[0].measured["partitions"]
for partition, steps in cuts:
    print(f"layers of the stages: {partition}, for {steps} steps")
sent = [m for t in world.traces for m in t.sent("repartition")]
(move,) = [m for m in sent if m.operation == "message"]
print(f"one message of {move.nbytes:,} B, from rank {move.rank} to rank {move.peer}")
ends = [
    max(s.end for t in world.traces for s in t.spans if s.name == f"step {i}") for i in range(6)
]
share = (ends[5] - ends[4]) / (ends[2] - ends[1])
print(f"a step takes {share:.2f} of its time")
assert [partition for partition, _ in cuts] == ["4,4", "7,1"]
assert share < 0.5

command = (
    "minidist train --layers 8 --pp 2 --microbatches 8 --micro-batch 1 --repartition-every 3"
    " --steps 6 --trace t.jsonl; minidist report t.jsonl --picture lanes"
)
title = "stages cut anew after three steps, rank 1 four times as slow"
show(draw("lanes", world.traces, {"command": command, "title": title}))

verdict = SimWorld(2, links=SLOW_STAGE).run(compare_rank, TrainConfig.make(**LAYERS))[0]
print(verdict.sentence())
assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# The mean of the ranks' means is the gradient of the batch where shares are equal, and only there.
# Here a rank with one row counts as much as one with three:

# %%
rows = [[1.0, 1.0, 1.0], [5.0]]
means = [sum(part) / len(part) for part in rows]
print("mean of means", sum(means) / 2, "  mean of the batch", sum(map(sum, rows)) / 4)
assert sum(means) / 2 != sum(map(sum, rows)) / 4

# %% [markdown]
# And the noise of uneven shares by the formula for equal ones is another one. Four rows, of which
# any may be the 5, have the variance 4; the mean of the estimates over these four cases shows which
# formula is unbiased:

# %%
right, wrong = [], []
for place in range(4):
    batch = [5.0 if i == place else 1.0 for i in range(4)]
    squares = (sum(batch[:3]) / 4) ** 2 + (batch[3] / 4) ** 2
    right.append(estimate_of_shares([3, 1], squares, 2.0**2).noise)
    wrong.append(estimate(2, squares * 2, 4, 2.0**2).noise)
print(
    f"noise {sum(right) / 4:.3f} with the rows of each rank, {sum(wrong) / 4:.3f} as if they "
    "were equal"
)
assert abs(sum(right) / 4 - 4) < 1e-12
assert abs(sum(wrong) / 4 - 4) > 1

# %% [markdown]
# ## 7 Exercise: the gradient and its noise, from one all-reduce
#
# Rank r has `shares[r]` rows; `rows` are the gradients of yours, one per line. Return an array: the
# mean gradient of the whole batch, then |G|^2, then tr(Sigma). A share of the gradient is b_r/B of
# that of its rows, so the sum of the ranks' squares, divided by s = sum b_r^2 / B^2, is that of a
# batch of s B rows.


# %%
def gradient_and_noise(comm, shares, rows):
    return np.append(rows.mean(axis=0), [0.0, 0.0])


check("10b.gradient_and_noise", gradient_and_noise)

# %%
reveal("10b.gradient_and_noise")
check("10b.gradient_and_noise", solution("10b.gradient_and_noise"))

# %% [markdown]
# And stages by time. Rank r has `sizes[r]` layers; `seconds` and `flops` are those of yours. Return
# the number of layers of each stage with which the slowest stage is fastest, the same on every
# rank. `minidist.pipeline.partition.by_slowest(costs, stages, paces)` cuts layers of given costs,
# where stage s takes `paces[s]` times as long for each of its layers.


# %%
def stages_by_time(comm, sizes, seconds, flops):
    return sizes


check("10b.stages_by_time", stages_by_time)

# %%
reveal("10b.stages_by_time")
check("10b.stages_by_time", solution("10b.stages_by_time"))

# %% [markdown]
# ## 8 Takeaway
#
# - Divide by the rows of the **whole batch** and add: then shares may be as uneven as the ranks
#   are.
# - Shares in proportion to measured speeds end the wait of fast ranks. Measure computing, not the
#   time of a step: in a step everyone waits for the slowest.
# - Seconds alone do not say whether a layer is expensive or its rank is slow. With seconds per FLOP
#   a cut stays good when layers have moved.
# - **tr(Sigma)/|G|^2** is the batch that the gradient is worth. It grows as the loss falls, and the
#   batch with it.
# - What the ranks choose is a part of the state: it is in the checkpoint, and one device has to be
#   told.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 3 minidist train --dp 3 --global-batch 8 --weights 2,1,1 --steps 5
#     mpiexec -n 2 minidist compare --dp 2 --global-batch 12 --weights measured:2 --reduction ordered --steps 5
#     mpiexec -n 4 minidist train --dp 4 --micro-batch 2 --adaptive-batch 64 --lr-scaling sqrt:5 --steps 20
#     mpiexec -n 2 minidist compare --pp 2 --layers 8 --repartition-every 3 --reduction ordered --steps 8
#     mpiexec -n 4 python mpi_examples/2_data_parallel/lr_scaling.py
#     mpiexec -n 3 python mpi_examples/2_data_parallel/uneven_ranks.py
#     mpiexec -n 2 python mpi_examples/6_pipeline/repartition.py
#     mpiexec -n 4 python mpi_examples/7_more/adaptive_batch.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `--weights` | PyTorch `Join` for uneven inputs; "heterogeneous" data parallelism |
# | `--repartition-every` | "dynamic load balancing" of pipelines; torchgpipe `balance_by_time`, once and before the training |
# | noise scale | McCandlish et al. 2018, *simple* noise scale; GPT-NeoX `gradient_noise_scale` |
# | `--adaptive-batch` | "batch size warm-up" of GPT-3 and Megatron-LM (`--rampup-batch-size`), there by a fixed plan |
# | `--lr-scaling linear:STEPS` | linear scaling rule with gradual warm-up, Goyal et al. 2017 |
#
# Next: [11 ZeRO 1 and 2](11_zero_1_and_2.ipynb). All of them are in the [index](README.md).
