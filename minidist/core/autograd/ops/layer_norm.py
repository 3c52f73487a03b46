"""Layer normalisation as one node (Ba, Kiros, Hinton, "Layer Normalization", 2016).

y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dim. The normalised rows are saved, because the
input gradient and the weight gradient both need them. Row sums are products with a vector: several times faster than
`sum`.

Proved by: tests/autograd/test_fused.py
"""

from minidist.core.autograd.operators import mismatch, operand, operands
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """x (..., n), weight (n,), bias (n,) -> (..., n), of one dtype."""
    x, weight = operands("layer_norm", x, weight)
    bias = operand(bias)
    n = x.shape[-1] if x.ndim else 0
    if weight.shape != (n,) or bias.shape != (n,):
        raise mismatch("layer_norm", x, weight, "do not fit: weight and bias must have the last dim of x")
    values, w, b = x.data, weight.data, bias.data
    if x.size and (kernels := xp.kernels_of(values)):
        y, normal, inverse = kernels.layer_norm(values, w, b, eps)
    else:
        # Row means and row sums of squares are products with a vector.
        normal = values - (values @ xp.constant(n, 1 / n if n else 0, values))[..., None]
        inverse = inverse_norms(normal, eps)  # 1 / standard deviation of each row, (..., 1)
        normal *= inverse
        y = normal * w
        y += b
    del values, w, b  # in half precision these are float32 copies, and need not live until the node is made
    kept, kept_w = x.save(normal), weight.saved()  # in half precision; the statistics, one number per row, stay float32
    del normal

    def grad_x(g: xp.Array) -> xp.Array:
        # dx = (d - mean(d) - r mean(d r)) / std, with d = g weight and r (`rows`) the normalised row.
        w, rows = kept_w.data, kept.data
        if g.size and (kernels := xp.kernels_of(g)):
            return kernels.layer_norm_gradient(g, w, rows, inverse)
        dx = g * w
        along = xp.dot_rows(dx, rows)
        along *= 1 / n if n else 0
        dx -= (dx @ xp.constant(n, 1 / n if n else 0, g))[..., None]
        dx -= rows * along
        dx *= inverse
        return dx

    def grad_weight(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        return xp.sum_rows(g * kept.data, out)

    return record(
        "layer_norm",
        y,
        ((x, grad_x),),
        ((weight, grad_weight), (bias, xp.sum_rows)),
        cost=lambda: (8 * x.size, [(9 * y.size, 4 * y.nbytes), (3 * y.size, 2 * y.nbytes), (y.size, y.nbytes)]),
        saved=(kept.stored, inverse),
    )


def inverse_norms(rows: xp.Array, eps: float) -> xp.Array:
    """1 / sqrt(mean of the squares + eps) of each row, (..., 1)."""
    n = rows.shape[-1]
    inverse = xp.dot_rows(rows, rows)
    inverse *= 1 / n if n else 0
    inverse += eps
    xp.sqrt(inverse, out=inverse)
    xp.reciprocal(inverse, out=inverse)
    return inverse
