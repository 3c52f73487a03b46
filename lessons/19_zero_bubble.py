# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 19 Zero bubble
#
# *30 minutes. Before it: 17.*
#
# ## 1 The case
#
# 1F1B on four stages with eight micro-batches; the forward F of a stage takes 1, its backward B takes 2.
# The step takes 33; a rank works for 24 of it and does nothing for 9. More micro-batches would make the
# waiting a smaller part, but they need more rows. It can be filled without them.
#
# Backward is two computations of length 1 each: the input gradient I, for which the stage before
# waits, and the weight gradient W, for which no stage waits. So do I at once, and put W where a
# rank would wait. The schedule *ZB-H1* does that with four micro-batches alive on a rank, as many as
# on 1F1B's stage 0; *ZB-H2* with seven.
#
# How long does stage 0, which waits longest, do nothing between its first action and its last, with ZB-H1
# and with ZB-H2?

# %% [markdown]
# ## 2 Predict
#
# In 1F1B stage 0 waits 6 for its first gradient, for which three other stages run F and B, and at the end 1
# before each of its last three backwards, 3 in all. How much of 6 and of 3 is left if the others put off W? And if
# stage 0 may run three more forwards?

# %%
from minidist.course.lesson import check, predict, reveal, solution

h1_guess = predict("wait of stage 0 with ZB-H1", example=6)
h2_guess = predict("wait of stage 0 with ZB-H2", example=3)

# %%
import numpy as np

from minidist import MLP, LinkModel, Pipeline, SimWorld, Tensor, get_schedule, split_model
from minidist.core.pipeline.plan import Action
from minidist.course.story import spent, story
from minidist.pipeline.schedules import from_cells
from minidist.pipeline.times import GivenTimes, uniform
from minidist.pipeline.timing import time_plan
from minidist.report import show
from minidist.report.gantt import as_traces, gantt

# %% [markdown]
# ## 3 The idea and its picture
#
# **Split backward in two, and let W fill the bubble.** It saves idle time. It costs activations
# that live until W.
#
# The same work three times: F, I and W take 1 each (B is both, 2). Look at the grey between a rank's own
# actions, which the titles count, and at the strips below, which show what it costs in activations, from
# F to W. (W needs only the inputs of its products and the gradients; the rest can go after I.) ZB-H1 pays
# nothing on its fullest rank. ZB-H2 pays, and ends this *one* step no earlier:

# %%
p, m = 4, 8
names = ("1f1b", "zb-h1", "zb-h2")
timings = [time_plan(get_schedule(name).plan(p, m), spans=True) for name in names]
titles = [f"{t.plan.name.upper()}: a rank waits at most {max(t.idle):.0f}" for t in timings]
show(
    gantt(
        timings,
        command="minidist schedule 1f1b zb-h1 zb-h2 --stages 4 --microbatches 8 --format svg -o "
        "zero.svg",
        titles=titles,
    )
)

# %% [markdown]
# No rank of ZB-H2 waits between its actions, but the ranks begin and end at different times. (Lesson 16 counted these
# ends as well, by which ZB-H1 and ZB-H2 are both idle for 3 of 27.) So ZB-H2 gains when the next step begins at once,
# with no sum over all ranks between the steps (part 10). Two steps of each, micro-batches 0 to 7 and 8 to 15:


# %%
def twice(plan):
    """Two steps of a plan, the second one directly behind the first."""
    orders = [[Action(item) for item in row] for row in plan.orders]
    cells = [
        [f"{a.stage}{a.kind}{a.microbatch + n}" for n in (0, m) for a in row] for row in orders
    ]
    return time_plan(from_cells(cells, plan.name), spans=True)


two_steps = [twice(timing.plan) for timing in timings[1:]]
titles = [f"{t.plan.name.upper()}: two steps take {t.makespan:.0f}" for t in two_steps]
show(gantt(two_steps, command="part 3 of lesson 19", titles=titles))

# %% [markdown]
# The two steps of ZB-H2 as a page to step through, one time after the other. W fills what was idle.

# %%
show(as_traces(two_steps[-1]), "ZB-H2: what each rank computes in two steps.")

# %% [markdown]
# ## 4 The code
#
# A stage that carries out its list, in a toy with every message. Look at the line that sends the
# gradient to the stage before: it comes with I, so no stage ever waits for W.


# %%
def carry_out(comm, order):
    """Each of F, I and W computes for 1 s. Returns nothing: the clock is the result."""
    stage, last, sends, message = comm.rank, comm.size - 1, [], np.zeros(1)
    for action in order[comm.rank]:
        kind = action[0]
        if kind == "F" and stage > 0:
            comm.recv(message, stage - 1)  # the output of the stage before
        if kind == "I" and stage < last:
            comm.recv(message, stage + 1)  # the gradient of this stage's output
        comm.compute(seconds=1.0, name=action)
        if kind == "F" and stage < last:
            sends.append(comm.isend(message.copy(), stage + 1))
        if kind == "I" and stage > 0:
            sends.append(comm.isend(message.copy(), stage - 1))
    for request in sends:
        request.wait()


# %% [markdown]
# Two stages and two micro-batches. Stage 0 always has the same list; stage 1 does W0 at once, or
# after the I for which stage 0 waits:

# %%
first = ["F0", "F1", "I0", "W0", "I1", "W1"]
for name, second in (("W at once", "F0 I0 W0 F1 I1 W1"), ("W last", "F0 I0 F1 I1 W0 W1")):
    world = SimWorld(2, links=LinkModel(0.0, 0.0))
    world.run(carry_out, [first, second.split()])
    print(f"{name:9} on stage 1: {world.end_time:.0f} s")

# %% [markdown]
# To find the list with which a pipeline of p stages waits least is your exercise; the library's is
# [schedules.py](../minidist/core/pipeline/schedules.py). The backward pass returns its W as
# work to be done later, `work = output.backward(gradient, weight_gradients="deferred")`, and
# `work.run()` does it.

# %% [markdown]
# ## 5 Check
#
# With ZB-H1 the three other stages run F and I before the first gradient, 6 instead of 9, so stage 0 waits
# 3. At the end they put off W, and gradients come as fast as stage 0 takes them. With ZB-H2 it fills the 3
# with three more forwards. The three plans above, and what ZB-H2 pays:

# %%
idle = {name: max(timing.idle) for name, timing in zip(names, timings, strict=True)}
print(f"idle in the plan: {idle}")
h1_guess.judge(idle["zb-h1"])
h2_guess.judge(idle["zb-h2"])
print(f"micro-batches alive at the peak: {[timing.peak for timing in timings]}")

# %% [markdown]
# For other times of F, I and W the waits are (p-1)(F+I+W) with 1F1B, (p-1)(F+I-W) with ZB-H1 and
# (p-1)(F+I-2W) with ZB-H2. The last two hold as long as W takes no longer than F, they are not negative, and
# there are enough micro-batches: m >= p for ZB-H1, m >= 2p - 1 for ZB-H2.
# In the last row W is longer, and the ranks wait longer than they say:

# %%
print("F I W           idle: 1f1b   zb-h1   zb-h2   formulas")
for F, I, W in ((1, 1, 1), (2, 2, 1), (1, 1.2, 0.8), (1, 2, 1.4)):
    times = uniform(p, F, I, W)
    row = [max(time_plan(get_schedule(name).plan(p, m), times).idle) for name in names]
    formulas = [(p - 1) * (F + I + W - less * W) for less in (0, 2, 3)]
    print(f"{(F, I, W)!s:14} {row[0]:11.1f} {row[1]:7.1f} {row[2]:7.1f}   {np.round(formulas, 1)}")
    assert np.allclose(row, formulas) == (W <= F)

# %% [markdown]
# Now run them: a pipeline on a clock on which F, I and W of a stage take 1 s each and messages take
# no time. A rank waits as long as it does not compute between its first action and its last:

# %%
WIDTH, ROWS = 16, 4
batches = [np.random.default_rng(i).normal(size=(ROWS, WIDTH)) for i in range(m)]
FREE = LinkModel(0.0, 0.0)


def pipeline_of(comm, plan):
    model = MLP([WIDTH] * 9, dtype=np.float64)
    stages, _ = split_model(model, plan.stages, plan.stages_of(comm.rank))
    return Pipeline(comm, plan, stages, loss, observers=[GivenTimes(comm, uniform(plan.stages))])


def loss(y, target):
    return (y * Tensor(target)).sum()


def waited(comm):
    spans = [s for s in comm.trace.spans if s.name[:1].isdigit()]  # of actions, such as 0F3
    return spans[-1].end - spans[0].start - sum(s.end - s.start for s in spans)


# %% [markdown]
# The clock must find exactly the idle time of the plan, and the gradients must have the same bits:


# %%
def step(comm, plan):
    """Returns how long this rank waits between its actions, and its gradients."""
    pipe = pipeline_of(comm, plan)
    pipe.step(batches, batches)
    return waited(comm), {q.name: q.grad.copy() for flat in pipe.flats for q in flat.parameters}


first = {}
for name in names:
    ranks = SimWorld(p, links=FREE).run(step, get_schedule(name).plan(p, m))
    worst = max(wait for wait, _ in ranks)
    own = {key: array for _, gradients in ranks for key, array in gradients.items()}
    first = first or own
    same = all(np.array_equal(own[key], array) for key, array in first.items())
    print(
        f"{name:5}: the worst rank waits {worst:.0f} s; gradients equal 1F1B's to the bit: {same}"
    )
    assert same
    assert worst == idle[name]

# %% [markdown]
# ## 6 Break it
#
# Put W off **by the same number of micro-batches on every stage**, as one would write it first. Then every rank has
# the same loop, and that is the mistake. It is run with several numbers; the picture has 4:


# %%
def order_of(stage, put_off):
    """F and I as 1F1B has F and B, and each W `put_off` micro-batches after its I."""
    ahead = p - 1 - stage
    order = [f"{stage}F{i}" for i in range(ahead)]
    for i in range(m):
        order += [f"{stage}F{ahead + i}"] * (ahead + i < m) + [f"{stage}I{i}"]
        order += [f"{stage}W{i - put_off}"] * (i >= put_off)
    return order + [f"{stage}W{i}" for i in range(m - put_off, m)]


for put_off in (0, 2, 4, 8):
    plan = from_cells([order_of(stage, put_off) for stage in range(p)], "put off")
    waits = [wait for wait, _ in SimWorld(p, links=FREE).run(step, plan)]
    print(f"{put_off} put off: ranks wait {waits} s, micro-batches alive {time_plan(plan).peak}")
    assert max(waits) == 2 * idle["zb-h1"]
    if put_off == 4:
        same_loop = time_plan(plan, spans=True)
titles = ["each W 4 micro-batches after its I, on every stage", "ZB-H1"]
show(gantt([same_loop, timings[1]], command="part 6 of lesson 19", titles=titles))

# %% [markdown]
# More and more activations are alive, up to all eight micro-batches, and the ranks wait as long as before.
# At the end stage 0 has no F any more, and the others still have one for each micro-batch, whatever all put
# off; so it waits 3 for them. The other 3 are at the beginning, and ZB-H1 has them too. (It waits 6 and not 9,
# because the gradient leaves before W.) It waits less only if the stages behind it put off more W than it does.

# %% [markdown]
# ## 7 Exercise: beat 1F1B within its memory
#
# As in lessons 16 and 17: for each of p stages the list of its actions on m micro-batches, now of F, I
# and W, which take 1 each.
#
# The lists for p = 4 and m = 8 are in part 3. Judged: no rank waits for ever, the whole takes no longer than ZB-H1,
# and on no stage more micro-batches are alive (from F to W) than on 1F1B's fullest, min(m, p).


# %%
def my_plan(p, m):
    lists = []
    for stage in range(p):
        ahead = min(m, p - 1 - stage)
        order = [f"F{i}" for i in range(ahead)]
        for i in range(m):
            if ahead + i < m:
                order.append(f"F{ahead + i}")
            order += [f"I{i}", f"W{i}"]
        lists.append(order)
    return lists


check("19.zero_bubble", my_plan)

# %%
reveal("19.zero_bubble")
check("19.zero_bubble", solution("19.zero_bubble"))

# %% [markdown]
# ## 8 Takeaway
#
# - **I first, W where you would wait**: where W ≤ F, ZB-H1 leaves (p-1)(F+I-W) of the bubble with
#   1F1B's largest memory, ZB-H2 (p-1)(F+I-2W) with 2p-1 micro-batches.
# - Put off too few W and ranks wait; put off too many and activations pile up.

# %% [markdown]
# The job of the course so far, since lesson 12 a model of 65 billion parameters on 64 cards of 80 GB (85 x 10^9 B), as
# `minidist plan` counts it ([story.py](../minidist/course/story.py)), with 2^20 tokens per step. The
# planner has no times for I and W: row 19 takes a third of row 17's idle seconds, because (p-1)(F+I-W) is a third of
# 1F1B's (p-1)(F+I+W) where the three take equally long. (Where I takes longer than W, as in attention, which has no
# weights, it is more: a half with I = 2 and F = W = 1.) The fullest card is now one of the last stage, which keeps 16
# micro-batches as the first one does, and the gradients of their logits as well:

# %%
story("19")
spent("14")
spent("17")
spent("19")

# %% [markdown]
# With this, stages (14.23 s) are faster than layers cut over cards (15.02 s) for the first time. But the
# computation takes 13.19 s where it takes 12.50 s in row 14: all 16 stages have five layers, and the last
# one also has the output matrix, for which the others wait. With half as many stages they are more equal,
# and the wait hardly falls, since a replica then has 64 micro-batches instead of 128. But ten layers do not
# fit on a card:

# %%
spent("19", schedule="zb-h1", dp=8, zero=2, pp=8)

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 minidist train --pp 4 --layers 4 --schedule zb-h1 --microbatches 8 --steps 5
#     mpiexec -n 4 python mpi_examples/6_pipeline/zero_bubble.py

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | I, W, and B for both | the Zero Bubble paper: B is the input gradient alone; PyTorch: `I`, `W`, `B` as here |
# | `zb-h1`, `zb-h2` | ZB-H1 and ZB-H2, the handcrafted schedules of the Zero Bubble paper; its ZB-1p and ZB-2p are found by a search, with p and 2p micro-batches alive |
# | a step without a sum over all ranks before it, [post_validation.py](../minidist/pipeline/runtime/post_validation.py) | "post-validation", Zero Bubble paper, section 4 |
#
# Sixteen stages are unequal and idle at the ends; fewer of them need another cut as well, and a place for each.
#
# Next: [20 The 3-D mesh](20_the_3d_mesh.ipynb). Side room: [19b Two stages per
# rank](19b_two_stages_per_rank.ipynb). All lessons are in the [index](README.md).
