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
# *25 minutes. Before it: 06.*
#
# ## 1 The case
#
# Three ranks train on 36 rows, twelve each. The machine of the third is four times as slow, so the
# other two wait for three quarters of every step. After two steps all tell each other how many
# seconds a row takes them, and share the 36 rows anew, in proportion to their speeds.
#
# How many rows does the slow rank get? And what part of its former time does a step take then?

# %% [markdown]
# ## 2 Predict
#
# Everything else in a step takes a little time, too; a twentieth off is good enough for the second.

# %%
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution

rows_guess = predict("rows of the slow rank", example=9)
time_guess = predict("time of a step, over that with equal shares", example=0.75)

# %%
import numpy as np

from minidist import LinkModel, SimWorld, all_gather, all_reduce
from minidist.data import weighted_shards
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train

# %% [markdown]
# ## 3 The idea and its picture
#
# **Rows go where they are computed fastest.** The step stays that of one device. It saves the time
# for which fast ranks wait. It costs one number per rank now and then.
#
# The ranks have equal shares for two steps. Then they exchange their seconds per row, and take two steps
# with shares in proportion to their speeds. (`small_job` returns the settings of a training job of a small GPT.)
#
# In the picture ranks 0 and 1 have computed early in the first two steps. In the red time their gradients wait for
# those of the slow rank. After two steps all three are done at nearly the same time:


# %%
slowness = [1, 1, 4]  # how many times as long a rank computes
links = LinkModel(alpha=1e-6, flops=1e9, memory_bandwidth=1e9, slowdown=lambda rank: slowness[rank])
world = SimWorld(3, links=links)
result = world.run(train, small_job(dp=3, global_batch=36, weights="measured:2", steps=4))[0]
picture("gantt", world, "part 3 of lesson 10c", title="three ranks; rank 2 is four times as slow")

# %% [markdown]
# ## 4 The code
#
# A share in proportion to a speed is rarely a whole number of rows. Each rank first gets its share
# rounded down; the rows that are left go to the ranks with the largest remainders. All ranks compute
# this from the same speeds, so they agree without another message.


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
# Once they are whole rows, shares in proportion are not always the best. Three rows, and ranks that take 1 s and 4 s
# for a row, so that the speeds are 1 and 1/4. The time of a step, that of the rank which is done last, for every way to
# share them:

# %%
in_proportion = rows_of(3, [1, 1 / 4])
times = {}
for slow in range(4):
    counts = [3 - slow, slow]
    times[slow] = max(1 * counts[0], 4 * counts[1])
    mark = "  <- in proportion" * (counts == in_proportion)
    print(f"rows {counts}: a step takes {times[slow]:2} s{mark}")
assert min(times.values()) < times[in_proportion[1]]

# %% [markdown]
# The exercise asks for the best shares. Trying all of them, as here, takes too long for many ranks, and is not needed.

# %% [markdown]
# ## 5 Check
#
# The shares of the four steps, as the job has recorded them:

# %%
runs = [([sum(rows) for rows in shares.rows], steps) for shares, steps in result.runs]
for rows, steps in runs:
    print(f"{steps} steps in which the ranks have {rows} rows")
rows_guess.judge(runs[1][0][2])
assert runs == [([12, 12, 12], 2), ([16, 16, 4], 2)]

# %% [markdown]
# The time of a step is the time from its start to the moment at which its last rank is done. The slow rank
# computes a third of the rows that it had; the rest of a step (the messages and the optimizer) takes as
# long as before:

# %%
ends = [
    max(span.end for trace in world.traces for span in trace.spans if span.name == f"step {i}")
    for i in range(4)
]
before, after = ends[1] - ends[0], ends[3] - ends[2]
share = after / before
print(f"equal shares: {before * 1e3:.2f} ms; in proportion: {after * 1e3:.2f} ms")
time_guess.judge(share, within=0.05)
assert share < 0.5

# %% [markdown]
# Is it the same training? Each rank divides the sum of its rows' gradients by the rows of the *whole*
# batch, and the parts are added (lesson 06). So the sum is the gradient of the batch, however the rows are shared.
# `compare_rank` trains the job on these ranks and on one device, and compares every array bit for bit. The one device
# computes the shares of the ranks one after the other and adds them in the order of the ranks (lesson 04b); as
# one matrix product over all rows it would have other last bits:

# %%
job = small_job(dp=3, global_batch=36, weights="measured:2", steps=4)
verdict = SimWorld(3, links=links).run(compare_rank, job)[0]
print(f"the bits of one device: {verdict.equal}")
assert verdict.equal
assert set(verdict.max_difference.values()) == {0}

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
    # All have computed 12 rows, so the speeds are in proportion to 1 / time.
    return rows_of(36, 1 / all_gather(comm, np.array([ended - began])))


measured = {}
for whole_step, what in ((False, "computing"), (True, "a whole step")):
    measured[what] = SimWorld(3).run(shares_after_a_step, whole_step)[0]
    print(f"shares by the time of {what}: {measured[what]}")
assert measured == {"computing": [16, 16, 4], "a whole step": [12, 12, 12]}

# %% [markdown]
# Each number is measured correctly, and yet all ranks report the same speed, so the shares stay equal.
#
# Two limits remain. Times on real machines are noisy, and shares that follow each of them swing to and fro, so they are
# averaged over several steps. And a rank with more rows needs more memory for activations.

# %% [markdown]
# ## 7 Exercise: the shares with which a step takes least time
#
# Rank r has computed `mine` rows in `seconds` seconds; the ranks may have computed different numbers of
# rows. Share out `rows` rows so that the slowest rank is done as early as possible. Return the rows of
# all ranks, a list, the same on every rank.
#
# A rank may get no row. Judged: least time of the slowest rank; bytes (par: one number sent for each rank).


# %%
def shares_by_time(comm, rows, mine, seconds):
    return rows_of(rows, np.ones(comm.size))


check("10c.shares_by_time", shares_by_time)

# %%
reveal("10c.shares_by_time")
check("10c.shares_by_time", solution("10c.shares_by_time"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Shares in proportion to measured speeds end the wait of fast ranks**, and dividing by the rows of the
#   whole batch keeps the gradient that of one device.
# - Measure the time of computing. In a whole step everyone waits for the slowest rank.

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
# | `--weights` | "heterogeneous" data parallelism; Whale (EPL) shares rows in proportion to speeds (PyTorch's `Join` is for ranks that run out of inputs) |
# | `--repartition-every` | "dynamic load balancing" of pipelines; torchgpipe `balance_by_time`, once and before the training |
#
# In a pipeline (lesson 16) all ranks see all rows, and layers move in place of rows: with
# `--repartition-every K` the stages are cut anew by the measured times of their layers.
#
# Next: [11 ZeRO 1 and 2](11_zero_1_and_2.ipynb). All lessons are in the [index](README.md).
