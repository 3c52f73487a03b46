"""Operations on each element. Two operands broadcast as in NumPy.

A vjp keeps the operand (through `saved()`, so that a Parameter is re-read and its version checked) or the result,
whichever it needs, and nothing else.

Proved by: tests/autograd/test_operations.py
"""

import operator
from collections.abc import Callable
from typing import Any

from minidist.core.autograd.errors import AutogradError
from minidist.core.autograd.operands import mismatch, operand, pair, summed_to, unbroadcast
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp
from minidist.core.base.arrays import downcast


def cast(x: Tensor, dtype: Any) -> Tensor:
    """The values in another float dtype, rounded to the nearest; the gradient comes back in the old one."""
    old, new = x.dtype, xp.dtype(dtype)
    if old == new:
        return x
    return record("cast", downcast(x.data, new), ((x, lambda g: downcast(g, old)),), cost=0)


def computed(name: str, function: Callable[..., xp.Array], a: Any, b: Any) -> tuple[Tensor, Tensor, xp.Array]:
    """Return both operands as tensors of one dtype, and function(a, b) of their broadcast arrays."""
    a, b = pair(name, a, b)
    try:
        return a, b, function(a.data, b.data)
    except ValueError:
        raise mismatch(name, a, b) from None


def add(a: Any, b: Any) -> Tensor:
    """a + b."""
    a, b, data = computed("add", operator.add, a, b)
    return record("add", data, ((a, summed_to(a, data)), (b, summed_to(b, data))))


def sub(a: Any, b: Any) -> Tensor:
    """a - b."""
    a, b, data = computed("sub", operator.sub, a, b)
    shape = b.shape
    return record("sub", data, ((a, summed_to(a, data)), (b, lambda g: unbroadcast(-g, shape))))


def mul(a: Any, b: Any) -> Tensor:
    """a * b."""
    a, b, data = computed("mul", operator.mul, a, b)
    kept_a, kept_b, shape_a, shape_b = a.saved(), b.saved(), a.shape, b.shape
    return record(
        "mul",
        data,
        ((a, lambda g: unbroadcast(g * kept_b.data, shape_a)), (b, lambda g: unbroadcast(g * kept_a.data, shape_b))),
    )


def div(a: Any, b: Any) -> Tensor:
    """a / b."""
    a, b, data = computed("div", operator.truediv, a, b)
    kept_b, shape_a, shape_b = b.saved(), a.shape, b.shape
    return record(
        "div",
        data,
        (
            (a, lambda g: unbroadcast(g / kept_b.data, shape_a)),
            (b, lambda g: unbroadcast(-g * data / kept_b.data, shape_b)),
        ),
    )


def neg(x: Tensor) -> Tensor:
    """-x."""
    return record("neg", -x.data, ((x, lambda g: -g),))


def pow(x: Tensor, exponent: float) -> Tensor:
    """x to a constant power."""
    if isinstance(exponent, Tensor):
        raise AutogradError("pow: the exponent must be a number; write exp(y * log(x)) for a tensor")
    exponent = exponent if isinstance(exponent, int) else float(exponent)
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
    data = xp.maximum(x.data, 0)
    return record("relu", data, ((x, lambda g: g * (data > 0)),))
