"""Gathers what the layers of tensor parallelism have split by columns: outputs that no other layer takes, and logits.

    region                                       forward             backward
    gather_from_tensor_parallel_region           all-gather          keep own columns

Columns are the last dim. The plan of an MLP gathers the output of each layer but those of Megatron's pair; a language
model without targets gathers the logits of all words.

Proved by: tests/parallel/test_tensor.py
"""

from functools import partial
from typing import Any

from minidist.base.errors import check_divisible
from minidist.core.autograd import Tensor
from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.core.nn import MLP
from minidist.core.nn.module import Module
from minidist.core.parallel import tensor_parallel as split
from minidist.core.parallel.model_parallel import Styles
from minidist.core.parallel.tensor_parallel import border, contiguous


def gather_from_tensor_parallel_region(x: Tensor, comm: Comm) -> Tensor:
    """Return all ranks' columns; backward keeps this rank's columns of the gradient."""
    return x if comm.size == 1 else gather(x, comm, x.ndim - 1)


def gather(x: Tensor, comm: Comm, dim: int) -> Tensor:
    """Return all ranks' x, joined along `dim`; each rank has all of the gradient of the whole."""
    return border("Gather", x, comm, partial(gathered, dim=dim), partial(own_part, dim=dim))


def gathered(comm: Comm, x: xp.Array, dim: int, why: str) -> xp.Array:
    """Return all ranks' x, joined along `dim`. All ranks together send n-1 times the result's elements."""
    # `dim` comes first, so that the ranks' parts lie one after the other in the gathered array.
    front = contiguous(xp.moveaxis(x, dim, 0))
    comm.advance_clock(why)
    with purpose(why):
        whole = all_gather(comm, front)

    # (ranks, part, ...) -> (ranks x part, ...), and `dim` back in its place.
    return contiguous(xp.moveaxis(whole.reshape(comm.size * front.shape[0], *front.shape[1:]), 0, dim))


def own_part(comm: Comm, x: xp.Array, dim: int, why: str = "") -> xp.Array:
    """Return this rank's equal part of x along `dim`, a new array. Sends nothing."""
    check_divisible(x.shape[dim], "columns", comm.size, "tensor")
    size = x.shape[dim] // comm.size
    index = (slice(None),) * dim + (slice(comm.rank * size, (comm.rank + 1) * size),)
    return xp.array(contiguous(x[index]))


class ColumnParallelLinear(split.ColumnParallelLinear):
    """The core's class, perhaps with an all-gather of its output: y (..., out) on all ranks with gather_output."""

    def __init__(self, *arguments: Any, gather_output: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.gather_output = gather_output

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out / t), or (..., out) with gather_output."""
        y = super().forward(x)
        return gather_from_tensor_parallel_region(y, self.comm) if self.gather_output else y


class GatherLogits(Module):
    """The logits of all words, without the padding, on every rank: for generating text, not for training."""

    def __init__(self, comm: Comm, vocab_size: int) -> None:
        self.comm, self.vocab_size = comm, vocab_size

    def forward(self, logits: Tensor) -> Tensor:
        """(..., padded V / t) -> (..., V)."""
        return gather_from_tensor_parallel_region(logits, self.comm)[..., : self.vocab_size]


def mlp_plan(layers: int) -> Styles:
    """Return the plan of an `MLP` with `layers` hidden layers.

    Each splits its output features, the last layer its input features. The last two layers are Megatron's pair; those
    before it gather their outputs.
    """
    plan: Styles = {f"layers.{i}": partial(ColumnParallelLinear, gather_output=i < layers - 1) for i in range(layers)}
    return {**plan, f"layers.{layers}": split.RowParallelLinear}


def mlp_plan_of(model: Any) -> Styles | None:
    """Return the plan of an MLP; None for another model."""
    return mlp_plan(len(model.layers) - 1) if isinstance(model, MLP) else None
