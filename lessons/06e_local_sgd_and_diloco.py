# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06e Local SGD and DiLoCo
#
# *25 minutes. Before it: 05 and 06.*
#
# ## 1 The case
#
# Two ranks are in two cities, with a slow link between them, so they do not sum their gradients in every step as data
# parallelism does. Each trains alone for many steps, and then they average their weights. What changes?
#
# The model has one weight w. Rank 0's data has the loss w²/2, which is least at w = 0; rank 1's data has the loss
# 4 (w - 10)²/2, which is least at w = 10 and four times as steep. The sum of both losses is least at w = 8, where data
# parallelism ends. A step is w <- w - 0.1 times the gradient. Where does w end when the ranks average every 50 steps?

# %% [markdown]
# ## 2 Predict
#
# Where is each of the two ranks after 50 steps alone?

# %%
from minidist.course.lesson import check, picture, predict, reveal, solution

end_guess = predict("w, averaged every 50 steps", example=8.0)

# %% [markdown]
# ## 3 The idea and its picture
#
# **Send rarely: train alone for H steps, then average the weights.** That is *local SGD*. The bytes
# fall by a factor of H, and so does the time of messages. The weights are no longer those of one device:
# between two averages the ranks drift apart, the further the longer they train alone.
#
# The pictures show a larger job, four ranks with a model of 5,000 parameters of 4 B: four steps with a sum in each,
# and four steps with one average at the end. A message between the cities takes 5 ms, and a step 10 ms:

# %%
import numpy as np

from minidist import (
    MLP,
    SGD,
    FlatParameters,
    LinkModel,
    SimWorld,
    Tensor,
    all_reduce,
    cross_entropy,
    glyphs,
)
from minidist.report import show
from minidist.report.frame import finish, line, new_panel
from minidist.report.palette import RANKS
from minidist.techniques.local_sgd.averaging import OuterOptimizer

LINKS = LinkModel(alpha=5e-3, beta=8e-9)  # "between cities" of lesson 05


def four_steps(comm, every):
    weights = np.zeros(5000, np.float32)
    for step in range(1, 5):
        comm.compute(seconds=0.01, name=f"step {step}")
        if step % every == 0:
            all_reduce(comm, weights, "avg", algorithm="ring")


longest = 0.0
for every, what in ((1, "a sum in every step"), (4, "an average every 4 steps")):
    world = SimWorld(4, links=LINKS)
    world.run(four_steps, every)
    longest = max(longest, world.end_time)
    title = f"{what}: {world.end_time * 1e3:.0f} ms"
    picture("lanes", world, "part 3 of lesson 06e", title=title, most_seconds=longest)

# %% [markdown]
# ## 4 The code
#
# The two ranks of the case, with the only message that they send:


# %%
def local_sgd(comm, every, steps=400, lr=0.1):
    """Return w after each step; the two ranks average it at each `every`-th step."""
    strength, best = ((1.0, 0.0), (4.0, 10.0))[comm.rank]
    w, others, history = np.zeros(1), np.empty(1), []
    for step in range(1, steps + 1):
        w = w - lr * strength * (w - best)
        if step % every == 0:
            comm.sendrecv(w, 1 - comm.rank, others, 1 - comm.rank)
            w = (w + others) / 2
        history.append(w[0])
    return history


print(f"an average in every step: w ends at {SimWorld(2).run(local_sgd, 1)[0][-1]:.2f}")

# %% [markdown]
# ## 5 Check
#
# The bytes are counted in the trace of the second picture's four steps. Then w for several H and two learning rates:

# %%
world = SimWorld(4, links=LINKS)
world.run(four_steps, 4)
sent = sum(message.nbytes for message in world.traces[0].sent()) / 4
print(f"{sent:,.0f} B leave a rank per step, a quarter of 2 (n-1)/n of 20,000 B")
histories = SimWorld(2).run(local_sgd, 50)
end_guess.judge(histories[0][-1], within=0.02)
for lr, steps in ((0.1, 400), (0.01, 4000)):
    ends = (SimWorld(2).run(local_sgd, every, steps, lr)[0][-1] for every in (2, 5, 50))
    print(f"learning rate {lr}, H = 2, 5, 50: w ends at", ", ".join(f"{w:.2f}" for w in ends))

figure, axes = new_panel(8, 3)
for rank, history in enumerate(histories):
    axes.plot([0, *history[:200]], color=RANKS[rank], linewidth=2)
axes.axhline(8, color="black", linestyle=":")
axes.set(xlabel="step", ylabel="w")
handles = [line(RANKS[rank], f"rank {rank}", linewidth=2) for rank in range(2)]
handles.append(line("black", "least sum of the losses", linestyle=":"))
show(finish(figure, handles, "part 5 of lesson 06e", "an average of both every 50 steps"))

# %% [markdown]
# After 50 steps alone with the rate 0.1 each rank is at the best value for its data, 0 and 10. Their
# average is 5, as if both losses were equally steep. With a smaller rate the ranks drift less far in 50
# steps. So the error depends on the rate times H, and on how different the ranks' data is.
#
# Local SGD is not the training of one device on all rows. But one device can repeat the steps of both
# ranks in turn, and gets their weights:

# %%
both, strength, best = np.zeros(2), np.array([1.0, 4.0]), np.array([0.0, 10.0])
for step in range(1, 401):
    both = both - 0.1 * strength * (both - best)
    if step % 5 == 0:
        both[:] = both.mean()
parallel = [history[-1] for history in SimWorld(2).run(local_sgd, 5)]
print(f"max |w_parallel - w_single| = {np.abs(both - parallel).max():g}")
assert np.array_equal(both, parallel)

# %% [markdown]
# Four ranks learn digits for 120 steps. First each rank has pictures of all digits; then the rows are
# sorted, so that each rank has three or four digits only. In the training loop an average of the weights,
# in every H-th step, is all that is sent.
#
# **DiLoCo** (Douillard et al. 2023) sends the same bytes and uses the average in another way: the
# difference between the last common weights and the average is taken as a gradient. An *outer optimizer*
# makes a step with it; an inner optimizer makes each rank's steps, AdamW in the paper and SGD here. The outer
# one is SGD with a learning rate of 0.7 and a momentum of 0.9, in Nesterov's form (part 7 has the formula).
# The momentum carries on a direction in which several rounds agree. With H = 1 the difference is the learning rate
# times the mean gradient, so DiLoCo is then data parallelism with momentum, the control for H = 10:

# %%
images, labels = glyphs().rows(np.arange(480))


def train(comm, every, rows, diloco=False, steps=120):
    """Return the network and this rank's last loss on its part of the rows."""
    mine = rows[comm.rank * 480 // comm.size : (comm.rank + 1) * 480 // comm.size]
    network = MLP([images.shape[1], 64, 10])
    weights = FlatParameters(network.parameters())
    optimizer = SGD(weights, lr=0.5)
    outer = OuterOptimizer(optimizer, weights, lr=0.7, momentum=0.9)
    for step in range(1, steps + 1):
        weights.zero_grad()
        loss = cross_entropy(network(Tensor(images[mine])), labels[mine])
        loss.backward()
        optimizer.step()
        if step % every == 0:
            all_reduce(comm, weights.data, "avg", algorithm="ring")
            if diloco:
                outer.outer_step()
    return network, loss.item()


# %% [markdown]
# The loss of the common weights, after the last average, on all rows:

# %%
losses, own, sent = {}, {}, {}
for name, rows in (("mixed", np.arange(480)), ("sorted", np.argsort(labels, kind="stable"))):
    for how, every in (("average", 1), ("DiLoCo", 1), ("average", 10), ("DiLoCo", 10)):
        world, case = SimWorld(4), (name, how, every)
        network, own[case] = world.run(train, every, rows, how == "DiLoCo")[0]
        sent[every] = sum(message.nbytes for message in world.traces[0].sent()) // 120
        losses[case] = cross_entropy(network(Tensor(images)), labels).item()
print(f"{'':10} {'mixed rows':18} sorted rows")
print(f"{'':10} average  DiLoCo    average  DiLoCo")
for every in (1, 10):
    row = [losses[n, how, every] for n in ("mixed", "sorted") for how in ("average", "DiLoCo")]
    print(f"H = {every:2}  ", *(f"{loss:9.3f}" for loss in row), f"  {sent[every]:6,} B per step")
alone = own["sorted", "average", 10]
print(f"rank 0 on its sorted rows, before the last average with H = 10: {alone:.3f}")
assert losses["sorted", "average", 10] > losses["sorted", "average", 1] + 0.3
for name in ("mixed", "sorted"):
    assert losses[name, "DiLoCo", 1] < losses[name, "DiLoCo", 10] - 0.3
    assert losses[name, "DiLoCo", 10] < losses[name, "average", 10] - 0.3

# %% [markdown]
# With mixed rows the ranks drift, too, but in directions that mostly cancel in the average, and a tenth of
# the bytes is enough. With sorted rows each rank learns its digits and unlearns the others, so the average
# is worse. The loss that rank 0 prints, on its rows, does not show it: it is lower than all others of an average.
#
# DiLoCo's loss is lower than that of averages with the same bytes, but the gain is that of the momentum, which makes
# longer steps: with it and an average in every step (H = 1) the loss is far lower still, for mixed and for sorted
# rows. The two columns of DiLoCo show what a tenth of the bytes costs here. DiLoCo does not cure the drift: where
# training ends, the common weights no longer change, so they are equal to the average. The two ranks of the case,
# with both:

# %%
for every in (5, 50):
    common, momentum = 0.0, 0.0
    for _ in range(200):
        change = common - (best + (common - best) * (1 - 0.1 * strength) ** every).mean()
        momentum = 0.9 * momentum + change
        common -= 0.7 * (change + 0.9 * momentum)
    alone = SimWorld(2).run(local_sgd, every)[0][-1]
    print(f"H = {every:2}: w ends at {common:.3f} with DiLoCo, at {alone:.3f} with local SGD")
    assert abs(common - alone) < 1e-6

# %% [markdown]
# ## 6 Break it
#
# Forget the average: each rank makes an outer step with the difference to its own weights. Nothing is
# sent, so nothing hangs, and the loss of each rank falls to nothing. The two ranks of the case, with rounds of 5
# steps and no momentum:


# %%
def without_the_average(comm, rounds=80):
    strength, best = ((1.0, 0.0), (4.0, 10.0))[comm.rank]
    common = 5.0
    for _ in range(rounds):
        w = common
        for _ in range(5):
            w = w - 0.1 * strength * (w - best)
        common = common - 0.7 * (common - w)  # and where is the average of all ranks' w?
    return common, strength * (common - best) ** 2 / 2


for rank, (w, loss) in enumerate(results := SimWorld(2).run(without_the_average)):
    print(f"rank {rank}: the loss on its data is {loss:.3f}, and w is {w:.2f}")
ends = [w for w, _ in results]
assert abs(ends[0] - ends[1]) > 9

# %% [markdown]
# ## 7 Exercise: DiLoCo's outer step
#
# All ranks began the round with the weights `common`; `weights` are this rank's after it. With
# d = `common` - the average of all ranks' weights, the new momentum is mu momentum + d, and `lr` times
# (d + mu times the new momentum) is subtracted from `common`; that is Nesterov's form, where plain momentum
# subtracts `lr` times the new momentum. Return the new common weights and the new momentum. Judged: both,
# and that no rank sends more bytes than in our solution; messages and time are only printed.


# %%
def outer_step(comm, common, weights, momentum, lr, mu):
    gradient = common - weights
    momentum = mu * momentum + gradient
    return common - lr * (gradient + mu * momentum), momentum


check("06e.outer_step", outer_step)

# %%
reveal("06e.outer_step")
check("06e.outer_step", solution("06e.outer_step"))

# %% [markdown]
# ## 8 Takeaway
#
# - Local SGD sends **2 (n-1)/n Ψ numbers every H steps** for a model of Ψ parameters. Between two averages
#   each rank drifts to the optimum of its rows, the further the larger the learning rate times H is. The
#   more similar the ranks' rows are, the larger H may be.
# - DiLoCo gives the difference of the common weights and the average to an outer optimizer with
#   momentum, as if it were a gradient. It sends the same bytes.
#
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist compare --dp 4 --steps 5 --local-steps 2
#     mpiexec -n 4 minidist train --dp 4 --steps 20 --local-steps 5 --outer-optimizer nesterov
#     mpiexec -n 4 python mpi_examples/2_data_parallel/local_sgd.py --every 10
#
# In *Streaming DiLoCo* (`--outer-fragments 2 --outer-delay 1`) *fragments* of the weights take turns within
# the `--local-steps`, and each is sent while the ranks train on.
#
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `PeriodicModelAverager(every=H)` | PyTorch `PostLocalSGDOptimizer`, `PeriodicModelAverager(period=H)` |
# | `OuterOptimizer`, `--outer-optimizer nesterov` | DiLoCo (Douillard et al. 2023); torchft `DiLoCo`; with one rank, Lookahead |
# | ranks drift apart | "client drift" in federated learning |
#
# Next: [06f Loading data](06f_loading.ipynb). All lessons are in the
# [index](README.md).
