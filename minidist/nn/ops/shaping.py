"""Operations that move elements, in addition to those of the core: transpose, stretch, join, stack and split.

Proved by: tests/autograd/test_operations.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.base.errors import DtypeError, ShapeError, reason
from minidist.core.autograd.operators import getitem, summed_to
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp


def transpose(x: Tensor, axes: Any = None) -> Tensor:
    """Dims in the order of `axes`; reversed when None. A view."""
    axes = tuple(range(x.ndim))[::-1] if axes is None else tuple(axes)
    if any(a not in range(-x.ndim, x.ndim) for a in axes) or len({a % x.ndim for a in axes}) != x.ndim:
        raise ShapeError(f"transpose: axes {axes} are not a permutation of the dims of shape {x.shape}")
    inverse = [0] * len(axes)
    for new, old in enumerate(axes):
        inverse[old % x.ndim] = new
    return record("transpose", x.data.transpose(axes), ((x, lambda g: g.transpose(inverse)),), cost=0)


def swapaxes(x: Tensor, a: int, b: int) -> Tensor:
    """Two dims exchanged."""
    return record("swapaxes", xp.swapaxes(x.data, a, b), ((x, lambda g: xp.swapaxes(g, a, b)),), cost=0)


def broadcast_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x stretched to `shape` as in NumPy. A read-only view."""
    try:
        data = xp.broadcast_to(x.data, shape)
    except ValueError:
        raise ShapeError(f"broadcast_to: shape {x.shape} does not stretch to {tuple(shape)}") from None
    return record("broadcast_to", data, ((x, summed_to(x, data)),), cost=0)


def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors one after the other along an existing dim."""
    _same_dtype("concatenate", tensors)
    try:
        data = xp.concatenate([t.data for t in tensors], axis=axis)
    except ValueError as error:
        shapes = " and ".join(str(t.shape) for t in tensors)
        raise ShapeError(f"concatenate: shapes {shapes} do not fit along axis {axis} ({reason(error)})") from None
    edges, start = [], 0
    for tensor in tensors:
        end = start + tensor.shape[axis]
        edges.append((tensor, _slicer(axis % data.ndim, slice(start, end))))
        start = end
    return record("concatenate", data, edges, cost=0)


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors of one shape along a new dim."""
    _same_dtype("stack", tensors)
    try:
        data = xp.stack([t.data for t in tensors], axis=axis)
    except ValueError as error:
        shapes = " and ".join(str(t.shape) for t in tensors)
        raise ShapeError(f"stack: shapes {shapes} are not all the same ({reason(error)})") from None
    return record("stack", data, [(t, _slicer(axis % data.ndim, i)) for i, t in enumerate(tensors)], cost=0)


def split(x: Tensor, sizes: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    """Consecutive pieces along a dim, of the given sizes; a number means equal sizes, the last perhaps shorter."""
    length = x.shape[axis]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)] if length else [0]
    total = 0
    pieces = []
    for size in sizes:
        pieces.append(getitem(x, (slice(None),) * (axis % x.ndim) + (slice(total, total + size),)))
        total += size
    if total != length:
        raise ShapeError(
            f"split: sizes {list(sizes)} add up to {total}, but axis {axis} of shape {x.shape} has {length}"
        )
    return pieces


def _slicer(axis: int, piece: Any) -> Any:
    index = (slice(None),) * axis + (piece,)
    return lambda g: g[index]


def _same_dtype(name: str, tensors: Sequence[Tensor]) -> None:
    if len({t.dtype for t in tensors}) > 1:
        raise DtypeError(f"{name}: dtypes {', '.join(str(t.dtype) for t in tensors)} differ; cast first")
