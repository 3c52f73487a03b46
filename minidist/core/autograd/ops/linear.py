"""Matrix products, the look-up of rows, and the fused affine map: product, bias and activation in one node.

    y = f(z), z = x W + b     dz = dy * f'(z)     dx = dz W^T     dW = x^T dz     db = sum of the rows of dz

Forward keeps f'(z) for GELU, and y for ReLU. `prepare` computes dz once, for both products of backward.

GELU is the tanh form (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016), value and derivative in one pass: x/2
(1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3). The pass goes block by block, and a block stays in the cache.

Proved by: tests/autograd/test_fused.py, tests/autograd/test_operations.py
"""

import math
from typing import Any

from minidist.core.autograd.operators import mismatch, operand, operands, pair, unbroadcast
from minidist.core.autograd.tensor import Prepare, Tensor, record
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.errors import AutogradError


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, weight_is_in_out: bool = False
) -> Tensor:
    """activation(x W^T + b), or activation(x W + b) when the weight is stored as (in, out).

    x (..., in), weight (out, in) or (in, out), bias (out,); all of one dtype. activation: None, "relu" or "gelu" (tanh
    form). 2 rows in out FLOP in forward, and as many for each of input gradient and weight gradient.
    """
    # Two tensors of one dtype are used as they are; half precision computes in float32.
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor)) or x.dtype != weight.dtype or x.dtype.itemsize == 2:
        x, weight = operands("linear", x, weight)
    shape, w_shape = x.shape, weight.shape
    if len(w_shape) != 2 or not shape or shape[-1] != w_shape[0 if weight_is_in_out else 1]:
        raise mismatch("linear", x, weight, "do not fit: the last dim of x must be the weight's in dim")
    if activation not in (None, "relu", "gelu"):
        raise AutogradError(f"linear: unknown activation {hooks.quoted(activation)}; one of None, 'relu', 'gelu'")

    # The product goes straight into the result's array, and everything after it works there in place.
    kept_x, kept_w = x.saved(), weight.saved()
    w = weight.data if weight_is_in_out else weight.data.T
    n_out = w.shape[1]
    z = xp.empty((*shape[:-1], n_out), w.dtype, w)
    rows = xp.as_rows(z)
    xp.product(xp.as_rows(x.data), w, rows)
    biases = []
    if bias is not None:
        if bias.dtype.itemsize == 2:
            bias = operand(bias)
        if bias.shape != (n_out,):
            raise mismatch("linear", bias, weight, "do not fit: the bias must have the weight's out dim")
        rows += bias.data
        biases.append((bias, xp.sum_rows))

    prepare: Prepare | None = None
    saved: tuple[xp.Array, ...] = ()
    if activation is not None:
        z, prepare, saved = _activated(x, z, activation)

    def grad_x(g: xp.Array) -> xp.Array:
        w = kept_w.data.T if weight_is_in_out else kept_w.data
        dx = xp.empty(shape, g.dtype, g)
        xp.product(xp.as_rows(g), w, xp.as_rows(dx))
        return dx

    def grad_w(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        x_rows, g_rows = xp.as_rows(kept_x.data), xp.as_rows(g)
        return xp.product(x_rows.T, g_rows, out) if weight_is_in_out else xp.product(g_rows.T, x_rows, out)

    weights = [(weight, grad_w), *biases]
    return record("linear", z, ((x, grad_x),), weights, prepare=prepare, saved=saved)


def _activated(x: Tensor, z: xp.Array, activation: str) -> tuple[xp.Array, Prepare, tuple[xp.Array, ...]]:
    """Return activation(z), computed in place; the step of backward through it; and what this step keeps."""
    if activation == "relu":
        xp.maximum(z, xp.zeros(z.shape[-1], z.dtype, z), out=z)  # with a row, which is three times as fast as with 0
        result = xp.downcast(z, x.dtype) if x.half else z
        # The sign of the result is that of z.
        return result, lambda g: g * (result > 0), ()

    z, derivative = gelu_with_derivative(z)
    kept = x.save(derivative)
    del derivative

    def prepare(g: xp.Array) -> xp.Array:
        factor = kept.data
        return xp.multiply(g, factor, out=factor)  # in place: this node runs once

    return z, prepare, (kept.stored,)


_BLOCK = 32 * 1024  # elements; four float32 blocks are 512 KiB, which fit into a second-level cache


def gelu_with_derivative(x: xp.Array) -> tuple[xp.Array, xp.Array]:
    """(gelu(x), gelu'(x)), both new arrays of x's shape and dtype."""
    if kernels := xp.kernels_of(x):
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


def embedding(indices: Any, weight: Tensor) -> Tensor:
    """indices (...), integers in [0, rows); weight (rows, width) -> (..., width)."""
    indices = xp.as_array(indices.data if isinstance(indices, Tensor) else indices)
    rows, width = weight.shape
    if indices.dtype.kind not in "iu" or (indices.size and (indices.min() < 0 or indices.max() >= rows)):
        hooks.operation_checks().refuse_indices(indices, weight)

    def grad(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        out = xp.empty((rows, width), g.dtype, g) if out is None else out
        out.fill(0)
        xp.scatter_add_rows(out, indices.reshape(-1), xp.as_rows(g))
        return out

    # Positions are counted on the host.
    if type(indices) is xp.ndarray and type(weight.data) is not xp.ndarray:
        indices = xp.to_device(indices)
    data = xp.take(weight.data, indices, axis=0)
    return record("embedding", data, (), ((operand(weight), grad),), cost=0, saved=(indices,))


def matmul(a: Any, b: Any) -> Tensor:
    """a @ b as in NumPy: (..., m, k) @ (..., k, n) -> (..., m, n); batch dims broadcast, a vector is a row or a column.

    2 m k n FLOP in forward and as many for each input gradient.
    """
    a, b = pair("matmul", a, b)
    if a.ndim < 2 or b.ndim < 2:
        return hooks.tensor_methods().product_with_vector(a, b)
    a, b = operand(a), operand(b)
    try:
        data = a.data @ b.data
    except ValueError:
        raise mismatch("matmul", a, b, "do not fit: columns of the first must be rows of the second") from None
    kept_a, kept_b = a.saved(), b.saved()
    shape_a, shape_b = a.shape, b.shape

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

    return record("matmul", data, ((a, grad_a),), ((b, grad_b),), cost=2 * data.size * shape_a[-1])


Tensor.__matmul__ = matmul
Tensor.__rmatmul__ = lambda x, other: matmul(other, x)
