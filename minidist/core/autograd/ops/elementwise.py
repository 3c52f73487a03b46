"""Operations on each element. Two operands broadcast as in NumPy.

A vector-Jacobian product (vjp) keeps only what it needs, the operand or the result. It keeps an operand through
`saved()`, so that a Parameter is read again and its version is checked.

GELU is the tanh form (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016), value and derivative in one pass: x/2
(1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3). The pass goes block by block, and a block stays in the cache. The
derivative is stored, not recomputed: backward is one multiplication.

Proved by: tests/autograd/test_operations.py, tests/autograd/test_fused.py, tests/autograd/test_half.py
"""

import math
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


_BLOCK = 32 * 1024  # elements; four float32 blocks are 512 KiB, which fit into a second-level cache


def gelu_with_derivative(x: xp.Array) -> tuple[xp.Array, xp.Array]:
    """(gelu(x), gelu'(x)), both new arrays of x's shape and dtype."""
    if (kernels := xp.kernels_of(x)) is not None:
        return kernels.gelu_with_derivative(x)
    c = math.sqrt(2 / math.pi)
    x_flat = x.reshape(-1)
    value, derivative = xp.empty(x.shape, x.dtype, x), xp.empty(x.shape, x.dtype, x)
    v_flat, d_flat = value.reshape(-1), derivative.reshape(-1)
    for block in xp.blocks(x_flat, _BLOCK):
        part, t, d = x_flat[block], v_flat[block], d_flat[block]
        square = part * part
        xp.multiply(square, 0.044715 * c, out=t)
        t += c
        t *= part
        xp.tanh(t, out=t)  # tanh u
        # derivative = (1 + t)/2 + x (1 - t^2) u'/2, u'/2 = c/2 + 1.5 c 0.044715 x^2
        square *= 1.5 * 0.044715 * c
        square += 0.5 * c
        square *= part
        xp.multiply(t, t, out=d)
        xp.subtract(1, d, out=d)
        d *= square
        t += 1
        t *= 0.5
        d += t
        t *= part
    return value, derivative


def gelu(x: Tensor) -> Tensor:
    """GELU of each element, in tanh form."""
    x = operand(x)
    value, derivative = gelu_with_derivative(x.data)
    kept = x.save(derivative)
    return record("gelu", value, ((x, lambda g: g * kept.data),), cost=11 * x.size, saved=(kept.stored,))
