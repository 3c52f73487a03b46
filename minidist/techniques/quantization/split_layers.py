"""Layers for INT8 whose weight is split over tensor-parallel ranks: each rounds its shard to the grid of the whole.

    column parallel   x on all ranks       W = | W0 | W1 |   a scale for each output: on the rank that has the column
    row parallel      x = | x0 | x1 |      W = | W0 |        a scale for each output: of the largest of all ranks' rows
                                               | W1 |

The range of the inputs is agreed on over all ranks in any case (`ranges.py`). The largest magnitudes of a row-parallel
weight, and with one scale for a whole weight those of any, are agreed on when the weights are new: `agree_on_weights`.
So the operands are those of one device, and the products differ by the order of the sums alone.

Proved by: tests/techniques/test_quantization.py
"""

from collections.abc import Callable, Collection, Iterable
from copy import copy
from typing import Any

from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.base.layout import cut
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.core.nn.layers import Conv1D, Linear
from minidist.core.nn.module import Module
from minidist.core.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from minidist.parallel.tensor.gathering import gather_from_tensor_parallel_region
from minidist.techniques.quantization.layers import OBSERVERS, Int8Linear, MinMaxObserver, QATLinear, replace_layers

SPLIT = (ColumnParallelLinear, RowParallelLinear)


class QATSplitLinear(QATLinear):
    """A column- or row-parallel layer that computes with operands rounded to 8 bits.

    agreed: the largest magnitudes of the whole weight; None where those of the shard are the same.
    """

    def __init__(self, layer: Any, observer: MinMaxObserver, per_channel: bool = True) -> None:
        super().__init__(layer, observer, per_channel)
        self.layer: Callable[[], Any] = lambda: layer  # no attribute that is a module: each parameter has one name
        self.agrees = isinstance(layer, RowParallelLinear) or not per_channel
        self.agreed: xp.Array | None = None

    def largest(self) -> xp.Array:
        """Return the largest magnitudes of the whole weight."""
        return super().largest() if self.agreed is None else self.agreed

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the split layer's result for operands that are rounded, with its messages."""
        layer = copy(self.layer())
        layer.weight = weight
        return layer.forward(x)  # type: ignore[no-any-return]

    def to_int8(self) -> Int8Linear:
        """Return the layer that computes with integers."""
        return Int8SplitLinear(self)


class Int8SplitLinear(Int8Linear):
    """A rank's part of an `Int8Linear`: sums of integers on each rank, which are added over the ranks as floats."""

    def __init__(self, layer: QATSplitLinear) -> None:
        super().__init__(layer)
        self.layer = layer.layer

    def forward(self, x: Tensor) -> Tensor:
        """As the split layer: of columns (..., in) -> (..., out / t), of rows (..., in / t) -> (..., out)."""
        layer = self.layer()
        if isinstance(layer, RowParallelLinear):
            return layer.leave(self.product(x))
        y = super().forward(layer.enter(x))
        return gather_from_tensor_parallel_region(y, layer.comm) if getattr(layer, "gather_output", False) else y


def prepare_split_qat(model: Module, names: Collection[str], observer: str, per_channel: bool) -> None:
    """As `prepare_qat`, in a model whose layers are split. names: of the layers that one device quantises."""

    def make(layer: Any) -> QATLinear:
        kind = QATSplitLinear if isinstance(layer, SPLIT) else QATLinear
        return kind(layer, OBSERVERS[observer](layer.weight.dtype), per_channel)

    # A tied head is split, too, and is not a separate layer on one device.
    replace_layers(model, lambda layer: isinstance(layer, (*SPLIT, Linear, Conv1D)) and layer.name in names, make)


def agree_on_weights(modules: Iterable[Module], comm: Comm) -> int:
    """Let every split layer below `modules` round to the grid of its whole weight; return how many numbers that took.

    comm: the tensor-parallel ranks; all of them call it with the same layers. One all-reduce (maximum) of a number per
    output, or per layer, by recursive doubling, purpose `quantization_range`.
    """
    layers = [
        layer for module in modules for layer in module.modules() if isinstance(layer, QATSplitLinear) and layer.agrees
    ]
    for layer in layers:
        layer.agreed = None
    shards = [layer.largest() for layer in layers]
    if not shards:
        return 0
    table = xp.concatenate([shard.reshape(-1) for shard in shards])
    with purpose("quantization_range"):
        all_reduce(comm, table, "max", algorithm="recursive_doubling")
    for layer, shard, part in zip(layers, shards, cut(table, [shard.size for shard in shards]), strict=True):
        layer.agreed = part.reshape(shard.shape)
    return int(table.size)
