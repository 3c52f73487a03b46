"""The sizes of a transformer: its parameters and floating-point operations, counted exactly from what describes it.

A model is described by a name, by sizes given as flags, or by the `config.json` that Hugging Face stores beside the
weights (llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, gpt2, gpt_neox, deepseek_v3). The counts equal those of the
published checkpoints to the last parameter.

Parameters are kept apart by how a layout divides them: `split` ones are divided by tensor parallelism, `replicated`
ones (norms, biases of row-parallel products, routers) are not, and `expert` ones are divided by expert parallelism.

Proved by: tests/planning/test_architecture.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.limits import MAX_LAYERS, check_count

MAX_SIZE = 10**8  # of a width, a vocabulary or a context
MAX_EXPERTS = 10**5  # of a layer

# How the command line calls what `checked` refuses; a file has names of its own.
FLAGS = {
    "layers": "--layers",
    "width": "--hidden",
    "heads": "--heads",
    "vocabulary": "--vocab",
    "positions": "--seq",
    "inner": "--ffn",
    "kv_heads": "--kv-heads",
    "experts": "--experts",
    "top_k": "--top-k",
}


class Parameters(NamedTuple):
    """Numbers of parameters, by how a layout divides them."""

    split: int
    replicated: int
    expert: int = 0

    @property
    def total(self) -> int:
        """Return all of them."""
        return self.split + self.replicated + self.expert


@dataclass(frozen=True)
class LatentAttention:
    """The ranks and head sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Architecture:
    """Sizes of a transformer; the defaults are GPT-2's kind of block.

    gated: a LLaMA block (RMS norms, no biases, a gated MLP, rotary positions, no dropout). tied: the output projection
    is the embedding (default: where the block is not gated). learned_positions: an embedding per position (default:
    where the block is not gated). qkv_bias: biases of a gated block's queries, keys and values, or of its projections
    to latent vectors; output_bias, mlp_bias: biases of its other matrices. query_norm: norms of queries and keys.
    experts, top_k: of each layer from `dense_layers` on; expert_inner: their width; shared_experts: how many of them
    every token uses; router_bias: one number per expert. window: how many tokens before it a token attends to.
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int
    inner: int
    gated: bool = False
    kv_heads: int | None = None
    head_size: int | None = None
    tied: bool | None = None
    learned_positions: bool | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_norm: bool = False
    experts: int = 0
    top_k: int = 0
    expert_inner: int | None = None
    shared_experts: int = 0
    dense_layers: int = 0
    router_bias: bool = False
    latent: LatentAttention | None = field(default=None)
    window: int | None = None

    @property
    def query_size(self) -> int:
        """Return the elements of a token's queries, of all heads."""
        if self.latent:
            return self.heads * (self.latent.nope + self.latent.rope)
        return self.heads * (self.head_size or self.width // self.heads)

    @property
    def kv_size(self) -> int:
        """Return the elements of a token's keys, of all heads that have their own."""
        if self.latent:
            return self.query_size
        return (self.kv_heads or self.heads) * (self.head_size or self.width // self.heads)

    @property
    def value_size(self) -> int:
        """Return the elements of a token's attention output, of all heads."""
        return self.heads * self.latent.value if self.latent else self.query_size

    @property
    def is_tied(self) -> bool:
        """Return whether the output projection is the embedding."""
        return not self.gated if self.tied is None else self.tied

    @property
    def has_positions(self) -> bool:
        """Return whether positions have an embedding."""
        return not self.gated if self.learned_positions is None else self.learned_positions

    # parameters -------------------------------------------------------------------------------------------------------

    @property
    def attention(self) -> Parameters:
        """Return the parameters of one attention with the norm before it."""
        h, q, kv, out = self.width, self.query_size, self.kv_size, self.value_size
        # The output projection is row-parallel, so its bias is not divided.
        output_bias = h if self.output_bias else 0
        if self.latent:
            # Low-rank projections: their inner matrices are small and every tensor-parallel rank has them whole.
            low, rope = self.latent, self.latent.rope
            down = h * (low.kv_rank + rope) + low.kv_rank
            up = low.kv_rank * self.heads * (low.nope + low.value)
            queries = h * q
            if low.q_rank:
                down, queries = down + h * low.q_rank + low.q_rank, low.q_rank * q
            return Parameters(queries + up + out * h, down + self._latent_biases + output_bias + h)
        matrices = h * (q + 2 * kv) + out * h
        if self.gated:
            norms = h + (2 * (self.head_size or h // self.heads) if self.query_norm else 0)
            return Parameters(matrices + (q + 2 * kv if self.qkv_bias else 0), norms + output_bias)
        # A norm has a weight and a bias, and all four projections have biases.
        return Parameters(matrices + q + 2 * kv, h + 2 * h)

    @property
    def _latent_biases(self) -> int:
        """Return the biases of the projections to latent vectors; a model without a latent query has one less."""
        if self.latent is None or not self.qkv_bias:
            return 0
        return self.latent.kv_rank + self.latent.rope + (self.latent.q_rank or 0)

    def mlp(self, layer: int) -> Parameters:
        """Return the parameters of one layer's MLP, or of its experts and their router, with the norm before it."""
        h = self.width
        if not self.is_sparse(layer):
            if not self.gated:
                return Parameters(2 * h * self.inner + self.inner, 3 * h)
            # Gate and up have a bias per inner element; the one of down is not divided.
            biases = (2 * self.inner, h) if self.mlp_bias else (0, 0)
            return Parameters(3 * h * self.inner + biases[0], h + biases[1])
        inner = self.expert_inner or self.inner
        one = 3 * h * inner if self.gated else 2 * h * inner + inner + h
        router = self.experts * h + (self.experts if self.router_bias else 0)
        return Parameters(self.shared_experts * one, router + (h if self.gated else 2 * h), self.experts * one)

    def is_sparse(self, layer: int) -> bool:
        """Return whether the layer has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    def of_a_kind(self, layers: Sequence[int]) -> list[tuple[int, int]]:
        """Return (a layer, how many there are like it) for each kind of layer: without experts, and with them."""
        sparse = [layer for layer in layers if self.is_sparse(layer)] if self.experts else []
        dense = [layer for layer in layers if not self.is_sparse(layer)] if sparse else list(layers)
        return [(kind[0], len(kind)) for kind in (dense, sparse) if kind]

    def block_at(self, layer: int) -> Parameters:
        """Return the parameters of a block."""
        attention, mlp = self.attention, self.mlp(layer)
        return Parameters(attention.split + mlp.split, attention.replicated + mlp.replicated, mlp.expert)

    @property
    def embedding(self) -> Parameters:
        """Return the parameters of the embedding of tokens, and of positions where they have one."""
        return Parameters(self.vocabulary * self.width, self.positions * self.width if self.has_positions else 0)

    @property
    def head(self) -> Parameters:
        """Return the parameters of the last norm and of an output projection of its own."""
        norm = self.width if self.gated else 2 * self.width
        return Parameters(0 if self.is_tied else self.vocabulary * self.width, norm)

    @property
    def parameters(self) -> int:
        """Return the parameters of the whole model."""
        blocks = sum(count * self.block_at(layer).total for layer, count in self.of_a_kind(range(self.layers)))
        return blocks + self.embedding.total + self.head.total

    @property
    def active_parameters(self) -> int:
        """Return the parameters that a token uses: of the experts, `top_k` per layer."""
        sparse = sum(self.is_sparse(layer) for layer in range(self.layers))
        unused = sparse * (self.mlp(self.dense_layers).expert // max(self.experts, 1)) * (self.experts - self.top_k)
        return self.parameters - unused

    @property
    def block(self) -> int:
        """Return the parameters of the first block."""
        return self.block_at(0).total

    @property
    def rest(self) -> int:
        """Return the parameters outside the blocks: embeddings, last norm, an untied output projection."""
        return self.embedding.total + self.head.total

    @property
    def largest_module(self) -> int:
        """Return the parameters of the largest single module: the embedding, or a projection of the block."""
        h, q, out = self.width, self.query_size, self.value_size
        embedding = max(self.vocabulary, self.positions if self.has_positions else 0) * h
        if not self.gated:
            # GPT computes queries, keys and values in one matrix, and its matrices have biases.
            return max(embedding, 3 * h * h + 3 * h, h * self.inner + self.inner)
        bias = self.inner if self.mlp_bias else 0
        projections = [h * self.inner + bias, h * (self.expert_inner or 0), h * q + (q if self.qkv_bias else 0)]
        if self.latent:
            low = self.latent
            projections = [*projections[:2], (low.q_rank or h) * q, low.kv_rank * self.heads * (low.nope + low.value)]
        return max(embedding, out * h + (h if self.output_bias else 0), *projections)

    # floating-point operations ----------------------------------------------------------------------------------------

    def layer_flops(self, layer: int, length: int) -> int:
        """Return the operations of one token's forward pass through a layer, an addition and a product each one.

        Scores are counted for all pairs of positions, as Narayanan et al. (SC 2021, appendix) do.
        """
        inner = self.expert_inner or self.inner
        matrices = 3 if self.gated else 2
        if self.is_sparse(layer):
            products = (self.top_k + self.shared_experts) * matrices * self.width * inner + self.experts * self.width
        else:
            products = matrices * self.width * self.inner
        return 2 * (self._attention_products + products) + 2 * length * (self.query_size + self.value_size)

    @property
    def expert_flops(self) -> int:
        """Return the operations of one token's forward pass in the experts that it chooses."""
        return 2 * self.top_k * (3 if self.gated else 2) * self.width * (self.expert_inner or self.inner)

    @property
    def _attention_products(self) -> int:
        """Return the elements of the matrices of an attention."""
        if self.latent:
            low = self.latent
            norms = self.width + low.kv_rank + (low.q_rank or 0)
            biases = self._latent_biases + (self.width if self.output_bias else 0)
            return self.attention.total - norms - biases
        return self.width * (self.query_size + 2 * self.kv_size + self.value_size)

    def forward_flops(self, length: int) -> int:
        """Return the operations of one token's forward pass, the output projection included."""
        layers = sum(count * self.layer_flops(layer, length) for layer, count in self.of_a_kind(range(self.layers)))
        return layers + 2 * self.width * self.vocabulary

    def step_flops(self, sequences: int, length: int) -> int:
        """Return the model FLOPs of a step: three forward passes of all tokens, nothing recomputed."""
        return 3 * sequences * length * self.forward_flops(length)


def _gpt(layers: int, width: int, heads: int, positions: int = 1024, vocabulary: int = 50257) -> Architecture:
    return Architecture(layers, width, heads, vocabulary, positions, 4 * width)


def _llama(
    layers: int, width: int, heads: int, inner: int, kv_heads: int, vocabulary: int, positions: int
) -> Architecture:
    return Architecture(layers, width, heads, vocabulary, positions, inner, gated=True, kv_heads=kv_heads)


MODELS = {
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
    "llama-7b": _llama(32, 4096, 32, 11008, 32, 32000, 2048),
    "llama-13b": _llama(40, 5120, 40, 13824, 40, 32000, 2048),
    "llama-65b": _llama(80, 8192, 64, 22016, 64, 32000, 2048),
    "llama-3.1-8b": _llama(32, 4096, 32, 14336, 8, 128256, 131072),
    "llama-3.1-70b": _llama(80, 8192, 64, 28672, 8, 128256, 131072),
    "llama-3.1-405b": _llama(126, 16384, 128, 53248, 8, 128256, 131072),
    "mixtral-8x7b": replace(_llama(32, 4096, 32, 14336, 8, 32000, 32768), experts=8, top_k=2),
}


def named(name: str) -> Architecture:
    """Return a published architecture; UsageError for an unknown name."""
    if name not in MODELS:
        raise UsageError(
            f"--model {quoted(name)} is unknown{nearest(name, MODELS)}; give a config.json, or one of"
            f" {', '.join(MODELS)}"
        )
    return MODELS[name]


def checked(model: Architecture, names: Mapping[str, str] = FLAGS, where: str = "") -> Architecture:
    """Return the architecture; UsageError for sizes that are out of range or do not fit each other.

    names: what the user calls each field. where: " in 'job.toml'", for sizes from a file.
    """
    for field_name in ("layers", "width", "heads", "vocabulary", "positions", "inner"):
        most = MAX_LAYERS if field_name == "layers" else MAX_SIZE
        check_count(getattr(model, field_name), names[field_name] + where, 1, most)
    heads = f"{names['heads']} {model.heads}"
    if model.head_size is None and model.latent is None and model.width % model.heads:
        raise UsageError(
            f"{names['width']} {model.width}{where} is not divisible by {heads}; change one of them"
            + (", or give head_dim" if "head_size" in names else "")
        )
    if model.kv_heads is not None and (model.kv_heads < 1 or model.heads % model.kv_heads):
        raise UsageError(
            f"{heads}{where} is not divisible by {names['kv_heads']} {model.kv_heads}; give a number of key-value heads"
            " that divides the heads"
        )
    if model.experts and not 1 <= model.top_k <= model.experts:
        raise UsageError(
            f"{names['top_k']} {model.top_k}{where} does not fit {names['experts']} {model.experts}; give from 1 to"
            f" {model.experts} experts per token"
        )
    return model
