"""Operations on each element, maxima, and the logarithm of a softmax: methods of a tensor that the core does not have.

Proved by: tests/autograd/test_operations.py, tests/autograd/test_half.py
"""

import operator
from typing import Any

from minidist.base.errors import AutogradError, DtypeError, ShapeError, quoted
from minidist.core.autograd.operators import axes_of, computed, operand, summed_to, unbroadcast
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import downcast


def astype(x: Tensor, dtype: Any) -> Tensor:
    """The values in another float dtype, rounded to the nearest; the gradient comes back in the old one."""
    try:
        old, new = x.dtype, xp.dtype(dtype)
    except TypeError:
        raise DtypeError(f"astype: {quoted(dtype)} is not a dtype; pass one such as np.float32") from None
    if old == new:
        return x
    return record("cast", downcast(x.data, new), ((x, lambda g: downcast(g, old)),), cost=0)


def sub(a: Any, b: Any) -> Tensor:
    """a - b."""
    a, b, data = computed("sub", operator.sub, a, b)
    shape = b.shape
    return record("sub", data, ((a, summed_to(a, data)), (b, lambda g: unbroadcast(-g, shape))))


def neg(x: Tensor) -> Tensor:
    """-x."""
    return record("neg", -x.data, ((x, lambda g: -g),))


def pow(x: Tensor, exponent: float) -> Tensor:
    """x to a constant power."""
    if isinstance(exponent, Tensor):
        raise AutogradError("pow: the exponent must be a number; write exp(y * log(x)) for a tensor")
    try:
        exponent = exponent if isinstance(exponent, int) else float(exponent)
    except (TypeError, ValueError):
        raise AutogradError(f"pow: the exponent is {quoted(exponent)}; it must be a number") from None
    x = operand(x)
    kept, data = x.saved(), x.data
    if exponent == 2:
        return record("pow", data * data, ((x, lambda g: g * (kept.data * 2)),))
    return record("pow", data**exponent, ((x, lambda g: g * (exponent * kept.data ** (exponent - 1))),))


def exp(x: Tensor) -> Tensor:
    """e to the x."""
    x = operand(x)
    data = xp.exp(x.data)
    return record("exp", data, ((x, lambda g: g * data),))


def log(x: Tensor) -> Tensor:
    """Natural logarithm."""
    x = operand(x)
    kept = x.saved()
    return record("log", xp.log(x.data), ((x, lambda g: g / kept.data),))


def sqrt(x: Tensor) -> Tensor:
    """Square root."""
    x = operand(x)
    y = x.save(xp.sqrt(x.data))
    return record("sqrt", y.stored, ((x, lambda g: g / (y.data * 2)),))


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent."""
    x = operand(x)
    result = x.save(xp.tanh(x.data))

    def grad(g: xp.Array) -> xp.Array:
        y = result.data
        return g * (1 - y * y)

    return record("tanh", result.stored, ((x, grad),))


def relu(x: Tensor) -> Tensor:
    """max(x, 0); the gradient at 0 is 0, as in PyTorch."""
    operand(x)  # raises for anything but a Tensor
    data = xp.maximum(x.data, 0)
    return record("relu", data, ((x, lambda g: g * (data > 0)),))


def max(x: Tensor, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Largest element; elements that tie share the gradient evenly."""
    axes, kept = axes_of("max", x, axis), x.saved()
    kept_dims = tuple(1 if i in axes else n for i, n in enumerate(x.shape))
    try:
        data = x.data.max(axis=axes, keepdims=keepdims)
    except ValueError:
        raise ShapeError(f"max: no elements to compare in shape {x.shape} over axis {axis}") from None

    def grad(g: xp.Array) -> xp.Array:
        largest = (kept.data == data.reshape(kept_dims)).astype(g.dtype)
        return largest * (g.reshape(kept_dims) / largest.sum(axis=axes, keepdims=True))

    return record("max", data, ((operand(x), grad),), cost=x.size)


def log_softmax(x: Tensor, axis: int = -1) -> Tensor:
    """log(softmax(x)) along `axis`, without ever taking the logarithm of a zero."""
    axes_of("log_softmax", x, axis)
    if x.size == 0:
        return x * 1.0
    x = operand(x)
    values = x.data
    shifted = values - values.max(axis=axis, keepdims=True)
    data = shifted - xp.log(xp.exp(shifted).sum(axis=axis, keepdims=True))

    def grad(g: xp.Array) -> xp.Array:
        return g - xp.exp(data) * g.sum(axis=axis, keepdims=True)

    return record("log_softmax", data, ((x, grad),), cost=5 * x.size)
