"""The two ways in which a model calls attention: GPT packs queries, keys and values in one array, Llama passes three.

Ring attention and all-gather attention compute with (q, k, v). Their `forward`, which takes either form, is here.

Proved by: tests/parallel/test_context.py, tests/parallel/test_all_gather_attention.py
"""

from typing import Any

from minidist.core.autograd import Tensor, reshape
from minidist.core.autograd.ops.attention import WeightDropout
from minidist.core.nn.module import Module


class SplitAttention(Module):
    """Attention whose rows each rank computes for its own tokens. A subclass defines `attend`.

    Called with (qkv, heads), qkv (batch, T_local, 3 D), it is an `attention_fn` for GPT; with (q, k, v) of shapes
    (batch, T_local, heads or kv_heads, n) one for Llama. The last argument may be the dropout of the weights.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: WeightDropout | None = None) -> Tensor:
        """Return the outputs (batch, T_local, heads, n) of this rank's queries."""
        raise NotImplementedError(f"{type(self).__name__} must define attend(q, k, v, dropout)")

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        """(qkv, heads) -> (batch, T_local, D), or (q, k, v) -> (batch, T_local, heads, n)."""
        # The second argument is the number of heads if x packs q, k and v; otherwise it is k.
        if isinstance(rest[0], int):
            heads, *dropout = rest
            batch, rows, width = x.shape
            split = reshape(x, (batch, rows, 3, heads, width // (3 * heads)))
            mixed = self.attend(split[:, :, 0], split[:, :, 1], split[:, :, 2], *dropout)
            return reshape(mixed, (batch, rows, width // 3))
        return self.attend(x, *rest)
