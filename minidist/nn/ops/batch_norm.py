"""Batch normalisation as one node (Ioffe, Szegedy, "Batch normalization", 2015): each channel over all rows of the
batch.

y = (x - mean) / sqrt(variance + eps) * weight + bias. With statistics of the batch the mean and the variance depend
on x, and the input gradient says so; with given ones (evaluation) it is a scale and a shift. Where the batch lies on
several ranks, the statistics are those of all its rows, and so are the two sums of the input gradient.

Proved by: tests/nn/test_convolution.py
"""

from typing import Protocol

from minidist.core.autograd.operators import mismatch, operand, operands
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp
from minidist.nn.ops.convolution import channels_last_rows

Statistics = tuple[xp.Array, xp.Array, int]  # mean and variance (biased) of each channel, and the rows they are of


class StatisticsGroup(Protocol):
    """The ranks that normalise their rows together."""

    def merge(self, statistics: Statistics) -> Statistics:
        """Return the statistics of the rows of all ranks."""
        ...

    def sum(self, values: xp.Array) -> xp.Array:
        """Return the sum over all ranks."""
        ...


def channel_statistics(x: xp.Array) -> Statistics:
    """(mean, variance, elements of a channel) over all dims of x (N, C, ...) but the second."""
    rows = channels_last_rows(x)
    average = xp.sum_rows(rows) / len(rows)
    centred = rows - average
    return average, xp.sum_rows(centred * centred) / len(rows), len(rows)


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    statistics: tuple[xp.Array, xp.Array] | None = None,
    group: StatisticsGroup | None = None,
    rows_of_group: int = 0,
) -> Tensor:
    """x (N, C, ...), weight and bias (C,) -> the shape of x. statistics: (mean, variance), each (C,), instead of the
    batch's own; with a group they are those of all rows of the group: `rows_of_group` per channel.
    """
    x, weight = operands("batch_norm", x, weight)
    bias = operand(bias)
    channels = x.shape[1] if x.ndim > 1 else 0
    if weight.shape != (channels,) or bias.shape != (channels,):
        raise mismatch(
            "batch_norm", x, weight, "do not fit: weight and bias must have one element a channel, the second dim of x"
        )

    # Channels last, so that all rows of a channel are one column; the normalised rows are kept for backward.
    own = statistics is None or group is not None
    rows = channels_last_rows(x.data)
    last = (x.shape[0], *x.shape[2:], channels)
    mean, variance = channel_statistics(x.data)[:2] if statistics is None else statistics
    inverse = xp.reciprocal(xp.sqrt(variance + eps))
    normal = (rows - mean) * inverse
    y = xp.array(xp.moveaxis((normal * weight.data + bias.data).reshape(last), -1, 1))
    kept, kept_w = x.save(normal), weight.saved()
    del normal

    def grad_x(g: xp.Array) -> xp.Array:
        dx = channels_last_rows(g) * kept_w.data
        if own:
            normal = kept.data
            sums, count = xp.stack([xp.sum_rows(dx), xp.sum_rows(dx * normal)]), len(dx)
            if group is not None:
                sums, count = group.sum(sums), rows_of_group
            dx = dx - sums[0] / count - normal * (sums[1] / count)
        return xp.array(xp.moveaxis((dx * inverse).reshape(last), -1, 1))

    def grad_weight(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        return xp.sum_rows(channels_last_rows(g) * kept.data, out)

    def grad_bias(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        return xp.sum_rows(channels_last_rows(g), out)

    return record(
        "batch_norm",
        y,
        ((x, grad_x),),
        ((weight, grad_weight), (bias, grad_bias)),
        cost=8 * x.size,
        saved=(kept.stored,),
    )
