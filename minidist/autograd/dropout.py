"""Dropout as one node: what backward needs is which elements were kept, one byte each, whatever the dtype of the values.

As a product with a tensor of factors it would keep 2, 4 or 8 bytes an element for one bit of information; in the closed
form of a transformer block's activations (Korthikanti et al., 2022) the masks count one byte.
"""

from minidist.autograd.errors import ShapeError
from minidist.autograd.tensor import Tensor, record
from minidist.base import arrays as xp


def dropout(x: Tensor, keep: xp.Array, scale: float) -> Tensor:
    """x * scale where `keep` (bools, of x's shape) is true, 0 elsewhere."""
    if keep.shape != x.shape:
        raise ShapeError(f"dropout: a mask of shape {keep.shape} for x of shape {x.shape}; they must be equal")

    def kept(values: xp.Array) -> xp.Array:
        result = values * xp.as_array(keep, values.dtype)
        result *= scale
        return result

    return record("dropout", kept(x.data), ((x, kept),), flops=2 * x.size, saved=(keep,))
