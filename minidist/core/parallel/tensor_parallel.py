"""Tensor parallelism: the two ways to split a product Y = X W, and why a transformer uses them in turn.

    column parallel                         row parallel
    W = | W0 | W1 |    Y = | XW0 | XW1 |    W = | W0 |    X = | X0 | X1 |    Y = X0 W0 + X1 W1
                                                | W1 |
    f before: every rank needs all of X     g after: the products are summands of Y

After a column-parallel layer each rank has its own columns of Y, a function of single elements (GELU, ReLU) or of
single heads (attention) needs no others, and the row-parallel layer takes the columns as they are: two layers, one
all-reduce in forward and one in backward. The bias of a row-parallel layer is added once, after the sum.

Between f and g is a *region*, in which every rank holds a shard of the activations; outside all ranks hold the same. At
a border of it, a node of the tape, backward does the adjoint of what forward does, and over one rank nothing:

                                                 forward             backward
    copy_to_tensor_parallel_region        (f)    nothing             all-reduce      purpose tensor_backward
    reduce_from_tensor_parallel_region    (g)    all-reduce          nothing         purpose tensor_forward

A layer asks its context for this rank's shard of a parameter. A contiguous split of a fused matrix would give rank 0
all of Q and half of K, so each of its blocks is split; minidist/parallel/tensor/full_state.py joins the whole again:

    blocks=1                        blocks=3: a fused Q|K|V is split inside each of Q, K and V
    | rank 0 | rank 1 |             | q0 q1 | k0 k1 | v0 v1 |   rank 0 holds | q0 | k0 | v0 |

With the vocabulary split, no rank ever holds the logits of all words:

    V = 10 words, 4 ranks, padded to 12     rank 0 {0 1 2}  rank 1 {3 4 5}  rank 2 {6 7 8}  rank 3 {9 - -}

A look-up gives, on each rank, the rows of its words and zeros for the others; the sum over ranks is the embedding.
The loss of a token needs three numbers that depend on all words; three all-reduces of (batch x T) numbers replace the
all-gather of (batch x T x V). The padding is not a word: its logits count as minus infinity, and its rows stay zero.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3 and appendix (padding). The names of the borders are
Megatron-LM's; those that gather are in `minidist/parallel/tensor`.

Proved by: tests/parallel/test_tensor.py, tests/parallel/test_tensor_against_torch.py, tests/checkpoint/test_layouts.py
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from minidist.core.autograd import Parameter, Tensor, linear, record
from minidist.core.autograd.operators import operand
from minidist.core.autograd.ops.cross_entropy import divisor_and_rows, softmax_loss
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.layout import Layout
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn import Conv1D, Embedding, Linear, Module
from minidist.core.nn.gpt import TiedHead

Affine = Linear | Conv1D


def copy_to_tensor_parallel_region(x: Any, comm: Comm) -> Tensor:
    """f: return x, a tensor or an array, as it is; backward sums its gradient over `comm`.

    Also for a replicated parameter that is used on split data: each rank then has a part of its gradient.
    """
    check_communicator(comm, "copy_to_tensor_parallel_region")
    if comm.size == 1:
        return x
    x = x if isinstance(x, Tensor) else Tensor(x)
    # A node that saves the result saves x instead: of a parameter the parameter itself, with its version.
    return _Alias(border("_Copy", x, comm, _unchanged, _summed), x)


def reduce_from_tensor_parallel_region(x: Tensor, comm: Comm) -> Tensor:
    """g: return the sum of x over `comm`; backward passes the gradient on unchanged."""
    # Every rank has the gradient of the sum, which is that of each summand.
    return x if comm.size == 1 else border("_Reduce", x, comm, _summed, _unchanged)


def border(name: str, x: Any, comm: Comm, there: Callable[..., xp.Array], back: Callable[..., xp.Array]) -> Tensor:
    """Return a node: `there` of x, whose backward is `back` of the gradient; functions of (comm, array, why=).

    x: a tensor, or an array, which needs no gradient.
    """
    x = x if isinstance(x, Tensor) else Tensor(x)
    # A view of the gradient: nothing may be added in place to what a collective has returned.
    result, edge = there(comm, x.data, why="tensor_forward"), (x, lambda grad: grad[...])
    return record(name, result, (edge,), prepare=lambda grad: back(comm, grad, why="tensor_backward"), cost=0)


def contiguous(x: xp.Array) -> xp.Array:
    """Return x in row-major order, copied only when it is not."""
    if x.flags.c_contiguous:
        return x
    result = xp.empty(x.shape, x.dtype, x)
    xp.copyto(result, x)
    return result


def _unchanged(comm: Comm, x: xp.Array, why: str) -> xp.Array:
    """Return x itself. Sends nothing."""
    return x


def _summed(comm: Comm, x: xp.Array, why: str) -> xp.Array:
    """Return the sum of all ranks' x, a new array; `why` is the messages' purpose."""
    # A copy, because the all-reduce works in place and x belongs to another node.
    result = xp.empty(x.shape, x.dtype, x)
    xp.copyto(result, x)
    comm.advance_clock(why)
    with purpose(why):
        all_reduce(comm, result)
    return result


class _Alias(Tensor):
    """The array of `tensor`, saved for backward as `source` would be: a parameter as itself, with its version."""

    __slots__ = ("_source",)

    def __init__(self, tensor: Tensor, source: Tensor) -> None:
        super().__init__(tensor.data)
        self.node, self._source = tensor.node, source

    def saved(self) -> Any:
        return self._source.saved()


def take_shard(array: xp.Array, layout: Layout, rank: int, ranks: int) -> xp.Array:
    """Return `rank`'s shard of `array`, a new contiguous array, over the last axis of the layout, with `ranks` ranks.

    array: the whole one, or a shard of it over the other axes.
    """
    # The split dim comes first, with the padding behind it.
    dim = layout.dims[-1]
    front = xp.moveaxis(array, dim, 0)
    if layout.padding:
        front = xp.concatenate([front, xp.zeros((layout.padding, *front.shape[1:]), array.dtype, array)])
    blocks, shards = layout.blocks, ranks // layout.copies

    # Every block is split into as many parts as there are shards; the shard has its part of each block.
    size = front.shape[0] // blocks // shards
    number = rank // layout.copies
    parts = front.reshape(blocks, shards, size, *front.shape[1:])[:, number].reshape(blocks * size, *front.shape[1:])

    # The split dim goes back to its place, in a new array: the whole one may be freed.
    shard = xp.empty(xp.moveaxis(parts, 0, dim).shape, array.dtype, array)
    xp.copyto(shard, xp.moveaxis(parts, 0, dim))
    return shard


@dataclass
class ShardContext:
    """The communicator and name of a mesh axis, and what has become of each parameter so far.

        tied weight W:   transformer.wte ──▶ shard_of(W) ──▶ a new Parameter, the shard
                         lm_head         ──▶ shard_of(W) ──▶ the same one: both modules share it on one device, too

    shards: parameter of the single-device model -> this rank's shard, or the parameter itself where every rank holds
    it whole.
    """

    comm: Comm
    axis: str = "tp"
    shards: dict[Parameter, Parameter] = field(default_factory=dict)

    def shard_of(
        self, whole: Parameter, dim: int, *, blocks: int = 1, padding: int = 0, replicas: int = 1
    ) -> Parameter:
        """Return this rank's shard of `whole` along `dim`; the same one again for a tied parameter.

        blocks, padding, replicas: as in `Layout` (`copies`). Raises UsageError when a tied parameter is sharded in two
        ways.
        """
        # The first split of this parameter, or one more (experts over ep, then their matrices over tp).
        before, comm = whole.layout or Layout(tuple(whole.shape)), self.comm
        axes, dims, ranks = (*before.axes, self.axis), (*before.dims, dim), (*before.ranks, tuple(comm.members))
        layout = Layout(before.global_shape, axes, dims, blocks, padding, copies=replicas, ranks=ranks)

        # A tied parameter is met once for each module that uses it: the second time it has its shard already.
        shard = self.shards.get(whole)
        if shard is None:
            if whole.flat is not None:
                hooks.refusals().refuse_flat_shard(whole)
            data = take_shard(whole.data, layout, comm.rank, comm.size)
            shard = self.shards[whole] = Parameter(data, whole.requires_grad, whole.name, whole.init)
            shard.layout = layout
        elif shard.layout != layout:
            hooks.refusals().refuse_two_layouts(whole, shard.layout, layout)
        return shard

    def replica_of(self, whole: Parameter) -> Parameter:
        """Return `whole` itself, which every rank holds, carrying a layout that says so."""
        if self.shards.get(whole, whole) is not whole:
            hooks.refusals().refuse_two_layouts(whole)
        # A shard over another axis keeps its layout: over this axis it is whole.
        if whole.layout is None or not whole.layout.axes:
            whole.layout = Layout(tuple(whole.shape))
        return self.shards.setdefault(whole, whole)


class ColumnParallelLinear(Module):
    """y = activation(x W + b) with the output features split: x (..., in) on all ranks -> (..., out / t) on each.

    linear: the layer of one device; this rank keeps its columns. name: of the layer in its model, for errors.
    blocks: the number of equal blocks of output features, each of them split (3 for a fused Q|K|V). Sends an all-reduce
    of x's size in backward.
    """

    def __init__(self, linear: Affine, context: ShardContext, name: str = "the layer", *, blocks: int = 1) -> None:
        if not isinstance(context, ShardContext):
            hooks.wrong_arguments().refuse_layer(self, linear, context)
        self.comm, self.name, self.activation = context.comm, linear.name, linear.activation
        hooks.check_divisible(linear.out_features, f"out features of {name}", self.comm.size, "tensor", blocks=blocks)

        # Conv1D stores (in, out), Linear (out, in): the output features are the columns or the rows.
        self.weight_is_in_out = isinstance(linear, Conv1D)
        self.weight = context.shard_of(linear.weight, 1 if self.weight_is_in_out else 0, blocks=blocks)
        self.bias = None if linear.bias is None else context.shard_of(linear.bias, 0, blocks=blocks)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out / t): x meets this rank's columns of W."""
        return linear(self.enter(x), self.weight, self.bias, self.activation, self.weight_is_in_out)

    def enter(self, x: Tensor) -> Tensor:
        """f: x is the same on every rank, so backward sums its gradient."""
        return copy_to_tensor_parallel_region(x, self.comm)


class RowParallelLinear(Module):
    """y = x W + b with the input features split: x (..., in / t) on each rank -> (..., out) on all.

    linear, name: as in `ColumnParallelLinear`. Sends an all-reduce of y's size in forward.
    """

    def __init__(self, linear: Affine, context: ShardContext, name: str = "the layer") -> None:
        if not isinstance(context, ShardContext):
            hooks.wrong_arguments().refuse_layer(self, linear, context)
        # The rows of W are split, and the bias is whole on every rank.
        hooks.check_divisible(linear.in_features, f"in features of {name}", context.comm.size, "tensor")
        self.comm, self.name = context.comm, linear.name
        self.weight_is_in_out = isinstance(linear, Conv1D)
        self.weight = context.shard_of(linear.weight, 0 if self.weight_is_in_out else 1)
        self.bias = None if linear.bias is None else context.replica_of(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in / t) -> (..., out)."""
        # This rank's columns of x (..., in / t) meet its rows of W: y (..., out) is a summand.
        return self.leave(linear(x, self.weight, None, None, self.weight_is_in_out))

    def leave(self, y: Tensor) -> Tensor:
        """g: sum the summands of all ranks."""
        return row_parallel_sum(y, self.bias, self.comm)


def row_parallel_sum(product: Tensor, bias: Parameter | None, comm: Comm) -> Tensor:
    """g and the bias in one node: `product` (..., out), which nothing else holds, is summed over the ranks in place."""
    y, edges = product.data, ((operand(product), None),)
    if comm.size > 1:
        # In place: `product` is a new array that no other node has saved.
        comm.advance_clock("tensor_forward")
        with purpose("tensor_forward"):
            all_reduce(comm, y)
    if bias is None:
        return record("row_parallel_sum", y, edges, cost=0)

    # Once, after the sum; added on each rank before it, the bias would count t times.
    y += bias.data
    return record("row_parallel_sum", y, edges, ((operand(bias), xp.sum_rows),), cost=y.size)


def split_heads(attention: Any, context: ShardContext, name: str) -> Any:
    """Return an attention with the dropout of this rank's heads, 1/t of all.

    The module takes its number of heads from its projections, which the plan splits over the ranks.
    """
    dropout, comm = attention.attn_dropout, context.comm
    hooks.check_divisible(dropout.heads, f"heads of {name}", comm.size, "tensor")
    attention.attn_dropout = dropout.part(comm.rank, comm.size)
    return attention


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

        # (batch, T) bools: the words that this rank has. The other rows stay zero, and the sum over ranks fills them.
        weight, own = self.weight, (indices >= self.first) & (indices < self.last)
        data = xp.zeros((*indices.shape, weight.shape[1]), weight.dtype, weight.data)
        local = indices[own] - self.first
        data[own] = xp.take(weight.data, local, axis=0)
        shape = weight.shape

        def grad(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
            # Rows of words that do not occur in the batch get zeros; a word that occurs twice gets both gradients.
            out = xp.empty(shape, g.dtype, g) if out is None else out
            out.fill(0)
            xp.scatter_add_rows(out, local, g[own])
            return out

        # (batch, T, width), a summand: each word's row is on one rank.
        edges, saved = ((operand(weight), grad),), (local, own)
        return self.leave(record("vocab_parallel_embedding", data, (), edges, cost=0, saved=saved))

    def leave(self, rows: Tensor) -> Tensor:
        """g: sum the summands of all ranks."""
        return reduce_from_tensor_parallel_region(rows, self.comm)


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
    """Return a language model that computes its loss from split logits; without targets a hook may gather them."""
    model.loss_fn = partial(vocab_parallel_cross_entropy, comm=context.comm, vocab_size=vocab_size)
    model.logits_fn = hooks.gather_logits(context.comm, vocab_size) or model.logits_fn
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
    targets = xp.as_array(targets)
    hooks.operation_checks().check_split_targets(name, comm.rank, logits, targets, ignore_index, vocab_size)
    flat = targets.reshape(-1)
    counted = flat != ignore_index
    divisor, mean_over = divisor_and_rows(name, divisor, flat, counted)

    # Each target's word is on one rank.
    first, last = vocab_range(vocab_size, comm.rank, comm.size)
    own = xp.as_array((flat >= first) & (flat < last)).nonzero()[0]

    def reduce(array: xp.Array, op: str) -> None:
        with purpose("tensor_forward"):
            all_reduce(comm, array, op)

    comm.advance_clock("tensor_forward")
    loss = softmax_loss(name, logits, (own, flat[own] - first), counted, divisor, last - first, reduce)
    return hooks.named_mean(loss, mean_over) if mean_over else loss
