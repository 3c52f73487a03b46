# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 40 One fragment at a time
#
# *25 minutes. Before it: 39.*
#
# ## 1 The case
#
# Two ranks train with DiLoCo (lesson 39): four steps alone, of one second each, then they exchange
# how far their weights have come. The link needs 3.2 s for all of the weights, and the ranks wait
# for it. Eight steps with two exchanges take 14.4 s, of which 6.4 s are waiting.
#
# Now the weights are cut into four *fragments*. After each step one of them is sent, in turn, so
# after four steps all have been. And the ranks do not wait: they make the next step while the
# fragment is on its way, and take it in one step later.
#
# How many bytes leave a rank at most in one exchange, where the weights are 4,000 numbers of 8
# bytes? And how long do the eight steps take?

# %%
import inspect

import numpy as np

from minidist import LinkModel, SimWorld, TrainConfig, UsageError
from minidist.course.lesson import check, expect, predict, solution
from minidist.job.equality.compare import compare_rank
from minidist.report import draw, show

# %% [markdown]
# ## 2 Predict
#
# The last fragment has no step behind which it could travel.

# %%
bytes_guess = predict("most bytes of one exchange, with four fragments", example=32_000, unit="B")
time_guess = predict("time of the eight steps", example=14.4, unit="s")

# %% [markdown]
# ## 3 The idea and its picture
#
# **Send one fragment of the weights at a time, and train on while it travels.** That is *Streaming
# DiLoCo*. All steps together send as many bytes as before, but never more than one fragment at
# once, and what travels behind a step costs no time. What it costs: a fragment that comes back is
# late. Meanwhile the rank has made another step with its old weights. So it does not replace its
# own weights by the common ones; it keeps a share alpha of its own.
#
# ## 4 The code
#
# The toy of the case, with every message. `on_the_way` has the fragments that were sent and not yet
# taken in:


# %%
def stream(comm, fragments, delay, alpha=0.5, steps=8, every=4, size=4000):
    """Each fragment is exchanged at every `every`-th step; it is taken in `delay` steps later."""
    other, on_the_way = 1 - comm.rank, []
    common = list(np.zeros((fragments, size // fragments)))
    own = [part.copy() for part in common]
    for step in range(steps):
        comm.compute(seconds=1.0, name=f"step {step}")
        for part in own:
            part += 1.0 + comm.rank  # what this rank learns in a step
        for f in range(fragments):
            if (step + 1) % every == f * (every // fragments):
                way, others = common[f] - own[f], np.empty_like(own[f])
                requests = [comm.isend(way, other), comm.irecv(others, other)]
                on_the_way.append((step + delay, f, way, others, requests))
        while on_the_way and (on_the_way[0][0] <= step or step == steps - 1):
            _, f, way, others, requests = on_the_way.pop(0)
            comm.waitall(requests)
            common[f] = common[f] - (way + others) / 2  # the outer step, with a learning rate of 1
            own[f] = alpha * own[f] + (1 - alpha) * common[f]
    return [float(part[0]) for part in common]


LINKS = LinkModel(alpha=0.0, beta=1e-4)  # 3.2 s for 32,000 B
worlds = {}
for name, fragments, delay in (("DiLoCo", 1, 0), ("four fragments, one step late", 4, 1)):
    worlds[name] = world = SimWorld(2, links=LINKS)
    common = world.run(stream, fragments, delay)
    print(f"{name}: common weights {common}")
    title = f"{name}: {world.end_time:.1f} s"
    command = "part 4 of lessons/40_one_fragment_at_a_time.py"
    show(draw("lanes", world.traces, {"command": command, "title": title}))

# %% [markdown]
# ## 5 Check

# %%
late = worlds["four fragments, one step late"]
bytes_guess.judge(max(message.nbytes for message in late.traces[0].sent()))
time_guess.judge(late.end_time, within=0.001)
sent = {name: sum(m.nbytes for m in world.traces[0].sent()) for name, world in worlds.items()}
print(f"all bytes that leave rank 0: {sent}")
assert len(set(sent.values())) == 1

# %% [markdown]
# In the library, with a model, AdamW inside and Nesterov's momentum outside. The reference keeps
# what is on its way for `outer_delay` steps on one device:

# %%
job = {"layers": 1, "width": 16, "heads": 2, "context": 16, "micro_batch": 2, "steps": 12}
job |= {"reduction": "ordered", "lr": 0.01, "dp": 4, "local_steps": 3}
for fragments in (1, 3):
    config = TrainConfig.make(
        **job,
        outer_optimizer="nesterov",
        outer_fragments=fragments,
        outer_delay=1,
        outer_mixing=0.5,
    )
    world = SimWorld(4)
    verdict = world.run(compare_rank, config)[0]
    sizes = [m.nbytes for m in world.traces[0].sent("parameter_gather")]
    print(
        f"fragments: {fragments}; {sum(sizes):,} B from rank 0, "
        f"at most {max(sizes):,} B in a message; loss {verdict.losses[-1]:.3f}; "
        f"equal to its replay on one device: {verdict.equal}"
    )
    assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# A fragment that is still on its way when its next exchange begins would be merged in the wrong
# order. So the delay must be shorter than the steps between two exchanges:

# %%
late = TrainConfig.make(**job, outer_optimizer="nesterov", outer_fragments=3, outer_delay=3)
with expect(UsageError):
    SimWorld(4).run(compare_rank, late)

# %% [markdown]
# ## 7 Exercise: merge a fragment
#
# The outer optimizer has no momentum here. `outer_gradient`, the mean over the ranks of the ways
# from their weights back to `common`, has arrived; `own` are your weights, which have made steps
# meanwhile. Return the new common weights, which an outer step of `lr` makes, and your own new
# ones, in which the share `alpha` is yours and the rest is of the new common ones.


# %%
def merge(comm, common, own, outer_gradient, lr, alpha):
    common = common - lr * outer_gradient
    return common, common


check("40.merge", merge)

# %%
print(inspect.getsource(solution("40.merge")))
check("40.merge", solution("40.merge"))

# %% [markdown]
# ## 8 Takeaway
#
# - Fragments: the same bytes per H steps, and **1/F of them at once**. With a delay they travel
#   behind the steps.
# - What is late is mixed, not copied: own = alpha own + (1 - alpha) common.
#
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --dp 4 --steps 20 --local-steps 4 --outer-optimizer nesterov --outer-fragments 2 --outer-delay 1
#
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `StreamingOuterOptimizer`, `--outer-fragments` | Streaming DiLoCo (Douillard et al. 2025); torchft `DiLoCo(fragment_sync_delay, fragment_update_alpha)` |
#
# This was the last one. All of them are in the [index](README.md).
