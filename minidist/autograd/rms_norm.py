"""RMS normalisation as one node (Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019): layer norm without the
mean and without a bias. y = x / sqrt(mean(x^2) + eps) * weight over the last dim.
"""

from minidist.autograd.operands import mismatch, pair
from minidist.autograd.tensor import Tensor, record
from minidist.base import arrays as xp


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x (..., n), weight (n,) -> (..., n), of one dtype."""
    x, weight = pair("rms_norm", x, weight)
    n = x.shape[-1] if x.ndim else 0
    if weight.shape != (n,):
        raise mismatch("rms_norm", x, weight, "do not fit: the weight must have the last dim of x")
    inverse = xp.dot_rows(x.data, x.data)  # becomes 1 / root mean square
    inverse *= 1 / n if n else 0
    inverse += eps
    xp.sqrt(inverse, out=inverse)
    xp.reciprocal(inverse, out=inverse)
    normal = x.data * inverse
    kept_w = weight.saved()

    def grad_x(g: xp.Array) -> xp.Array:
        dx = g * kept_w.data
        along = xp.dot_rows(dx, normal)
        along *= 1 / n if n else 0
        dx -= normal * along
        dx *= inverse
        return dx

    def grad_weight(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        return xp.sum_rows(xp.as_rows(g * normal), out)

    y = normal * weight.data
    return record("rms_norm", y, ((x, grad_x),), ((weight, grad_weight),), flops=4 * x.size, saved=(normal, inverse))
