"""Causal self-attention from elementary operations, one node each: what the fused `causal_attention` must equal.

Proved by: tests/autograd/test_fused.py
"""

from minidist.autograd.ops import elementwise, reductions, shaping
from minidist.autograd.ops.attention import WeightDropout
from minidist.autograd.ops.dropout import dropout as dropped
from minidist.autograd.tensor import Tensor
from minidist.base import arrays as xp


def causal_attention_composite(qkv: Tensor, heads: int, dropout: WeightDropout | None = None) -> Tensor:
    """The packed form from elementary operations on the whole score matrix; the oracle of `causal_attention`."""
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    size = width // heads
    split = shaping.transpose(shaping.reshape(qkv, (batch, length, 3, heads, size)), (2, 0, 3, 1, 4))
    q, k, v = split[0], split[1], split[2]
    scores = q @ shaping.swapaxes(k, -1, -2) * size**-0.5
    positions = xp.device_arange(length)
    scores = elementwise.where(positions[:, None] >= positions, scores, -xp.inf)
    weights = reductions.softmax(scores)
    if dropout is not None:
        weights = dropped(weights, dropout.mask(batch, heads, length), dropout.scale)
    mixed = weights @ v
    return shaping.reshape(shaping.transpose(mixed, (0, 2, 1, 3)), (batch, length, width))
