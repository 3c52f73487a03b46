# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14b Sequence and vocabulary
#
# *40 minutes. Before it: 10 and 14.*
#
# ## 1 The case
#
# Four ranks divide the matrices of lesson 14 and what is computed between them. This is what a block keeps for
# backward, in bytes for each number of the activations, at the 32 tokens of this lesson:
#
# | | bytes | in lesson 14 |
# |---|---|---|
# | between the matrices: heads, attention scores, GELU | 66 | a quarter on each rank |
# | the *rows* between the layers, one per token: inputs of norms and of first matrices, dropout masks | 18 | whole |
#
# A norm and dropout work token by token. So let each rank have a quarter of the rows, too, gather all tokens before the
# first matrix, and scatter the sums after the second. A first matrix needs its gathered input once more in
# backward, and does not keep it. How much does a block then keep, compared with lesson 14?
#
# And the loss needs *logits*, one for each token and word. The embedding of lesson 14 is cut by words and is the
# output matrix, too, so each rank has the logits of a quarter of the words. How many numbers per token must
# the ranks at least sum or compare, so that all of them know the loss?

# %% [markdown]
# ## 2 Predict
#
# First: 1 means as much as in lesson 14, and 5 % off is good enough. Second: the loss of a token is
# log(sum of exp(logit - m)) + m - the logit of the right word, where m is the largest logit.

# %%
from minidist.course.lesson import check, picture, predict, reveal, small_job, solution

kept_guess = predict("bytes that a block keeps, over tensor parallelism's", example=0.9)
loss_guess = predict("numbers per token that the ranks sum or compare for the loss", example=100)

# %%
from contextlib import nullcontext
from unittest.mock import patch

import numpy as np
from matplotlib.colors import ListedColormap

from minidist import (
    Block,
    FlopCounter,
    GPTConfig,
    LinkModel,
    SimWorld,
    Tensor,
    all_gather,
    all_reduce,
    batch_coordinates,
    gpt_plan,
    parallelize_module,
    reduce_scatter,
)
from minidist.base.memory import account_memory
from minidist.job.equality.compare import compare_rank
from minidist.nn import causal_attention_composite
from minidist.report import show
from minidist.report.frame import new_figure
from minidist.report.palette import RANKS

# %% [markdown]
# ## 3 The idea and its picture
#
# **Split the rows between the layers, too, and compute the loss from logits that stay split.** An all-reduce
# becomes a reduce-scatter and an all-gather, and of what lies between the two each of t ranks keeps a t-th. It
# costs one more gather in backward for each layer that reads a gathered input (two per block), and a sum of the
# gradients of the norms' weights, of which each rank has a part. The loss costs a few numbers per token.
#
# First the rows. The block of lesson 14 with dropout, and its rows whole or split:

# %%
BATCH, LENGTH, WIDTH, HEADS = 2, 32, 64, 4
BLOCK = "transformer.h.*."


def one_block(comm, split, dropout=0.1):
    """Forward and backward of a GPT block; returns the bytes of activations kept between them."""
    plan = {k.removeprefix(BLOCK): cut for k, cut in gpt_plan(2, split).items() if BLOCK in k}
    config = GPTConfig(n_embd=WIDTH, n_head=HEADS, dropout=dropout, attention_dropout=dropout)
    rows = LENGTH // comm.size if split else LENGTH
    x = Tensor(np.ones((BATCH, rows, WIDTH), np.float32), requires_grad=True)
    with account_memory() as account, batch_coordinates(), FlopCounter() as counter:
        block = Block(config, np.float32, attention_fn=causal_attention_composite).initialize(0)
        y = parallelize_module(block, comm, plan)(x)
        kept = account.by_purpose["activation"] - y.data.nbytes  # y is the next block's input
        comm.compute(counter.take(), name="forward")
        y.backward(np.ones_like(y.data))
        comm.compute(counter.take(), name="backward")
    return kept


# %% [markdown]
# Rank 0 of four, above with whole rows, below with split rows. Each bar is a message, and an all-reduce is six of them.
# With split rows the same six are three and three: what was computed on all rows between two all-reduces (norm and
# dropout) now lies between a reduce-scatter and an all-gather, on a quarter of the rows. `regather` is new, and so are
# the short messages in backward, the sums of the gradients of norms and biases. These make the lower run longer: they
# are 36 of its 66 messages, with 64 B each, and cost little but their latency. Megatron-LM sums all of them in one:

# %%
worlds, kept = {}, {}
links = LinkModel(alpha=1e-6, beta=2e-10, flops=3e11, memory_bandwidth=1e11)
for split in (False, True):
    worlds[split] = SimWorld(4, links=links)
    kept[split] = worlds[split].run(one_block, split)[0]
    title = f"rank 0: a block with {'split' if split else 'whole'} rows"
    picture("lanes", worlds[split], "part 3 of lesson 14b", title=title, most_seconds=1.2e-4)

# %% [markdown]
# Then the logits, of four tokens and twelve words on four ranks. The colour is the rank that has a column, and
# bold is a token's right word. The largest logit of a row, m, is on one rank, and for each token on another:

# %%
logits = np.random.default_rng(291).integers(-9, 10, (4, 12)) * 1.0
targets = np.array([7, 0, 11, 4])
axes = (figure := new_figure(7, 2.4)).add_subplot()
axes.imshow(np.tile(np.arange(12) // 3, (4, 1)), cmap=ListedColormap(RANKS[:4]), aspect="auto")
for (token, word), value in np.ndenumerate(logits):
    weight = "bold" if word == targets[token] else "normal"
    axes.text(word, token, f"{value:.0f}", weight=weight, ha="center", va="center")
axes.set_xticks([1, 4, 7, 10], [f"words of rank {r}" for r in range(4)])
axes.set_title("logits; bold: a token's right word", fontsize=10, loc="left")
axes.set_yticks(range(4), [f"token {i}, m = {row.max():.0f}" for i, row in enumerate(logits)])
show(figure)

# %% [markdown]
# ## 4 The code
#
# Between the layers each rank has its own rows. On the way into the columns the rows are gathered;
# out of the rows the sum is scattered. In backward a gather is a reduce-scatter and the other way
# round:
#
# | | forward | backward |
# |---|---|---|
# | `gather_from_sequence_parallel_region` (in f's place) | all-gather | reduce-scatter |
# | `reduce_scatter_to_sequence_parallel_region` (in g's place) | reduce-scatter | all-gather |
#
# The forward pass of lesson 14's MLP, in which each rank has two rows of x before and two rows of y after.
# `all_gather` and `reduce_scatter` (lesson 11) give flat arrays:


# %%
def split_forward(comm, x, a, b):
    """This rank's rows of relu(x A) B, from its rows of x, its columns of A and its rows of B."""
    gathered = all_gather(comm, x).reshape(-1, x.shape[1])
    part = np.maximum(gathered @ a, 0) @ b
    return reduce_scatter(comm, part).reshape(x.shape)


rng = np.random.default_rng(1)
x, a, b = (rng.integers(-3, 4, shape) * 1.0 for shape in ((4, 4), (4, 6), (6, 4)))
tiles = [*zip(np.split(x, 2), np.split(a, 2, axis=1), np.split(b, 2), strict=True)]
mine = SimWorld(2).run(lambda comm: split_forward(comm, *tiles[comm.rank]))
print("the rows of both ranks:", np.array_equal(np.concatenate(mine), np.maximum(x @ a, 0) @ b))

# %% [markdown]
# A layer norm on a part of the rows needs no neighbour. But its weight, the same on all ranks, has seen a part
# of the rows, so each rank's gradient is one summand, and f in front of the weight sums them
# ([sequence_parallel.py](../minidist/parallel/tensor/sequence_parallel.py)).
#
# The embedding of a token is a row of the table that is cut by words. A rank looks up the tokens whose words it has and
# takes zeros for the others, and the reduce-scatter in front of the first block sums them.
#
# The loss from split logits. All ranks subtract the same m, so one all-reduce takes the maximum of theirs. A
# second one sums two numbers for each token: the exponentials of a rank's words, and the right word's logit,
# which is 0 on the ranks that do not have that word:


# %%
def split_loss(comm, logits, targets, own_m=False):
    """The loss of each token on every rank, from the logits of this rank's words."""
    first, words = comm.rank * logits.shape[1], logits.shape[1]
    m = logits.max(axis=1) if own_m else all_reduce(comm, logits.max(axis=1), "max")
    mine = (targets >= first) & (targets < first + words)
    right = np.zeros(len(targets))
    right[mine] = logits[mine, targets[mine] - first]
    z, right = all_reduce(comm, np.stack([np.exp(logits - m[:, None]).sum(axis=1), right]))
    return np.log(z) + m - right


toy = SimWorld(4)
losses = toy.run(lambda comm: split_loss(comm, np.split(logits, 4, axis=1)[comm.rank], targets))
single = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(4), targets]
print("losses", losses[0].round(3))
print(f"max |parallel - single| = {np.abs(np.array(losses) - single).max():.0e}")

# %% [markdown]
# In backward nothing travels for the loss: a rank has exp(logit - m)/z, which is the gradient of its own
# logits once 1 is subtracted at the right word. What the output matrix read was whole, so f sums its
# gradient. The library's function is `vocab_parallel_cross_entropy` in
# [tensor_parallel.py](../minidist/core/parallel/tensor_parallel.py).

# %% [markdown]
# ## 5 Check
#
# What a block keeps, counted by the memory account, and counted by hand. An activation of b texts with s
# tokens of h numbers is s b h numbers; a heads have a s² b attention scores, here twice as many:
#
# | kept for backward | bytes | for each of | in lesson 14 |
# |---|---|---|---|
# | inputs of two norms and two first matrices, two masks | 4 x 4 + 2 x 1 = 18 | s b h | whole |
# | Q, K and V; the heads' outputs; before and after GELU, 4 h wide | 12 + 4 + 16 + 16 = 48 | s b h | divided |
# | softmax, before and after dropout; its mask | 4 + 4 + 1 = 9 | a s² b | divided |
# | a number of each norm | 2 x 4 = 8 | s b | whole |

# %%
t, sbh = 4, LENGTH * BATCH * WIDTH
scores, a_number_a_row = HEADS * LENGTH**2 * BATCH, 2 * BATCH * LENGTH * 4
by_hand = {
    False: 18 * sbh + (48 * sbh + 9 * scores) // t + a_number_a_row,
    True: (18 * sbh + 48 * sbh + 9 * scores + a_number_a_row) // t,
}
for split in (False, True):
    what = "split" if split else "whole"
    print(f"rows {what}: {kept[split]:,} B kept; by hand {by_hand[split]:,} B")
    assert kept[split] == by_hand[split]
kept_guess.judge(kept[True] / kept[False], within=0.05)

# %% [markdown]
# What rank 0 sends, and a formula. The two regathers are a quarter more; the rest are gradients of norms and biases:

# %%
once = 3 * BATCH * LENGTH * WIDTH * 4 // 4  # a gather, or a reduce-scatter, of an activation of 4 B
# Summed gradients: 2 weights and 2 biases of the norms, 2 biases of the second matrices.
summed = 6 * 2 * 3 * WIDTH * 4 // 4
form = {"tensor_forward": 4 * once, "tensor_backward": 4 * once + summed, "regather": 2 * once}
for split in (False, True):
    purposes = worlds[split].traces[0].bytes_by_purpose()
    print(f"rows {'split' if split else 'whole'}: {sum(purposes.values()):,} B", purposes)
assert purposes == form

# %% [markdown]
# And the loss: an all-reduce of three numbers per token sends 2 (t-1)/t of them from each rank. To gather the
# logits of V words instead sends V (t-1)/t, which is V/6 times as many:

# %%
sent = sum(toy.traces[0].bytes_by_purpose().values())
per_token = sent / 8 / len(targets) / (2 * 3 / 4)  # numbers of 8 B, 2 (t-1)/t of them, t = 4
print(f"rank 0 sends {sent:.0f} B for the losses; {per_token:g} numbers per token are reduced")
print(f"GPT-2's 50,257 words: to gather them sends {50_257 / 6:,.0f} times as many numbers")
loss_guess.judge(per_token)

# %% [markdown]
# Is it the same training? With dropout too: each rank draws the rows, and the heads, that one
# device would draw for it.


# %%
def job(ranks, **settings):
    return small_job(tp=ranks, sequence_parallel=True, heads=4, steps=3, **settings)


for ranks in (2, 4):
    config = job(ranks, dropout=0.1, precision="fp64")
    verdict = SimWorld(ranks).run(compare_rank, config)[0]
    off = verdict.max_difference["weights"]
    print(f"{ranks} ranks: max |w_parallel - w_single| = {off:.1e}")
    assert verdict.equal

# %% [markdown]
# ## 6 Break it
#
# Sum the gradients of what is whole on all ranks and has seen a part of the rows twice: those of the norms, of the
# biases of the second matrices, and of the embedding of the positions. On four ranks they are four times as large.
# (`patch.object` replaces f for the time of a run. SGD is the optimizer, because Adam divides by the size of a
# gradient, and would hide the factor.)

# %%
from minidist.job.train.trainer import train
from minidist.parallel.tensor import sequence_parallel

f = sequence_parallel.copy_to_tensor_parallel_region
twice = patch.object(
    sequence_parallel, "copy_to_tensor_parallel_region", lambda x, comm: f(f(x, comm), comm)
)
sgd = job(4, precision="fp64", optimizer="sgd", check_replicas=True)
for name, during in (("summed once", nullcontext()), ("summed twice", twice)):
    with during:
        losses = SimWorld(4).run(train, sgd.model_copy(update={"steps": 40, "lr": 0.1}))[0].losses
        verdict = SimWorld(4).run(compare_rank, sgd)[0]
    print(f"{name:12}: loss {losses[0]:.3f} at first, {losses[-1]:.3f} after 40 steps", end="; ")
    print(f"max |w_parallel - w_single| = {verdict.max_difference['weights']:.0e} after 3")

# %% [markdown]
# The loss falls nevertheless. And here `--check-replicas`, which found the bug of lesson 14, finds nothing: all
# ranks have the same wrong gradient. Only one device shows it.
#
# A bug of the loss: every rank subtracts the largest of its own logits, which saves the message for m. The
# exponentials of the ranks then do not have the same factor, and their quotients are not a softmax:

# %%
wrong = SimWorld(4).run(
    lambda comm: split_loss(comm, np.split(logits, 4, axis=1)[comm.rank], targets, own_m=True)
)
print("right", single.round(2))
for rank, losses in enumerate(wrong):
    print(f"rank {rank}:", losses.round(2))
assert not np.allclose(wrong, single)

# %% [markdown]
# Nothing overflows, nothing raises, and the ranks have four different losses, some of them below 0, which the
# logarithm of a probability with its sign changed never is.

# %% [markdown]
# ## 7 Exercise: both passes of an MLP with split rows
#
# y = relu(x A) B. A rank gets *its rows* of x and of the gradient of y, two of each, *its columns* of A
# and *its rows* of B. Return your rows of y, and your rows of the gradient of x. Part 4 has the forward
# pass; backward a gather becomes a reduce-scatter and the other way round.
#
# Judged: both arrays, and the bytes of two all-gathers and two reduce-scatters.


# %%
def split_mlp(comm, x, a, b, gradient):
    gathered = all_gather(comm, x).reshape(-1, x.shape[1])
    hidden = np.maximum(gathered @ a, 0)
    y = reduce_scatter(comm, hidden @ b).reshape(x.shape)
    own = np.maximum(x @ a, 0)
    return y, ((gradient @ b.T) * (own > 0)) @ a.T


check("14b.split_mlp", split_mlp)

# %%
reveal("14b.split_mlp")
check("14b.split_mlp", solution("14b.split_mlp"))

# %% [markdown]
# Compute the loss with its gradient. A rank gets the logits of its words, the number `first` of its first word, and
# the right words. Return the loss of each token, and the gradient of the sum of the losses by your logits. Judged:
# both arrays, and the bytes of three numbers per token.


# %%
def split_cross_entropy(comm, logits, targets, first):
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    z = exponentials.sum(axis=1)
    return np.log(z), exponentials / z[:, None]


check("14b.split_cross_entropy", split_cross_entropy)

# %%
reveal("14b.split_cross_entropy")
check("14b.split_cross_entropy", solution("14b.split_cross_entropy"))

# %% [markdown]
# ## 8 Takeaway
#
# - All-reduce = reduce-scatter + all-gather; between the two each rank keeps **1/t of the rows**. In
#   16 bits, where each 4 of the table is a 2, a block keeps (34 s b h + 5 a s² b)/t bytes (without the 8 s b of
#   the table; b texts, s tokens, h numbers, a heads, t ranks), for two more gathers in backward and short sums.
# - The loss from split logits reduces **three numbers per token**: m, the sum of exp(logit - m), the right logit.

# %% [markdown]
# ## 9 The same code under mpiexec
#
#     mpiexec -n 2 python mpi_examples/4_tensor_parallel/tensor_parallel_gpt.py --sequence-parallel
#     mpiexec -n 2 python mpi_examples/4_tensor_parallel/layouts.py --bug norm
#     mpiexec -n 2 minidist compare --tp 2 --sequence-parallel --precision fp64 --steps 3

# %% [markdown]
# ## 10 What others call it
#
# | here | elsewhere |
# |---|---|
# | `gpt_plan(..., sequence_parallel=True)`, `--sequence-parallel` | Megatron-LM `--sequence-parallel`; PyTorch `SequenceParallel()` in a `parallelize_module` plan |
# | `gather_from_sequence_parallel_region` | the same in Megatron-LM `tensor_parallel/mappings.py` |
# | `regather` | Megatron-LM gathers again in `LinearWithGradAccumulationAndAsyncCommunication.backward` |
# | `vocab_parallel_cross_entropy` | the same in Megatron-LM; PyTorch `loss_parallel()` |
# | `VocabParallelEmbedding`, `padded_vocab_size` | the same in Megatron-LM, which pads to a multiple of 128 times the number of ranks by default (`--make-vocab-size-divisible-by`), minidist to one of the number of ranks |
#
# Careful with the word: in DeepSpeed "sequence parallelism" is Ulysses, which is lesson 22b.
#
# Here every rank has a part of each layer. A layer may also have many parts, and each token use one of them.
#
# Next: [14c Experts](14c_experts.ipynb). All lessons are in the [index](README.md).
