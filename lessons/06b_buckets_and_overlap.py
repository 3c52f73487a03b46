# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 06b Buckets and overlap
#
# *25 minutes. Before it: 04 and 06.*
#
# ## 1 The case
#
# A model of 16 equal layers trains on four ranks. Backward computes the gradient of the last layer
# first, and nothing changes it afterwards. So this gradient can be sent while backward computes
# those of the other layers. The gradients have 524,288 B in all, a ring on four ranks takes 6 rounds,
# a message takes 8 µs of latency (alpha) and 1 ns per byte (beta), and backward computes for about
# 550 µs.
#
# The gradients of the 16 layers can be sent in 1, 2, 4, 8 or 16 *buckets*, each summed by a separate
# ring. With one bucket the sum starts when backward has ended. With 16 it starts after the first
# layer, and every bucket takes 6 latencies. With which number of buckets is the step shortest?

# %% [markdown]
# ## 2 Predict
#
# Write down what is left to do after backward for 1 bucket and for 16. Then guess where the minimum
# is.

# %%
from minidist.course.lesson import check, expect, picture, predict, reveal, solution

buckets_guess = predict("best number of buckets", example=16)

# %% [markdown]
# ## 3 The idea and its picture
#
# **Send gradients before backward has ended.** The price is many small sums instead of one large one, and
# each takes the latency again.
#
# The model, the data and the links of the case. `flops` and `memory_bandwidth` are the operations and the
# bytes of memory per second with which a rank computes:

# %%
import numpy as np

from minidist import MLP, FlatParameters, LinkModel, SimWorld, Tensor, cross_entropy
from minidist.report import show
from minidist.report.frame import finish, line, new_panel, plain_numbers
from minidist.report.palette import PALETTE

SIZES, RANKS, ROWS = [64] * 17, 4, 64
links = LinkModel(alpha=8e-6, beta=1e-9, flops=3e10, memory_bandwidth=1e11)
rng = np.random.default_rng(0)
rows, targets = rng.normal(size=(RANKS * ROWS, SIZES[0])), rng.integers(0, SIZES[-1], RANKS * ROWS)

# %% [markdown]
# This is one step of data parallelism. Backward tells the library's `GradientReducer` when it has
# completed a gradient; part 4 shows what the reducer does then. A `FlopCounter` counts the operations
# of forward and backward, from which the virtual clock computes their time.

# %%
from minidist import FlopCounter, GradientReducer


def step(comm, buckets, algorithm="ring"):
    """Return the sum of the gradients over all ranks."""
    mine = slice(comm.rank * len(rows) // comm.size, (comm.rank + 1) * len(rows) // comm.size)
    model = MLP(SIZES, bias=False, dtype=np.float64)
    flat = FlatParameters(model.parameters())
    megabytes = flat.data.nbytes / buckets / 1e6
    reducer = GradientReducer(flat, comm, algorithm=algorithm, bucket_cap_mb=megabytes)
    reducer.observe()  # backward calls reducer.ready(p) for each parameter p, and reducer.finish()
    with FlopCounter() as counter:
        loss = cross_entropy(model(Tensor(rows[mine])), targets[mine], divisor=len(rows))
        comm.compute(counter.take(), name="forward")
        loss.backward()
        comm.compute(counter.take(), name="backward")
    return flat.grad


# %% [markdown]
# The sum runs in the communicator's *stream*, a second flow of control next to the rank's main program: the
# bars "send" and "receive" in the pictures. In the first picture everything is in one bucket, and the sum
# starts when backward has ended. In the second picture the first of two buckets leaves when half of
# backward is done:


# %%
def timed(buckets):
    world = SimWorld(RANKS, links=links)
    world.run(step, buckets)
    return world


MOST = timed(16).end_time  # all pictures have the time axis of the longest run
for buckets in (1, 2):
    world = timed(buckets)
    picture("lanes", world, "part 3 of lesson 06b", name=f"buckets: {buckets}", most_seconds=MOST)

# %% [markdown]
# ## 4 The code
#
# Backward reports each parameter whose gradient is complete. A parameter that is used twice has two
# contributions to its gradient, and is complete after the second. A bucket may leave when all its
# parameters are complete, but bucket 1 never leaves before bucket 0. Here the gradients of two ranks
# are completed in different orders (no message is sent yet):

# %%
BUCKETS = [{"head", "mlp"}, {"attention", "embedding"}]
ORDERS = ["head", "mlp", "attention", "embedding"], ["attention", "embedding", "head", "mlp"]
for rank, order in enumerate(ORDERS):
    complete, left = set(), []  # the buckets that have left
    for name in order:
        complete.add(name)
        while len(left) < len(BUCKETS) and BUCKETS[len(left)] <= complete:
            left.append(len(left))
        print(f"rank {rank}: {name:9} is complete, buckets that have left: {left}")

# %% [markdown]
# Rank 1 keeps its complete bucket 1 until bucket 0 has left, so both ranks sum bucket 0 first. The
# library's version is [data_parallel.py](../minidist/core/parallel/data_parallel.py); you write it in part 7.
# The sum itself is the ring of lesson 04.

# %% [markdown]
# ## 5 Check
#
# Of k buckets the first one can leave when 1/k of backward is done. Here the links are slower than
# backward, so from then on they are busy, for k times the latency of a ring and once the time of all
# bytes. That gives a formula for the step, whose parts come from a run on one rank. (Where the links
# are faster than backward they wait for it between the buckets, and the formula does not hold.)

# %%
from itertools import pairwise

alone = SimWorld(1, links=links)
alone.run(step, 1)
work = {span.name: span.end - span.start for span in alone.traces[0].spans}  # of 256 rows
forward = work["forward"] / RANKS  # a rank has a quarter of them
backward = work["backward"] / RANKS
size = 8 * sum(n * m for n, m in pairwise(SIZES))
ring_latency = 2 * (RANKS - 1) * links.alpha
ring_bytes = 2 * (RANKS - 1) / RANKS * links.beta * size

# %% [markdown]
# Measured and computed, for each number of buckets:

# %%
ends = {}
for k in (1, 2, 4, 8, 16):
    ends[k] = timed(k).end_time
    formula = forward + backward / k + k * ring_latency + ring_bytes
    print(f"buckets: {k:2}, step: {ends[k] * 1e6:6.1f} µs, by the formula: {formula * 1e6:6.1f} µs")
    assert abs(ends[k] / formula - 1) < 0.01
best = min(ends, key=ends.get)
buckets_guess.judge(best)
print(
    "the formula is smallest at sqrt(backward / latency of a ring) = "
    f"{np.sqrt(backward / ring_latency):.1f} buckets; of the five numbers {best} is best"
)

# %% [markdown]
# With two buckets the step is 9 µs longer than the formula: the first layer needs no gradient of its input, so
# the last 8 of 16 layers are 16/31 of backward, and not a half.
#
# With too few buckets the links are idle at first. With 16, half of the time of a message is latency:

# %%
chunk = size // 16 // RANKS * links.beta
print(f"per message: {links.alpha * 1e6:.1f} µs of latency, {chunk * 1e6:.1f} µs of bytes")

k = np.geomspace(1, 16)
figure, axes = new_panel(8, 3.4)
fixed = forward + ring_bytes
axes.plot(k, 1e6 * (fixed + backward / k + k * ring_latency), color=PALETTE["other"], linewidth=3)
axes.plot(k, 1e6 * (fixed + backward / k), ":", color=PALETTE["B"])
axes.plot(k, 1e6 * (fixed + k * ring_latency), ":", color=PALETTE["communication"])
axes.plot(list(ends), [1e6 * end for end in ends.values()], "o", color=PALETTE["F"])
axes.set(xscale="log", xlabel="buckets k", ylabel="time of a step [µs]", xticks=list(ends))
plain_numbers(axes.xaxis)
handles = [line(PALETTE["F"], "measured", marker="o", linestyle="")]
handles.append(line(PALETTE["other"], "the formula", linewidth=3))
handles.append(line(PALETTE["B"], "without latency", linestyle=":"))
handles.append(line(PALETTE["communication"], "without backward / k", linestyle=":"))
show(finish(figure, handles, "part 5 of lesson 06b", "few buckets leave late, many pay latency"))

# %% [markdown]
# Is the gradient the same? With a ring it is, up to rounding: where a chunk's sum begins depends on
# where the buckets end (lesson 04b). `algorithm="ordered"` always adds in the order of the ranks, and
# its bits do not depend on the buckets:

# %%
(single,) = SimWorld(1).run(step, 1)
for algorithm in ("ring", "ordered"):
    one, four = (SimWorld(RANKS).run(step, k, algorithm)[0] for k in (1, 4))
    same = "the same bits" if np.array_equal(one, four) else "not the same bits"
    off = np.abs(four - single).max() / np.abs(single).max()
    print(
        f"{algorithm:8} max |g_parallel - g_single| / max |g| = {off:.1e}; 1 and 4 buckets: {same}"
    )
    assert off < 1e-12

# %% [markdown]
# ## 6 Break it
#
# A layer that forward does not use gets no gradient. So its bucket never gets complete, and all
# buckets behind it wait for it. The library raises an error that names the parameter:

# %%
from minidist import DistributedDataParallel, UnusedParameterError


def skips_a_layer(comm, **options):
    model = MLP([8, 8, 8, 8], dtype=np.float64)
    parallel = DistributedDataParallel(model, comm, **options)
    first, _, last = model.layers
    parallel.module.forward = lambda x: last(first(x))
    cross_entropy(parallel(Tensor(np.ones((2, 8)))), np.zeros(2, dtype=int)).backward()
    return [parameter.name for parameter in model.parameters() if parameter.grad is None]


with expect(UnusedParameterError):
    SimWorld(2).run(skips_a_layer)
zeros, _ = SimWorld(2).run(skips_a_layer, find_unused_parameters=True)
print("with find_unused_parameters=True these took part as zeros:", ", ".join(zeros))


# %% [markdown]
# Ranks may complete their parameters in different orders, for example where a branch of the model
# depends on the data. If a rank sends what is complete first, and not bucket 0 before bucket 1, different
# buckets are added up. Where their lengths differ the library notices it. When they are equal, no error says
# so; the sum of attention's ones is then:

# %%
from minidist import all_reduce


def as_they_come(comm):
    gradients = {"attention": np.ones(6), "mlp": np.full(6, 100.0)}
    order = ["attention", "mlp"] if comm.rank == 0 else ["mlp", "attention"]
    for work in [all_reduce(comm, gradients[name], async_op=True) for name in order]:
        work.wait()
    return float(gradients["attention"][0])


print("1 + 1 =", SimWorld(2).run(as_they_come))

# %% [markdown]
# Only the same order on all ranks prevents that.

# %% [markdown]
# ## 7 Exercise: the bucketed reducer
#
# `for parameter in backward:` runs the backward pass; each turn adds one contribution to the
# gradient of the parameter with that number. `uses[p]` says how many contributions parameter p will
# get on this rank: one, two (it is used twice), or none (unused here, but perhaps used on another
# rank). `buckets[b]` is a list of parameters. `launch(b)` starts the sum of bucket b over all
# ranks, as it is now, and returns something to `wait()` for. Let every bucket leave as early as it
# may. Judged: the sums, and that bytes and time are at most those of our solution; messages are only
# printed.


# %%
def bucketed_reducer(comm, backward, uses, buckets, launch):
    for _ in backward:
        pass
    for b in range(len(buckets)):
        launch(b).wait()


check("06b.bucketed_reducer", bucketed_reducer)

# %% [markdown]
# The sums of this one are right, but nothing is sent while backward runs, so it takes longer than ours:

# %%
reveal("06b.bucketed_reducer")
check("06b.bucketed_reducer", solution("06b.bucketed_reducer"))

# %% [markdown]
# ## 8 Takeaway
#
# - Gradients are complete from the last layer to the first. So buckets begin with the last layer, and
#   every rank launches them **in the same order**, each when its last contribution is there. An unused
#   parameter must be declared, or its bucket waits for ever.
# - When the links are the bottleneck, a step with k buckets takes forward + backward/k + k · 2(n-1)α +
#   2(n-1)/n βS, and **k = sqrt(backward / (2(n-1)α))** is best.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --model mlp --data glyphs --layers 8 --dp 4 --steps 5 \
#         --bucket-cap-mb 0.05 --trace t.jsonl
#     minidist report t.jsonl --picture lanes

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `bucket_cap_mb` | PyTorch DDP `bucket_cap_mb` (25; the first bucket has 1 MB); DeepSpeed `reduce_bucket_size`; Megatron-LM `--ddp-bucket-size`; Horovod `HOROVOD_FUSION_THRESHOLD` |
# | launching while backward runs | DeepSpeed `overlap_comm`; Megatron-LM `--overlap-grad-reduce`; PyTorch DDP always |
# | `find_unused_parameters` | PyTorch DDP `find_unused_parameters`; it looks for them before backward begins, minidist at its end |
# | a parameter ready after its last use | PyTorch DDP `static_graph=True` for parameters used more than once under recomputation |
# | a stream | a separate CUDA stream; NCCL's communicator stream |
#
# Next: [06c Parameter server](06c_parameter_server.ipynb). All lessons are in the
# [index](README.md).
