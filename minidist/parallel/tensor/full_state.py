"""The whole arrays of a sharded model: joined from the shards, and loaded into them.

    take_shard     whole ──▶ | rank 0 | rank 1 | ...        join_shards    the inverse

`full_tensor` reads a parameter's `Layout` and gathers, so a checkpoint, a test or a picture never has to know the
strategy. A tensor that is split twice (experts over ep, then their matrices over tp) is joined in the opposite order.

Proved by: tests/parallel/test_tensor.py, tests/checkpoint/test_layouts.py
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from minidist.base.errors import UsageError, nearest
from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.layout import Layout
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.core.nn.module import Module
from minidist.core.parallel.tensor_parallel import take_shard
from minidist.nn.buffers import named_buffers


class MeshLike(Protocol):
    """A mesh, or a dict {axis name: communicator}."""

    def __getitem__(self, name: Any, /) -> Comm: ...


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
    return result | dict(named_buffers(module))


def load_full_state_dict(
    module: Module, state: Mapping[str, Any], mesh: MeshLike, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load whole arrays into a model that is sharded already, as `Module.load_state_dict`: each rank takes its shards.

    A name that is missing or unknown is an error with strict; a shape that differs from the *global* one always. Sends
    nothing.
    """
    shards: dict[str, Any] = {}
    own, buffers = dict(module._all_parameters()), dict(named_buffers(module))
    for name, value in state.items():
        if name in own:
            layout, value = own[name].layout, xp.as_array(value)
            shape = own[name].shape if layout is None else layout.global_shape
            if value.shape != tuple(shape):
                raise UsageError(
                    f"load_full_state_dict: {name!r} has shape {value.shape}; the whole parameter has {tuple(shape)}"
                )
            value = local_tensor(value, layout, mesh)
        elif strict and name not in buffers:
            raise UsageError(f"load_full_state_dict: the model has no {name!r}{nearest(name, own)}")
        shards[name] = value
    return module.load_state_dict(shards, strict)  # type: ignore[no-any-return]
