"""Fake quantisation: values on a grid of integers times a scale, as floats, with a gradient that ignores the rounding.

    q = clamp(round(x / s) + z, low, high)     y = (q - z) s     dy/dx = 1 where q is inside the range, 0 where clamped

Rounding has the derivative 0 almost everywhere, so nothing would train. The straight-through estimator takes 1 in its
place; where a value was clamped the result is constant, and the gradient is 0 (Bengio et al., "Estimating or
propagating gradients through stochastic neurons", 2013, section 4; Jacob et al., "Quantization and training of neural
networks for efficient integer-arithmetic-only inference", CVPR 2018, section 3). The formulas are those of torch.ao:

    affine       low = 0, high = 255 (uint8)      s = (max - min) / 255    z = -round(min / s)    for activations
    symmetric    low = -127, high = 127 (int8)    s = max |x| / 127        z = 0                  for weights

`min` and `max` are widened to include 0, so that 0 (padding, ReLU) has a grid point, and s is at least float32's eps.
torch.ao's symmetric range begins at -128; then s is max |x| / 127.5, and the largest positive weight is clamped and
would get no gradient. -127 is torch's range for the kernels that need one that is symmetric around 0.

Proved by: tests/techniques/test_quantized_layers.py
"""

from dataclasses import dataclass
from typing import Any

from minidist.base import arrays as xp
from minidist.core.autograd.operators import operand
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base.errors import ShapeError

SMALLEST_SCALE = 2.0**-23  # float32's eps


@dataclass(frozen=True)
class Grid:
    """Integers `low` to `high` times `scale`; the integer `zero_point` stands for 0.

    scale, zero_point: arrays that broadcast to the values: () for one grid, (n, 1) or (1, n) for one per channel.
    """

    scale: xp.Array
    zero_point: xp.Array
    low: int
    high: int

    def levels(self, x: xp.Array) -> xp.Array:
        """Return round(x / s) + z, halves rounded to even, in the dtype of x and not clamped."""
        levels: xp.Array = (x / self.scale).round() + self.zero_point
        return levels

    def quantize(self, x: xp.Array) -> xp.Array:
        """Return the integers q of x: int8 where the grid has negative ones, else uint8."""
        levels = xp.minimum(xp.maximum(self.levels(x), self.low), self.high)
        return levels.astype("int8" if self.low < 0 else "uint8")

    def dequantize(self, q: xp.Array) -> xp.Array:
        """Return (q - z) s in the dtype of the scale."""
        return (q.astype(self.scale.dtype) - self.zero_point) * self.scale


def affine_grid(smallest: Any, largest: Any, dtype: Any, low: int = 0, high: int = 255) -> Grid:
    """Return the grid from `smallest` to `largest`, widened to include 0; both are numbers or arrays."""
    smallest = xp.minimum(xp.as_array(smallest, dtype), 0)
    scale = (xp.maximum(xp.as_array(largest, dtype), 0) - smallest) / xp.as_array(high - low, dtype)
    scale = xp.as_array(xp.maximum(scale, SMALLEST_SCALE), dtype)
    zero_point = xp.minimum(xp.maximum(low - (smallest / scale).round(), low), high)
    return Grid(scale, xp.as_array(zero_point, dtype), low, high)


def symmetric_grid(largest: Any, dtype: Any, low: int = -127, high: int = 127) -> Grid:
    """Return the grid around 0 whose end is the largest magnitude; a number, or one per channel."""
    scale = xp.as_array(largest, dtype) / xp.as_array((high - low) / 2, dtype)
    scale = xp.as_array(xp.maximum(scale, SMALLEST_SCALE), dtype)
    return Grid(scale, xp.zeros_like(scale), low, high)


def fake_quantize(x: Tensor, grid: Grid) -> Tensor:
    """The values of x rounded to the grid; the gradient passes where x is inside its range.

    ShapeError for a grid of another number of channels.
    """
    x = operand(x)
    shape = grid.scale.shape
    if shape and (len(shape) != x.ndim or any(n not in (1, m) for n, m in zip(shape, x.shape, strict=True))):
        raise ShapeError(f"fake_quantize: scales of shape {shape} for a tensor of shape {x.shape}")
    levels = grid.levels(x.data)
    inside = (levels >= grid.low) & (levels <= grid.high)

    # Clamped and scaled back in place: the levels are an array of this operation.
    xp.minimum(xp.maximum(levels, grid.low, out=levels), grid.high, out=levels)
    levels -= grid.zero_point
    levels *= grid.scale

    def grad(g: xp.Array) -> xp.Array:
        return g * inside

    return record("fake_quantize", levels, ((x, grad),), cost=5 * x.size, saved=(inside,))
