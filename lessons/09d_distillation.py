# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 09d Distillation
#
# *25 minutes. Before it: 06.*
#
# ## 1 The case
#
# A small GPT learns from a large one: for each token the large model, the *teacher*, says how likely
# every next token is, which tells more than the one token that came. The small model trains for 80 steps
# of two samples, once on the text alone and once with the teacher, on the same samples. The text comes from
# a source whose entropy is known. No model can have a loss below the entropy, so the loss minus the entropy
# is what a model still has to learn. How many times less is that with the teacher?
#
# On several ranks the teacher's answers travel. Three ranks train the student, each on two samples of
# a step; a fourth rank has the teacher and sends each of them the logits of its samples. A sample has
# 16 tokens, and there are 16 words; a logit takes 4 B. How many bytes does the teacher send in three
# steps?

# %%
import tempfile

import numpy as np

from minidist import SimWorld, Tensor, load_dataset
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train as train_job
from minidist.techniques.distillation.loss import distillation_loss

# %% [markdown]
# ## 2 Predict
#
# Nothing here says the first; guess it, a third off is good enough. For the second count the logits of a
# token, of a sample, of a step.

# %%
times_guess = predict("times less above the entropy with a teacher", example=1.5)
sent_guess = predict("bytes that the teacher sends in three steps", example=1_000, unit="B")

# %% [markdown]
# ## 3 The idea and its picture
#
# *Distil*: train a small model on the outputs of a large one. **The student needs the teacher's logits
# and nothing else**, so the teacher may be anywhere: on each rank, in shards, on another rank, or on
# the disk. The loss is (1 - a) times the loss on the labels plus a times the distance from the teacher's
# probabilities. What it saves: samples, because a row of probabilities says more than one word. What it
# costs: forward passes of the teacher, and its logits travel.
#
# First a teacher is trained and saved:

# %%
saved = tempfile.TemporaryDirectory()
teacher = small_job(
    layers=2, width=32, context=16, micro_batch=8, steps=150, lr=0.01, save=saved.name
)
run = SimWorld(1).run(train_job, teacher)[0].losses
print(f"the teacher's loss: {run[0]:.2f} at first, {run[-1]:.2f} after {len(run)} steps")

# %% [markdown]
# Then two students, one without it and one with it. Their losses are taken on samples that they have not
# trained on:

# %%
TEXTS = {"context": 16, "micro_batch": 2}
alone = {**TEXTS, "lr": 0.02, "steps": 80, "evaluate_every": 80}
taught = {**alone, "distill_from": saved.name, "temperature": 1.0, "distill_weight": 0.9}
held_out = [SimWorld(1).run(train_job, small_job(**job))[0].held_out[80] for job in (alone, taught)]

# %% [markdown]
# And the job of the case, three ranks with a student and a fourth with the teacher. It runs again with the
# teacher on each of the three ranks, and is compared with one device:

# %%
three = {**TEXTS, "distill_from": saved.name, "temperature": 2.0, "dp": 3, "steps": 3}
world = SimWorld(4)
losses = world.run(train_job, small_job(**three, teacher_ranks=1))[0].losses
sent = world.traces[3].bytes_by_purpose()["teacher"]
everywhere = SimWorld(3).run(train_job, small_job(**three))[0].losses
verdict = SimWorld(4).run(compare_rank, small_job(**three, teacher_ranks=1))[0]
saved.cleanup()

# %% [markdown]
# The last of the four ranks has the teacher. Bytes by who sends and who receives: the students sum their
# gradients, and the teacher only sends.

# %%
picture("bytes-matrix", world, "part 3 of lesson 09d", name="a teacher and three students")

# %% [markdown]
# ## 4 The code
#
# With z the student's logits and t the teacher's, the student has the probabilities q = softmax(z / T),
# and the teacher p = softmax(t / T). The *temperature* T makes probabilities more equal, so that the
# small ones count. The loss is (1 - a) times the cross-entropy plus a T² KL(p || q), where KL(p || q) =
# sum of p log(p / q), and its gradient is (1 - a) (softmax(z) - onehot) + a T (q - p):


# %%
def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum()


z, teacher, label, T, a = np.array([1.0, 0.5, -1.0]), np.array([2.0, 1.5, -3.0]), 0, 2.0, 0.5
hard, q, p = softmax(z), softmax(z / T), softmax(teacher / T)
loss = -(1 - a) * np.log(hard[label]) + a * T**2 * (p * np.log(p / q)).sum()
gradient = (1 - a) * (hard - np.eye(3)[label]) + a * T * (q - p)

logits = Tensor(z[None], requires_grad=True)
node = distillation_loss(logits, np.array([label]), teacher[None], T, a, divisor=1)
node.backward()
print(f"the toy's loss {loss:.4f}, the library's {node.item():.4f}")
print(f"max |gradient - the library's| = {np.abs(gradient - logits.grad[0]).max():.0e}")

# %% [markdown]
# The library's version ([loss.py](../minidist/techniques/distillation/loss.py)) also takes rows that do not
# count, and classes that the teacher excludes.

# %% [markdown]
# ## 5 Check
#
# What the student gains. The teacher has read 150 steps of 8 samples where the student reads 80 of 2, and for
# every token it passes on 16 probabilities where the text has one word:

# %%
entropy = load_dataset("markov").entropy
above = [loss - entropy for loss in held_out]
print(f"the text alone  : {above[0]:.3f} above the entropy")
print(f"with the teacher: {above[1]:.3f} above the entropy")
times_guess.judge(above[0] / above[1], within=1 / 3)
assert above[0] > 2 * above[1]

# %% [markdown]
# A teacher is a checkpoint, and a student a job that names it. Where the teacher is changes no bit of
# the student:

# %%
print(verdict.sentence())
print(f"the teacher sent {sent:,} B: 3 steps of 6 samples of 16 tokens, each with 16 logits of 4 B")
assert verdict.equal
assert losses == everywhere
sent_guess.judge(sent)
assert sent == 3 * 6 * 16 * 16 * 4

# %% [markdown]
# That is 4 V bytes per token for V words, whatever the size of the teacher. With the 50,257 words of
# GPT-2 it is 201 kB for each token: there one sends the largest logits only.

# %% [markdown]
# ## 6 Break it
#
# A temperature for the teacher alone. The student is trained towards other probabilities than the
# teacher's: even with the teacher's logits its gradient is not zero.

# %%
for own, name in ((T, "both at temperature 2"), (1.0, "the student at temperature 1")):
    off = np.abs(softmax(teacher / own) - softmax(teacher / T)).max()
    print(f"{name}: largest gradient at the teacher's logits {off:.2f}")
    assert (off == 0) == (own == T)

# %% [markdown]
# A quieter mistake: leave out the factor T² of the second part of the loss. At temperature 1 nothing changes,
# so a test at temperature 1 passes. Here are the lengths of the two parts of the gradient, that of the
# labels and that of the teacher:

# %%
of_labels = np.linalg.norm((1 - a) * (hard - np.eye(3)[label]))
for high in (1.0, 2.0, 8.0):
    away = softmax(z / high) - softmax(teacher / high)  # q - p
    right, wrong = (np.linalg.norm(a * factor * away) for factor in (high, 1 / high))
    parts = f"labels {of_labels:.3f}, teacher {right:.3f}, without T² {wrong:.3f}"
    print(f"temperature {high:g}: {parts}")
assert wrong < right / 50

# %% [markdown]
# Without T² the student learns at temperature 8 from the labels almost alone, and no error says so.

# %% [markdown]
# ## 7 Exercise: teachers and students
#
# Ranks 0 to `teachers` - 1 have the teacher, the others are students:
# student j is rank `teachers` + j, and its teacher is rank j % `teachers`. `logits(j)` returns, on
# a teacher, the logits for student j's rows. Return, on a student, its soft targets softmax(logits
# / temperature), an array (rows, 4); on a teacher an empty one, (0, 4). What is judged: the targets, and that
# each student's logits or targets are sent once.


# %%
def distil(comm, teachers, logits, rows, temperature):
    if comm.rank < teachers:
        return np.zeros((0, 4))
    return np.full((rows, 4), 0.25)


check("09d.distil", distil)

# %%
reveal("09d.distil")
check("09d.distil", solution("09d.distil"))

# %% [markdown]
# ## 8 Takeaway
#
# - **(1 - a) cross-entropy + a T² KL(p || q)**, p and q at temperature T. T² makes up for the
#   1/T² by which a high temperature shortens the second part's gradient.
# - A student needs the teacher's logits and nothing else, **4 V bytes per token** for V words.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 4 python mpi_examples/7_more/distillation.py
#     mpiexec -n 3 minidist train --dp 2 --teacher-ranks 1 --distill-from runs/teacher --layers 1 --steps 20

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `--distill-from`, `--temperature`, `--distill-weight` | Hugging Face's `DistillationTrainer` examples: `alpha`, `temperature`; TRL `GKDTrainer` |
#
# Next: [10 Accumulate and recompute](10_accumulate_and_recompute.ipynb). All of them are in the
# [index](README.md).
