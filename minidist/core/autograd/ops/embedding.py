"""Table look-up: rows of a weight by integer. Backward adds the gradient of each row that came out to its source.

Proved by: tests/autograd/test_operations.py
"""

from typing import Any

from minidist.core.autograd.errors import AutogradError
from minidist.core.autograd.operands import operand
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp


def embedding(indices: Any, weight: Tensor) -> Tensor:
    """indices (...), integers in [0, rows); weight (rows, width) -> (..., width)."""
    indices = xp.as_array(indices.data if isinstance(indices, Tensor) else indices)
    rows, width = weight.shape
    if indices.dtype.kind not in "iu":
        raise AutogradError(f"embedding: indices must be integers, not {indices.dtype}")
    if indices.size and (indices.min() < 0 or indices.max() >= rows):
        worst = int(indices.min() if indices.min() < 0 else indices.max())
        raise AutogradError(
            f"embedding: index {worst} is out of range: the weight of shape {weight.shape} has rows 0..{rows - 1}"
        )

    def grad(g: xp.Array, out: xp.Array | None = None) -> xp.Array:
        out = xp.empty((rows, width), g.dtype, g) if out is None else out
        out.fill(0)
        xp.scatter_add_rows(out, indices.reshape(-1), xp.as_rows(g))
        return out

    # Positions are counted on the host.
    if type(indices) is xp.ndarray and type(weight.data) is not xp.ndarray:
        indices = xp.to_device(indices)
    data = xp.take(weight.data, indices, axis=0)
    return record("embedding", data, (), ((operand(weight), grad),), cost=0, saved=(indices,))
