# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 17c Two versions of the weights
#
# *30 minutes. Before it: 17b.*
#
# ## 1 The case
#
# PipeDream (lesson 17b) updates the weights of a stage after every backward, and each mini-batch
# keeps the weights that it began with. On 16 stages the first stage then keeps 16 versions of its
# weights. For a stage of a billion parameters in float32 that is 64 GB.
#
# *2BW* (double-buffered weights) makes one update of the gradients of m micro-batches, which
# together are a batch. Micro-batches are numbered without a gap: those of batch b are m b to
# m b + m - 1. While batch b is on its way, batch b - 1 may not have come back. So the micro-batches
# of batch b use the weights that were there before batch b - 1 made its update.
#
# Weights that have had v updates are version v, so a micro-batch k of batch b = k // m uses version max(b - 1, 0). How
# many versions do the 16 stages keep together with PipeDream, and how many with 2BW?

# %% [markdown]
# ## 2 Predict
#
# In PipeDream the last stage keeps one version, and each stage before it one more. How many does 2BW need on a stage?

# %%
from minidist.course.lesson import check, expect, predict, reveal, solution

stash_guess = predict("versions of all 16 stages together, PipeDream", example=100)
two_guess = predict("versions of all 16 stages together, 2BW", example=100)

# %%
from dataclasses import replace

import numpy as np

from minidist import MLP, SGD, SimWorld, Tensor, UsageError, get_schedule, split_model
from minidist.pipeline.runtime.pipedream import WeightVersions
from minidist.pipeline.runtime.versioned import VersionedPipeline
from minidist.pipeline.timing import time_plan
from minidist.pipeline.validate import validate
from minidist.report import show
from minidist.report.frame import new_panel
from minidist.report.version_gantt import version_gantt

# %% [markdown]
# ## 3 The idea and its picture
#
# **One update per batch, and each batch works with the weights before the last update: then two
# versions are always enough.** The pipeline still never drains (an update after which it drains, as in
# lesson 17, would leave it idle for 3/7 of the time, 43 %, with m = p = 4). It saves versions, p - 2 of
# them on the first of p stages. But the last stage is late by one batch as well, and keeps two versions
# where PipeDream keeps one there.
#
# The colour is the version that an action sees, a red line is an update. Above PipeDream, below
# 2BW; under the rows is how many versions each rank keeps:

# %%
p, m, batches = 3, 3, 4
pipedream = get_schedule("pipedream").plan(p, m * batches)
plan = get_schedule("pipedream-2bw").plan(p, m, batches=batches)
show(
    version_gantt(
        [time_plan(pipedream, spans=True), time_plan(plan, spans=True)],
        command="part 3 of lesson 17c",
        titles=["PipeDream: an update after every backward", "2BW: an update after three"],
    )
)

# %% [markdown]
# ## 4 The code
#
# A toy of two stages with every message, which are empty here. `store` is what matters: the two newest
# versions, and the version that F and B of a micro-batch need must be one of them:


# %%
def two_stages(comm, order, m):
    """Return (micro-batch, version that it uses, newest version) for each F of this stage."""
    other, store, rows, sends = 1 - comm.rank, [0], [], []
    for action in order[comm.rank].split():
        kind, k = action[0], int(action[1:])
        if (kind == "F") == (comm.rank == 0):  # F goes down the pipeline, B comes back
            sends.append(comm.isend(np.zeros(1), other))
        else:
            comm.recv(np.zeros(1), other)
        uses = max(k // m - 1, 0)
        assert uses in store, f"{action} needs version {uses}, and the stage keeps {store}"
        if kind == "F":
            rows.append((k, uses, store[-1]))
        if kind == "B" and k % m == m - 1:  # the gradients of the batch are there: one update
            store = [store[-1], store[-1] + 1]
    for request in sends:
        request.wait()
    return rows


# %% [markdown]
# Three batches of two micro-batches. For each F the version that it uses, and the newest one that its
# stage has by then:

# %%
orders = ["F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5", "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"]
for stage, rows in enumerate(SimWorld(2).run(two_stages, orders, 2)):
    print(f"stage {stage}:", *(f"F{k} uses {uses} (newest {newest})" for k, uses, newest in rows))

# %% [markdown]
# On stage 0 the newest version differs from micro-batch to micro-batch of one batch. The version
# that is used does not, and it is never more than one behind.

# %% [markdown]
# ## 5 Check
#
# The library's pipeline, on four batches of three micro-batches:

# %%
WIDTH, ROWS = 32, 16
rng = np.random.default_rng(0)
inputs = [rng.normal(size=(ROWS, WIDTH)) for _ in range(m * batches)]
targets = [rng.normal(size=(ROWS, WIDTH)) for _ in range(m * batches)]


def loss(y, target):
    return (y * Tensor(target)).sum() * (1 / ROWS)


def train(comm, plan):
    model = MLP([WIDTH] * (plan.stages + 1), dtype=np.float64)
    stages, _ = split_model(model, plan.stages, plan.stages_of(comm.rank))
    versions = WeightVersions(
        comm, plan, stages, lambda flat: SGD(flat, lr=0.05), keep_history=True
    )
    pipe = VersionedPipeline(comm, plan, stages, loss, versions=versions)
    pipe.step(inputs, targets)
    return versions


# %% [markdown]
# Which version micro-batch 9 used on each stage, and how many versions each stage kept. It belongs to batch 3, so it is
# 2 everywhere:

# %%
ranks = SimWorld(p).run(train, plan)
print("micro-batch 9 used versions", [ranks[s].used["F", s, 9] for s in range(p)])
print("versions kept on 3 stages:", [ranks[s].own[s].most for s in range(p)])

# %% [markdown]
# And the case: 16 stages, and versions of 4 GB each. On two stages 2BW keeps one version
# more than PipeDream, and on three as many:

# %%
for name, count, options in (("pipedream", 64, {}), ("pipedream-2bw", 16, {"batches": 4})):
    for stages in (2, 3, 4, 16):
        kept = validate(get_schedule(name).plan(stages, count, **options)).weight_versions
        print(
            f"{name:13} on {stages:2} stages: {kept[0]:2} on the first ({4 * kept[0]:2} GB)"
            f", {kept[-1]} on the last, {sum(kept):3} versions together"
        )
    (stash_guess if name == "pipedream" else two_guess).judge(sum(kept))

# %% [markdown]
# What does the delay cost? Gradient descent on a least-squares problem, with the gradient at the newest weights (a
# pipeline that drains) and at those before (2BW). Along the steepest direction, where the gradient is s times the
# distance, the first diverges from lr = 2/s on. Two rates, 0.7/s and 1.3/s:

# %%
draw = np.random.default_rng(3)
A, y = draw.normal(size=(32, 8)), draw.normal(size=32)
s = np.linalg.eigvalsh(A.T @ A / 32).max()
lowest = np.square(A @ np.linalg.lstsq(A, y)[0] - y).mean()
figure, axes = new_panel(8, 2.6)
for factor, colour in ((0.7, "#4477AA"), (1.3, "#AA3377")):
    for name, delay, style in (("drained", 0, "-"), ("2BW", 1, "--")):
        weights, losses = [np.zeros(8)], []
        for b in range(30):
            late = weights[max(b - delay, 0)]
            weights.append(weights[-1] - factor / s * A.T @ (A @ late - y) / 32)
            losses.append(np.square(A @ weights[-1] - y).mean() - lowest)
        axes.plot(losses, style, color=colour, label=f"{name}, lr = {factor}/s")
        print(f"lr = {factor}/s, {name:7}: {losses[-1]:.1e} above the lowest loss after 30 updates")
axes.set_yscale("log")
axes.set_xlabel("update")
axes.set_title("loss above the lowest one", fontsize=10, loc="left")
axes.legend(fontsize=8)
show(figure)

# %% [markdown]
# At the small rate the delay costs little. At the large one 2BW diverges, and the drained pipeline does not: with a
# delay of one update the largest rate is 1/s instead of 2/s, a half.
#
# The pipeline's weights are those of W(b+1) = W(b) - lr grad f(W(b-1)) on one device; the gradient of batch 0 is at
# W(0):

# %%
model = MLP([WIDTH] * (p + 1), dtype=np.float64)
stages, _ = split_model(model, p, range(p))
history = [[stage.flat.data.copy()] for stage in stages]
optimizers = [SGD(stage.flat, lr=0.05) for stage in stages]
for b in range(batches):
    # The gradient of a batch, at the weights before the last update.
    for s, stage in enumerate(stages):
        stage.flat.bind(history[s][max(b - 1, 0)].copy(), max(b - 1, 0))
    for k in range(m * b, m * b + m):
        y = Tensor(inputs[k])
        for stage in stages:
            y = stage.module(y)
        loss(y, targets[k]).backward()
    # The update changes the newest weights.
    for s, stage in enumerate(stages):
        stage.flat.bind(history[s][-1].copy(), b)
        optimizers[s].step()
        history[s].append(stage.flat.data.copy())
        stage.flat.zero_grad()
off = max(np.abs(ranks[s].history[s][-1] - history[s][-1]).max() for s in range(p))
print(f"max |w_parallel - w_single| = {off:.1e}")
assert off < 1e-12

# %% [markdown]
# ## 6 Break it
#
# Let each micro-batch use the newest weights that its stage has at its F, and keep them until its B, as PipeDream
# does. The toy has noted which ones these are. Two micro-batches are a batch, whose gradients are added:

# %%
for stage, rows in enumerate(SimWorld(2).run(two_stages, orders, 2)):
    newest = [version for _, _, version in rows]
    print(f"stage {stage}: batches with the versions", *zip(newest[::2], newest[1::2], strict=True))

# %% [markdown]
# On stage 0 the two micro-batches of the second batch use versions 0 and 1; and the first of them uses
# version 0 there and version 1 on stage 1. Their sum is the gradient of no weights that ever existed.
# Every shape fits, and no error says so. Train the pipeline of part 5 in this way. `updates="stash"` is PipeDream's
# rule for versions, and the plan is the same otherwise. For each stage, the versions of the second batch's three
# micro-batches, and how far the final weights are from those of 2BW, over the distance that 2BW moved:

# %%
mixed = SimWorld(p).run(train, replace(plan, updates="stash"))
for s in range(p):
    used = [mixed[s].used["F", s, k] for k in range(m, 2 * m)]
    start, end = ranks[s].history[s][0], ranks[s].history[s][-1]
    off = np.linalg.norm(mixed[s].history[s][-1] - end) / np.linalg.norm(end - start)
    print(f"stage {s}: versions {used}, {mixed[s].own[s].most} kept; weights off by {off:.2f}")
    assert off > 0.01

# %% [markdown]
# And a batch must have at least as many micro-batches as there are stages. With fewer of them a batch
# begins before the batch before the last has come back, and two versions are not enough:

# %%
with expect(UsageError):
    get_schedule("pipedream-2bw").plan(p, 2, batches=3)

# %% [markdown]
# ## 7 Exercise: one stage with two versions
#
# You get one stage's order, such as `["F0", "F1", "B0", "F2", "B1", ...]`, its weights, a function
# `gradient(k, weights)`, and m. Micro-batch k uses version max(k // m - 1, 0). The gradients of a
# batch are added and make one update with learning rate 0.25. Yield the weights after each update.
#
# Judged: the weights after every update, and that no more than two versions are kept.


# %%
def my_two_versions(order, weights, gradient, m):
    total = 0.0
    for action in order:
        if action[0] == "B":
            k = int(action[1:])
            total = total + gradient(k, weights)
            if k % m == m - 1:
                weights, total = weights - 0.25 * total, 0.0
                yield weights


check("17c.two_versions", my_two_versions)

# %%
reveal("17c.two_versions")
check("17c.two_versions", solution("17c.two_versions"))

# %% [markdown]
# ## 8 Takeaway
#
# - **2BW**: one update per batch of m ≥ p micro-batches, late by one batch on every stage, and two
#   versions of the weights on every stage. PipeDream keeps p - s of them on stage s.
# - W(b+1) = W(b) - lr grad f(W(b-1)), from b = 1 on: the delay does not grow with the number of stages, and it halves
#   the largest learning rate.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 3 python mpi_examples/6_pipeline/asynchronous.py --weights 2bw
#     mpiexec -n 3 minidist compare --pp 3 --layers 3 --schedule pipedream-2bw --microbatches 3 --steps 4

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `pipedream-2bw` | PipeDream-2BW (ICML 2021), "double-buffered weight updates" |
# | `pipedream-vertical-sync` | *vertical sync* in PipeDream (SOSP 2019): a mini-batch uses on all stages the version that it found on stage 0, so all keep as many as stage 0 |
#
# Late gradients are the price of a pipeline that never drains. The next lesson drains, and fills the wait.
#
# Next: [19 Zero bubble](19_zero_bubble.ipynb). All lessons are in the [index](README.md).
