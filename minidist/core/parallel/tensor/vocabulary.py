"""The embedding and the loss with the vocabulary split: no rank ever holds the logits of all words.

    V = 10 words, 4 ranks, padded to 12     rank 0 {0 1 2}  rank 1 {3 4 5}  rank 2 {6 7 8}  rank 3 {9 - -}

A look-up gives, on each rank, the rows of its words and zeros for the others; the sum over ranks is the embedding.
The loss of a token needs three numbers that depend on all words; three all-reduces of (batch x T) numbers replace the
all-gather of (batch x T x V): [1] the largest logit, [2] the target's logit, [3] the sum of the exponentials. Backward
needs none. The padding is not a word: its logits count as minus infinity, and its rows stay zero.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3 (embedding, cross-entropy) and appendix (padding).

Proved by: tests/parallel/test_tensor.py
"""

from functools import partial
from typing import Any

from minidist.core.autograd import Parameter, ShapeError, Tensor
from minidist.core.autograd.operators import operand
from minidist.core.autograd.ops.cross_entropy import divisor_and_rows, softmax_loss
from minidist.core.autograd.tensor import named_mean, record
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn.gpt import TiedHead
from minidist.core.nn.layers import Embedding, Linear
from minidist.core.nn.module import Module
from minidist.core.parallel.tensor.layers import ColumnParallelLinear, ShardContext, reduce_from_tensor_parallel_region


def padded_vocab_size(vocab_size: int, ranks: int) -> int:
    """Return vocab_size rounded up to a multiple of the ranks."""
    return -(-vocab_size // ranks) * ranks


def vocab_range(vocab_size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the words [first, last) of a rank, without padding; a late rank may have none."""
    hooks.check_whole("vocab_size", vocab_size)
    size = padded_vocab_size(vocab_size, ranks) // ranks
    return min(rank * size, vocab_size), min((rank + 1) * size, vocab_size)


class VocabParallelEmbedding(Module):
    """Rows of words: integers (batch, T) on all ranks -> (batch, T, width) on all; weight (padded V / t, width).

    Sends an all-reduce of the result in forward, nothing in backward.
    """

    def __init__(self, whole: Embedding, context: ShardContext, name: str = "") -> None:
        self.comm, self.name = context.comm, whole.name
        self.vocab_size = whole.weight.shape[0]
        self.first, self.last = vocab_range(self.vocab_size, self.comm.rank, self.comm.size)
        self.weight = shard_words(whole.weight, context)

    def forward(self, indices: Any) -> Tensor:
        """Integers (batch, T) -> (batch, T, width)."""
        indices = xp.as_array(indices)
        if indices.size and (indices.min() < 0 or indices.max() >= self.vocab_size):
            hooks.operation_checks().refuse_words(self.comm.rank, indices, self.vocab_size)

        # (batch, T, width), a summand: each word's row is on one rank.
        return self.leave(_own_rows(indices, self.weight, self.first, self.last))

    def leave(self, rows: Tensor) -> Tensor:
        """g: sum the summands of all ranks."""
        return reduce_from_tensor_parallel_region(rows, self.comm)


def _own_rows(indices: xp.Array, weight: Parameter, first: int, last: int) -> Tensor:
    """Return weight[index - first] where first <= index < last, zeros elsewhere."""
    # (batch, T) bools: the words that this rank has. The other rows stay zero, and the sum over ranks fills them.
    own = (indices >= first) & (indices < last)
    data = xp.zeros((*indices.shape, weight.shape[1]), weight.dtype, weight.data)
    local = indices[own] - first
    data[own] = xp.take(weight.data, local, axis=0)
    shape = weight.shape

    def grad(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        # Rows of words that do not occur in the batch get zeros; a word that occurs twice gets both gradients.
        out = xp.empty(shape, g.dtype, g) if out is None else out
        out.fill(0)
        xp.scatter_add_rows(out, local, g[own])
        return out

    return record("vocab_parallel_embedding", data, (), ((operand(weight), grad),), cost=0, saved=(local, own))


class VocabParallelHead(ColumnParallelLinear):
    """The output projection: x (..., width) on all -> logits (..., padded V / t) of this rank's words on each.

    A column-parallel layer whose weight may be the embedding's shard (tied). The last ranks' padding has logits too;
    `vocab_parallel_cross_entropy` leaves them out.
    """

    weight_is_in_out = False
    bias = activation = None

    def __init__(self, whole: TiedHead | Linear, context: ShardContext, name: str = "") -> None:
        self.comm, self.name = context.comm, whole.name
        self.weight = shard_words(whole.weight, context)


def shard_words(whole: Parameter, context: ShardContext) -> Parameter:
    """Return this rank's words of a (V, width) weight, with the padding's rows of zeros."""
    vocab_size = whole.shape[0]
    padding = padded_vocab_size(vocab_size, context.comm.size) - vocab_size
    return context.shard_of(whole, 0, padding=padding)


def split_loss(model: Any, context: ShardContext, name: str, *, vocab_size: int) -> Any:
    """Return a language model whose loss is computed from split logits; without targets it returns these."""
    model.loss_fn = partial(vocab_parallel_cross_entropy, comm=context.comm, vocab_size=vocab_size)
    return model


def vocab_parallel_cross_entropy(
    logits: Tensor, targets: Any, divisor: float | None = None, ignore_index: int = -100, *, comm: Comm, vocab_size: int
) -> Tensor:
    """`cross_entropy` from logits (..., padded V / t) of this rank's words; the same tensor of shape () on all ranks.

    targets (...), words in [0, vocab_size) or ignore_index. Sends three all-reduces of one number per row in forward
    (largest logit, target's logit, sum of exponentials), purpose `tensor_forward`, and nothing in backward.
    """
    name = "vocab_parallel_cross_entropy"
    check_communicator(comm, name)
    if not isinstance(logits, Tensor):
        hooks.operation_checks().refuse_logits(logits)
    targets = xp.as_array(targets)
    if targets.shape != logits.shape[:-1]:
        raise ShapeError(f"{name}: targets of shape {targets.shape} for logits of shape {logits.shape}")
    flat = targets.reshape(-1)
    counted = flat != ignore_index
    hooks.operation_checks().check_targets(comm.rank, flat, counted, vocab_size)
    divisor, mean_over = divisor_and_rows(name, divisor, flat, counted)

    # Each target's word is on one rank.
    first, last = vocab_range(vocab_size, comm.rank, comm.size)
    own = xp.as_array((flat >= first) & (flat < last)).nonzero()[0]

    def reduce(array: xp.Array, op: str) -> None:
        with purpose("tensor_forward"):
            all_reduce(comm, array, op)

    comm.advance_clock("tensor_forward")
    loss = softmax_loss(name, logits, (own, flat[own] - first), counted, divisor, last - first, reduce)
    return named_mean(loss, mean_over) if mean_over else loss
