"""GPT-2's architecture under GPT-2's parameter names, so that a GPT-2 state dict loads as it is.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. Blocks normalise first; the output
projection is the token embedding, transposed (`lm_head.weight` is `transformer.wte.weight`); weights of `Conv1D` have
the shape (in, out).

    tokens ──▶ wte + wpe ──▶ n_layer x [ x + attn(ln_1(x)), then x + mlp(ln_2(x)) ] ──▶ ln_f

`LanguageModel` is what GPT and Llama have in common:

    tokens ──▶ decoder ──▶ lm_head ──▶ logits_fn ──▶ logits          model(tokens)
                                  └──▶ loss_fn   ──▶ loss            model(tokens, targets)

Proved by: tests/nn/test_modules.py, tests/nn/test_against_torch.py, tests/nn/test_llama.py
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from minidist.core.autograd import Parameter, ShapeError, Tensor, causal_attention, cross_entropy, linear, reshape
from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.nn.experts import MixtureOfExperts, auxiliary_losses
from minidist.core.nn.layers import Conv1D, Embedding, LayerNorm
from minidist.core.nn.module import Identity, Module, run_blocks

# (qkv (batch, T, 3 D), heads) -> (batch, T, D); with attention dropout (qkv, heads, dropout)
AttentionFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT. The defaults are GPT-2's smallest, with no dropout.

    dropout applies to the sum of the embeddings and to the outputs of attention and MLP, attention_dropout to
    attention's weights (GPT-2's embd_pdrop and resid_pdrop, and attn_pdrop).
    n_experts above 0: a mixture of experts takes the place of each MLP (see `experts`); aux_loss_weight times
    the mean of the groups' auxiliary losses, summed over layers, is added to the loss.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    dropout: float = 0.0
    layer_norm_epsilon: float = 1e-5
    n_experts: int = 0
    expert_top_k: int = 1
    capacity_factor: float = 1.25
    aux_loss_weight: float = 0.01
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        whole = isinstance(self.n_embd, int) and isinstance(self.n_head, int)
        if not whole or self.n_head < 1 or self.n_embd % self.n_head:
            hooks.refusals().check_heads(self.n_embd, self.n_head)
        if (self.dropout or self.attention_dropout) and not hooks.dropout:
            hooks.not_in_the_core()


class Attention(Module):
    """Causal self-attention, (batch, T, D) -> (batch, T, D), by a function that may be replaced (ring attention).

    The number of heads is that of `c_attn`'s output: under tensor parallelism a rank has some of them.
    """

    def __init__(self, config: GPTConfig, dtype: Any, attention_fn: AttentionFunction = causal_attention) -> None:
        width = config.n_embd
        self.head_size = width // config.n_head
        self.attention_fn = attention_fn
        self.c_attn = Conv1D(width, 3 * width, dtype=dtype, seed=None)
        self.c_proj = Conv1D(width, width, dtype=dtype, scale=0.02 * (2 * config.n_layer) ** -0.5, seed=None)
        self.attn_dropout = hooks.attention_dropout(config.attention_dropout, config.n_head)  # without a library: none
        self.resid_dropout = hooks.dropout(config.dropout) or Identity()

    def forward(self, x: Tensor) -> Tensor:
        # (batch, T, 3 D); under tensor parallelism this rank's heads only, (batch, T, 3 D / t).
        qkv = self.c_attn(x)
        heads = qkv.shape[-1] // (3 * self.head_size)
        dropout = (self.attn_dropout,) if self.attn_dropout.active else ()
        return self.resid_dropout(self.c_proj(self.attention_fn(qkv, heads, *dropout)))


class FeedForward(Module):
    """Two affine layers of inner width 4 D with GELU between, (batch, T, D) -> (batch, T, D)."""

    def __init__(self, config: GPTConfig, dtype: Any) -> None:
        width = config.n_embd
        self.c_fc = Conv1D(width, 4 * width, activation="gelu", dtype=dtype, seed=None)
        self.c_proj = Conv1D(4 * width, width, dtype=dtype, scale=0.02 * (2 * config.n_layer) ** -0.5, seed=None)
        self.dropout = hooks.dropout(config.dropout) or Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.c_fc(x)))


class Block(Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), (batch, T, D) -> (batch, T, D)."""

    def __init__(self, config: GPTConfig, dtype: Any, attention_fn: AttentionFunction = causal_attention) -> None:
        self.ln_1 = LayerNorm(config.n_embd, config.layer_norm_epsilon, dtype, seed=None)
        self.attn = Attention(config, dtype, attention_fn)
        self.ln_2 = LayerNorm(config.n_embd, config.layer_norm_epsilon, dtype, seed=None)
        self.mlp: FeedForward | MixtureOfExperts = FeedForward(config, dtype)

        # A mixture takes the place of the MLP, with the initial values of its layers.
        if config.n_experts:
            width, chosen = config.n_embd, (config.n_experts, config.expert_top_k, config.capacity_factor)
            self.mlp = MixtureOfExperts(width, 4 * width, *chosen, dtype, seed=None)
            self.mlp.proj_weight.init = ("normal", 0.02 * (2 * config.n_layer) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        # Normalise first: the residual stream itself is never normalised inside the blocks.
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class TiedHead(Module):
    """The output projection that shares the token embedding's weight: (..., D) -> (..., vocab)."""

    def __init__(self, wte: Embedding) -> None:
        # The same Parameter object: its gradient is the sum over both uses.
        self.weight = wte.weight

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def with_own_weight(head: Any) -> Any:
    """Return a tied head with a copy of its weight, of the same name, for a stage that does not have the embedding."""
    head, shared = copy(head), head.weight
    head.weight = Parameter(xp.array(shared.data), shared.requires_grad, shared.name, shared.init)
    head.weight.layout = shared.layout
    return head


class LanguageModel(Module):
    """Base of GPT and Llama.

    Subclasses set `lm_head`, which computes logits from the decoder's output, the names that published state dicts give
    to the decoder and to its blocks, and the class of a stage.
    """

    decoder_name: ClassVar[str]
    blocks_name: ClassVar[str]
    stage_class: ClassVar[Callable[..., Module]]
    lm_head: Any  # a TiedHead or a Linear, or what a parallel style puts in its place; it has a `weight`

    def __init__(self) -> None:
        self.aux_loss_weight: float | None = None  # of the experts' auxiliary losses; None without experts
        self.loss_fn: Callable[..., Tensor] = cross_entropy  # (logits, targets, divisor) -> shape ()
        self.logits_fn: Module = Identity()

    @property
    def decoder(self) -> Any:
        """The module that turns tokens (batch, T) into features (batch, T, D)."""
        return getattr(self, self.decoder_name)

    @property
    def blocks(self) -> Any:
        """The list of repeated layers, in order: what a pipeline cuts between and FSDP shards one by one."""
        return getattr(self.decoder, self.blocks_name)

    def stage(self, first: int, last: int, is_first: bool, is_last: bool) -> Module:
        """Return blocks first..last-1 as a stage of a pipeline: the first one embeds, the last one has the head."""
        return self.stage_class(self, first, last, is_first, is_last)

    def forward(
        self, tokens: Any, targets: Any = None, divisor: float | None = None, positions: xp.Array | None = None
    ) -> Tensor:
        """Integers (batch, T) -> logits (batch, T, vocab); with targets (batch, T) the loss, of shape ().

        divisor: as in `cross_entropy`. positions (T,): of the tokens in their text, when they are a part of it
        (context parallelism). With experts their auxiliary losses are added to the loss.
        """
        # (batch, T, vocab), or this rank's words only when the vocabulary is split.
        tokens = xp.as_array(tokens)
        if tokens.ndim != 2:
            raise ShapeError(f"tokens of shape {tokens.shape}; a model takes (batch, T), and one text is (1, T)")
        logits = self.lm_head(self.decoder(tokens, positions))
        if targets is None:
            return self.logits_fn(logits)
        loss = self.loss_fn(logits, targets, divisor)
        if self.aux_loss_weight is None:
            return loss
        # This group's share of the step, so that the sum over micro-batches and ranks is the mean of the groups.
        return self.with_auxiliary(loss, auxiliary_losses(self.blocks), tokens.size / (divisor or tokens.size))

    def with_auxiliary(self, loss: Tensor, auxiliary: Tensor, share: float) -> Tensor:
        """Add the experts' losses; share: of this group in the step, so that the groups' losses are averaged."""
        assert self.aux_loss_weight is not None
        return loss + reshape(auxiliary, loss.shape) * (self.aux_loss_weight * share)


class Transformer(Module):
    """Embeddings, blocks and the last layer norm: tokens (batch, T) -> (batch, T, D). A stage is a slice of these."""

    def __init__(self, config: GPTConfig, dtype: Any, attention_fn: AttentionFunction = causal_attention) -> None:
        self.wte = Embedding(config.vocab_size, config.n_embd, dtype, scale=0.02, seed=None)
        self.wpe = Embedding(config.n_positions, config.n_embd, dtype, scale=0.01, seed=None)
        self.drop = hooks.dropout(config.dropout) or Identity()
        self.h = [Block(config, dtype, attention_fn) for _ in range(config.n_layer)]
        self.ln_f = LayerNorm(config.n_embd, config.layer_norm_epsilon, dtype, seed=None)

    def embed(self, tokens: xp.Array, positions: xp.Array | None = None) -> Tensor:
        """Tokens (batch, T) -> (batch, T, D). positions (T,): of the tokens in their text; default 0..T-1."""
        length, known = tokens.shape[1], self.wpe.weight.shape[0]
        if length > known:
            raise ShapeError(f"GPT: {length} positions (tokens of shape {tokens.shape}) but n_positions is {known}")
        if positions is not None and getattr(self.drop, "active", False):
            hooks.refusals().require_coordinates(positions)
        return self.drop(self.wte(tokens) + self.wpe(xp.arange(length) if positions is None else positions))

    def forward(self, tokens: xp.Array, positions: xp.Array | None = None) -> Tensor:
        return self.ln_f(run_blocks(self.h, self.embed(tokens, positions)))


class GPTStage(Module):
    """Blocks first..last-1 of a GPT, with the embedding in front or the head behind."""

    def __init__(self, model: "GPT", first: int, last: int, embeds: bool, heads: bool) -> None:
        transformer = model.transformer
        self.embeds, self.heads = embeds, heads
        if embeds:
            self.wte, self.wpe, self.drop = transformer.wte, transformer.wpe, transformer.drop
            self._embed = transformer.embed
        self.h = transformer.h[first:last]
        self.experts = bool(model.config.n_experts)
        if heads:
            self.ln_f = transformer.ln_f
            self.head = model.lm_head if embeds else with_own_weight(model.lm_head)  # last: its weight may be a copy

    def forward(self, x: Any, auxiliary: Tensor | None = None) -> Any:
        """Return activations (batch, T, D), or logits on the last stage, from tokens or activations.

        With experts also the sum of their auxiliary losses so far, shape (1,).
        """
        if self.embeds:
            x = self._embed(x)
        for block in self.h:
            x = block(x)
        out = self.head(self.ln_f(x)) if self.heads else x
        return (out, auxiliary_losses(self.h, auxiliary)) if self.experts else out


class GPT(LanguageModel):
    """The language model, with GPT-2's initial values: normal with 0.02, and 0.02 / sqrt(2 n_layer) for `c_proj`."""

    decoder_name, blocks_name, stage_class = "transformer", "h", GPTStage

    def __init__(
        self,
        config: GPTConfig,
        dtype: Any = xp.float32,
        seed: int | None = 0,
        attention_fn: AttentionFunction = causal_attention,
    ) -> None:
        if not isinstance(config, GPTConfig):
            hooks.refusals().refuse_config("GPT", config, GPTConfig)
        super().__init__()
        self.config = config
        self.aux_loss_weight = config.aux_loss_weight if config.n_experts else None
        # The head reuses the embedding's weight: one parameter, under two names.
        self.transformer = Transformer(config, dtype, attention_fn)
        self.lm_head = TiedHead(self.transformer.wte)
        self.initialize(seed)
