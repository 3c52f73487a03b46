"""The operations of cuda_kernels.py for meta arrays: results with the right shapes, and no work.

A dry run calls them instead of the individual array functions, each of which would create a temporary meta array that
nothing reads. `arrays.kernels_of(array)` returns this module.

Proved by: tests/cupy/test_kernels.py, tests/train/test_dry_run.py
"""

from typing import Any

from minidist.base.meta import MetaArray


def gelu_with_derivative(x: MetaArray) -> tuple[MetaArray, MetaArray]:
    """Return gelu(x) and gelu'(x), of x's shape."""
    return MetaArray(x.shape, x.dtype), MetaArray(x.shape, x.dtype)


def causal_exponentials(scores: MetaArray) -> MetaArray:
    """Return 1 / sums over the keys of (batch, heads, keys, queries), as (batch, heads, queries, 1)."""
    batch, heads, _, queries = scores.shape
    return MetaArray((batch, heads, queries, 1), scores.dtype)


def layer_norm(x: MetaArray, weight: Any, bias: Any, eps: float) -> tuple[MetaArray, MetaArray, MetaArray]:
    """Return the result, the normalised rows, and one number for each row."""
    return MetaArray(x.shape, x.dtype), MetaArray(x.shape, x.dtype), MetaArray((*x.shape[:-1], 1), x.dtype)


def layer_norm_gradient(g: MetaArray, weight: Any, rows: Any, inverse: Any) -> MetaArray:
    """Return the gradient of the rows, of g's shape."""
    return MetaArray(g.shape, g.dtype)


def _in_place(*arguments: Any) -> None:
    """Change nothing: a meta array has no values."""


adam = score_gradients = scatter_add = scatter_add_rows = _in_place
