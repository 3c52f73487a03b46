"""GELU in tanh form (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016), value and derivative in one sweep.

gelu(x) = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3). The sweep goes in blocks that stay in the cache, because
eleven passes over a large array would otherwise each go to memory. The derivative is stored, not recomputed: backward
is one multiplication.

Proved by: tests/autograd/test_fused.py
"""

from math import pi, sqrt

from minidist.core.autograd.operands import operand
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp

_BLOCK = 16 * 1024  # elements; three float32 blocks fit into 192 KiB


def gelu_with_derivative(x: xp.Array) -> tuple[xp.Array, xp.Array]:
    """(gelu(x), gelu'(x)), both new arrays of x's shape and dtype."""
    if (kernels := xp.kernels_of(x)) is not None:
        return kernels.gelu_with_derivative(x)
    c = sqrt(2 / pi)
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
        # derivative = (1 + t)/2 + x/2 (1 - t^2) u', u' = c + 3 c 0.044715 x^2
        square *= 3 * 0.044715 * c
        square += c
        square *= part
        xp.multiply(t, t, out=d)
        xp.subtract(1, d, out=d)
        d *= square
        t += 1
        d += t
        d *= 0.5
        t *= part
        t *= 0.5
    return value, derivative


def gelu(x: Tensor) -> Tensor:
    """GELU of each element, in tanh form."""
    x = operand(x)
    value, derivative = gelu_with_derivative(x.data)
    kept = x.save(derivative)
    return record("gelu", value, ((x, lambda g: g * kept.data),), cost=11 * x.size, saved=(kept.stored,))
