"""Norms, dropout and position rows on 1/t of the sequence, between the regions that need all of it: less memory.

    tensor parallel     [norm on all rows] f [matrices, 1/t of the columns] g [dropout on all rows] ...
    sequence parallel   [norm on own rows] all-gather [matrices] reduce-scatter [dropout on own rows] ...

Without it every rank computes, and saves, the same norm of the same rows. A norm's weight is replicated but each rank
sees its own rows only, so its gradient is a summand: the weight passes f on its way in, and backward sums it over the
ranks. (Leaving that sum out is a known bug; the loss falls all the same.)

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2.

Proved by: tests/parallel/test_tensor.py, tests/train/test_replicas.py
"""

from collections.abc import Callable
from typing import Any

from minidist.base.coordinates import BatchCoordinates
from minidist.core.autograd import Tensor, embedding, layer_norm
from minidist.core.base import arrays as xp
from minidist.core.nn.layers import Embedding, LayerNorm
from minidist.core.nn.module import Module
from minidist.core.parallel.tensor_parallel import ShardContext, copy_to_tensor_parallel_region
from minidist.nn import rms_norm
from minidist.nn.dropout import Dropout
from minidist.nn.norms import RMSNorm
from minidist.parallel.tensor.gathering import own_part
from minidist.parallel.tensor.styles import ParallelStyle


class SequenceParallelLayerNorm(Module):
    """Layer norm of this rank's rows.

    The gradients of weight and bias are summed over `comm` in backward: an all-reduce of `features` elements each.
    """

    def __init__(self, whole: LayerNorm, context: ShardContext) -> None:
        self.comm, self.name, self.eps = context.comm, whole.name, whole.eps
        self.weight, self.bias = context.replica_of(whole.weight), context.replica_of(whole.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, T/t, features) -> the same shape."""
        # f on the parameters: their gradient from these rows is a summand.
        weight = copy_to_tensor_parallel_region(self.weight, self.comm)
        return layer_norm(x, weight, copy_to_tensor_parallel_region(self.bias, self.comm), self.eps)


class SequenceParallelRMSNorm(Module):
    """RMS norm of this rank's rows; the weight's gradient is summed over `comm` in backward."""

    def __init__(self, whole: RMSNorm, context: ShardContext) -> None:
        self.comm, self.name, self.eps = context.comm, whole.name, whole.eps
        self.weight = context.replica_of(whole.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, T/t, features) -> the same shape."""
        return rms_norm(x, copy_to_tensor_parallel_region(self.weight, self.comm), self.eps)


class SequenceParallelEmbedding(Module):
    """This rank's rows of a look-up by position: integers (T,) on all -> (T/t, width) on each."""

    def __init__(self, whole: Embedding, context: ShardContext) -> None:
        self.comm, self.name, self.weight = context.comm, whole.name, context.replica_of(whole.weight)

    def forward(self, indices: Any) -> Tensor:
        """Integers (T,) -> (T/t, width)."""
        # (T,) -> (T/t,): the positions of this rank's rows.
        own = own_part(self.comm, xp.as_array(indices), 0)
        return embedding(own, copy_to_tensor_parallel_region(self.weight, self.comm))


class SequenceParallelDropout(Dropout):
    """The rows of the global mask that this rank holds: the numbers that one device would draw for them."""

    def __init__(self, whole: Dropout, context: ShardContext) -> None:
        super().__init__(whole.p)
        self.comm, self.name, self.training = context.comm, whole.name, whole.training

    def places(self, rows: int, place: BatchCoordinates) -> tuple[int, Any]:
        """As in `Dropout`, for this rank's part of the rows that the ranks of `comm` hold together."""
        # The places that the ranks hold together, and this rank's part of them.
        length, positions = super().places(rows * self.comm.size, place)
        return length, own_part(self.comm, xp.device_arange(length) if positions is None else xp.as_array(positions), 0)


# The kinds of modules that work on a part of the sequence, and their classes for it.
SEQUENCE_PARALLEL: dict[type[Module], Callable[[Any, ShardContext], Module]] = {
    LayerNorm: SequenceParallelLayerNorm,
    RMSNorm: SequenceParallelRMSNorm,
    Dropout: SequenceParallelDropout,
    Embedding: SequenceParallelEmbedding,
}


class SequenceParallel(ParallelStyle):
    """LayerNorm, RMSNorm, Dropout or the position Embedding: works on this rank's rows of the sequence."""

    def apply(self, module: Any, name: str, context: ShardContext) -> Module:
        """Return the module's class for a part of the sequence."""
        self.expect(module, name, *SEQUENCE_PARALLEL)
        return next(split(module, context) for kind, split in SEQUENCE_PARALLEL.items() if isinstance(module, kind))
