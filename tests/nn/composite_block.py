"""A transformer block whose attention is unfused and unblocked: the block that the published memory formulas count.

`gpt.Block` computes attention in one node that never makes the upper half of the score matrix and keeps no
probabilities. This one keeps what "Reducing activation recomputation in large transformer models" (Korthikanti et al.,
2022, section 4) lists, operation by operation: with 2-byte values and 1-byte masks 34 s b h + 5 a s^2 b bytes. It is
slower, and exists to be counted: see `planning/block_bytes.py`.
"""

from typing import Any

from minidist.core.autograd import Tensor, gelu, reshape, softmax
from minidist.core.base import arrays as xp
from minidist.core.nn.gpt import GPTConfig
from minidist.core.nn.layers import Conv1D, LayerNorm
from minidist.core.nn.module import Module
from minidist.nn import swapaxes, transpose
from minidist.nn.dropout import Dropout


class CompositeAttention(Module):
    """Causal self-attention with dropout on the probabilities, one node per operation."""

    def __init__(self, config: GPTConfig, dtype: Any) -> None:
        width = config.n_embd
        self.heads = config.n_head
        self.c_attn = Conv1D(width, 3 * width, dtype=dtype, seed=None)
        self.c_proj = Conv1D(width, width, dtype=dtype, scale=0.02 * (2 * config.n_layer) ** -0.5, seed=None)
        self.attn_dropout, self.resid_dropout = Dropout(config.dropout), Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, T, D) -> (batch, T, D)."""
        batch, length, width = x.shape

        # (batch, T, 3 D) -> q, k, v of (batch, heads, T, size) each.
        qkv = reshape(self.c_attn(x), (batch, length, 3, self.heads, width // self.heads))
        q, k, v = (transpose(qkv[:, :, part], (0, 2, 1, 3)) for part in range(3))

        # (batch, heads, T, T), kept for backward by the softmax: the 5 a s^2 b of the formula.
        scores = q @ swapaxes(k, -1, -2) * (width // self.heads) ** -0.5
        probabilities = self.attn_dropout(softmax(scores + Tensor(_causal(length, x.data))))
        return self.resid_dropout(
            self.c_proj(reshape(transpose(probabilities @ v, (0, 2, 1, 3)), (batch, length, width)))
        )


class CompositeBlock(Module):
    """As `gpt.Block`, with `CompositeAttention` and a GELU that is a separate node."""

    def __init__(self, config: GPTConfig, dtype: Any = xp.float32, seed: int | None = 0) -> None:
        width, scale = config.n_embd, 0.02 * (2 * config.n_layer) ** -0.5
        self.ln_1 = LayerNorm(width, config.layer_norm_epsilon, dtype, seed=None)
        self.attn = CompositeAttention(config, dtype)
        self.ln_2 = LayerNorm(width, config.layer_norm_epsilon, dtype, seed=None)
        self.c_fc = Conv1D(width, 4 * width, dtype=dtype, seed=None)
        self.c_proj = Conv1D(4 * width, width, dtype=dtype, scale=scale, seed=None)
        self.dropout = Dropout(config.dropout)
        self.initialize(seed)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, T, D) -> (batch, T, D)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.dropout(self.c_proj(gelu(self.c_fc(self.ln_2(x)))))


def _causal(length: int, like: xp.Array) -> xp.Array:
    """Return 0 where a query may see a key, -inf elsewhere: added to the scores, it is not kept for backward."""
    # (T, T), row: query, column: key.
    places = xp.device_arange(length)
    return xp.as_array(xp.where(places[:, None] >= places, 0.0, -xp.inf), like.dtype)
