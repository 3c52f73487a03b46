# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 28 The museum of bugs
#
# *30 minutes. Before it: 06; the stories touch 11, 14, 17 and 22. You need no MPI, no GPU and no download.*
#
# ## 1 Goal
#
# See with your own eyes that **a falling loss proves nothing**. Every bug in this museum was found in code that
# people used and trusted, and every one passed its authors' tests. Their authors were careful; care alone does not
# find bugs of this kind.
#
# What finds them: comparing every gradient and weight with one device. What that costs: one run more.

# %%
import inspect

import numpy as np

from minidist.base.errors import DeadlockError
from minidist.collectives import all_gather, all_reduce
from minidist.comm import SimWorld
from minidist.lesson import check, expect, solution
from minidist.museum import exhibits, find, run_exhibit
from minidist.museum.exhibit_run import table
from minidist.report import draw, show

# %% [markdown]
# ## 2 The picture first
#
# Exhibit 9a: a vocabulary is cut over two ranks, and one function takes the end of a range as inclusive, the other as
# exclusive. The last word of each range has no embedding. The grey curve is the run without the bug:

# %%
(off_by_one,) = find("9a")
run = run_exhibit(off_by_one, tests=False)
show(run.figure("minidist museum 9a -o curves.svg"))
print(off_by_one.story)

# %% [markdown]
# The other half of the picture, drawn as `minidist compare --trace` draws it:

# %%
show(
    draw(
        "loss",
        [],
        {
            "losses": run.wrong.losses,
            "reference_losses": run.right.losses,
            "command": "minidist museum 9a",
        },
    )
)

# %% [markdown]
# ## 3 Predict
#
# In exhibit 4b, 11 rows are distributed over 3 ranks, each rank takes the mean over its own rows, and the ranks'
# gradients are averaged. How far off is the gradient of the first step, in percent of its largest entry? And after 12
# steps, will the loss be visibly worse?

# %%
my_guess = {"gradient off by percent": 1, "visibly worse": True}

# %% [markdown]
# ## 4 The code
#
# A bug is injected in memory into the code that trains, for the time of one run. This is all of 4b, and all of the
# injection:

# %%
(means,) = find("4b")
print(inspect.getsource(means.inject))
print(inspect.getsource(type(means).injected))

# %% [markdown]
# ## 5 Check

# %%
run = run_exhibit(means, tests=False)
print(run.text())
off = 100 * run.differences["gradients"].ratio
worse = run.wrong.losses[-1] - run.right.losses[-1]
print(
    f"\noff by {off:.0f} %; the last loss is {worse:+.3f} of {run.right.losses[-1]:.3f}. Your "
    f"guess: {my_guess}"
)
assert off > 5
assert abs(worse) < 0.1

# %% [markdown]
# A round through the museum (`minidist museum` shows all of it). Look at the two columns of losses first, and ask
# yourself which of them you would have noticed.

# %%
ROUND = (
    "2",
    "3",
    "4c",
    "6",
    "7",
    "8",
    "10b",
    "11a",
    "12a",
    "13a",
    "14",
    "17",
    "19a",
    "23",
    "25",
    "27a",
    "30",
)
runs = [run_exhibit(find(number)[0], tests=False) for number in ROUND]
print(table(runs))
print(f"{len(ROUND)} of {len(exhibits())} exhibits")

# %% [markdown]
# Some change no number at all: 19a and its relatives only take memory, and only the peak shows it. The right run is
# always that of one device:

# %%
right = [v for v in runs if v.wrong is not None and v.right.tensors]
silent = [v.exhibit.number for v in right if not any(d.largest for d in v.differences.values())]
print(
    f"no gradient and no weight differs in {silent}; in the other {len(right) - len(silent)} of "
    "this round max |w_wrong - w_right| > 0"
)

# %% [markdown]
# ## 6 Break it
#
# Exhibit 28a without the museum. One rank leaves a sum out, because its data ran out. Elsewhere the job would hang
# for ever; here the error says why:


# %%
def sums(comm):
    for step in range(3):
        loss = np.array([comm.rank + 10.0 * step])
        if (comm.rank, step) != (2, 2):
            all_reduce(comm, loss)


with expect(DeadlockError):
    SimWorld(4).run(sums)

# %% [markdown]
# ## 7 Exercise: are the replicas still equal?
#
# Half of these bugs let replicas drift apart, and a cheap check after each step would have found it.
# `first_difference(comm, weights)`: the lowest rank whose float64 array differs from rank 0's in any bit, or -1, the
# same answer on every rank. Weights are long: do not send them.


# %%
def first_difference(comm, weights):
    sums = all_gather(comm, np.array([weights.sum()]))
    return int(np.argmax(sums != sums[0])) if (sums != sums[0]).any() else -1


check("28.first_difference", first_difference)

# %%
print(inspect.getsource(solution("28.first_difference")))
check("28.first_difference", solution("28.first_difference"))

# %% [markdown]
# ## 8 Takeaway
#
# - **Compare tensors, not curves**: max |gradient - one device's| after one step finds in a second what a loss hides
#   for a week.
# - 16 bytes per rank decide whether replicas are equal: a digest, gathered.
#
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 minidist compare --dp 2 --steps 3
#     mpiexec -n 2 minidist train --dp 2 --steps 3 --check-replicas
#
# `minidist museum` shows the table, `minidist museum 9a` one exhibit with the tests that catch it.
#
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | planting a bug | mutation testing |
# | compare with one device | Megatron-LM's and torchtitan's "loss parity" runs (curves); PyTorch `TORCH_DISTRIBUTED_DEBUG=DETAIL` (consistency of collectives) |
# | `--check-replicas` | Megatron-LM `--check-weight-hash-across-dp-replicas-interval` |
#
# Back to the [index](README.md).
