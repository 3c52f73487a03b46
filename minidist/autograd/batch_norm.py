"""Batch normalisation as one node (Ioffe, Szegedy, "Batch normalization", 2015): each channel over all rows of the
batch.

y = (x - mean) / sqrt(variance + eps) * weight + bias. With statistics of its own batch the mean and the variance depend
on x, and the input gradient says so; with given ones (evaluation) it is a scale and a shift.

Proved by: tests/nn/test_convolution.py
"""

from minidist.autograd.operands import mismatch, operand, operands
from minidist.autograd.tensor import Tensor, record
from minidist.base import arrays as xp


def channel_statistics(x: xp.Array) -> tuple[xp.Array, xp.Array, int]:
    """(mean, variance, elements of a channel) over all dims of x (N, C, ...) but the second."""
    rows = xp.moveaxis(x, 1, -1).reshape(-1, x.shape[1])
    average = xp.sum_rows(rows) / len(rows)
    centred = rows - average
    return average, xp.sum_rows(centred * centred) / len(rows), len(rows)


def batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, statistics: tuple[xp.Array, xp.Array] | None = None
) -> Tensor:
    """x (N, C, ...), weight and bias (C,) -> the shape of x. statistics: (mean, variance), each (C,), instead of the
    batch's own.
    """
    x, weight = operands("batch_norm", x, weight)
    bias = operand(bias)
    channels = x.shape[1] if x.ndim > 1 else 0
    if weight.shape != (channels,) or bias.shape != (channels,):
        raise mismatch(
            "batch_norm", x, weight, "do not fit: weight and bias must have one element a channel, the second dim of x"
        )

    # Channels last, so that all rows of a channel are one column; the normalised rows are kept for backward.
    own = statistics is None
    values = xp.moveaxis(x.data, 1, -1)
    rows = values.reshape(-1, channels)
    mean, variance = channel_statistics(x.data)[:2] if statistics is None else statistics
    inverse = xp.reciprocal(xp.sqrt(variance + eps))
    normal = (rows - mean) * inverse
    y = xp.array(xp.moveaxis((normal * weight.data + bias.data).reshape(values.shape), -1, 1))
    kept_w = weight.saved()

    def as_rows(g: xp.Array) -> xp.Array:
        return xp.moveaxis(g, 1, -1).reshape(-1, channels)

    def grad_x(g: xp.Array) -> xp.Array:
        dx = as_rows(g) * kept_w.data
        if own:
            count = len(dx)
            dx = dx - xp.sum_rows(dx) / count - normal * (xp.sum_rows(dx * normal) / count)
        return xp.array(xp.moveaxis((dx * inverse).reshape(values.shape), -1, 1))

    def grad_weight(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        return xp.sum_rows(as_rows(g) * normal, out)

    def grad_bias(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        return xp.sum_rows(xp.array(as_rows(g)), out)

    return record(
        "batch_norm", y, ((x, grad_x),), ((weight, grad_weight), (bias, grad_bias)), cost=8 * x.size, saved=(normal,)
    )
