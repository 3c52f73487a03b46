"""A parameter's shard, taken from the whole.

    blocks=1                        blocks=3: a fused Q|K|V is split inside each of Q, K and V
    | rank 0 | rank 1 |             | q0 q1 | k0 k1 | v0 v1 |   rank 0 holds | q0 | k0 | v0 |

A contiguous split of a fused matrix would give rank 0 all of Q and half of K. A parameter's `Layout` says how it is
split; full_state.py joins the whole from the shards.

Proved by: tests/parallel/test_tensor.py, tests/checkpoint/test_layouts.py
"""

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.base.layout import Layout


def take_shard(array: xp.Array, layout: Layout, rank: int, ranks: int) -> xp.Array:
    """Return `rank`'s shard of the whole `array`, a new contiguous array; the layout's one axis has `ranks` ranks."""
    (dim,) = layout.dims

    # The split dim comes first, with the padding behind it.
    front = xp.moveaxis(array, dim, 0)
    if layout.padding:
        front = xp.concatenate([front, xp.zeros((layout.padding, *front.shape[1:]), array.dtype, array)])
    length, blocks, shards = front.shape[0], layout.blocks, ranks // layout.copies
    if length % (blocks * shards) or ranks % layout.copies:
        raise UsageError(
            f"dim {dim} of shape {layout.global_shape} has {length // blocks} entries in each of {blocks} blocks, which"
            f" do not divide over {ranks} ranks"
        )

    # Every block is split into as many parts as there are shards; the shard has its part of each block.
    size = length // blocks // shards
    number = rank // layout.copies
    parts = front.reshape(blocks, shards, size, *front.shape[1:])[:, number].reshape(blocks * size, *front.shape[1:])

    # The split dim goes back to its place, in a new array: the whole one may be freed.
    shard = xp.empty(xp.moveaxis(parts, 0, dim).shape, array.dtype, array)
    xp.copyto(shard, xp.moveaxis(parts, 0, dim))
    return shard


def shard_parameter(parameter: Parameter, layout: Layout, rank: int, ranks: int) -> Parameter:
    """Return a new parameter that holds rank's shard of `parameter` and carries the layout. Sends nothing.

    A parameter that is a shard already is split once more: `layout` is its old one with one more axis.
    """
    if parameter.flat is not None:
        raise UsageError(
            f"parameter {parameter.name!r} belongs to a FlatParameters already; shard the model first and make it flat"
            " then"
        )

    # Only the newest axis is split here; the earlier ones have made `parameter` what it is.
    one = layout if len(layout.axes) == 1 else Layout(tuple(parameter.shape), layout.axes[-1:], layout.dims[-1:])
    data = take_shard(parameter.data, one, rank, ranks) if ranks > 1 or layout.padding else xp.array(parameter.data)
    shard = Parameter(data, parameter.requires_grad, parameter.name, parameter.init)
    shard.layout = layout
    return shard
