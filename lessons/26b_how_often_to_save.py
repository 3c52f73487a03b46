# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 26b How often to save
#
# *20 minutes. Before it: 26.*
#
# ## 1 The case
#
# A job has a thousand hours of work to do, on a machine that fails every 20 hours on average. After a
# failure it begins again from its last save, and the work since then is lost. A save takes 6 minutes, in
# which nothing else is done.
#
# With a save after every 12 minutes of work, a third of the time goes into saving. With one every 10 hours
# a failure costs five hours on average. After how many hours of work should the job save?

# %% [markdown]
# ## 2 Predict
#
# Say that the job saves after every T hours of work. Per hour of work: how many hours do the saves cost, and
# how many do the failures cost? For which T is the sum of both the least? A fifth off is good enough.

# %%
from minidist.course.lesson import check, predict, reveal, solution

interval_guess = predict("best interval between two saves", example=1.0, unit="h")

# %%
import numpy as np

from minidist.report import show
from minidist.report.frame import new_figure, tidy

# %% [markdown]
# ## 3 The idea and its picture
#
# **Save so often that the saves cost as much as the failures.** A job that saves more often spends more time on
# saving than it wins back, and one that saves less often repeats more work.
#
# With a save of C hours after every T hours of work, an hour of work costs C/T hours of saving. A failure
# costs half an interval on average, T/2 hours, and there is one every M hours: T/2M per hour of work. (A restart
# takes no time here, and the job waits for a save. One that goes on while it saves has a smaller C.)

# %%
SAVE, MTBF = 0.1, 20.0  # C and M, in hours: the mean time between failures


def costs(interval):
    """Hours per hour of work: of the saves, and of the failures."""
    return SAVE / interval, interval / (2 * MTBF)


# %% [markdown]
# Both costs and their sum, by the hours between two saves. One falls, the other one rises, and the sum is the
# least where they cross, at the dot, because their product does not depend on T. Around it the sum is flat: it
# does not matter much whether one saves a little too often or too seldom.

# %%
intervals = np.geomspace(0.2, 20, 200)
saves, failures = costs(intervals)
least = np.argmin(saves + failures)
axes = (figure := new_figure(8, 3.2)).add_subplot()
axes.plot(intervals, saves, color="#AA3377", label="saves, C/T")
axes.plot(intervals, failures, color="#EE6677", label="failures, T/2M")
axes.plot(intervals, saves + failures, color="#4477AA", label="both")
axes.plot(intervals[least], (saves + failures)[least], "o", color="#4477AA")
case = np.array([0.2, 10.0])
axes.plot(case, sum(costs(case)), "s", color="#222222", markersize=5, label="the case's two")
axes.legend(fontsize=8)
axes.set_title("hours lost per hour of work", fontsize=10, loc="left")
axes.set_xscale("log")
axes.set_xticks(ticks := [0.2, 0.5, 1, 2, 5, 10, 20], [str(tick) for tick in ticks])
axes.set_xlabel("hours between two saves")
axes.set_ylabel("hours")
tidy(axes)
show(figure)

# %% [markdown]
# ## 4 The code
#
# The formula must be tried. One simulated job, with failures at random times:


# %%
def duration(work, interval, mtbf, rng):
    """Hours until the work is done."""
    now, done, failure = 0.0, 0.0, rng.exponential(mtbf)
    while done < work:
        segment = min(interval, work - done)
        end = now + segment + SAVE
        if end <= failure:
            now, done = end, done + segment
        else:  # it fails in this segment, and is started again at once
            now, failure = failure, failure + rng.exponential(mtbf)
    return now


def lost(work, interval, mtbf):
    """The mean over 40 jobs: hours lost per hour of work."""
    jobs = [duration(work, interval, mtbf, np.random.default_rng(seed)) for seed in range(40)]
    return np.mean(jobs) / work - 1


# %% [markdown]
# ## 5 Check
#
# The case by the formula and by simulated jobs:

# %%
print("hours between saves   by the formula   40 jobs")
for interval in (0.2, 1.0, 2.0, 4.0, 10.0):
    print(f"{interval:19} {sum(costs(interval)):16.3f} {lost(1000, interval, MTBF):9.3f}")
best = np.sqrt(2 * SAVE * MTBF)
print(f"C/T = T/2M, so T = sqrt(2 C M) = {best:.2f} hours")
interval_guess.judge(best, within=0.2)
assert costs(best)[0] == costs(best)[1]

# %% [markdown]
# With an interval of 10 hours the jobs lose more than by the formula, which assumes that T is small against
# M: it leaves out that a segment that is begun again may fail again. The mean of all jobs is
# M (e^((T+C)/M) - 1)/T - 1, since a stretch of T + C hours without a failure takes M (e^((T+C)/M) - 1) hours on
# average:

# %%
for interval in (2.0, 10.0):
    exactly = MTBF * np.expm1((interval + SAVE) / MTBF) / interval - 1  # expm1(x) is e^x - 1
    print(f"{interval:4} hours: {exactly:.3f} hours lost per hour of work")

# %% [markdown]
# ## 6 Break it
#
# Train on twenty times as many cards and keep the interval of 2 hours. Now there is a failure every hour.
# 100 hours of work, with the old interval and with that of the formula:

# %%
for interval in (2.0, np.sqrt(2 * SAVE * 1.0)):
    hours, formula = lost(100, interval, 1.0), SAVE / interval + interval / 2
    print(
        f"a save every {interval:.2f} hours: {hours:.1f} hours lost per hour of work, "
        f"{formula:.2f} by the formula"
    )

# %% [markdown]
# Few segments of 2 hours come to their end without a failure, and so the formula, which is for T small against
# M, is far off there. M falls with the number of cards, and the interval must fall with
# the square root of M.

# %% [markdown]
# ## 7 Exercise: after how many steps?
#
# Each of `cards` cards fails once in `mtbf` hours on average, and a failure of any of them stops the job. A
# save takes `save` hours and a training step takes `step` hours. Return after how many steps to save, at
# least one. Judged: C/T + T/2M with your number of steps; no other number may cost less. So try the number
# below and the one above.


# %%
def steps_between_saves(cards, mtbf, save, step):
    return max(1, round(np.sqrt(2 * save * mtbf) / step))


check("26b.steps_between_saves", steps_between_saves)

# %%
reveal("26b.steps_between_saves")
check("26b.steps_between_saves", solution("26b.steps_between_saves"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Save after every sqrt(2 C M) hours of work** (Young 1974), with C hours for a save and M between two
#   failures of the whole job. M is that of one card, divided by the number of cards.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --dp 4 --zero 3 --steps 4 --every 2 --save runs/checkpoints
#
# `--every` is the number of steps between two saves.

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `--every` | torchtitan `checkpoint.interval`; Megatron-LM `--save-interval` |
# | sqrt(2 C M) | the Young/Daly interval; Daly (2006) has the terms for a T that is not small against M |
#
# A state that is saved and loaded to the last bit may still be that of a wrong training.
#
# Next: [28 The museum of bugs](28_the_museum.ipynb). All lessons are in the [index](README.md).
