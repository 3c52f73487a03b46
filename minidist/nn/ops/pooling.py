"""Pooling: each window of an image becomes its largest value, or each whole image its mean.

Windows of maximum pooling do not overlap. Backward gives a window's whole gradient to its first largest value, as
PyTorch does, so one number of 8 bits per window is kept.

Proved by: tests/nn/test_convolution.py
"""

from minidist.core.autograd.operators import operand
from minidist.core.autograd.tensor import Tensor, kept, record
from minidist.core.base import arrays as xp
from minidist.core.base.errors import AutogradError, ShapeError
from minidist.nn.ops.convolution import channels_last_rows

MAX_WINDOW = 16  # its places are counted in 8 bits


def max_pool2d(x: Tensor, size: int = 2) -> Tensor:
    """x (N, C, H, W) -> (N, C, H // size, W // size); rows and columns that fill no window are left out."""
    if not 1 <= size <= MAX_WINDOW:
        raise AutogradError(f"max_pool2d: the window {size} must be from 1 to {MAX_WINDOW}")
    if x.ndim != 4 or min(x.shape[2:]) < size:
        raise ShapeError(f"max_pool2d: shape {x.shape} has no window of {size} x {size}; it must be (N, C, H, W)")
    (n, c, h, w), ho, wo = x.shape, x.shape[2] // size, x.shape[3] // size
    x = operand(x)

    # One view of the image per place in the window; a later place wins only where it is larger.
    places = [
        (slice(None), slice(None), slice(i, ho * size, size), slice(j, wo * size, size))
        for i in range(size)
        for j in range(size)
    ]
    values = x.data
    y, winner = xp.array(values[places[0]]), xp.zeros((n, c, ho, wo), "uint8", values)
    for number, place in enumerate(places[1:], start=1):
        larger = values[place] > y
        winner[larger] = number
        xp.maximum(y, values[place], out=y)

    kept_winner = kept(winner)
    del winner

    def grad(g: xp.Array) -> xp.Array:
        result, winner = xp.zeros((n, c, h, w), g.dtype, g), kept_winner.data
        for number, place in enumerate(places):
            result[place] = g * (winner == number)
        return result

    return record("max_pool2d", y, ((x, grad),), cost=x.size, saved=(kept_winner.stored,))


def global_avg_pool2d(x: Tensor) -> Tensor:
    """x (N, C, H, W) -> (N, C), the mean of each channel over its image."""
    if x.ndim != 4 or 0 in x.shape[2:]:
        raise ShapeError(f"global_avg_pool2d: shape {x.shape} must be (N, C, H, W) with H and W of at least 1")
    shape, pixels = x.shape, x.shape[2] * x.shape[3]
    x = operand(x)
    y = channels_last_rows(x.data).reshape(shape[0], pixels, shape[1]).sum(axis=1) / pixels

    def grad(g: xp.Array) -> xp.Array:
        return xp.broadcast_to((g / pixels)[:, :, None, None], shape)

    return record("global_avg_pool2d", y, ((x, grad),), cost=x.size)
