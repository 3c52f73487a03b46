"""Clipping by the global gradient norm, with bits that do not depend on how the gradient is sharded.

A float32 sum of squares depends on where it is cut. Here the gradient is cut into blocks of 1,024 elements in its
global order, each block is summed in float64 by itself, and the block sums are added from first to last. A rank whose
shard begins at a multiple of 1,024 computes exactly the blocks it holds; the strategy gathers them (8 bytes per 1,024
elements), and every rank adds the same numbers in the same order:

    blocks = block_square_sums(shard.grad)      here
    blocks = all_gather(comm, blocks)           in parallel/, purpose "clip_norm"
    norm = norm_from_blocks(blocks)             here

Blocks of zeros (padding) change nothing. Source of the method: R. Pascanu, T. Mikolov, Y. Bengio, "On the difficulty of
training recurrent neural networks" (ICML 2013), algorithm 1; the coefficient is PyTorch's.
Proved by: tests/optim/test_clip.py
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from minidist.base.limits import check_number
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.optim.optimizer import NORM_BLOCK

_CHUNK = 64 * NORM_BLOCK  # elements converted at a time, so that the float64 copy stays in the cache


def block_square_sums(array: xp.Array, skip: Sequence[slice] = ()) -> xp.Array:
    """Return the sums of squares of blocks of 1,024 elements of a 1-D array: float64, shape (ceil(size / 1024),).

    skip: elements that do not count, because another rank counts them.
    """
    # A copy, because the gradient itself still has these elements.
    if skip:
        array = xp.array(array)
        for elements in skip:
            array[elements] = 0

    # sums: the result. squares: one piece in float64, at most `chunk` elements, used again for every piece.
    size = array.size
    sums = xp.empty(-(-size // NORM_BLOCK), xp.float64, array)
    chunk = xp.block_length(array, _CHUNK)
    squares = xp.empty(min(chunk, -(-size // NORM_BLOCK) * NORM_BLOCK), xp.float64, array)
    for place in xp.blocks(array, _CHUNK):
        # Convert one piece to float64 and square it there.
        piece = array[place]
        blocks = -(-piece.size // NORM_BLOCK)
        part = squares[: blocks * NORM_BLOCK]
        part[piece.size :] = 0  # the last block is summed like a full one, padded with zeros
        xp.copyto(part[: piece.size], piece)
        xp.square(part, out=part)

        # One sum per row of 1,024.
        first = place.start // NORM_BLOCK
        part.reshape(blocks, NORM_BLOCK).sum(axis=1, out=sums[first : first + blocks])
    return sums


def add_blocks(blocks: xp.Array, total: float = 0.0) -> float:
    """Return `total` plus the block sums, added one after the other in the order given."""
    for value in blocks.tolist():  # not sum(): from Python 3.12 on that compensates, so its bits differ by version
        total += value
    return total


def norm_from_blocks(blocks: xp.Array) -> float:
    """Return the norm whose block sums in global order are `blocks`."""
    return math.sqrt(add_blocks(blocks))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return min(1, max_norm / (norm + 1e-6)). An infinite norm gives 0 and a NaN gives NaN, as in PyTorch.

    max_norm: a number above 0; an infinite one leaves the gradients as they are. Raises UsageError for others.
    """
    check_max_norm(max_norm)
    return 1.0 if norm + 1e-6 <= max_norm else max_norm / (norm + 1e-6)


def check_max_norm(max_norm: Any) -> None:
    """Raise UsageError unless gradients can be clipped to this norm: with 0 (DeepSpeed's "off") all would become 0."""
    if max_norm != math.inf:
        try:
            check_number("max_norm", max_norm, above=0)
        except UsageError as error:
            raise UsageError(f"{error}, or infinite to compute the norm alone") from None


def scale_gradients_(parameters: Any, coefficient: float) -> None:
    """Multiply all gradients in place; nothing is touched when the coefficient is 1."""
    if coefficient != 1.0:
        for grad in gradients(parameters):
            grad *= coefficient


def clip_by_norm_(parameters: Any, norm: float, max_norm: float, optimizer: Any = None) -> float:
    """Scale the gradients in place so that their norm, which is known already, is at most `max_norm`; returns it.

    optimizer: when given, nothing is changed in place. The norm is that of the gradients times `optimizer.grad_scale`
    (the unscaled ones), and the coefficient goes into `grad_scale`: for gradients in half precision, which are scaled
    in float32.
    """
    if optimizer is None:
        scale_gradients_(parameters, clip_coefficient(norm, max_norm))
        return norm

    # The stored gradients are the true ones times 1 / grad_scale; the optimizer scales while it reads them.
    norm *= optimizer.grad_scale
    optimizer.grad_scale *= clip_coefficient(norm, max_norm)
    return norm


def holders(parameters: Any) -> Iterator[Any]:
    """Yield what has a gradient in a `FlatParameters`, a slice, a parameter, or an iterable (a generator) of these."""
    if hasattr(parameters, "data") and hasattr(parameters, "grad"):
        yield parameters
    else:
        for piece in parameters:
            yield from holders(piece)


def gradients(parameters: Any) -> Iterator[xp.Array]:
    """Yield the gradients that exist, as 1-D arrays: one per `FlatParameters`, slice or parameter."""
    for holder in holders(parameters):
        if (grad := holder.grad) is not None:
            yield grad.reshape(-1)
