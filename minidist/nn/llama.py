"""Llama's architecture under Llama's parameter names, next to GPT's: what most models that people read today are.

Touvron et al., "LLaMA", 2023. Four differences from GPT-2: RMS norm in the place of layer norm, rotary positions in the
place of a table, SwiGLU in the place of GELU, no biases; and from Llama 2 on several query heads share one key-value
head (Ainslie et al., "GQA", 2023). Weights have the shape (out, in); the names, such as
`model.layers.0.self_attn.q_proj.weight`, are those of the published state dicts (with the halves of a head as the pairs
that rotate).

A token's angle depends on its place in the whole text. A rank that holds a part of the text must pass the global
`positions` of its tokens; 0..T-1 on every rank would be a silent bug.

Proved by: tests/nn/test_llama.py
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from minidist.base.limits import check_whole
from minidist.core.autograd import Parameter, ShapeError, Tensor, reshape
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from minidist.core.nn.experts import MixtureOfExperts, auxiliary_losses
from minidist.core.nn.gpt import LanguageModel, TiedHead, with_own_weight
from minidist.core.nn.layers import Embedding, Linear
from minidist.core.nn.module import Module, run_blocks
from minidist.nn import rotary, rotary_angles, swiglu
from minidist.nn.dropout import AttentionDropout
from minidist.nn.norms import RMSNorm
from minidist.nn.ops.grouped_attention import grouped_query_attention
from minidist.nn.refusals import refuse_config

# q (batch, T, heads, n), k and v (batch, T, kv_heads, n) -> (batch, T, heads, n)
# (and with attention dropout that as a fourth argument)
GroupedAttention = Callable[..., Tensor]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; the names are those of its published configurations. The defaults are Llama 2 7B's."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None  # as many as heads
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    attention_dropout: float = 0.0
    num_local_experts: int = 0  # in place of each MLP, as in Mixtral; 0: none
    num_experts_per_tok: int = 1
    capacity_factor: float = 1.25
    router_aux_loss_coef: float = 0.01

    def __post_init__(self) -> None:
        check_whole("hidden_size", self.hidden_size, 1)
        heads, kv = check_whole("num_attention_heads", self.num_attention_heads, 1), self.kv_heads
        if self.hidden_size % (2 * heads):
            raise UsageError(
                f"hidden_size {self.hidden_size} does not divide into {heads} heads of an even size; use a multiple of"
                f" {2 * heads}"
            )
        if kv < 1 or heads % kv:
            divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise UsageError(f"{heads} heads do not share {kv} key-value heads evenly; use one of {divisors}")

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads


def _projection(n: int, m: int, dtype: Any) -> Linear:
    """An affine layer without bias, with Llama's initial values."""
    layer = Linear(n, m, bias=False, dtype=dtype, seed=None)
    layer.weight.init = ("normal", 0.02)
    return layer


class RotaryEmbedding(Module):
    """The angles by which queries and keys rotate, from the tokens' places in the whole text. No parameters."""

    def __init__(self, config: LlamaConfig) -> None:
        self.head_size = config.hidden_size // config.num_attention_heads
        self.known, self.theta = config.max_position_embeddings, config.rope_theta

    def forward(self, positions: xp.Array) -> xp.Array:
        """Integers (T,) -> angles (T, head size / 2)."""
        if positions.size and int(positions.max()) >= self.known:
            raise ShapeError(
                f"Llama: position {int(positions.max())} (of {positions.size} tokens) "
                f"but max_position_embeddings is {self.known}"
            )
        return rotary_angles(positions, self.head_size, self.theta)


class LlamaAttention(Module):
    """Causal self-attention with rotary positions. attention_fn may be replaced (ring attention).

    The numbers of heads are those of the projections' outputs: under tensor parallelism a rank has some of them.
    """

    def __init__(self, config: LlamaConfig, dtype: Any, attention_fn: GroupedAttention) -> None:
        width = config.hidden_size
        self.head_size = width // config.num_attention_heads
        self.attention_fn = attention_fn
        self.q_proj = _projection(width, width, dtype)
        self.k_proj = _projection(width, config.kv_heads * self.head_size, dtype)
        self.v_proj = _projection(width, config.kv_heads * self.head_size, dtype)
        self.o_proj = _projection(width, width, dtype)
        self.attn_dropout = AttentionDropout(config.attention_dropout, config.num_attention_heads)

    def forward(self, x: Tensor, angles: xp.Array) -> Tensor:
        """x (batch, T, width), angles (T, head size / 2) of its tokens -> (batch, T, width)."""
        # (batch, T, heads, n) and (batch, T, kv_heads, n); queries and keys are turned by the token's angle.
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = rotary(self._heads(q), angles), rotary(self._heads(k), angles), self._heads(v)
        # Attention gets the dropout only while it drops, so that a plain function of q, k, v will do.
        dropout = (self.attn_dropout,) if self.attn_dropout.active else ()
        mixed = self.attention_fn(q, k, v, *dropout)
        return self.o_proj(reshape(mixed, (*mixed.shape[:2], -1)))

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, T, heads x size) -> (batch, T, heads, size)."""
        return reshape(x, (*x.shape[:2], -1, self.head_size))


class LlamaMLP(Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, dtype: Any) -> None:
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _projection(width, inner, dtype)
        self.up_proj = _projection(width, inner, dtype)
        self.down_proj = _projection(inner, width, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, T, width) -> (batch, T, width)."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class SwiGLUExperts(MixtureOfExperts):
    """A mixture of Llama's MLPs: down(silu(gate(x)) * up(x)), the experts' matrices next to each other.

    Source: Jiang et al., "Mixtral of experts", 2024.
    """

    expert_dims: ClassVar[dict[str, int | None]] = {"gate_weight": 2, "up_weight": 2, "down_weight": 1}

    def make_experts(self, weight: Callable[..., Parameter], experts: int, width: int, hidden: int) -> None:
        """Make the experts' parameters with `weight(*shape, scale=)`."""
        self.gate_weight, self.up_weight = weight(experts, width, hidden), weight(experts, width, hidden)
        self.down_weight = weight(experts, hidden, width)

    def compute(self, work: Tensor) -> Tensor:
        """(experts, capacity, width) -> the same shape."""
        work = self.f(work)
        return self.g(swiglu(work @ self.gate_weight, work @ self.up_weight) @ self.down_weight)


class LlamaBlock(Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, config: LlamaConfig, dtype: Any, attention_fn: GroupedAttention = grouped_query_attention
    ) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, seed=None)
        self.self_attn = LlamaAttention(config, dtype, attention_fn)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, seed=None)
        self.mlp: LlamaMLP | SwiGLUExperts = LlamaMLP(config, dtype)

        # A mixture takes the place of the MLP, with the initial values of its layers.
        if config.num_local_experts:
            experts, top_k = config.num_local_experts, config.num_experts_per_tok
            sizes = config.hidden_size, config.intermediate_size, experts, top_k, config.capacity_factor
            self.mlp = SwiGLUExperts(*sizes, dtype, seed=None)

    def forward(self, x: Tensor, angles: xp.Array) -> Tensor:
        """x (batch, T, width), angles (T, head size / 2) -> (batch, T, width)."""
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, config: LlamaConfig, dtype: Any, attention_fn: GroupedAttention) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, scale=0.02, seed=None)
        self.layers = [LlamaBlock(config, dtype, attention_fn) for _ in range(config.num_hidden_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, seed=None)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, tokens: xp.Array, positions: xp.Array | None = None) -> Tensor:
        """Tokens (batch, T) -> (batch, T, width). positions (T,): global places of the tokens; default 0..T-1."""
        # Computed once for all layers, from the global positions.
        angles = self.rotary_emb(xp.device_arange(tokens.shape[1]) if positions is None else positions)
        return self.norm(run_blocks(self.layers, self.embed_tokens(tokens), angles))


class LlamaStage(Module):
    """Blocks first..last-1 of a Llama, with the embedding in front or the head behind."""

    def __init__(self, model: "Llama", first: int, last: int, embeds: bool, heads: bool) -> None:
        inner = model.model
        self.embeds, self.heads, self.rotary_emb = embeds, heads, inner.rotary_emb
        if embeds:
            self.embed_tokens = inner.embed_tokens
        self.layers = inner.layers[first:last]
        self.experts = bool(model.config.num_local_experts)
        if heads:
            self.norm = inner.norm
            tied = model.config.tie_word_embeddings and not embeds
            self.head = with_own_weight(model.lm_head) if tied else model.lm_head

    def forward(self, x: Any, auxiliary: Tensor | None = None) -> Any:
        """Return activations (batch, T, width), or logits on the last stage, from tokens or activations.

        With experts also the sum of their auxiliary losses so far, shape (1,).
        """
        angles = self.rotary_emb(xp.device_arange(x.shape[1]))
        if self.embeds:
            x = self.embed_tokens(x)
        for layer in self.layers:
            x = layer(x, angles)
        out = self.head(self.norm(x)) if self.heads else x
        return (out, auxiliary_losses(self.layers, auxiliary)) if self.experts else out


class Llama(LanguageModel):
    """The language model. `model(tokens)` gives logits (batch, T, vocab), `model(tokens, targets)` the loss."""

    decoder_name, blocks_name, stage_class = "model", "layers", LlamaStage

    def __init__(
        self,
        config: LlamaConfig,
        dtype: Any = xp.float32,
        seed: int | None = 0,
        attention_fn: GroupedAttention = grouped_query_attention,
    ) -> None:
        if not isinstance(config, LlamaConfig):
            refuse_config("Llama", config, LlamaConfig)
        super().__init__()
        self.config = config
        self.aux_loss_weight = config.router_aux_loss_coef if config.num_local_experts else None
        self.model = LlamaModel(config, dtype, attention_fn)

        # Most Llamas have a head that is not tied to the embedding.
        tied = config.tie_word_embeddings
        self.lm_head = (
            TiedHead(self.model.embed_tokens) if tied else _projection(config.hidden_size, config.vocab_size, dtype)
        )
        self.initialize(seed)
