"""Layer normalisation as one node (Ba, Kiros, Hinton, "Layer Normalization", 2016).

y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dim. The normalised rows are saved, because the
input gradient and the weight gradient both need them. Row sums are products with a vector: several times faster than
`sum`.
"""

from minidist.autograd.operands import mismatch, pair
from minidist.autograd.precision import stored
from minidist.autograd.tensor import Tensor, record
from minidist.base import arrays as xp
from minidist.base.half import upcast


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """x (..., n), weight (n,), bias (n,) -> (..., n), of one dtype."""
    x, weight = pair("layer_norm", x, weight)
    n = x.shape[-1] if x.ndim else 0
    if weight.shape != (n,) or bias.shape != (n,):
        raise mismatch("layer_norm", x, weight, "do not fit: weight and bias must have the last dim of x")
    values = upcast(x.data)
    average = xp.full(n, 1 / n if n else 0, values.dtype, x.data)
    normal = values - (values @ average)[..., None]
    inverse = xp.dot_rows(normal, normal)  # becomes 1 / standard deviation
    inverse *= 1 / n if n else 0
    inverse += eps
    xp.sqrt(inverse, out=inverse)
    xp.reciprocal(inverse, out=inverse)
    normal *= inverse
    y = normal * upcast(weight.data)
    y += upcast(bias.data)
    normal = stored("layer_norm", normal, x.dtype)  # the statistics, one number a row, stay float32
    kept_w = weight.saved()

    def grad_x(g: xp.Array) -> xp.Array:
        rows, dx = upcast(normal), g * upcast(kept_w.data)
        along = xp.dot_rows(dx, rows)
        along *= 1 / n if n else 0
        dx -= (dx @ average)[..., None]
        dx -= rows * along
        dx *= inverse
        return dx

    def grad_weight(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        return xp.sum_rows(xp.as_rows(g * upcast(normal)), out)

    def grad_bias(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        return xp.sum_rows(xp.as_rows(g), out)

    return record(
        "layer_norm",
        y,
        ((x, grad_x),),
        ((weight, grad_weight), (bias, grad_bias)),
        flops=8 * x.size,
        costs=lambda: [(9 * y.size, 4 * y.nbytes), (3 * y.size, 2 * y.nbytes), (y.size, y.nbytes)],
        saved=(normal, inverse),
        storage=x.dtype,
    )


def layer_norm_composite(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """The same, op by op: for lessons, and the oracle of `layer_norm`."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred / (variance + eps).sqrt() * weight + bias
