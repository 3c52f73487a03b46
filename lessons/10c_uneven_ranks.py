# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10c Uneven ranks
#
# *30 minutes. Before it: 06.*
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

from minidist import LinkModel, SimWorld, all_gather, all_reduce
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution
from minidist.data import weighted_shards
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train

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
# **Rows go where they are computed fastest.** The step stays that of one device. What it saves: the
# time for which fast ranks wait. What it costs: one number per rank now and then. In a pipeline every
# rank sees all rows, so there the **layers** follow the speeds (section 5, after lesson 16).
#
# Two steps with equal shares; then the ranks exchange their seconds per row, and two steps with
# shares in proportion to their speeds.


# %%
def links(*slowness):
    """Links between ranks; `slowness` says how many times as long each of them computes."""
    slowdown = slowness.__getitem__
    return LinkModel(alpha=1e-6, flops=1e9, memory_bandwidth=1e9, slowdown=slowdown)


world = SimWorld(3, links=links(1, 1, 4))
result = world.run(train, small_job(dp=3, global_batch=36, weights="measured:2", steps=4))[0]
picture("lanes", world, "part 3 of lesson 10c", title="measured shares, rank 2 four times as slow")

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
# ## 5 Check
#
# The shares, the time of a step, and jobs with uneven shares against one device.


# %%
def seconds_of(world, step):
    """How long a step of a job has taken, until its last rank was done."""
    ends = [
        max(s.end for t in world.traces for s in t.spans if s.name == f"step {i}")
        for i in (step - 1, step)
    ]
    return ends[1] - ends[0]


runs = [([sum(rows) for rows in shares.rows], steps) for shares, steps in result.runs]
for rows, steps in runs:
    print(f"{steps} steps in which the ranks have {rows} rows")
share = seconds_of(world, 3) / seconds_of(world, 1)
rows_guess.judge(runs[1][0][2])
time_guess.judge(share, within=0.25)
assert runs == [([12, 12, 12], 2), ([16, 16, 4], 2)]
assert share < 0.5

for job in (
    small_job(dp=3, global_batch=36, weights="measured:2", steps=4),
    small_job(dp=3, global_batch=8, weights="2,1,1", zero=3, steps=2),
):
    verdict = SimWorld(3, links=links(1, 1, 4)).run(compare_rank, job)[0]
    print(verdict.sentence())
    assert verdict.equal

# %% [markdown]
# **Layers that follow the speeds.** In a pipeline (lesson 16) each rank has some of the layers, a
# *stage*, and the rows of a batch go through all stages, one part of the batch after the other. So it
# is as fast as its slowest stage, and a slow rank makes any stage slow. With `--repartition-every K` the ranks measure their layers, exchange the times, and choose the cut
# whose slowest stage is fastest. A layer's seconds are those on one rank; on another one it takes
# others, by the ratio of their seconds per FLOP ([cut.py](../minidist/techniques/repartition/cut.py)).
#
# Two stages of four layers, the second rank four times as slow. After three steps layers move to
# the fast rank, with their weights and Adam's two averages: one message. In the picture rank 0
# waits before, and hardly any more after it.

# %%
two_stages = {"layers": 8, "pp": 2, "microbatches": 8, "micro_batch": 1, "steps": 6}
job = small_job(**two_stages, repartition_every=3)
world = SimWorld(2, links=links(1, 4))
cuts = world.run(train, job)[0].measured["partitions"]
for partition, steps in cuts:
    print(f"layers of the stages: {partition}, for {steps} steps")
moves = [m for t in world.traces for m in t.sent("repartition") if m.operation == "message"]
for move in moves:
    print(f"a message of {move.nbytes:,} B, from rank {move.rank} to rank {move.peer}")
share = seconds_of(world, 5) / seconds_of(world, 2)
print(f"a step takes {share:.2f} of its time")
assert ([partition for partition, _ in cuts], len(moves)) == (["4,4", "7,1"], 1)
assert share < 0.5


picture(
    "lanes",
    world,
    "part 5 of lesson 10c",
    title="stages cut anew after three steps, rank 1 four times as slow",
)

verdict = SimWorld(2, links=links(1, 4)).run(compare_rank, job)[0]
print(verdict.sentence())
assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# Measure the time of a whole step in place of the time of computing. It is what a training loop prints,
# and it seems to be the same thing. But a step ends when the gradients of all ranks are added, so a
# fast rank measures the slow one:


# %%
def shares_after_a_step(comm, whole_step):
    """The rows of each rank after a step with 12; a row takes rank 2 four seconds, others one."""
    began = comm.time()
    comm.compute(seconds=12 * (4.0 if comm.rank == 2 else 1.0), name="forward and backward")
    computed = comm.time()
    all_reduce(comm, np.zeros(1000))  # the gradient: nobody has it before rank 2 has computed
    ended = comm.time() if whole_step else computed
    return rows_of(36, 1 / all_gather(comm, np.array([ended - began])))


measured = {}
for whole_step, what in ((False, "computing"), (True, "a whole step")):
    measured[what] = SimWorld(3).run(shares_after_a_step, whole_step)[0]
    print(f"shares by the time of {what}: {measured[what]}")
assert measured == {"computing": [16, 16, 4], "a whole step": [12, 12, 12]}

# %% [markdown]
# Nothing is wrong with the numbers, and nothing becomes faster. (The other mistake with uneven shares,
# the mean of the ranks' means, is in lesson 06.)

# %% [markdown]
# ## 7 Exercise: stages by time
#
# Rank r has `sizes[r]` layers; `seconds` and `flops` are the measured times and the work of *your*
# layers, two arrays. Return the number of layers of each stage with which the slowest stage is
# fastest, the same list on every rank. `all_gather(comm, array, counts=[...])` gathers arrays of
# unequal lengths, and `by_slowest(costs, stages, paces)` of `minidist.pipeline.partition` cuts layers
# of given costs, where stage s takes `paces[s]` times as long for each of its layers.
#
# An example: rank 0 took 2 s and 4 s for layers of 2 and 4 FLOPs, so its pace is 1 s per FLOP. Rank
# 1 took 8 s for a layer of 2 FLOPs: its pace is 4. With [2, 1] the slowest stage takes 8 s. Rank 0
# would take 2 s for that layer, and rank 1 takes 16 s for the second one: [2, 1] is the best cut.


# %%
def stages_by_time(comm, sizes, seconds, flops):
    return sizes


check("10c.stages_by_time", stages_by_time)

# %%
reveal("10c.stages_by_time")
check("10c.stages_by_time", solution("10c.stages_by_time"))

# %% [markdown]
# ## 8 Takeaway
#
# - Divide by the rows of the **whole batch** and add: then shares may be as uneven as the ranks
#   are.
# - Shares in proportion to measured speeds end the wait of fast ranks. Measure computing, not the
#   time of a step: in a step everyone waits for the slowest.
# - Seconds alone do not say whether a layer is expensive or its rank is slow. With seconds per FLOP
#   a cut stays good when layers have moved.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 3 minidist train --dp 3 --global-batch 8 --weights 2,1,1 --steps 5
#     mpiexec -n 2 minidist compare --dp 2 --global-batch 12 --weights measured:2 --reduction ordered --steps 5
#     mpiexec -n 2 minidist compare --pp 2 --layers 8 --repartition-every 3 --reduction ordered --steps 8
#     mpiexec -n 3 python mpi_examples/2_data_parallel/uneven_ranks.py
#     mpiexec -n 2 python mpi_examples/6_pipeline/repartition.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `--weights` | PyTorch `Join` for uneven inputs; "heterogeneous" data parallelism |
# | `--repartition-every` | "dynamic load balancing" of pipelines; torchgpipe `balance_by_time`, once and before the training |
#
# Next: [11 ZeRO 1 and 2](11_zero_1_and_2.ipynb). All of them are in the [index](README.md).
