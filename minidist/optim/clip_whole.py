"""Clip gradients that are whole on this rank, by their norm: PyTorch's `clip_grad_norm_`.

Proved by: tests/optim/test_clip.py
"""

from typing import Any

from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.optim.clip import block_square_sums, check_max_norm, clip_by_norm_, gradients, holders, norm_from_blocks


def clip_grad_norm_(parameters: Any, max_norm: float, optimizer: Any = None) -> float:
    """Scale the gradients in place so that their norm is at most `max_norm`; returns the norm before.

    parameters: a `FlatParameters`, slices, or an iterable of these, all of them on this rank. Each array of gradients
    begins a new block, so a reference that must equal units or stages bit for bit passes one slice for each of them.
    Raises UsageError for gradients that this rank has a part of only: the norm would be another one on each rank.
    optimizer: as for `clip_by_norm_`.
    """
    check_max_norm(max_norm)
    parameters = list(holders(parameters))  # model.parameters() can be walked once only
    for holder in parameters:
        _check_whole(holder)

    # The same blocks in the same order as on any number of ranks, so the same norm to the last bit.
    sums = [block_square_sums(grad) for grad in gradients(parameters)]
    norm = norm_from_blocks(xp.concatenate(sums)) if sums else 0.0
    return clip_by_norm_(parameters, norm, max_norm, optimizer)


def _check_whole(holder: Any) -> None:
    """Raise UsageError when this rank has a part of a gradient only: in shards, or of a matrix that is split."""
    # A slice has a source, a shard and a parameter of a unit have that unit, and the unit of a sharded one has a shard.
    source = getattr(holder, "source", holder)
    unit = getattr(source, "flat", None) or source
    shard = getattr(unit, "shard", None)
    if shard is not None and shard.comm.size > 1:
        raise UsageError(
            f"clip_grad_norm_ of {unit.names[0]!r}, whose summed gradient lies in shards on {shard.comm.size} ranks;"
            " call clip_shards_(comm, shards_of(model), max_norm), or clip_grad_norm_ of the ZeroOptimizer"
        )
    for parameter in getattr(unit, "parameters", (holder,)):
        layout = getattr(parameter, "layout", None)
        if layout is not None and layout.global_shape != parameter.shape:
            raise UsageError(
                f"clip_grad_norm_ of {parameter.name!r}, and this rank has only a shard, on axis {layout.axes[-1]!r};"
                " call parallel.tensor.clip_grad_norm_(model, max_norm, mesh), which sums the squares over the axes"
            )
