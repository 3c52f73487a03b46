"""A parameter's tile: cutting it from the whole, and the whole from the tiles.

    blocks=1                        blocks=3: a fused Q|K|V is cut inside each of Q, K and V
    | rank 0 | rank 1 |             | q0 q1 | k0 k1 | v0 v1 |   rank 0 holds | q0 | k0 | v0 |

A contiguous cut of a fused matrix would hand rank 0 all of Q and half of K. What cut a parameter has is its
`Layout`; `full_tensor` reads that and gathers, so a checkpoint, a test or a picture never has to know the strategy.
"""

from typing import Any, Protocol

from minidist.autograd import Parameter
from minidist.base import arrays as xp
from minidist.base.errors import UsageError
from minidist.base.layout import Layout
from minidist.base.trace import purpose
from minidist.collectives import all_gather
from minidist.comm import Comm
from minidist.nn.module import Module


class Axes(Protocol):
    """A mesh, or a dict {axis name: communicator}."""

    def __getitem__(self, name: Any, /) -> Comm: ...


def cut(array: xp.Array, layout: Layout, rank: int, ranks: int) -> xp.Array:
    """Rank's tile of the whole `array`, a new contiguous array; `layout` has one axis, which has `ranks` ranks."""
    (dim,) = layout.dims
    front = xp.moveaxis(array, dim, 0)
    if layout.padding:
        front = xp.concatenate([front, xp.zeros((layout.padding, *front.shape[1:]), array.dtype, array)])
    length, blocks = front.shape[0], layout.blocks
    if length % (blocks * ranks):
        raise UsageError(
            f"dim {dim} of shape {layout.global_shape} has {length // blocks} entries in each of {blocks} blocks, which "
            f"do not divide over {ranks} ranks"
        )
    size = length // blocks // ranks
    parts = front.reshape(blocks, ranks, size, *front.shape[1:])[:, rank].reshape(blocks * size, *front.shape[1:])
    tile = xp.empty(xp.moveaxis(parts, 0, dim).shape, array.dtype, array)
    xp.copyto(tile, xp.moveaxis(parts, 0, dim))
    return tile


def join(tiles: xp.Array, layout: Layout) -> xp.Array:
    """The whole from its tiles (ranks, *tile shape): the inverse of `cut`."""
    (dim,) = layout.dims
    ranks, blocks = tiles.shape[0], layout.blocks
    fronts = xp.moveaxis(tiles, dim + 1, 1)
    rest = fronts.shape[2:]
    split = fronts.reshape(ranks, blocks, fronts.shape[1] // blocks, *rest)
    whole = xp.swapaxes(split, 0, 1).reshape(-1, *rest)[: layout.global_shape[dim]]
    result = xp.empty(layout.global_shape, tiles.dtype, tiles)
    xp.copyto(result, xp.moveaxis(whole, 0, dim))
    return result


def full_tensor(array: xp.Array, layout: Layout | None, mesh: Axes, why: str = "checkpoint") -> xp.Array:
    """The global array of which `array` (in the tile's shape, or flat) is this rank's tile; on every rank.

    One all-gather over the layout's axis under purpose `why`; a replicated array sends nothing.
    """
    if layout is None or not layout.axes:
        return array if layout is None else array.reshape(layout.global_shape)
    comm = mesh[layout.axes[0]]
    shape = local_shape(layout, comm.size)
    with purpose(why):
        tiles = all_gather(comm, xp.array(array).reshape(-1))
    return join(tiles.reshape(comm.size, *shape), layout)


def local_shape(layout: Layout, ranks: int) -> tuple[int, ...]:
    """Shape of a tile when the layout's axis has `ranks` ranks."""
    return tuple(
        (n + layout.padding) // ranks if dim in layout.dims else n for dim, n in enumerate(layout.global_shape)
    )


def full_state_dict(module: Module, mesh: Axes) -> dict[str, xp.Array]:
    """Qualified name to whole array: what `state_dict` of the single-device model would be. A call of all ranks."""
    done: dict[Parameter, xp.Array] = {}
    result = {}
    for name, parameter in module._all_parameters():
        if parameter not in done:
            done[parameter] = full_tensor(parameter.data, parameter.layout, mesh)
        result[name] = done[parameter]
    return result


def shard_parameter(parameter: Parameter, layout: Layout, rank: int, ranks: int) -> Parameter:
    """A new parameter that holds rank's tile of `parameter` and carries the layout. Sends nothing."""
    if parameter.flat is not None:
        raise UsageError(
            f"parameter {parameter.name!r} belongs to a FlatParameters already; cut the model first and make it flat then"
        )
    data = cut(parameter.data, layout, rank, ranks) if ranks > 1 or layout.padding else xp.array(parameter.data)
    tile = Parameter(data, parameter.requires_grad, parameter.name, parameter.init)
    tile.layout = layout
    return tile
