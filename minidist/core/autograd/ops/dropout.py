"""Dropout as one node that keeps its mask as bools: 1 byte per element, where a product with a mask of floats keeps 4.

The caller chooses the elements that stay (`nn.Dropout` draws them by their place in the global batch). The mask is what
the activation formulas count as 1 byte (Korthikanti et al., 2022, section 4.1).

Proved by: tests/autograd/test_half.py
"""

from minidist.core.autograd.errors import ShapeError
from minidist.core.autograd.operands import operand
from minidist.core.autograd.tensor import Tensor, kept, record
from minidist.core.base import arrays as xp


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
