"""Operations on each element. Two operands broadcast as in NumPy.

A vjp keeps the operand (through `saved()`, so that a Parameter is re-read and its version checked) or the result,
whichever it needs, and nothing else.

Proved by: tests/autograd/test_operations.py
"""

from math import pi
from math import sqrt as square_root
from typing import Any

from minidist.autograd.errors import AutogradError
from minidist.autograd.operands import mismatch, operand, pair, summed_to, unbroadcast
from minidist.autograd.tensor import Tensor, record
from minidist.base import arrays as xp
from minidist.base.arrays import downcast


def cast(x: Tensor, dtype: Any) -> Tensor:
    """The values in another float dtype, rounded to the nearest; the gradient comes back in the old one."""
    old, new = x.dtype, xp.dtype(dtype)
    if old == new:
        return x
    return record("cast", downcast(x.data, new), ((x, lambda g: downcast(g, old)),), cost=0)


def add(a: Any, b: Any) -> Tensor:
    """a + b."""
    a, b = pair("add", a, b)
    try:
        data = a.data + b.data
    except ValueError:
        raise mismatch("add", a, b) from None
    return record("add", data, ((a, summed_to(a, data)), (b, summed_to(b, data))))


def sub(a: Any, b: Any) -> Tensor:
    """a - b."""
    a, b = pair("sub", a, b)
    try:
        data = a.data - b.data
    except ValueError:
        raise mismatch("sub", a, b) from None
    shape = b.shape
    return record("sub", data, ((a, summed_to(a, data)), (b, lambda g: unbroadcast(-g, shape))))


def mul(a: Any, b: Any) -> Tensor:
    """a * b."""
    a, b = pair("mul", a, b)
    try:
        data = a.data * b.data
    except ValueError:
        raise mismatch("mul", a, b) from None
    kept_a, kept_b, shape_a, shape_b = a.saved(), b.saved(), a.shape, b.shape
    return record(
        "mul",
        data,
        ((a, lambda g: unbroadcast(g * kept_b.data, shape_a)), (b, lambda g: unbroadcast(g * kept_a.data, shape_b))),
    )


def div(a: Any, b: Any) -> Tensor:
    """a / b."""
    a, b = pair("div", a, b)
    try:
        data = a.data / b.data
    except ValueError:
        raise mismatch("div", a, b) from None
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


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), through tanh so that nothing overflows."""
    x = operand(x)
    result = x.save(xp.tanh(x.data * 0.5) * 0.5 + 0.5)

    def grad(g: xp.Array) -> xp.Array:
        y = result.data
        return g * (y * (1 - y))

    return record("sigmoid", result.stored, ((x, grad),))


def relu(x: Tensor) -> Tensor:
    """max(x, 0); the gradient at 0 is 0, as in PyTorch."""
    data = xp.maximum(x.data, 0)
    return record("relu", data, ((x, lambda g: g * (data > 0)),))


def maximum(a: Any, b: Any) -> Tensor:
    """The larger of two; where they are equal each gets half of the gradient."""
    a, b = pair("maximum", a, b)
    try:
        data = xp.maximum(a.data, b.data)
    except ValueError:
        raise mismatch("maximum", a, b) from None
    kept_a, kept_b, shape_a, shape_b = a.saved(), b.saved(), a.shape, b.shape

    def share(of: Any, other: Any) -> Any:
        return xp.as_array((xp.as_array(of > other, data.dtype) + (of >= other)) * 0.5, data.dtype)

    return record(
        "maximum",
        data,
        (
            (a, lambda g: unbroadcast(g * share(kept_a.data, kept_b.data), shape_a)),
            (b, lambda g: unbroadcast(g * share(kept_b.data, kept_a.data), shape_b)),
        ),
    )


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of two."""
    a, b = pair("minimum", a, b)
    return neg(maximum(neg(a), neg(b)))


def absolute(x: Tensor) -> Tensor:
    """|x|; the gradient at 0 is 0."""
    kept = x.saved()
    return record("absolute", xp.absolute(x.data), ((x, lambda g: g * xp.sign(kept.data)),))


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where the condition (an array of bools, no tensor) is true, else b."""
    if isinstance(condition, Tensor):
        raise AutogradError(
            "where: the condition must be an array of bools, not a Tensor; compare the .data of tensors"
        )
    condition = xp.as_array(condition)
    a, b = pair("where", a, b)
    try:
        data = xp.where(condition, a.data, b.data)
    except ValueError:
        raise mismatch("where", a, b, f"do not broadcast with a condition of shape {condition.shape}") from None
    shape_a, shape_b = a.shape, b.shape
    return record(
        "where",
        data,
        ((a, lambda g: unbroadcast(g * condition, shape_a)), (b, lambda g: unbroadcast(g * ~condition, shape_b))),
    )


def gelu_composite(x: Tensor) -> Tensor:
    """GELU in tanh form from elementary operations (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016): the
    oracle of `gelu`.
    """
    inner = (x + x * x * x * 0.044715) * square_root(2 / pi)
    return x * 0.5 * (tanh(inner) + 1.0)
