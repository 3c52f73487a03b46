"""The operations of cuda.py for meta arrays: results with the right shapes, and no work.

A dry run calls them instead of the individual array functions, which would each create a temporary meta array that
nothing reads. `arrays.kernels_of(array)` returns this module.

Proved by: tests/cupy/test_kernels.py, tests/train/test_dry_run.py
"""

from functools import lru_cache
from typing import Any

import numpy as np

from minidist.base.meta import MetaArray
from minidist.core.autograd.ops.attention import at_once
from minidist.core.autograd.tensor import Tensor, saved_tensors


def gelu_with_derivative(x: MetaArray) -> tuple[MetaArray, MetaArray]:
    """Return gelu(x) and gelu'(x), of x's shape."""
    return MetaArray(x.shape, x.dtype), MetaArray(x.shape, x.dtype)


def product(a: MetaArray, b: MetaArray, out: Any = None) -> Any:
    """Return a @ b."""
    return np.matmul(a, b, out=out)


def sum_rows(matrix: MetaArray, out: Any = None) -> Any:
    """Return the sums over the rows of (m, n), in `out` or a new array."""
    return MetaArray(matrix.shape[1:], matrix.dtype) if out is None else out


def softmax_loss(scores: MetaArray, targets: Any, counted: Any, part: float) -> tuple[MetaArray, MetaArray]:
    """Return the sum of the losses, and the gradient."""
    return MetaArray((), scores.dtype), MetaArray(scores.shape, scores.dtype)


def attention(q: Any, k: Any, v: Any, o: Any, source: Tensor, drop: Any) -> list[Any]:
    """Return what attention keeps: arrays of as many bytes, those of all blocks but the last two as one.

    Backward reads the last two blocks first, and that is where its peak is.
    """
    sizes = _sizes(q.shape[:3], *at_once(q))
    saved: list[Any] = []
    # What `saved_tensors` keeps elsewhere moves block by block.
    if len(sizes) > 2 and saved_tensors.get() is None:
        scores, rows = (sum(column) for column in zip(*sizes[:-2], strict=True))
        saved.append((Tensor(MetaArray(scores, source.dtype)), MetaArray(rows, q.dtype)))
        sizes = sizes[-2:]
    for scores, rows in sizes:
        kept: Any = MetaArray(scores, q.dtype)
        saved.append((source.save(kept), MetaArray(rows, q.dtype)))
    return saved


def attention_gradients(q: Any, k: Any, v: Any, o: Any, g: Any, saved: list[Any], gradients: Any, drop: Any) -> None:
    """Read what attention keeps, one block after the other."""
    while saved:
        kept, _inverse = saved.pop()  # both live until the next block, as they do where there are values
        e = kept.data  # noqa: F841


def layer_norm(x: MetaArray, weight: Any, bias: Any, eps: float) -> tuple[MetaArray, MetaArray, MetaArray]:
    """Return the result, the normalised rows, and one number for each row."""
    return MetaArray(x.shape, x.dtype), MetaArray(x.shape, x.dtype), MetaArray((*x.shape[:-1], 1), x.dtype)


def layer_norm_gradient(g: MetaArray, weight: Any, rows: Any, inverse: Any) -> MetaArray:
    """Return the gradient of the rows, of g's shape."""
    return MetaArray(g.shape, g.dtype)


@lru_cache
def _sizes(shape: tuple[int, int, int], step: int, queries: int) -> list[tuple[int, int]]:
    """Return of each block the numbers of exponentials and of rows, a row for each head and query."""
    batch, heads, length = shape
    blocks = [(n, start) for n in range(0, batch, step) for start in range(0, length, queries)]
    rows = [min(step, batch - n) * heads * min(queries, length - start) for n, start in blocks]
    return [(n * min(start + queries, length), n) for n, (_, start) in zip(rows, blocks, strict=True)]


def _in_place(*arguments: Any) -> None:
    """Change nothing: a meta array has no values."""


adam = scatter_add = scatter_add_rows = _in_place
