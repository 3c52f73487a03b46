"""Causal attention of CuPy's arrays: the loops of core/autograd/ops/attention.py with whole operations as kernels.

Queries go in blocks of 256, all samples together, because a GPU needs more work per kernel than a cache has room for.
The heads are read where they lie in the packed projection (cuda_products.py), so that nothing is copied.

Proved by: tests/cupy/test_kernels.py
"""

from collections.abc import Iterator
from typing import Any

from minidist.base import cuda_kernels as kernels
from minidist.base.cuda_products import product
from minidist.core.autograd.ops.attention import Drop, Saved
from minidist.core.autograd.tensor import Tensor

Array = Any  # one of CuPy's
BLOCK = 256  # queries at once


def attention(q: Array, k: Array, v: Array, o: Array, source: Tensor, drop: Drop) -> Saved:
    """Fill o (batch, heads, T, size); return for each block of queries (exp of the shifted scores, 1 / row sums)."""
    saved: Saved = []
    for start, end in _blocks(q):
        e = product(k[:, :, :end], q[:, :, start:end].swapaxes(2, 3), scale=q.shape[3] ** -0.5)
        inverse = kernels.causal_exponentials(e)
        part = o[:, :, start:end]
        weights = e if drop is None else drop(e, 0, len(q), start, end)
        product(weights.swapaxes(2, 3), v[:, :, :end], out=part)
        part *= inverse
        saved.append((source.save(e), inverse))
    return saved


def attention_gradients(
    q: Array, k: Array, v: Array, o: Array, g: Array, saved: Saved, gradients: Any, drop: Drop
) -> None:
    """Fill the gradients (dq, dk, dv); uses up `saved`. The last block meets all keys: it writes, and others add."""
    dq, dk, dv = gradients
    length, scale = q.shape[2], q.shape[3] ** -0.5 if q.shape[3] else 1.0
    for start, end in reversed(list(_blocks(q))):
        kept, inverse = saved.pop()
        e = kept.data
        # dS = P * (dO V^T - rowsum(dO * O)); P = e / row sums, and the division is in dO already.
        do, delta = kernels.output_gradients(g[:, :, start:end], o[:, :, start:end], inverse)
        ds = product(v[:, :, :end], do.swapaxes(2, 3))
        ds = ds if drop is None else drop(ds, 0, len(q), start, end)
        kernels.score_gradients(ds, delta.swapaxes(2, 3), e)
        # dQ = dS^T K, dK = dS Q, dV = P dO, with scores as (keys, queries).
        product(ds.swapaxes(2, 3), k[:, :, :end], dq[:, :, start:end], scale)
        product(ds, q[:, :, start:end], dk[:, :, :end], scale, add=end < length)
        weights = e if drop is None else drop(e, 0, len(q), start, end)
        product(weights, do, dv[:, :, :end], add=end < length)


def _blocks(q: Array) -> Iterator[tuple[int, int]]:
    """Yield the first query of each block and the one after its last; none where there is nothing to compute."""
    for start in range(0, q.shape[2] if q.size else 0, BLOCK):
        yield start, min(start + BLOCK, q.shape[2])
