"""Keys and values of the tokens that a language model has seen, so that each new token is computed once.

Without a cache, token t of a text costs a forward pass over all t tokens before it. Causal attention never changes what
an earlier token computed, so its keys and values can be kept, and a new token costs a pass over itself alone:

    layer    new token ──▶ q, k, v ──▶ k, v appended     K  | k0 k1 k2 ... kt |
                           └─────────▶ softmax(q K^T / sqrt(d)) V              work per token: 2 P + 4 L t D

with P the weights in products, L layers, t tokens in the cache and D the width of keys; without it, about t times as
much. The cache holds 2 L t D numbers, D = (key-value heads) x (head size).

A cache is of a text that only grows. Where a model's window slides, every token has another position and sees fewer
tokens before it: then the window has to be computed anew.

Proved by: tests/commands/test_generation.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minidist.core.autograd import Tensor, no_grad
from minidist.core.autograd.tensor import record
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.nn.experts import MixtureOfExperts


class LayerCache:
    """The keys and values of one layer, and attention to them in place of the layer's own.

    before: the layer's own attention, which the first tokens go through: none is in the cache yet.
    """

    def __init__(self, capacity: int, before: Any) -> None:
        self.capacity, self.before = capacity, before
        self.length = 0
        self.keys: Any = None  # (kv heads, capacity, size), made with the first tokens, as the values are
        self.values: Any = None

    def packed(self, qkv: Tensor, heads: int) -> Tensor:
        """GPT's form: (1, T, 3 D) of T new tokens -> (1, T, D)."""
        _, new, width = qkv.shape
        q, k, v = xp.moveaxis(qkv.data.reshape(new, 3, heads, width // (3 * heads)), 1, 0)
        if self.append(k, v) == 0:
            return self.before(qkv, heads)
        return self._attend(q, (1, new, width // 3))

    def grouped(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Llama's form: q (1, T, heads, size), k and v (1, T, kv heads, size) -> as q."""
        if self.append(k.data[0], v.data[0]) == 0:
            return self.before(q, k, v)
        return self._attend(q.data[0], q.shape)

    def append(self, k: xp.Array, v: xp.Array) -> int:
        """Keep the keys and values (T, kv heads, size) of new tokens; return how many tokens were there before."""
        before, new = self.length, len(k)
        if before == 0:
            shape = (k.shape[1], self.capacity, k.shape[2])
            self.keys, self.values = xp.zeros(shape, k.dtype, k), xp.zeros(shape, k.dtype, k)
        self.keys[:, before : before + new] = k.swapaxes(0, 1)
        self.values[:, before : before + new] = v.swapaxes(0, 1)
        self.length += new
        return before

    def _attend(self, q: xp.Array, shape: tuple[int, ...]) -> Tensor:
        """Queries (T, heads, size) of the last T tokens meet all keys up to their own; the result has `shape`."""
        new, heads, size = q.shape
        kv, end = len(self.keys), self.length
        keys, values = self.keys[:, None, :end], self.values[:, None, :end]

        # (kv heads, query heads of each, T, size): consecutive query heads share a key-value head.
        grouped = (q * size**-0.5).reshape(new, kv, heads // kv, size).transpose(1, 2, 0, 3)
        scores = grouped @ keys.swapaxes(2, 3)
        # The i-th of the new tokens does not see the later ones.
        positions = xp.arange(end)
        scores[..., positions[None, :] > positions[end - new :, None]] = -xp.inf
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        mixed = (scores @ values) / scores.sum(axis=-1, keepdims=True)
        out = mixed.transpose(2, 0, 1, 3).reshape(shape)
        return record("cached_attention", out, (), cost=4 * new * heads * size * end)


class KeyValueCache:
    """The cache of all layers of a GPT or a Llama that writes one text of at most `capacity` tokens.

        cache = KeyValueCache(model, 64)
        logits = cache.extend(prompt)           # of the last token, (vocab,); the prompt's tokens are in the cache now
        logits = cache.extend([token])          # one token's work

    Raises UsageError for a model with experts: which tokens an expert takes depends on the tokens that are computed
    together.
    """

    def __init__(self, model: Any, capacity: int) -> None:
        if not can_cache(model):
            raise UsageError(
                f"{type(model).__name__} has no cache of keys and values: its blocks have no causal attention alone, as"
                " those of a GPT without experts and of a Llama do; generate without a cache"
            )
        self.model, self.capacity = model, capacity
        self._attentions = [_attention_of(block) for block in model.blocks]
        self.layers = [LayerCache(capacity, attention.attention_fn) for attention in self._attentions]

    @property
    def length(self) -> int:
        """The number of tokens in the cache."""
        return self.layers[0].length

    @property
    def nbytes(self) -> int:
        """The bytes of the keys and values that are kept."""
        return sum(2 * layer.keys[:, : layer.length].nbytes for layer in self.layers if layer.length)

    def extend(self, tokens: Any) -> xp.Array:
        """Compute new tokens (1-D) that follow those in the cache, keep their keys and values; return the last logits.

        Raises UsageError for no token, and for more than fit.
        """
        first, new = self.length, len(tokens)
        if not 0 < new <= self.capacity - first:
            raise UsageError(
                f"{new} new tokens for a cache with {first} of {self.capacity} tokens; give at least one, and begin a"
                " new cache where the text is longer"
            )
        with no_grad(), self._attached():
            logits = self.model(xp.as_array([list(tokens)]), positions=xp.arange(first, first + new))
        result: xp.Array = logits.data[0, -1]
        return result

    @contextmanager
    def _attached(self) -> Iterator[None]:
        """Let the blocks attend to the cache, in the block."""
        try:
            for attention, layer in zip(self._attentions, self.layers, strict=True):
                attention.attention_fn = layer.packed if hasattr(attention, "c_attn") else layer.grouped
            yield
        finally:
            for attention, layer in zip(self._attentions, self.layers, strict=True):
                attention.attention_fn = layer.before


def can_cache(model: Any) -> bool:
    """Return whether a model's tokens depend on earlier tokens through causal attention alone."""
    blocks = getattr(model, "blocks", ())
    routes = any(isinstance(module, MixtureOfExperts) for module in model.modules())
    return bool(blocks) and not routes and all(_attention_of(block) is not None for block in blocks)


def _attention_of(block: Any) -> Any:
    return getattr(block, "attn", None) or getattr(block, "self_attn", None)
