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
# So the small model, the student, should need fewer samples of the text. The teacher has read 1,200 samples, and
# the student reads 160 of them, in 80 steps. Without a teacher its loss would be lower after all 1,200, in 150 steps.
# What part of this gain does it have after 160 samples with the teacher?
#
# On several ranks the teacher's answers travel. Three ranks train the student, each on two samples of
# a step; a fourth rank has the teacher and sends each of them the logits of its samples, the scores of the
# 16 words from which the softmax makes probabilities. A sample has 16 tokens; a logit takes 4 B. How many bytes does
# the teacher send in a step?

# %% [markdown]
# ## 2 Predict
#
# A sample without the teacher says of each token which word came. How often has a word to come before its
# probability is known, and what does one row of the teacher say? For the gain a seventh off is good enough.

# %%
from minidist.course.lesson import check, predict, reveal, small_job, solution

gain_guess = predict("part of the gain of 1,200 samples, with the teacher", example=10, unit="%")
bytes_guess = predict("bytes of logits that the teacher sends in a step", example=1000, unit="B")

# %%
import tempfile
from functools import partial

import numpy as np

from minidist import GPT, Adam, GPTConfig, SimWorld, Tensor, cross_entropy, load_dataset, no_grad
from minidist.commands.generation import load_model
from minidist.data import GlobalBatchSampler
from minidist.data.datasets import hold_out
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train as train_job
from minidist.report import show
from minidist.report.frame import finish, line, new_panel, patch, plain_numbers
from minidist.report.palette import PALETTE
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
# What does it know? The text comes from a source whose words depend on the word before only. The picture shows, for
# one word, how often each of the 16 words follows it in 90,000 tokens, and what the teacher says. The next token of a
# sample is one of these bars, here the red one; the row of the teacher is all of them:


# %%
def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum()


source = load_dataset("markov")
read, unread = hold_out(source)
teacher_model, _ = load_model(saved.name)
text = read.tokens.astype(int)
word, came = text[3], text[4]
with no_grad():
    of_teacher = softmax(teacher_model(text[None, :4]).data[0, 3])
follows = np.bincount(text[1:][text[:-1] == word], minlength=16)

figure, axes = new_panel(8, 3)
words = np.arange(16)
axes.bar(words - 0.2, follows / follows.sum(), 0.4, color=PALETTE["other"])
axes.bar(words + 0.2, of_teacher, 0.4, color=PALETTE["F"])
axes.bar(came + 0.2, of_teacher[came], 0.4, color=PALETTE["blocked"])
axes.set(xlabel="next word", ylabel="probability", xticks=words)
handles = [patch(PALETTE["other"], "share in the text"), patch(PALETTE["F"], "the teacher")]
handles.append(patch(PALETTE["blocked"], "the teacher, of the word that came"))
show(finish(figure, handles, "part 3 of lesson 09d", f"what follows word {word}"))

# %% [markdown]
# ## 4 The code
#
# With z the student's logits and t the teacher's, the student has the probabilities q = softmax(z / T),
# and the teacher p = softmax(t / T). The *temperature* T makes probabilities more equal, so that the
# small ones count. The loss is (1 - a) times the cross-entropy plus a T² KL(p || q), where KL(p || q) =
# sum of p log(p / q), and its gradient is (1 - a) (softmax(z) - onehot) + a T (q - p)
# ([loss.py](../minidist/techniques/distillation/loss.py) is the library's version):

# %%
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
# The entropy of the source is known: no model can have a smaller expected loss. So the loss minus the entropy is what
# a model still has to learn. It is measured on the last tenth of the text, 10,000 tokens on which no model was
# trained. `loss` is any function of the student's logits, the words that came, and the teacher's logits:

# %%
tokens = unread.tokens.astype(int)[: 16 * 624 + 1]
inputs, targets = tokens[:-1].reshape(624, 16), tokens[1:].reshape(624, 16)


def above_entropy(loss, rows=2, steps=80, every=80):
    """Losses minus the entropy after every `every` steps, on the unread text; means of three."""
    curves = []
    for seed in range(3):
        curves.append([])
        student = GPT(GPTConfig(16, 16, 16, 1, 2), seed=seed)
        optimizer = Adam(student.parameters(), lr=0.02)
        batches = GlobalBatchSampler(read, rows, 16, seed)
        for step in range(1, steps + 1):
            words, following = batches.batch(step - 1, 0, rows)
            with no_grad():
                of_teacher = teacher_model(words).data
            student.zero_grad()
            loss(student(words), following, of_teacher).backward()
            optimizer.step()
            if step % every == 0:
                with no_grad():
                    curves[-1].append(student(inputs, targets).item() - source.entropy)
    return np.mean(curves, axis=0)


def text_alone(z, label, of_teacher):
    return cross_entropy(z, label)


def with_teacher(z, label, of_teacher, T=2.0):
    return distillation_loss(z, label, of_teacher, T, 0.9)


# %% [markdown]
# Three kinds of students. The first two make 80 steps of two samples, the third 150 of eight:

# %%
kinds = {"text alone, 2 per step": (text_alone, 2, 80)}
kinds |= {"with the teacher, 2 per step": (with_teacher, 2, 80)}
kinds |= {"text alone, 8 per step": (text_alone, 8, 150)}
with no_grad():
    its_own = teacher_model(inputs, targets).item() - source.entropy

figure, axes = new_panel(8, 3.6)
axes.axhline(its_own, color="black", linewidth=1, linestyle=":")
handles, curves = [line("black", "the teacher itself", linestyle=":")], {}
colours = (PALETTE["other"], PALETTE["F"], PALETTE["W"])
for (kind, (loss, rows, steps)), colour in zip(kinds.items(), colours, strict=True):
    curves[kind] = curve = above_entropy(loss, rows, steps, every=10)
    axes.plot(10 * rows * np.arange(1, len(curve) + 1), curve, color=colour, marker="o")
    handles.append(line(colour, kind, marker="o"))
    print(f"{kind:28} {rows * steps:5,} samples: {curve[-1]:.3f} above the entropy")
print(f"{'the teacher itself':28} 1,200 samples: {its_own:.3f} above the entropy")
axes.set(xlabel="samples read", ylabel="loss above the entropy", yscale="log")
plain_numbers(axes.yaxis)
show(finish(figure, handles, "part 5 of lesson 09d", "what is left to learn, over samples"))

alone, taught, longer = (curve[-1] for curve in curves.values())
gain_guess.judge(100 * (alone - taught) / (alone - longer), within=1 / 7)
assert its_own < longer < taught < alone / 2

# %% [markdown]
# The student is neither better than its teacher nor than the text that the teacher has read would make it. The teacher
# saves samples, and steps, where it is there already.
#
# A teacher is a checkpoint, and a student a job that names it. Where the teacher is changes no bit of the student.
# `compare_rank` trains the job on these ranks and on one device, and compares every array of each step. The one
# device computes the micro-batches of the ranks one after the other and adds them in the order of the ranks
# (lesson 04b); as one matrix product over all rows it would have other last bits:

# %%
three = {"context": 16, "micro_batch": 2, "distill_from": saved.name, "dp": 3, "steps": 3}
world = SimWorld(4)
losses = world.run(train_job, small_job(**three, teacher_ranks=1))[0].losses
everywhere = SimWorld(3).run(train_job, small_job(**three))[0].losses
verdict = SimWorld(4).run(compare_rank, small_job(**three, teacher_ranks=1))[0]
sent = world.traces[3].bytes_by_purpose()["teacher"]
print(f"the bits of one device: {verdict.equal}; of a teacher on each rank: {losses == everywhere}")
print(
    f"3 steps: {sent:,} B of logits; 3 x 6 samples x 16 tokens x 16 x 4 B = {3 * 6 * 16 * 16 * 4:,}"
)
bytes_guess.judge(sent / 3)
assert verdict.equal
assert losses == everywhere
assert sent == 3 * 6 * 16 * 16 * 4

# %% [markdown]
# That is 4 V bytes per token for V words, whatever the size of the teacher. With the 50,257 words of
# GPT-2 it is 201 kB for each token: there one sends the largest logits only.

# %% [markdown]
# ## 6 Break it
#
# Two mistakes that no error names, in trainings like those above. In the first only the teacher has a temperature, so
# the student is trained towards other probabilities than the teacher's. In the second the factor T² is left out of
# the second part of the loss, whose gradient is then a (q - p) / T in place of a T (q - p):


# %%
def one_temperature(z, label, of_teacher, T):
    return distillation_loss(z, label, of_teacher / T, 1.0, 0.9)


def without_square(z, label, of_teacher, T):
    second = distillation_loss(z, label, of_teacher, T, 1.0)  # T² KL(p || q)
    return 0.1 * cross_entropy(z, label) + 0.9 / T**2 * second


ends = {}
for T in (2.0, 8.0):
    print(f"temperature {T:g}:", end="")
    for loss in (with_teacher, one_temperature, without_square):
        ends[loss, T] = above_entropy(partial(loss, T=T))[-1]
        print(f"  {loss.__name__} {ends[loss, T]:.3f}", end="")
    print()
saved.cleanup()
assert (
    ends[with_teacher, 8] < 0.5 * alone < ends[without_square, 8] < alone < ends[one_temperature, 8]
)

# %% [markdown]
# With T² the temperature matters little. A teacher at temperature 8 and a student at 1 are worse than no teacher
# at all: the student learns to be as unsure as the softened probabilities are. Without T² little of the
# teacher is left: at temperature 8 its part of the gradient is a 64th of what it should be, and the student ends
# near the text alone. At temperature 1 both mistakes change nothing, so a test at temperature 1 passes.

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
#     mpiexec -n 1 minidist train --layers 2 --steps 20 --save runs/teacher
#     mpiexec -n 3 minidist train --dp 2 --teacher-ranks 1 --distill-from runs/teacher --layers 1 --steps 20

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `--distill-from`, `--temperature`, `--distill-weight` | Hinton et al. 2015; TRL `GKDTrainer` (on texts that the student writes) |
# | `distillation_loss` | PyTorch `torch.nn.KLDivLoss(reduction="batchmean")`, times T² by hand; NeMo AutoModel `KDLoss(temperature=)`, which has this factor |
#
# Next: [10 Accumulate and recompute](10_accumulate_and_recompute.ipynb). All lessons are in the
# [index](README.md).
