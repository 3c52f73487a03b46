"""The two ways to split a product Y = X W, and why a transformer uses them in turn.

    column parallel                         row parallel
    W = | W0 | W1 |    Y = | XW0 | XW1 |    W = | W0 |    X = | X0 | X1 |    Y = X0 W0 + X1 W1
                                                | W1 |
    f before: every rank needs all of X     g after: the products are summands of Y

After a column-parallel layer each rank has its own columns of Y, a function of single elements (GELU, ReLU) or of
single heads (attention) needs no others, and the row-parallel layer takes the columns as they are: two layers, one
all-reduce in forward and one in backward. The bias of a row-parallel layer is added once, after the sum.
"""

from typing import Any

from minidist.autograd import Parameter, Tensor, linear, record
from minidist.base import arrays as xp
from minidist.base.errors import UsageError, check_divisible
from minidist.base.layout import Layout
from minidist.base.trace import purpose
from minidist.collectives import all_reduce
from minidist.comm import Comm
from minidist.nn.linear import Conv1D, Linear
from minidist.nn.module import Module
from minidist.parallel.clock import advance_clock
from minidist.parallel.tensor.regions import (
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_parallel_region,
)
from minidist.parallel.tensor.shards import shard_parameter


class ColumnParallelLinear(Module):
    """y = activation(x W + b) with the output features split over `comm`: x (..., in) on all -> (..., out / t) on each.

    gather_output: all-gather y. sequence_parallel: x is this rank's rows (batch, T/t, in) and gathered first.
    copy_input =False: x has passed f already (several layers share it). blocks: see `shards`. Sends nothing in forward
    (with sequence_parallel an all-gather) and an all-reduce of x's size (a reduce-scatter, and a regather) in backward.

    copies > 1: so many neighbouring ranks have the same columns (key-value heads, when there are fewer than ranks).
    Each has
    a part of their gradient, so backward sums it over those ranks: an all-reduce of the tile's size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Comm,
        bias: bool = True,
        activation: str | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        dtype: Any = xp.float32,
        seed: int = 0,
    ) -> None:
        whole = Linear(in_features, out_features, bias, activation, dtype, seed)
        self._split(whole, comm, "tp", 1, {}, "the layer")
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel

    @classmethod
    def from_linear(
        cls,
        whole: Linear | Conv1D,
        comm: Comm,
        axis: str,
        made: dict[Parameter, Parameter],
        name: str,
        blocks: int = 1,
        copies: int = 1,
        **options: bool,
    ) -> "ColumnParallelLinear":
        """This rank's part of a layer that was built on one device. made: tiles made so far, for tied parameters."""
        self = cls.__new__(cls)
        self._split(whole, comm, axis, blocks, made, name, copies)
        vars(self).update(options)
        return self

    gather_output = False
    sequence_parallel = False
    copy_input = True

    def _split(
        self,
        whole: Linear | Conv1D,
        comm: Comm,
        axis: str,
        blocks: int,
        made: dict[Parameter, Parameter],
        name: str,
        copies: int = 1,
    ) -> None:
        self.comm, self.name = comm, whole.name
        first = comm.rank // copies * copies
        self.sharers = comm.group(list(range(first, first + copies)), f"copies{first}") if copies > 1 else None
        self.activation = whole.activation
        self.weight_is_in_out = isinstance(whole, Conv1D)
        check_divisible(whole.out_features, f"out features of {name}", comm.size // copies, "tensor", blocks=blocks)
        dim = 1 if self.weight_is_in_out else 0
        self.weight = tile_of(whole.weight, axis, dim, comm, made, blocks, copies=copies)
        self.bias = None if whole.bias is None else tile_of(whole.bias, axis, 0, comm, made, blocks, copies=copies)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out / t), or (..., out) with gather_output."""
        if self.sequence_parallel:
            x = gather_from_sequence_parallel_region(x, self.comm, regather=True)
        elif self.copy_input:
            x = copy_to_tensor_parallel_region(x, self.comm)
        weight, bias = self._shared(self.weight), self.bias and self._shared(self.bias)
        y = linear(x, weight, bias, self.activation, self.weight_is_in_out)
        return gather_from_tensor_parallel_region(y, self.comm) if self.gather_output else y

    def _shared(self, parameter: Parameter) -> Tensor:
        return parameter if self.sharers is None else copy_to_tensor_parallel_region(parameter, self.sharers)


class RowParallelLinear(Module):
    """y = x W + b with the input features split over `comm`: x (..., in / t) on each -> (..., out) on all.

    input_is_parallel=False: x is whole and its own columns are taken first. sequence_parallel: y is reduce-scattered to
    this rank's rows. Sends an all-reduce of y's size in forward (a reduce-scatter, and an all-gather in backward).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        comm: Comm,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        dtype: Any = xp.float32,
        seed: int = 0,
    ) -> None:
        whole = Linear(in_features, out_features, bias, None, dtype, seed)
        self._split(whole, comm, "tp", {}, "the layer")
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel

    @classmethod
    def from_linear(
        cls, whole: Linear | Conv1D, comm: Comm, axis: str, made: dict[Parameter, Parameter], name: str, **options: bool
    ) -> "RowParallelLinear":
        """This rank's part of a layer that was built on one device."""
        self = cls.__new__(cls)
        self._split(whole, comm, axis, made, name)
        vars(self).update(options)
        return self

    input_is_parallel = True
    sequence_parallel = False

    def _split(
        self, whole: Linear | Conv1D, comm: Comm, axis: str, made: dict[Parameter, Parameter], name: str
    ) -> None:
        if whole.activation is not None:
            raise UsageError(
                f"{name} has activation {whole.activation!r}, which cannot be applied to the summands of a row-parallel"
                " layer; give it ColwiseParallel, or take the activation out"
            )
        self.comm, self.name = comm, whole.name
        self.weight_is_in_out = isinstance(whole, Conv1D)
        check_divisible(whole.in_features, f"in features of {name}", comm.size, "tensor")
        self.weight = tile_of(whole.weight, axis, 0 if self.weight_is_in_out else 1, comm, made)
        self.bias = None if whole.bias is None else replica_of(whole.bias, made)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in / t) -> (..., out)."""
        if not self.input_is_parallel:
            x = scatter_to_tensor_parallel_region(x, self.comm)
        y = linear(x, self.weight, None, None, self.weight_is_in_out)
        if not self.sequence_parallel:
            return sum_of_products(y, self.bias, self.comm)
        y = reduce_scatter_to_sequence_parallel_region(y, self.comm)
        return y if self.bias is None else y + copy_to_tensor_parallel_region(self.bias, self.comm)


def sum_of_products(product: Tensor, bias: Parameter | None, comm: Comm) -> Tensor:
    """g and the bias in one node: `product`, which nobody else holds, is summed over the ranks where it lies."""
    y, edges = product.data, ((product, None),)
    if comm.size > 1:
        advance_clock(comm, "tensor_forward")
        with purpose("tensor_forward"):
            all_reduce(comm, y)
    if bias is None:
        return record("row_parallel_sum", y, edges, flops=0, storage=y.dtype)
    y += bias.data

    def grad(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        return xp.sum_rows(xp.as_rows(g), out)

    return record("row_parallel_sum", y, edges, ((bias, grad),), flops=y.size, storage=y.dtype)


def tile_of(
    whole: Parameter,
    axis: str,
    dim: int,
    comm: Comm,
    made: dict[Parameter, Parameter],
    blocks: int = 1,
    padding: int = 0,
    copies: int = 1,
) -> Parameter:
    """This rank's tile of a parameter; the same one again for a tied parameter, which must be cut alike.

    A parameter that is cut over another axis already is cut once more.
    """
    before = whole.layout
    if before is None or not before.axes:
        layout = Layout(tuple(whole.shape), (axis,), (dim,), blocks=blocks, padding=padding, copies=copies)
    else:
        layout = Layout(before.global_shape, (*before.axes, axis), (*before.dims, dim))
    if whole not in made:
        made[whole] = shard_parameter(whole, layout, comm.rank, comm.size)
    elif made[whole].layout != layout:
        raise UsageError(
            f"tied parameter {whole.name!r} is cut as {made[whole].layout} and as {layout}; cut it one way"
        )
    return made[whole]


def replica_of(whole: Parameter, made: dict[Parameter, Parameter]) -> Parameter:
    """A parameter that every rank holds whole: itself, carrying a layout that says so."""
    if made.get(whole, whole) is not whole:
        raise UsageError(f"tied parameter {whole.name!r} is cut in one place and whole in another; cut it one way")
    if whole.layout is None or not whole.layout.axes:  # it may be a tile over another axis
        whole.layout = Layout(tuple(whole.shape))
    return made.setdefault(whole, whole)
