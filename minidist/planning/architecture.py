"""The sizes of a transformer: its parameters and floating-point operations, counted exactly from what describes it.

A model is described by a name, by sizes given as flags, or by the `config.json` that Hugging Face stores next to the
weights (huggingface_config.py), whose layers may be of several kinds. The counts equal those of the published
checkpoints to the last parameter.

Proved by: tests/planning/test_architecture.py, tests/planning/test_families.py
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.limits import MAX_LAYERS, check_count
from minidist.planning.parts import (
    NOTHING,
    LatentAttention,
    Part,
    column,
    experts,
    grouped_query,
    mlp,
    row,
    together,
    vector,
    whole,
)

MAX_SIZE = 10**8  # of a width, a vocabulary or a context
MAX_EXPERTS = 10**5  # of a layer

# How the command line calls what `checked` refuses; a file has other names.
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


class Block(NamedTuple):
    """A kind of layer.

    scores: elements of a token's query and output that meet each other position, of all heads; 0 without attention.
    window: how many positions before it a token attends to; None for all of them. mixes: it has attention, or what
    takes its place; has_mlp: it has an MLP or experts.
    """

    part: Part
    scores: int
    is_sparse: bool = False
    window: int | None = None
    mixes: bool = True
    has_mlp: bool = True


@dataclass(frozen=True)
class Architecture:
    """Sizes of a transformer; the defaults are GPT-2's kind of block.

    gated: a LLaMA block (RMS norms, no biases, a gated MLP, rotary positions, no dropout). tied: the output projection
    is the embedding (default: where the block is not gated). learned_positions: an embedding per position (default:
    where the block is not gated). experts, top_k: of each layer from `dense_layers` on; expert_groups: the
    number of groups of experts, and of those from which a token chooses; expert_inner: their width; shared_experts: the
    number of them that every token uses.

    A model from a file also has its kinds of layers, `blocks`, and the kind of each layer, `pattern`; without them the
    fields above say what a layer is. first: what the first stage has next to the embeddings of tokens and positions;
    last: what the last stage has next to the output projection (default: a norm). approximations: sentences that say
    what times and activations leave out. projection_alone: the parameters of an output projection that is planned, and
    that transformers' AutoModel, by which the parameters of the file are counted, does not build.
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
    experts: int = 0
    top_k: int = 0
    expert_groups: tuple[int, int] = (1, 1)
    expert_inner: int | None = None
    shared_experts: int = 0
    dense_layers: int = 0
    latent: LatentAttention | None = None
    blocks: tuple[Block, ...] = ()
    pattern: tuple[int, ...] = ()
    first: Part = NOTHING
    last: Part | None = None
    approximations: tuple[str, ...] = ()
    projection_alone: int = 0

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

    @cached_property
    def kinds(self) -> tuple[Block, ...]:
        """Return the kinds of layers: those of the file, or the one without experts and the one with them."""
        if self.blocks:
            return self.blocks
        h, scores = self.width, self.query_size + self.value_size
        bias = not self.gated  # GPT's matrices have biases, and its norms too
        if self.latent:
            attention = self.latent.part(h, self.heads)
        elif self.gated:
            attention = grouped_query(h, self.query_size, self.kv_size)
        else:
            # GPT computes queries, keys and values in one matrix.
            attention = together(column(h, self.query_size + 2 * self.kv_size, True), row(self.value_size, h, True))
        attention = together(attention, vector(2 * h * (1 + bias)))
        dense = Block(together(attention, mlp(h, self.inner, self.gated, bias)), scores)
        if not self.experts:
            return (dense,)
        one = mlp(h, self.expert_inner or self.inner, self.gated, bias)
        mixture = [whole(h, self.experts), one.times(self.shared_experts), experts(self.experts, self.top_k, one)]
        return dense, Block(together(attention, *mixture), scores, True)

    def kind(self, layer: int) -> int:
        """Return which of `kinds` a layer is."""
        return self.pattern[layer] if self.blocks else int(self.is_sparse(layer))

    def is_sparse(self, layer: int) -> bool:
        """Return whether the layer has experts."""
        if self.blocks:
            return self.blocks[self.pattern[layer]].is_sparse
        return self.experts > 0 and layer >= self.dense_layers

    def of_a_kind(self, layers: Sequence[int]) -> list[tuple[int, int]]:
        """Return (a layer, how many there are like it) for each kind of layer, those with experts last."""
        kinds = [self.kind(layer) for layer in layers]
        counts, examples = Counter(kinds), dict(zip(reversed(kinds), reversed(layers), strict=True))
        order = sorted(counts, key=lambda kind: (self.kinds[kind].is_sparse, self.kinds[kind].part.total))
        return [(examples[kind], counts[kind]) for kind in order]

    def block_at(self, layer: int) -> Part:
        """Return the parameters of a block."""
        return self.kinds[self.kind(layer)].part

    @property
    def embedding(self) -> Part:
        """Return the parameters of the first stage outside its blocks, such as the embedding of tokens."""
        positions = self.positions * self.width if self.has_positions else 0
        return together(Part(self.vocabulary * self.width, positions), self.first)

    @property
    def head(self) -> Part:
        """Return the parameters of the last norm and of an output projection that is not the embedding."""
        last = vector(self.width if self.gated else 2 * self.width) if self.last is None else self.last
        return together(Part(0 if self.is_tied else self.vocabulary * self.width), last)

    @property
    def parameters(self) -> int:
        """Return the parameters of the whole model that is planned."""
        blocks = sum(count * self.block_at(layer).total for layer, count in self.of_a_kind(range(self.layers)))
        return blocks + self.rest

    @property
    def counted_parameters(self) -> int:
        """Return the parameters of the module that transformers builds of the file."""
        return self.parameters - self.projection_alone

    @property
    def active_parameters(self) -> int:
        """Return the counted parameters that a token uses: of the experts, `top_k` per layer."""
        kinds = self.of_a_kind(range(self.layers))
        return self.counted_parameters - sum(count * self.block_at(layer).idle for layer, count in kinds)

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
        """Return the parameters of the largest single module: the embedding, or a projection of a block."""
        embedding = max(self.vocabulary, self.positions if self.has_positions else 0) * self.width
        return max(embedding, self.first.largest, *(block.part.largest for block in self.kinds))

    # floating-point operations ----------------------------------------------------------------------------------------

    def layer_flops(self, layer: int, length: int) -> int:
        """Return the operations of one token's forward pass through a layer, an addition and a product each one.

        Scores are counted for all pairs of positions, as Narayanan et al. (SC 2021, appendix) do.
        """
        return 2 * self.block_at(layer).products + 2 * self.layer_scores(layer, length)

    def layer_scores(self, layer: int, length: int) -> int:
        """Return the products of one token's scores and outputs with all positions of a sequence.

        All pairs are twice what a causal mask leaves, so a window counts twice, too.
        """
        block = self.kinds[self.kind(layer)]
        return block.scores * (length if block.window is None else min(length, 2 * block.window))

    @property
    def expert_flops(self) -> int:
        """Return the operations of one token's forward pass in the experts that it chooses."""
        return 2 * self.top_k * (3 if self.gated else 2) * self.width * (self.expert_inner or self.inner)

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


def missing_sizes(sizes: Mapping[str, Any], where: str = "") -> str:
    """Return a sentence that names the sizes without which there is no model; where: as in `from_sizes`."""
    missing = [f"--{name}" for name in ("layers", "hidden", "heads") if sizes.get(name) is None]
    if not missing:
        return ""
    return (
        f"{', '.join(missing)} {'are' if missing[1:] else 'is'} missing{where}; describe the model with --layers,"
        " --hidden and --heads, or give a config.json or --model NAME"
    )


def from_sizes(sizes: Mapping[str, Any], where: str = "") -> Architecture:
    """Return the model of sizes that have the names of `minidist plan`'s flags, such as layers, hidden and kv_heads.

    where: " in 'rows.json'", for sizes from a file. Errors: UsageError for a size that is missing or out of range.
    """
    if lacking := missing_sizes(sizes, where):
        raise UsageError(lacking)
    experts, top_k = sizes.get("experts") or 0, sizes.get("top_k")
    check_count(experts, "--experts" + where, 0, MAX_EXPERTS)
    if top_k is not None and not experts:
        raise UsageError(f"--top-k {top_k} needs a model with experts{where}; add --experts, or leave --top-k out")
    return checked(
        Architecture(
            sizes["layers"],
            sizes["hidden"],
            sizes["heads"],
            _given(sizes, "vocab", 51_200),
            _given(sizes, "seq", 2048),
            _given(sizes, "ffn", 4 * sizes["hidden"]),
            gated=bool(sizes.get("gated")),
            kv_heads=sizes.get("kv_heads"),
            tied=sizes.get("tied"),
            experts=experts,
            top_k=min(2, experts) if top_k is None else top_k,
        ),
        where=where,
    )


def _given(sizes: Mapping[str, Any], name: str, default: int) -> int:
    value: int | None = sizes.get(name)
    return default if value is None else value
