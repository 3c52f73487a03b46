"""GELU, layer normalisation and attention from elementary operations, one node each: what the fused ones must equal.

Proved by: tests/autograd/test_fused.py
"""

from math import pi, sqrt

from minidist.core.autograd.operators import reshape
from minidist.core.autograd.ops.cross_entropy import softmax
from minidist.core.autograd.tensor import Tensor
from minidist.core.base import arrays as xp
from minidist.nn.ops import comparisons, shaping
from minidist.nn.ops.dropout import WeightDropout
from minidist.nn.ops.dropout import dropout as dropped
from minidist.nn.ops.functions import tanh


def gelu_composite(x: Tensor) -> Tensor:
    """GELU in tanh form from elementary operations (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016): the
    oracle of `gelu`.
    """
    inner = (x + x * x * x * 0.044715) * sqrt(2 / pi)
    return x * 0.5 * (tanh(inner) + 1.0)


def layer_norm_composite(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer normalisation from elementary operations: for lessons, and the oracle of `layer_norm`."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return centred / (variance + eps).sqrt() * weight + bias


def causal_attention_composite(qkv: Tensor, heads: int, dropout: WeightDropout | None = None) -> Tensor:
    """The packed form from elementary operations on the whole score matrix; the oracle of `causal_attention`."""
    batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    size = width // heads
    split = shaping.transpose(reshape(qkv, (batch, length, 3, heads, size)), (2, 0, 3, 1, 4))
    q, k, v = split[0], split[1], split[2]
    scores = q @ shaping.swapaxes(k, -1, -2) * size**-0.5
    positions = xp.device_arange(length)
    scores = comparisons.where(positions[:, None] >= positions, scores, -xp.inf)
    weights = softmax(scores)
    if dropout is not None:
        weights = dropped(weights, dropout.mask(batch, heads, length), dropout.scale)
    mixed = weights @ v
    return reshape(shaping.transpose(mixed, (0, 2, 1, 3)), (batch, length, width))
