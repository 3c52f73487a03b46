"""The borders of a region in which matrices are split, when outside of it each rank has 1/t of the sequence.

    region                                       forward             backward
    scatter_to_sequence_parallel_region          keep own rows       all-gather
    gather_from_sequence_parallel_region         all-gather          reduce-scatter
    reduce_scatter_to_sequence_parallel_region   reduce-scatter      all-gather

Activations are (batch, T, features): rows are those of the sequence, dim 1. An all-reduce is a reduce-scatter and an
all-gather, so the last two send the same bytes as f and g (see `minidist.core.parallel.tensor_parallel`). Between two
regions each rank keeps 1/t of the sequence, and norms and dropout work on that.

Source: Korthikanti et al., "Reducing Activation Recomputation", 2022, section 4.2.2. The functions have Megatron-LM's
names.

Proved by: tests/parallel/test_tensor.py
"""

from functools import partial
from typing import Any

from minidist.base.errors import check_divisible
from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose, track
from minidist.core.collectives import reduce_scatter
from minidist.core.comm import Comm, check_communicator
from minidist.core.parallel.tensor_parallel import border, contiguous
from minidist.parallel.tensor.gathering import gather, gathered, own_part

SEQUENCE = 1  # the dim of a sequence


def scatter_to_sequence_parallel_region(x: Tensor, comm: Comm) -> Tensor:
    """Return this rank's rows of x (batch, T, ...); backward gathers the gradient's rows."""
    check_communicator(comm, "scatter_to_sequence_parallel_region")
    _check(comm, x)
    return x if comm.size == 1 else border("Scatter", x, comm, partial(own_part, dim=SEQUENCE), _all_rows)


def gather_from_sequence_parallel_region(
    x: Tensor, comm: Comm, tensor_parallel_output_grad: bool = True, regather: bool = False
) -> Tensor:
    """Return all ranks' rows; backward reduce-scatters the gradient.

    tensor_parallel_output_grad=False: every rank has the same gradient, and backward keeps its own rows.
    regather: a node that would save the result saves this rank's rows instead and gathers again in backward, under
    purpose `regather`; without it, splitting the sequence would save nothing.
    """
    check_communicator(comm, "gather_from_sequence_parallel_region")
    if comm.size == 1:
        return x
    # The gathered array is used now, and dropped when nothing in forward needs it any more.
    if tensor_parallel_output_grad:
        # Each rank has a part of the gradient of the whole, that of its columns.
        whole = border("_GatherSummands", x, comm, _all_rows, _scattered_sum)
    else:
        whole = gather(x, comm, SEQUENCE)
    return _Gathered(whole, x, comm) if regather else whole


def reduce_scatter_to_sequence_parallel_region(x: Tensor, comm: Comm) -> Tensor:
    """Return this rank's rows of the sum of x over `comm`; backward gathers the gradient's rows."""
    check_communicator(comm, "reduce_scatter_to_sequence_parallel_region")
    return x if comm.size == 1 else border("_ReduceScatter", x, comm, _scattered_sum, _all_rows)


_all_rows = partial(gathered, dim=SEQUENCE)


def _scattered_sum(comm: Comm, x: xp.Array, why: str) -> xp.Array:
    """Return this rank's rows of the sum of all ranks' x."""
    _check(comm, x)
    # The rows come first, so that the ranks' parts are the equal pieces of the flat array that reduce_scatter cuts.
    front = contiguous(xp.moveaxis(x, SEQUENCE, 0))
    comm.advance_clock(why)
    with purpose(why):
        part = reduce_scatter(comm, front)
    return contiguous(xp.moveaxis(part.reshape(front.shape[0] // comm.size, *front.shape[1:]), 0, SEQUENCE))


def _check(comm: Comm, x: Any) -> None:
    check_divisible(x.shape[SEQUENCE], "tokens of a sequence" if x.ndim > 2 else "columns", comm.size, "tensor")


class _Gathered(Tensor):
    """A gathered tensor that saves only the shard."""

    __slots__ = ("_kept",)

    def __init__(self, tensor: Tensor, shard: Tensor, comm: Comm) -> None:
        super().__init__(tensor.data)
        self.node = tensor.node
        self._kept = _Regather(shard.saved(), comm)

    def saved(self) -> "_Regather":
        return self._kept


class _Regather:
    """Gathers the shard at the first read in backward; nodes that share the input share the gathered array."""

    def __init__(self, shard: Any, comm: Comm) -> None:
        self.shard, self.comm = shard, comm
        self.whole: xp.Array | None = None

    @property
    def data(self) -> xp.Array:
        # Gathered once in backward, whichever of the nodes reads it first.
        if self.whole is None:
            self.whole = track(gathered(self.comm, self.shard.data, SEQUENCE, "regather"), "communication")
        return self.whole
