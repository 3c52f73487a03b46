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
# A small GPT, one layer of width 16, learns from a larger one, the *teacher*, two layers of width 32. For
# each token the teacher says how likely every next token is, which tells more than the one token that came.
# So the small model, the student, should need fewer samples of the text. Part 5 measures what it gains.
#
# On several ranks the teacher's answers travel. Three ranks train the student, each on two samples of
# a step; a fourth rank has the teacher and sends each of them the logits of its samples, the scores of the
# 16 words from which the softmax makes probabilities. A sample has 16 tokens; a logit takes 4 B. How many
# bytes does the teacher send in three steps?

# %% [markdown]
# ## 2 Predict
#
# Count the logits of a token, of a sample, of a step.

# %%
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution

sent_guess = predict("bytes that the teacher sends in three steps", example=1_000, unit="B")

# %%
import tempfile

import numpy as np

from minidist import SimWorld, Tensor, load_dataset, no_grad
from minidist.commands.generation import load_model
from minidist.data.datasets import hold_out
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train as train_job
from minidist.techniques.distillation.loss import distillation_loss

# %% [markdown]
# ## 3 The idea and its picture
#
# *Distil*: train a small model on the outputs of a large one. **The student needs the teacher's
# logits and nothing else**, so the teacher may be anywhere: on each rank, in shards, on another
# rank, or on the disk. The loss is (1 - a) times the loss on the labels plus a times the distance
# from the teacher's probabilities. It saves samples, because a row of probabilities says more than
# one word. It costs the teacher's forward passes, and the bytes of its logits.
#
# First the teacher is trained and saved. `small_job` returns the settings of a training job, here of the teacher;
# with `evaluate_every` a job never trains on the last tenth of the text.

# %%
saved = tempfile.TemporaryDirectory()
TEXT = {"context": 16, "evaluate_every": 1000}
large = small_job(**TEXT, layers=2, width=32, micro_batch=8, steps=150, lr=0.01, save=saved.name)
run = SimWorld(1).run(train_job, large)[0].losses
print(f"the teacher's loss: {run[0]:.2f} at first, {run[-1]:.2f} after {len(run)} steps")

# %% [markdown]
# The job of the case: ranks 0 to 2 train a student, and rank 3 has the teacher. In the picture, bytes by who
# sends and who receives, the teacher only sends logits. The three students sum their gradients, and each sends
# most of it to the next one. Rank 0 also sends each of the other two the first weights (15.3 kB), and the teacher
# 8 B: how many steps are done.

# %%
three = {"context": 16, "micro_batch": 2, "distill_from": saved.name, "dp": 3, "steps": 3}
world = SimWorld(4)
losses = world.run(train_job, small_job(**three, teacher_ranks=1))[0].losses
picture("bytes-matrix", world, "part 3 of lesson 09d", title="three students, one teacher")

# %% [markdown]
# ## 4 The code
#
# With z the student's logits and t the teacher's, the student has the probabilities q = softmax(z / T),
# and the teacher p = softmax(t / T). The *temperature* T makes probabilities more equal, so that the
# small ones count. The loss is (1 - a) times the cross-entropy plus a T² KL(p || q), where KL(p || q) =
# sum of p log(p / q), and its gradient is (1 - a) (softmax(z) - onehot) + a T (q - p)
# ([loss.py](../minidist/techniques/distillation/loss.py) is the library's version):


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
# ## 5 Check
#
# The teacher has read 1,200 samples of the text. The student reads 160 of them, once without the teacher and once
# with it, and then all 1,200 without the teacher. The text comes from a source whose entropy is known: no model can
# have a smaller expected loss. So the loss minus the entropy is what a model still has to learn. The loss is that of
# the last tenth of the text, 10,000 tokens on which no model was trained:

# %%
source = load_dataset("markov")
unseen = hold_out(source)[1].tokens.astype(int)[: 16 * 624 + 1]
inputs, targets = unseen[:-1].reshape(624, 16), unseen[1:].reshape(624, 16)


def above_entropy(**settings):
    """The loss of a trained student on the unseen text, minus the entropy; the mean of three."""
    above = []
    for seed in range(3):
        with tempfile.TemporaryDirectory() as folder:
            job = small_job(**TEXT, lr=0.02, seed=seed, save=folder, **settings)
            SimWorld(1).run(train_job, job)
            student, _ = load_model(folder)
        with no_grad():
            above.append(student(inputs, targets).item() - source.entropy)
    return np.mean(above)


# %% [markdown]
# Three kinds of students. `temperature` and `distill_weight` are the T and the a of part 4. The first two make 80
# steps, the third 150:

# %%
few, many = {"micro_batch": 2, "steps": 80}, {"micro_batch": 8, "steps": 150}
alone = above_entropy(**few)
taught = above_entropy(**few, distill_from=saved.name, temperature=2.0, distill_weight=0.9)
longer = above_entropy(**many)
print(f"160 samples, the text alone     : {alone:.3f} above the entropy")
print(f"160 samples, with the teacher   : {taught:.3f} above the entropy")
print(f"1,200 samples, the text alone   : {longer:.3f} above the entropy")
gain = (alone - taught) / (alone - longer)
print(f"the teacher gives {gain:.0%} of what 1,040 more samples and 70 more steps give")
assert longer < taught < alone / 2

# %% [markdown]
# So the teacher does not make the student better than the text that the teacher has read would make it. It
# saves samples, where a teacher is there already.
#
# A teacher is a checkpoint, and a student a job that names it. Where the teacher is changes no bit of the student.
# `compare_rank` trains the job on these ranks and on one device, and compares every array of each step:

# %%
everywhere = SimWorld(3).run(train_job, small_job(**three))[0].losses
verdict = SimWorld(4).run(compare_rank, small_job(**three, teacher_ranks=1))[0]
sent = world.traces[3].bytes_by_purpose()["teacher"]
print(f"the bits of one device: {verdict.equal}; of a teacher on each rank: {losses == everywhere}")
print(f"the teacher sent {sent:,} B: 3 steps of 6 samples of 16 tokens, each with 16 logits of 4 B")
assert verdict.equal
assert losses == everywhere
sent_guess.judge(sent)
assert sent == 3 * 6 * 16 * 16 * 4
saved.cleanup()

# %% [markdown]
# That is 4 V bytes per token for V words, whatever the size of the teacher. With the 50,257 words of
# GPT-2 it is 201 kB for each token: there one sends the largest logits only.

# %% [markdown]
# ## 6 Break it
#
# A temperature for the teacher alone. The student is trained towards other probabilities than the teacher's. With
# a temperature of t for the student the second part of its gradient is a T²/t (q - p), and even with the teacher's
# logits it is not zero.

# %%
for own, name in ((T, "both at temperature 2"), (1.0, "the student at temperature 1")):
    off = a * T**2 / own * np.abs(softmax(teacher / own) - softmax(teacher / T)).max()
    print(f"{name}: largest gradient at the teacher's logits {off:.2f}")
    assert (off == 0) == (own == T)

# %% [markdown]
# A quieter mistake: leave out the factor T² of the second part of the loss. At temperature 1 nothing changes,
# so a test at temperature 1 passes. Here are the lengths of the two parts of the gradient, that of the
# labels and that of the teacher:

# %%
of_labels = np.linalg.norm((1 - a) * (hard - np.eye(3)[label]))
for high in (1.0, 8.0, 16.0, 32.0):
    away = softmax(z / high) - softmax(teacher / high)  # q - p
    right, wrong = (np.linalg.norm(a * factor * away) for factor in (high, 1 / high))
    parts = f"labels {of_labels:.3f}, teacher {right:.4f}, without T² {wrong:.4f}"
    print(f"temperature {high:2g}: {parts}")
assert wrong < right / 50

# %% [markdown]
# At high temperatures twice the temperature leaves a quarter of it, so without T² the student learns from the labels
# almost alone, and no error says so.

# %% [markdown]
# ## 7 Exercise: teachers and students
#
# Ranks 0 to `teachers` - 1 have the teacher, the others are students:
# student j is rank `teachers` + j, and its teacher is rank j % `teachers`. `logits(j)` returns, on
# a teacher, the logits for student j's rows. Return, on a student, its soft targets softmax(logits
# / temperature), an array (rows, 4); on a teacher an empty one, (0, 4). Judged: right targets; bytes (par:
# each student's logits or targets, sent once).


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
# | `--distill-from`, `--temperature`, `--distill-weight` | Hinton et al. 2015; TRL `GKDTrainer` (on texts that the student writes) |
#
# Next: [10 Accumulate and recompute](10_accumulate_and_recompute.ipynb). All lessons are in the
# [index](README.md).
