"""Matrix products: 2-D, batched, broadcast over batch dims, and with vectors.

Proved by: tests/autograd/test_operations.py
"""

from typing import Any

from minidist.core.autograd.operands import mismatch, operand, pair, unbroadcast
from minidist.core.autograd.ops import shaping
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp


def matmul(a: Any, b: Any) -> Tensor:
    """a @ b as in NumPy: (..., m, k) @ (..., k, n) -> (..., m, n); batch dims broadcast, a vector is a row or a column.

    2 m k n FLOP in forward and as many for each input gradient.
    """
    a, b = pair("matmul", a, b)
    if a.ndim == 0 or b.ndim == 0:
        raise mismatch("matmul", a, b, "include a scalar; use * instead")
    if a.ndim == 1 or b.ndim == 1:
        return _with_vector(a, b)
    a, b = operand(a), operand(b)
    try:
        data = a.data @ b.data
    except ValueError:
        raise mismatch("matmul", a, b, "do not fit: columns of the first must be rows of the second") from None
    kept_a, kept_b = a.saved(), b.saved()
    shape_a, shape_b = a.shape, b.shape
    flops = 2 * data.size * shape_a[-1]

    def grad_a(g: xp.Array) -> xp.Array:
        return unbroadcast(g @ xp.swapaxes(kept_b.data, -1, -2), shape_a)

    def grad_b(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        left = kept_a.data
        if len(shape_b) == 2:  # a weight: one product over all rows
            left, g = xp.as_rows(left), xp.as_rows(g)
            return xp.matmul(left.T, g, out=out)
        value = unbroadcast(xp.swapaxes(left, -1, -2) @ g, shape_b)
        if out is None:
            return value
        xp.copyto(out, value)
        return out

    return record("matmul", data, ((a, grad_a),), ((b, grad_b),), cost=flops)


def _with_vector(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[-1] != b.shape[0 if b.ndim == 1 else -2]:
        raise mismatch("matmul", a, b, "do not fit: columns of the first must be rows of the second")
    left = shaping.reshape(a, (1, *a.shape)) if a.ndim == 1 else a
    right = shaping.reshape(b, (*b.shape, 1)) if b.ndim == 1 else b
    result = matmul(left, right)
    if b.ndim == 1:
        result = shaping.reshape(result, result.shape[:-1])
    if a.ndim == 1:
        result = shaping.reshape(result, result.shape[:-1] if b.ndim == 1 else (*result.shape[:-2], result.shape[-1]))
    return result
