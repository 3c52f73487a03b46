"""Causal self-attention as one node: softmax(Q K^T / sqrt(d)) V, where position i sees positions 0..i.

Queries go in blocks of 64, and a block meets only the keys up to its own end: half of the score matrix is never computed
and none of it is ever masked except the diagonal blocks. The exponentials are saved unnormalised; the division by their
row sums is folded into the (much smaller) outputs and output gradients. Heads are strided views of the packed projection,
so nothing is copied. With P the softmax, dS = P * (dO V^T - rowsum(dO * O)) (Dao et al., "FlashAttention", 2022, app. B).
"""

from operator import itemgetter

from minidist.autograd.errors import ShapeError
from minidist.autograd import elementwise, reductions, shaping
from minidist.autograd.operands import mismatch
from minidist.autograd.tensor import Tensor, record
from minidist.base import arrays as xp

_BLOCK = 64


def causal_attention(qkv: Tensor, heads: int) -> Tensor:
    """Packed form: qkv (batch, T, 3 D), queries, keys, values side by side, heads side by side in each -> (batch, T, D)."""
    if qkv.ndim != 3 or qkv.shape[2] % (3 * heads):
        raise ShapeError(f"causal_attention: shape {qkv.shape} is no (batch, T, 3 x {heads} heads x head size)")
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = _heads(qkv.data, 3, heads)
    out = xp.empty((batch, length, width), qkv.dtype, qkv.data)
    (o,) = _heads(out, 1, heads)
    saved = _forward(q, k, v, o)
    kept = qkv.saved()

    def grad(g: xp.Array) -> xp.Array:
        q, k, v = _heads(kept.data, 3, heads)
        dqkv = xp.empty((batch, length, 3 * width), g.dtype, g)
        _backward(q, k, v, o, *_heads(g, 1, heads), saved, *_heads(dqkv, 3, heads))
        return dqkv

    flops = 2 * batch * length * length * width  # half of 2 products of 2 batch T T D
    return record("causal_attention", out, ((qkv, grad),), flops=flops, saved=[e for pair in saved for e in pair])


def causal_attention_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Separate form: q, k, v (batch, heads, T, head size) -> the same shape."""
    if q.ndim != 4 or q.shape != k.shape or k.shape != v.shape:
        raise mismatch("causal_attention_heads", q, k if k.shape != q.shape else v, "must be equal: (batch, heads, T, size)")
    o = xp.empty(q.shape, q.dtype, q.data)
    saved = _forward(q.data, k.data, v.data, o)
    kept_q, kept_k, kept_v = q.saved(), k.saved(), v.saved()

    def prepare(g: xp.Array) -> tuple[xp.Array, xp.Array, xp.Array]:
        result = xp.empty_like(o), xp.empty_like(o), xp.empty_like(o)
        _backward(kept_q.data, kept_k.data, kept_v.data, o, g, saved, *result)
        return result

    edges = ((q, itemgetter(0)), (k, itemgetter(1)), (v, itemgetter(2)))
    flops = 2 * q.size * q.shape[2]
    return record(
        "causal_attention_heads", o, edges, prepare=prepare, flops=flops, saved=[e for pair in saved for e in pair]
    )


def _heads(packed: xp.Array, parts: int, heads: int) -> list[xp.Array]:
    """(batch, T, parts x heads x size) as `parts` views (batch, heads, T, size)."""
    batch, length, width = packed.shape
    split = packed.reshape(batch, length, parts, heads, width // (parts * heads))
    return [split[:, :, part].transpose(0, 2, 1, 3) for part in range(parts)]


def _forward(q: xp.Array, k: xp.Array, v: xp.Array, o: xp.Array) -> list[tuple[xp.Array, xp.Array]]:
    """Fill o; returns for each sample and query block (exp of the shifted scores, 1 / row sums)."""
    batch, _, length, size = q.shape
    scale = size**-0.5 if size else 1.0
    diagonal = _diagonal(min(_BLOCK, length), q)
    ones = xp.ones(length, q.dtype, q)
    saved = []
    for n in range(batch):
        for start in range(0, length, _BLOCK):
            end = min(start + _BLOCK, length)
            e = (q[n, :, start:end] * scale) @ k[n, :, :end].transpose(0, 2, 1)
            e[:, :, start:] += diagonal[: end - start, : end - start]
            e -= e.max(axis=-1, keepdims=True)
            xp.exp(e, out=e)
            inverse = xp.reciprocal(e @ ones[:end])[..., None]
            part = o[n, :, start:end]
            xp.matmul(e, v[n, :, :end], out=part)
            part *= inverse
            saved.append((e, inverse))
    return saved


def _backward(
    q: xp.Array, k: xp.Array, v: xp.Array, o: xp.Array, g: xp.Array, saved: list[tuple[xp.Array, xp.Array]],
    dq: xp.Array, dk: xp.Array, dv: xp.Array,
) -> None:  # fmt: skip
    """Fill dq, dk, dv. The last query block meets all keys, so it goes first and writes; the others add. Uses up `saved`."""
    batch, _, length, size = q.shape
    scale = size**-0.5 if size else 1.0
    saved = list(saved)
    for n in reversed(range(batch)):
        for start in reversed(range(0, length, _BLOCK)):
            end = min(start + _BLOCK, length)
            e, inverse = saved.pop()
            do = g[n, :, start:end] * inverse
            delta = xp.dot_rows(do, o[n, :, start:end])
            ds = do @ v[n, :, :end].transpose(0, 2, 1)
            ds -= delta
            ds *= e
            part = dq[n, :, start:end]
            xp.matmul(ds, k[n, :, :end], out=part)
            part *= scale
            scaled_q = q[n, :, start:end] * scale
            if end == length:
                xp.matmul(ds.transpose(0, 2, 1), scaled_q, out=dk[n])
                xp.matmul(e.transpose(0, 2, 1), do, out=dv[n])
            else:
                dk[n, :, :end] += ds.transpose(0, 2, 1) @ scaled_q
                dv[n, :, :end] += e.transpose(0, 2, 1) @ do


def _diagonal(n: int, like: xp.Array) -> xp.Array:
    """0 on and below the diagonal, -inf above."""
    positions = xp.arange(n)
    mask = xp.zeros((n, n), like.dtype, like)
    mask[positions[:, None] < positions] = -xp.inf
    return mask


def causal_attention_composite(qkv: Tensor, heads: int) -> Tensor:
    """The packed form, op by op with the whole score matrix: for lessons, and the oracle of `causal_attention`."""
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    size = width // heads
    split = shaping.transpose(shaping.reshape(qkv, (batch, length, 3, heads, size)), (2, 0, 3, 1, 4))
    q, k, v = split[0], split[1], split[2]
    scores = q @ shaping.swapaxes(k, -1, -2) * size**-0.5
    positions = xp.arange(length)
    scores = elementwise.where(positions[:, None] >= positions, scores, -xp.inf)
    mixed = reductions.softmax(scores) @ v
    return shaping.reshape(shaping.transpose(mixed, (0, 2, 1, 3)), (batch, length, width))
