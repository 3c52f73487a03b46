"""RMS normalisation as one node: layer norm without the mean and without a bias.

y = x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang, Sennrich, "Root Mean Square Layer Normalization",
2019).

Proved by: tests/nn/test_llama.py
"""

from minidist.core.autograd.operators import mismatch, operands
from minidist.core.autograd.ops.layer_norm import inverse_norms
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x (..., n), weight (n,) -> (..., n), of one dtype."""
    x, weight = operands("rms_norm", x, weight)
    n = x.shape[-1] if x.ndim else 0
    if weight.shape != (n,):
        raise mismatch("rms_norm", x, weight, "do not fit: the weight must have the last dim of x")
    values = x.data
    inverse = inverse_norms(values, eps)  # 1 / root mean square
    normal = values * inverse
    y = normal * weight.data
    kept, kept_w = x.save(normal), weight.saved()
    del normal

    def grad_x(g: xp.Array) -> xp.Array:
        rows, dx = kept.data, g * kept_w.data
        along = xp.dot_rows(dx, rows)
        along *= 1 / n if n else 0
        dx -= rows * along
        dx *= inverse
        return dx

    def grad_weight(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        return xp.sum_rows(g * kept.data, out)

    weights = ((weight, grad_weight),)
    return record("rms_norm", y, ((x, grad_x),), weights, cost=4 * x.size, saved=(kept.stored, inverse))
