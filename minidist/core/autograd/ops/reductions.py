"""Sums and means over dims, and the softmax.

Proved by: tests/autograd/test_operations.py
"""

from typing import Any

from minidist.core.autograd.errors import ShapeError
from minidist.core.autograd.operands import operand
from minidist.core.autograd.tensor import Tensor, named_mean, record
from minidist.core.base import arrays as xp
from minidist.core.base import hooks


def axes_of(name: str, x: Tensor, axis: Any) -> tuple[int, ...]:
    """Return the dims that `axis` names, counted from 0; ShapeError for one that x has not."""
    axes = tuple(range(x.ndim)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    for a in axes:
        if not -x.ndim <= a < x.ndim:
            raise ShapeError(f"{name}: axis {a} does not exist in shape {x.shape}")
    return tuple(a % x.ndim for a in axes)


def sum(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Sum over one dim, several, or all (None)."""
    axes, shape = axes_of("sum", x, axis), x.shape
    kept_dims = tuple(1 if i in axes else n for i, n in enumerate(shape))
    x = operand(x)
    data = x.data.sum(axis=axes, keepdims=keepdims)
    edges = ((x, lambda g: xp.broadcast_to(g.reshape(kept_dims), shape)),)
    return record("sum", data, edges, cost=x.size)


def mean(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Mean over one dim, several, or all (None); nan over no elements, as in NumPy."""
    if x.dtype.kind in "biu":
        hooks.operation_checks().refuse_mean(x)
    count = 1
    for a in axes_of("mean", x, axis):
        count *= x.shape[a]
    return named_mean(sum(x, axis, keepdims) * (1 / count if count else float("nan")), f"{count} elements")


def softmax(x: Tensor, axis: int = -1) -> Tensor:
    """exp(x) / sum exp(x) along `axis`, shifted by the maximum so that nothing overflows."""
    axes_of("softmax", x, axis)
    if x.size == 0:
        return x * 1.0
    x = operand(x)
    values = x.data
    data = xp.exp(values - values.max(axis=axis, keepdims=True))
    data /= data.sum(axis=axis, keepdims=True)
    result = x.save(data)
    del data

    def grad(g: xp.Array) -> xp.Array:
        y = result.data
        return y * (g - (g * y).sum(axis=axis, keepdims=True))

    return record("softmax", result.stored, ((x, grad),), cost=5 * x.size)
