"""Causal attention of queries, keys and values that are separate: heads by heads, and with fewer key-value heads.

The blocks and the gradients are those of the core's `causal_attention`, which takes the three packed.

Proved by: tests/autograd/test_fused.py, tests/nn/test_llama.py
"""

from operator import itemgetter

from minidist.core.autograd.operators import mismatch, operand, reshape
from minidist.core.autograd.ops.attention import attend, attention_gradients, kept_arrays
from minidist.core.autograd.tensor import Tensor, record
from minidist.core.base import arrays as xp
from minidist.nn.ops import shaping
from minidist.nn.ops.dropout import WeightDropout, dropped_weights


def causal_attention_heads(q: Tensor, k: Tensor, v: Tensor, dropout: WeightDropout | None = None) -> Tensor:
    """Separate form: q, k, v (batch, heads, T, head size) -> the same shape."""
    if q.ndim != 4 or q.shape != k.shape or k.shape != v.shape:
        raise mismatch(
            "causal_attention_heads", q, k if k.shape != q.shape else v, "must be equal: (batch, heads, T, size)"
        )
    q, k, v = operand(q), operand(k), operand(v)
    values = q.data
    o = xp.empty(q.shape, values.dtype, values)
    drop = None if dropout is None else dropped_weights(dropout, *q.shape[:3])
    saved = attend(values, k.data, v.data, o, q, drop)
    y = q.save(o)
    o = y.stored
    kept_q, kept_k, kept_v = q.saved(), k.saved(), v.saved()

    def prepare(g: xp.Array) -> tuple[xp.Array, xp.Array, xp.Array]:
        out = y.data
        result = xp.empty_like(out), xp.empty_like(out), xp.empty_like(out)
        attention_gradients(kept_q.data, kept_k.data, kept_v.data, out, g, saved, result, drop)
        return result

    edges = ((q, itemgetter(0)), (k, itemgetter(1)), (v, itemgetter(2)))
    flops = 2 * q.size * q.shape[2]
    return record(
        "causal_attention_heads",
        o,
        edges,
        prepare=prepare,
        cost=lambda: (flops, [(flops * 5 // 6, 3 * o.nbytes)] * 3),  # five products, shared by three inputs
        saved=kept_arrays(saved, drop),
    )


def grouped_query_attention(q: Tensor, k: Tensor, v: Tensor, dropout: WeightDropout | None = None) -> Tensor:
    """Causal attention in which consecutive query heads share a key-value head: (batch, T, heads, n) -> the same.

    k, v (batch, T, kv heads, n), with heads a multiple of kv heads. Source: Ainslie et al., "GQA", 2023.
    """
    batch, length, heads, size = q.shape
    shared = heads // k.shape[2]

    def repeated(x: Tensor) -> Tensor:
        """(batch, T, kv heads, n) -> (batch, heads, T, n): each key-value head once per query head that reads it."""
        x = shaping.transpose(x, (0, 2, 1, 3))
        if shared == 1:
            return x
        # A view with the key-value head repeated; backward sums over the query heads that read it.
        x = reshape(x, (batch, x.shape[1], 1, length, size))
        repeats = shaping.broadcast_to(x, (batch, x.shape[1], shared, length, size))
        return reshape(repeats, (batch, heads, length, size))

    # All are (batch, heads, T, n) now.
    mixed = causal_attention_heads(shaping.transpose(q, (0, 2, 1, 3)), repeated(k), repeated(v), dropout)
    return shaping.transpose(mixed, (0, 2, 1, 3))
