"""Causal self-attention as one node: softmax(Q K^T / sqrt(d)) V, where position i sees positions 0..i.

Queries are processed in blocks of 64, each with the keys up to the end of its block: half of the score matrix is never
computed, and only the blocks on the diagonal are masked. The exponentials are saved unnormalised; the outputs and their
gradients, which are much smaller, are divided by the row sums. Heads are strided views of the packed projection, so
nothing is copied. Scores have the layout (keys, queries), so that a maximum over keys compares whole rows at once. With
P the softmax, dS = P * (dO V^T - rowsum(dO * O)) (Dao et al., "FlashAttention", 2022, app. B).

Proved by: tests/autograd/test_fused.py
"""

from collections.abc import Sequence
from typing import Any

from minidist.core.autograd.operators import operand
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.arrays import Array
from minidist.core.base.errors import ShapeError

_BLOCK = 64  # queries at once
_CACHE = 256 * 1024  # bytes of scores at once


def causal_attention(qkv: Tensor, heads: int, dropout: Any = None) -> Tensor:
    """Packed form: qkv (batch, T, 3 D) -> (batch, T, D); queries, keys, values side by side, and heads in each."""
    if qkv.ndim != 3 or qkv.shape[2] % (3 * heads):
        raise ShapeError(f"causal_attention: shape {qkv.shape} is not (batch, T, 3 x {heads} heads x head size)")
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    qkv = operand(qkv)
    values = qkv.data
    q, k, v = _heads(values, 3, heads)
    out = xp.empty((batch, length, width), values.dtype, values)
    drop = None if dropout is None else hooks.dropped_weights(dropout, batch, heads, length)
    saved = attend(q, k, v, _heads(out, 1, heads)[0], qkv, drop)
    y, kept = qkv.save(out), qkv.saved()
    out = y.stored

    def grad(g: Array) -> Array:
        q, k, v = _heads(kept.data, 3, heads)
        dqkv = xp.empty((batch, length, 3 * width), g.dtype, g)
        (o,), (do,), (dq, dk, dv) = _heads(y.data, 1, heads), _heads(g, 1, heads), _heads(dqkv, 3, heads)
        attention_gradients(q, k, v, o, do, saved, (dq, dk, dv), drop)
        return dqkv

    return record("causal_attention", out, ((qkv, grad),), saved=kept_arrays(saved, drop))


# None, or (block of weights, first sample, samples, first query, last query) -> the block less the dropped weights.
Drop = Any
Saved = list[tuple[Tensor, Array]]  # of each block: exponentials, 1 / row sums


def kept_arrays(saved: Saved, drop: Drop) -> list[Array]:
    return [array for e, inverse in saved for array in (e.stored, inverse)] + ([] if drop is None else [drop.keep])


def _heads(packed: Array, parts: int, heads: int) -> list[Array]:
    """(batch, T, parts x heads x size) as `parts` views (batch, heads, T, size)."""
    batch, length, width = packed.shape
    return list(packed.reshape(batch, length, parts, heads, width // (parts * heads)).transpose(2, 0, 3, 1, 4))


def at_once(q: Array) -> tuple[int, int]:
    """The samples and queries per block: as many samples as fit into the cache together."""
    _, heads, length, _ = q.shape
    return max(1, _CACHE // max(1, heads * min(_BLOCK, length) * length * q.dtype.itemsize)), _BLOCK


def attend(q: Array, k: Array, v: Array, o: Array, source: Tensor, drop: Drop = None) -> Saved:
    """Fill o; returns for each group of samples and query block (exp of the shifted scores, 1 / row sums).

    The exponentials, numbers from 0 to 1, are saved as `source` says; the row sums, one number a query, as they are.
    """
    batch, _, length, size = q.shape
    scale = size**-0.5 if size else 1.0
    if kernels := xp.kernels_of(q):
        return kernels.attention(q, k, v, o, source, drop)
    step, queries = at_once(q)
    ones, positions = xp.constant(length, 1, q), xp.device_arange(min(queries, length))
    # (keys, queries) of a block on the diagonal: 0 where the key is not later than the query, -inf where it is.
    diagonal = xp.zeros((len(positions), len(positions)), q.dtype, q)
    diagonal[positions[:, None] > positions] = -xp.inf
    saved = []
    for n in range(0, batch, step):
        qn, kn, vn, on = q[n : n + step], k[n : n + step], v[n : n + step], o[n : n + step]
        for start in range(0, length, queries):
            end = min(start + queries, length)
            # e = exp(K Q^T / sqrt(d) - maximum), of the keys up to the block's end.
            e = xp.matmul(kn[:, :, :end], (qn[:, :, start:end] * scale).swapaxes(2, 3))
            inverse = _exponentials(e, diagonal, ones)
            # O^T = V^T e / row sums: the division is done on the output, which is much smaller than the scores.
            part = on[:, :, start:end]
            weights = e if drop is None else drop(e, n, step, start, end)
            xp.matmul(vn[:, :, :end].swapaxes(2, 3), weights, out=part.swapaxes(2, 3))
            part *= inverse
            saved.append((source.save(e), inverse))
    return saved


def attention_gradients(
    q: Array, k: Array, v: Array, o: Array, g: Array, saved: Saved, gradients: Sequence[Array], drop: Drop = None
) -> None:
    """Fill dq, dk, dv; uses up `saved`. The last query block meets all keys: it goes first and writes, others add."""
    batch, _, length, size = q.shape
    scale = size**-0.5 if size else 1.0
    if kernels := xp.kernels_of(q):
        kernels.attention_gradients(q, k, v, o, g, saved, gradients, drop)
        return
    step, queries = at_once(q)
    for n in reversed(range(0, batch, step)):
        qn, kn, vn, on, gn = q[n : n + step], k[n : n + step], v[n : n + step], o[n : n + step], g[n : n + step]
        dqn, dkn, dvn = (array[n : n + step] for array in gradients)
        for start in reversed(range(0, length, queries)):
            end = min(start + queries, length)
            kept, inverse = saved.pop()
            e = kept.data
            # dS = P * (dO V^T - rowsum(dO * O)); P = e / row sums, and the division is in dO already.
            do = gn[:, :, start:end] * inverse
            delta = xp.dot_rows(do, on[:, :, start:end])
            ds = xp.matmul(vn[:, :, :end], do.swapaxes(2, 3))
            ds = ds if drop is None else drop(ds, n, step, start, end)
            ds -= delta.swapaxes(2, 3)
            ds *= e
            # dQ^T = K^T dS, dK = dS Q, dV = P dO, with scores as (keys, queries).
            part = dqn[:, :, start:end]
            xp.matmul(kn[:, :, :end].swapaxes(2, 3), ds, out=part.swapaxes(2, 3))
            part *= scale
            scaled_q = qn[:, :, start:end] * scale
            e = e if drop is None else drop(e, n, step, start, end)
            if end == length:
                dk_sum = xp.matmul(ds, scaled_q, out=dkn if start == 0 else None)
                dv_sum = xp.matmul(e, do, out=dvn if start == 0 else None)
            else:
                dk_sum[:, :, :end] += xp.matmul(ds, scaled_q)
                dv_sum[:, :, :end] += xp.matmul(e, do)
        # Several blocks are added in contiguous memory, which is faster than in rows of one head's size.
        if length > queries:
            dkn[...], dvn[...] = dk_sum, dv_sum


def _exponentials(e: Array, diagonal: Array, ones: Array) -> Array:
    """Turn a block's scores (..., keys, queries) into exponentials, in place; return 1 / row sums (..., queries, 1).

    The last key is the last query's own; keys after a query's own are 0. diagonal, ones: of a block that may be larger.
    """
    keys, n = e.shape[2:]
    e[:, :, keys - n :] += diagonal[:n, :n]
    e -= _largest(e)
    xp.exp(e, out=e)
    return xp.reciprocal(ones[:keys] @ e)[..., None]


def _largest(e: Array) -> Array:
    """Maximum over the keys, (..., keys, queries) -> (..., 1, queries), by folding: halves that may overlap."""
    while (n := e.shape[-2]) > 1:
        half = (n + 1) // 2
        e = xp.maximum(e[:, :, :half], e[:, :, n - half :])
    return e
