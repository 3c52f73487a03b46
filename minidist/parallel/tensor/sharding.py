"""A parameter's shard: taking it from the whole, and joining the whole from the shards.

    blocks=1                        blocks=3: a fused Q|K|V is split inside each of Q, K and V
    | rank 0 | rank 1 |             | q0 q1 | k0 k1 | v0 v1 |   rank 0 holds | q0 | k0 | v0 |

A contiguous split of a fused matrix would give rank 0 all of Q and half of K. A parameter's `Layout` says how it is
split; `full_tensor` reads that and gathers, so a checkpoint, a test or a picture never has to know the strategy. A
tensor that is split twice (experts over ep, each expert's matrices over tp) is joined in the opposite order.

Proved by: tests/parallel/test_tensor.py, tests/checkpoint/test_layouts.py
"""

from collections.abc import Iterator
from typing import Any, Protocol

from minidist.autograd import Parameter
from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.base.layout import Layout
from minidist.base.trace import purpose
from minidist.collectives import all_gather
from minidist.comm import Comm
from minidist.nn.module import Module


class MeshLike(Protocol):
    """A mesh, or a dict {axis name: communicator}."""

    def __getitem__(self, name: Any, /) -> Comm: ...


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


def join_shards(shards: xp.Array, layout: Layout) -> xp.Array:
    """Join the whole from its shards (ranks, *shard shape): the inverse of `take_shard`."""
    (dim,) = layout.dims

    # One of each group of ranks that hold the same shard.
    shards = shards[:: layout.copies]
    ranks, blocks = shards.shape[0], layout.blocks
    fronts = xp.moveaxis(shards, dim + 1, 1)
    rest = fronts.shape[2:]

    # (ranks, blocks, size) -> (blocks, ranks, size): the parts of a block lie side by side again.
    split = fronts.reshape(ranks, blocks, fronts.shape[1] // blocks, *rest)
    whole = xp.swapaxes(split, 0, 1).reshape(-1, *rest)[: layout.global_shape[dim]]

    # The padding is cut off above; the split dim goes back to its place.
    result = xp.empty(layout.global_shape, shards.dtype, shards)
    xp.copyto(result, xp.moveaxis(whole, 0, dim))
    return result


def splits(layout: Layout, mesh: MeshLike) -> Iterator[tuple[Comm, Layout]]:
    """The splits of a layout, one per axis: (the axis's communicator, the one-axis layout of what is split there)."""
    shape = layout.global_shape
    for axis, dim in zip(layout.axes, layout.dims, strict=True):
        # A later axis splits what the earlier ones have left.
        one = Layout(shape, (axis,), (dim,), layout.blocks, layout.padding, layout.copies)
        yield mesh[axis], one
        shape = local_shape(one, mesh[axis].size)


def local_tensor(array: xp.Array, layout: Layout | None, mesh: MeshLike) -> xp.Array:
    """Return this rank's shard of the whole `array`. Sends nothing."""
    for comm, one in splits(layout, mesh) if layout is not None else ():
        array = take_shard(array, one, comm.rank, comm.size)
    return array


def full_tensor(array: xp.Array, layout: Layout | None, mesh: MeshLike, why: str = "checkpoint") -> xp.Array:
    """Return the global array whose shard on this rank is `array` (in the shard's shape, or flat); on every rank.

    Sends one all-gather over each of the layout's axes under purpose `why`; a replicated array sends nothing.
    """
    if layout is None or not layout.axes:
        return array if layout is None else array.reshape(layout.global_shape)
    # The last split is joined first; after each step `array` is the shard of one axis fewer.
    for comm, one in reversed(list(splits(layout, mesh))):
        with purpose(why):
            shards = all_gather(comm, xp.array(array).reshape(-1))
        array = join_shards(shards.reshape(comm.size, *local_shape(one, comm.size)), one)
    return array


def local_shape(layout: Layout, ranks: int) -> tuple[int, ...]:
    """Return the shape of a shard when the layout's one axis has `ranks` ranks."""
    shards = ranks // layout.copies
    return tuple(
        (n + layout.padding) // shards if dim in layout.dims else n for dim, n in enumerate(layout.global_shape)
    )


def full_state_dict(module: Module, mesh: MeshLike) -> dict[str, xp.Array]:
    """Return {qualified name: whole array}, the `state_dict` of the single-device model. Every rank calls it.

    As in `state_dict`, an array that is not sharded is the parameter's own, not a copy.
    """
    done: dict[Parameter, xp.Array] = {}
    result = {}
    for name, parameter in module._all_parameters():
        # A tied parameter is gathered once.
        if parameter not in done:
            done[parameter] = full_tensor(parameter.data, parameter.layout, mesh)
        result[name] = done[parameter]
    return result | dict(module.named_buffers())


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
