# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17b PipeDream and weight stashing
#
# *30 minutes. Before it: 17.*
#
# ## 1 The case
#
# A pipeline of four stages trains on a stream of mini-batches, none of which is cut, and never drains: the
# next one enters before the last one has left, and **a stage updates its weights right after each
# backward**. The order on a stage is 1F1B's (lesson 17), so stage 0 begins with four forwards before its
# first backward, and stage 3 alternates from the start. Call the weights of a stage after v updates
# version v.
#
# Mini-batch 7 goes through all stages. The update of a mini-batch comes after its backward, so the
# freshest weights for mini-batch 7 are version 7: those that have learned from mini-batches 0 to 6.
# Which version does it find on stage 3, and which on stage 0?

# %% [markdown]
# ## 2 Predict
#
# How many mini-batches are on their way, begun on stage 0 and not yet back, when mini-batch 7
# enters?

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, solution

last_guess = predict("version that mini-batch 7 uses on stage 3", example=6)
first_guess = predict("version that mini-batch 7 uses on stage 0", example=6)

# %%
from contextlib import contextmanager

import numpy as np

from minidist import (
    MLP,
    SGD,
    PlanError,
    SimWorld,
    Tensor,
    get_schedule,
    quiet_overflow,
    split_model,
)
from minidist.base.memory import account_memory
from minidist.pipeline.runtime.pipedream import WeightVersions
from minidist.pipeline.runtime.versioned import VersionedPipeline
from minidist.pipeline.times import GivenTimes, uniform
from minidist.pipeline.timing import time_plan
from minidist.pipeline.validate import validate
from minidist.report import show
from minidist.report.frame import new_panel
from minidist.report.version_gantt import version_gantt

# %% [markdown]
# ## 3 The idea and its picture
#
# 1F1B still drains at the end of every step, because the update comes when all gradients are there.
# PipeDream does not wait. Then a mini-batch's forward and its backward would see different weights.
# So **each mini-batch keeps the weights that it began with**, in a *stash*. It saves the bubble. It
# costs p - s versions of the weights on stage s, and gradients that are late.
#
# The colour is the version of the weights that an action sees, a red line an update. Follow one
# mini-batch: on a stage its F and its B have one colour. Follow one *stage*: between them the
# weights changed. (There are six colours: version 6 has that of version 0.) Below the rows is how many
# versions each rank keeps.

# %%
p, m = 4, 10
stream = get_schedule("pipedream").plan(p, m)
show(
    version_gantt(
        [time_plan(stream, spans=True)],
        command="minidist schedule pipedream --stages 4 --microbatches 10 --format versions -o "
        "lanes.svg",
    )
)

# %% [markdown]
# ## 4 The code
#
# A toy with every message: y = w2 w1 w0 x with one weight on each stage, and the loss y²/2. First the
# order of a stage, which is 1F1B's, and a message of one number:


# %%
def received(comm, source):
    message = np.empty(1)
    comm.recv(message, source)
    return message[0]


def order_of(stage, last, mini_batches):
    ahead = min(last - stage, mini_batches)
    order = [("F", i) for i in range(ahead)]
    for i in range(mini_batches):
        if ahead + i < mini_batches:
            order.append(("F", ahead + i))
        order.append(("B", i))
    return order


# %% [markdown]
# This toy keeps the input of F only: B computes with the newest weight, which is another one than F has used where
# updates came in between. To keep the weight that F has used is your exercise:


# %%
def stage(comm, mini_batches):
    """Returns (version that F used, version at B) in the order of the mini-batches."""
    rank, last = comm.rank, comm.size - 1
    weight, version, kept, sends, log = 1.0, 0, {}, [], []
    for kind, i in order_of(rank, last, mini_batches):
        if kind == "F":
            x = 0.1 * i if rank == 0 else received(comm, rank - 1)
            kept[i] = version, x
            if rank < last:
                sends.append(comm.isend(np.array([weight * x]), rank + 1))
        else:
            seen, x = kept.pop(i)
            gradient = weight * x if rank == last else received(comm, rank + 1)
            if rank > 0:
                sends.append(comm.isend(np.array([weight * gradient]), rank - 1))
            log.append((seen, version))
            weight, version = weight - 0.1 * gradient * x, version + 1
    for request in sends:
        request.wait()
    return log


for number, log in enumerate(SimWorld(3).run(stage, 6)):
    print(f"stage {number}: (version that F used, version at B):", *log)

# %% [markdown]
# The library's is [versions.py](../minidist/pipeline/runtime/versions.py): an update makes a new
# array, so the old one lives for as long as some backward needs it.

# %% [markdown]
# ## 5 Check
#
# The library's pipeline, on the clock of the picture. At the start of each F and B, and at the end of the last one,
# `noted` writes down the bytes of the newest weights and of the stash:

# %%
WIDTH, ROWS, RATE = 32, 64, 0.25


def mini_batches(seed):
    """Inputs, and as targets what one layer with a tanh makes of them."""
    rng = np.random.default_rng(seed)
    inputs = [rng.normal(size=(ROWS, WIDTH)) for _ in range(40)]
    teacher = rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
    return inputs, [np.tanh(x @ teacher) for x in inputs]


def loss(y, target):
    difference = y - Tensor(target)
    return (difference * difference).sum() * (1 / ROWS)


def train(comm, plan, inputs, targets, rate=RATE):
    """Returns the versions that this rank used, and the losses, which the last rank has."""
    with account_memory() as account:

        def note():
            versions = sum(account.by_purpose.get(kind, 0) for kind in ("parameter", "stash"))
            comm.trace.memory.append((comm.time(), {"parameter": versions}))

        @contextmanager
        def noted(action):
            note()
            yield  # here the pipeline runs the action

        whole = MLP([WIDTH] * (plan.stages + 1), dtype=np.float64)
        stages, _ = split_model(whole, plan.stages, plan.stages_of(comm.rank))
        del whole  # a rank keeps its stage only
        versions = WeightVersions(
            comm, plan, stages, lambda flat: SGD(flat, lr=rate), keep_history=True
        )
        times = GivenTimes(comm, uniform(plan.stages))
        pipe = VersionedPipeline(
            comm, plan, stages, loss, versions=versions, observers=[noted, times]
        )
        losses = pipe.step(inputs[: plan.microbatches], targets[: plan.microbatches])
        note()
    return versions, losses


# %% [markdown]
# Ten mini-batches: which versions mini-batch 7 used, and how many each stage kept:

# %%
inputs, targets = mini_batches(0)
world = SimWorld(p)
ranks = [versions for versions, _ in world.run(train, stream, inputs, targets)]
used = [versions.used["B", stage, 7] for stage, versions in enumerate(ranks)]
print(f"mini-batch 7 used versions {used}")
last_guess.judge(used[3])
first_guess.judge(used[0])
kept = [versions.own[stage].most for stage, versions in enumerate(ranks)]
print(f"versions kept: {kept}, in the plan {validate(stream).weight_versions}")
assert used == [max(0, 7 - (p - 1 - s)) for s in range(p)]

# %% [markdown]
# The same in bytes: a version has 8.4 kB, and in the middle of the stream stage 0 keeps four and stage 3 one. And
# the time: stage 0 waits 9 in all, however long the stream is. In lesson 17's pipeline, with steps of four
# micro-batches, it waits 9 in every step:

# %%
picture("memory", world, "part 5 of lesson 17b", title="PipeDream: bytes of all versions")
for count in (4, 40, 400):
    waits = max(time_plan(get_schedule("pipedream").plan(p, count)).idle)
    drains = count // 4 * max(time_plan(get_schedule("1f1b").plan(p, 4)).idle)
    print(
        f"{count:3} mini-batches: stage 0 waits {waits:g}; with a drain after each four {drains:g}"
    )

# %% [markdown]
# So mini-batch t trains by
#
#     W(t+1) = W(t) - lr grad f(w_0^(t-p+1), ..., w_{p-1}^(t))
#
# with older weights on earlier stages. A replay on one device with these delays gives the same
# weights, bit for bit:

# %%
model = MLP([WIDTH] * (p + 1), dtype=np.float64)
stages, _ = split_model(model, p, range(p))
history = [[stage.flat.data.copy()] for stage in stages]
optimizers = [SGD(stage.flat, lr=RATE) for stage in stages]
for t, (x, target) in enumerate(zip(inputs[:m], targets[:m], strict=True)):
    y = Tensor(x)
    # Forward and backward with weights that are older on earlier stages.
    for s, stage in enumerate(stages):
        version = max(0, t - (p - 1 - s))
        stage.flat.bind(history[s][version].copy(), version)
        y = stage.module(y)
    loss(y, target).backward()
    # The update changes the newest weights.
    for s, stage in enumerate(stages):
        stage.flat.bind(history[s][-1].copy(), len(history[s]) - 1)
        optimizers[s].step()
        history[s].append(stage.flat.data.copy())
        stage.flat.zero_grad()

# %% [markdown]
# The replay's versions and the pipeline's, on every stage:

# %%
same = all(
    np.array_equal(mine, theirs)
    for s, versions in enumerate(ranks)
    for mine, theirs in zip(versions.history[s], history[s], strict=True)
)
print("every version on every stage equals the replay's, bit for bit:", same)
assert same

# %% [markdown]
# ## 6 Break it
#
# Without stashing B uses the newest weights and F has used older ones: together that is the gradient of
# no function. The validator rejects the plan. Run it all the same:

# %%
careless = get_schedule("pipedream").plan(p, m, stashing=False)
with expect(PlanError):
    validate(careless)
wrong = [versions for versions, _ in SimWorld(p).run(train, careless, inputs, targets)]
print(
    "B of mini-batch 7 saw",
    [versions.used["B", s, 7] for s, versions in enumerate(wrong)],
    "and its F",
    [versions.used["F", s, 7] for s, versions in enumerate(wrong)],
)

# %% [markdown]
# The gradient by which each stage made its eighth update, that of mini-batch 7, and the one at the weights
# that F used. What stage 3 sends back is right, because its F and B see one version. So the gradient on
# stage 2 is right, too; but what stage 2 sends on comes from its newer weights:

# %%
for s, stage in enumerate(stages):
    version = 7 - (p - 1 - s)
    stage.flat.bind(wrong[s].history[s][version].copy(), version)
    stage.flat.zero_grad()
y = Tensor(inputs[7])
for stage in stages:
    y = stage.module(y)
loss(y, targets[7]).backward()
for s, stage in enumerate(stages):
    right, used = stage.flat.grad, (wrong[s].history[s][7] - wrong[s].history[s][8]) / RATE
    off = np.linalg.norm(used - right) / np.linalg.norm(right)
    print(f"stage {s}: the gradient of mini-batch 7 is off by {100 * off:.1f} % of its length")
    assert (off < 1e-9) == (s >= 2)

# %% [markdown]
# And the training, over 40 mini-batches of six data sets. At the larger rate the weights change much between an F
# and its B. The curves, one for each data set, end at a loss of 1,000:

# %%
data_sets = [mini_batches(seed) for seed in range(6)]
figure, axes = new_panel(8, 2.6)
diverged = {}
for rate in (0.1, RATE):
    for stashing, style in ((True, "-"), (False, "--")):
        long = get_schedule("pipedream").plan(p, 40, stashing=stashing)
        with quiet_overflow():
            runs = [SimWorld(p).run(train, long, *data, rate)[-1][1] for data in data_sets]
        curves = np.fmin(runs, 1000)
        diverged[rate, stashing] = sum(curves[:, -8:].mean(axis=1) > 1.5 * runs[0][0])
        print(f"rate {rate:4}, stash {stashing!s:5}: {diverged[rate, stashing]} of 6 diverge")
        if rate == RATE:
            axes.plot(curves.T, style, color="#4477AA" if stashing else "#EE6677")
axes.set_yscale("log")
axes.set_xlabel("mini-batch")
axes.set_title(f"loss at rate {RATE}: with the stash, and dashed without", fontsize=10, loc="left")
show(figure)
assert diverged[RATE, False] > diverged[RATE, True] == diverged[0.1, False] == 0

# %% [markdown]
# At the smaller rate, the better one for both, the losses fall without the stash as well, and only the gradients
# above say what is wrong. At the larger one most runs without it diverge, and none with it.

# %% [markdown]
# ## 7 Exercise: stash
#
# You get one stage's order, such as `["F0", "F1", "F2", "B0", "F3", "B1", ...]`, its weights, and
# `gradient(i, weights)`, the gradient of mini-batch i. Each B is an update with learning rate 0.25, by
# the gradient at the weights that its F saw. Return the weights after each of them, in a list.
#
# Judged: the weights after every update, with 0 to 5 forwards ahead.


# %%
def my_stage(order, weights, gradient):
    history = []
    for action in order:
        if action[0] == "B":
            weights = weights - 0.25 * gradient(int(action[1:]), weights)
            history.append(weights)
    return history


check("17b.stashing", my_stage)

# %%
reveal("17b.stashing")
check("17b.stashing", solution("17b.stashing"))

# %% [markdown]
# ## 8 Takeaway
#
# - **An update after every backward, and no drain**: no bubble between mini-batches, but stage s
#   works with weights that are p-1-s updates old. Late gradients need smaller rates (lesson 06c).
# - **Stash**: F and B of a mini-batch see one version, or the gradient is that of no function.
#   Stage s keeps p-s versions.
# - Training is not that of one device any more, but it is exactly that of one device *with these
#   delays*.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/6_pipeline/pipedream.py
#     mpiexec -n 3 minidist compare --pp 3 --layers 3 --schedule pipedream --steps 8
#
# The second one compares with a replay on one device, with the same delays.

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | weight stashing | PipeDream (SOSP 2019); "multi-version weights" |
# | mini-batch of a stream | PipeDream: "minibatch"; it is not cut into micro-batches, one piece goes through all stages |
# | delayed gradients | asynchronous SGD; "staleness" (lesson 06c) |
#
# The first of p stages keeps p versions of its weights, which are 64 GB in the next lesson; two are enough.
#
# Next: [17c Two versions of the weights](17c_two_versions.ipynb). All lessons are in the
# [index](README.md).
