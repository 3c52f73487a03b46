"""Operations that move elements and compute nothing: reshape and index.

Proved by: tests/autograd/test_operations.py
"""

from typing import Any

from minidist.core.autograd.errors import ShapeError
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
