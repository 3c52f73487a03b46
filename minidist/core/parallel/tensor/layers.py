"""The two ways to split a product Y = X W, and why a transformer uses them in turn.

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

Source: Shoeybi et al., "Megatron-LM", 2019, section 3. The names of the borders are Megatron-LM's; those that gather
are in `minidist/parallel/tensor`.

Proved by: tests/parallel/test_tensor.py, tests/parallel/test_tensor_against_torch.py, tests/checkpoint/test_layouts.py
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minidist.core.autograd import Parameter, Tensor, linear, record
from minidist.core.autograd.operators import operand
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import UsageError, check_divisible
from minidist.core.base.layout import Layout
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm, check_communicator
from minidist.core.nn.layers import Conv1D, Linear
from minidist.core.nn.module import Module


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
        layout = Layout(
            before.global_shape,
            (*before.axes, self.axis),
            (*before.dims, dim),
            blocks=blocks,
            padding=padding,
            copies=replicas,
            ranks=(*before.ranks, tuple(comm.members)),
        )

        # A tied parameter is met once for each module that uses it: the second time it has its shard already.
        shard = self.shards.get(whole)
        if shard is None:
            if whole.flat is not None:
                hooks.refusals().refuse_flat_shard(whole)
            data = take_shard(whole.data, layout, comm.rank, comm.size)
            shard = self.shards[whole] = Parameter(data, whole.requires_grad, whole.name, whole.init)
            shard.layout = layout
        elif shard.layout != layout:
            raise UsageError(
                f"tied parameter {whole.name!r} is sharded as {shard.layout} and as {layout}; shard it one way"
            )
        return shard

    def replica_of(self, whole: Parameter) -> Parameter:
        """Return `whole` itself, which every rank holds, carrying a layout that says so."""
        if self.shards.get(whole, whole) is not whole:
            raise UsageError(
                f"tied parameter {whole.name!r} is sharded in one place and whole in another; shard it one way"
            )
        # A shard over another axis keeps its layout: over this axis it is whole.
        if whole.layout is None or not whole.layout.axes:
            whole.layout = Layout(tuple(whole.shape))
        return self.shards.setdefault(whole, whole)


class ColumnParallelLinear(Module):
    """y = activation(x W + b) with the output features split: x (..., in) on all ranks -> (..., out / t) on each.

    linear: the layer of one device; this rank keeps its columns. name: of the layer in its model, for errors.
    blocks: the number of equal blocks of output features, each of them split (3 for a fused Q|K|V). replicas > 1: this
    number of neighbouring ranks has the same columns. Sends an all-reduce of x's size in backward.
    """

    def __init__(
        self,
        linear: Linear | Conv1D,
        context: ShardContext,
        name: str = "the layer",
        *,
        blocks: int = 1,
        replicas: int = 1,
    ) -> None:
        shards = context.comm.size // replicas
        check_divisible(linear.out_features, f"out features of {name}", shards, "tensor", blocks=blocks)
        self.comm, self.name, self.activation = context.comm, linear.name, linear.activation

        # Conv1D stores (in, out), Linear (out, in): the output features are the columns or the rows.
        self.weight_is_in_out = isinstance(linear, Conv1D)
        split = {"blocks": blocks, "replicas": replicas}
        self.weight = context.shard_of(linear.weight, 1 if self.weight_is_in_out else 0, **split)
        self.bias = None if linear.bias is None else context.shard_of(linear.bias, 0, **split)

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

    def __init__(self, linear: Linear | Conv1D, context: ShardContext, name: str = "the layer") -> None:
        # The rows of W are split, and the bias is whole on every rank.
        check_divisible(linear.in_features, f"in features of {name}", context.comm.size, "tensor")
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


def split_heads(attention: Any, context: ShardContext, name: str) -> Module:
    """Return an attention with the dropout of this rank's heads, 1/t of all.

    The module takes its number of heads from its projections, which the plan splits over the ranks.
    """
    dropout, comm = attention.attn_dropout, context.comm
    check_divisible(dropout.heads, f"heads of {name}", comm.size, "tensor")
    attention.attn_dropout = dropout.part(comm.rank, comm.size)
    split: Module = attention
    return split
