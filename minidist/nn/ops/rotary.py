"""Rotary position embedding as one node (Su et al., "RoFormer", 2021): a position is an angle, not a row of a table.

Feature i and feature i + n/2 of a head are the coordinates of a point, which is turned by position x theta^(-2i/n).
The product of a query and a key then depends on the difference of their positions only. Backward turns back.

Proved by: tests/nn/test_llama.py
"""

from minidist.base import arrays as xp
from minidist.core.autograd.operators import operand
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base.errors import ShapeError


def rotary_angles(positions: xp.Array, head_size: int, theta: float = 10000.0) -> xp.Array:
    """Angles (T, head_size / 2), float64, of tokens at the global `positions` (T,) of their text."""
    frequencies = xp.to_device(theta ** (-xp.arange(0, head_size, 2) / head_size))
    return xp.as_array(positions, xp.float64)[:, None] * frequencies


def rotary(x: Tensor, angles: xp.Array) -> Tensor:
    """x (batch, T, heads, n) with its pairs turned by `angles` (T, n/2)."""
    half = x.shape[-1] // 2
    if x.ndim != 4 or x.shape[-1] % 2 or angles.shape != (x.shape[1], half):
        raise ShapeError(
            f"rotary: x of shape {x.shape} and angles {angles.shape}; expected (batch, T, heads, n), (T, n/2)"
        )
    x = operand(x)
    values = x.data
    cos, sin = (xp.as_array(f(angles), values.dtype)[None, :, None, :] for f in (xp.cos, xp.sin))

    def turn(a: xp.Array, sin: xp.Array) -> xp.Array:
        result = xp.empty(a.shape, a.dtype, a)
        first, second = a[..., :half], a[..., half:]
        result[..., :half] = first * cos - second * sin
        result[..., half:] = second * cos + first * sin
        return result

    edges = ((x, lambda g: turn(g, -sin)),)
    return record("rotary", turn(values, sin), edges, cost=3 * x.size, saved=(cos, sin))
