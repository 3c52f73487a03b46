"""Operations that move elements and compute nothing: reshape, join, index.

Proved by: tests/autograd/test_operations.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.core.autograd.errors import DtypeError, ShapeError
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp
from minidist.core.base.errors import quoted, reason


def reshape(x: Tensor, shape: Any) -> Tensor:
    """The same elements in row-major order under another shape; one entry may be -1."""
    old = x.shape
    try:
        data = x.data.reshape(shape)
    except ValueError:
        raise ShapeError(f"reshape: {x.size} elements of shape {old} do not fill shape {tuple(shape)}") from None
    return record("reshape", data, ((x, lambda g: g.reshape(old)),), cost=0)


def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors one after the other along an existing dim."""
    same_dtype("concatenate", tensors)
    try:
        data = xp.concatenate([t.data for t in tensors], axis=axis)
    except ValueError as error:
        shapes = " and ".join(str(t.shape) for t in tensors)
        raise ShapeError(f"concatenate: shapes {shapes} do not fit along axis {axis} ({reason(error)})") from None
    edges, start = [], 0
    for tensor in tensors:
        end = start + tensor.shape[axis]
        edges.append((tensor, slicer(axis % data.ndim, slice(start, end))))
        start = end
    return record("concatenate", data, edges, cost=0)


def getitem(x: Tensor, index: Any) -> Tensor:
    """x[index]: slices, integers, None, Ellipsis, arrays of integers or bools (repeats add up in backward)."""
    try:
        data = x.data[index]
    except IndexError as error:
        raise ShapeError(f"getitem: index {quoted(index)} does not fit shape {x.shape} ({reason(error)})") from None
    shape, kind = x.shape, x.dtype
    basic = all(
        isinstance(i, (int, slice)) or i is None or i is Ellipsis for i in (index if type(index) is tuple else (index,))
    )

    def grad(g: xp.Array) -> xp.Array:
        whole = xp.zeros(shape, kind, g)
        if basic:
            whole[index] = g
        else:
            xp.scatter_add(whole, index, g)
        return whole

    return record("getitem", data, ((x, grad),), cost=0)


def slicer(axis: int, piece: Any) -> Any:
    index = (slice(None),) * axis + (piece,)
    return lambda g: g[index]


def same_dtype(name: str, tensors: Sequence[Tensor]) -> None:
    if len({t.dtype for t in tensors}) > 1:
        raise DtypeError(f"{name}: dtypes {', '.join(str(t.dtype) for t in tensors)} differ; cast first")
