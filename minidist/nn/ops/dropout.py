"""Dropout of elements, and of the weights of attention.

The masks are kept as bools, 1 byte per element (Korthikanti et al., 2022, section 4.1). The caller chooses the elements
that stay: `nn.Dropout` draws them by their place in the global batch.

Dropout of attention's weights multiplies the softmax P by a mask M of 0 and 1 / (1 - p) before it meets V; then
dS = P * (M * dO V^T - rowsum(dO * O)), with the same row sums.

Proved by: tests/autograd/test_fused.py, tests/autograd/test_operations.py
"""

from typing import NamedTuple, Protocol

from minidist.core.autograd.operators import operand
from minidist.core.autograd.tensor import Tensor, kept, record
from minidist.core.base import arrays as xp
from minidist.core.base.errors import ShapeError


def dropout(x: Tensor, keep: xp.Array, scale: float) -> Tensor:
    """x * scale where keep is true, 0 elsewhere. keep: bools of x's shape; scale: 1 / (1 - p)."""
    if keep.shape != x.shape:
        raise ShapeError(f"dropout: a mask of shape {keep.shape} for a tensor of shape {x.shape}")
    x = operand(x)
    data = x.data * keep
    data *= scale
    mask = kept(keep)

    def grad(g: xp.Array) -> xp.Array:
        g = g * mask.data
        g *= scale
        return g

    return record("dropout", data, ((x, grad),), cost=2 * x.size, saved=(keep,))


class WeightDropout(Protocol):
    """Which weights of attention stay (`nn.AttentionDropout`), and what those are multiplied by."""

    @property
    def scale(self) -> float: ...

    def mask(self, samples: int, heads: int, length: int, first: int = 0) -> xp.Array:
        """Bools (samples, heads, length queries, length keys) of `heads` heads, from the `first` of those here on."""


class DroppedWeights(NamedTuple):
    """Which weights stay (batch, heads, queries, keys), and their factor."""

    keep: xp.Array
    scale: float

    def __call__(self, e: xp.Array, n: int, step: int, start: int, end: int) -> xp.Array:
        """Return e (samples n.., heads, keys ..end, queries start..end) less the dropped weights."""
        e = e * self.keep[n : n + step, :, start:end, :end].swapaxes(2, 3)
        e *= self.scale
        return e


class DroppedParts(NamedTuple):
    """Which weights stay (batch, key-value heads, heads of each, queries, keys), and their factor."""

    keep: xp.Array
    scale: float

    def __call__(self, weights: xp.Array, queries: slice, keys: xp.Array) -> xp.Array:
        """Return the weights of these queries and keys without the dropped ones."""
        return weights * self.keep[..., queries, :][..., keys] * xp.as_array(self.scale, weights.dtype)


def dropped_weights(dropout: WeightDropout, samples: int, heads: int, length: int) -> DroppedWeights:
    """Draw which weights of attention stay.

    samples, heads, length: the mask has the shape (samples, heads, length queries, length keys). The result multiplies
    the weights that stay by `dropout.scale`, and the others by 0.
    """
    return DroppedWeights(dropout.mask(samples, heads, length), dropout.scale)
