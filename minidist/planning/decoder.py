"""A model's layers and what is outside them, from the row of its family and the keys of its file.

Proved by: tests/planning/test_families.py, tests/planning/test_architecture.py
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from minidist.planning.architecture import Architecture, Block
from minidist.planning.config_keys import Keys, shown
from minidist.planning.family import Family, families
from minidist.planning.layer_kinds import layer_types, sparse_layers
from minidist.planning.mixers import MIXERS, latent_sizes
from minidist.planning.parts import NOTHING, Part, together, vector, whole
from minidist.planning.vision_towers import TOWERS

CHOSEN = "attention over chosen or compressed positions is timed as attention over all of them"
STATES = "the recurrence of layers without attention is not timed, and their activations are counted as attention's"
TOWER = "the tower before the language model is counted on the first stage; its time and its activations are not"
TEXT_ONLY = "the language model is counted, as AutoModelForCausalLM builds it; the vision tower is not"
NO_TEXT = "the file has no text_config, so the sizes are the defaults of its class, as transformers reads it"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # read by no family without experts
WITHOUT_ATTENTION = {"delta", "kimi_delta", "lightning", "mamba", "mamba2", "mamba_with_attention", "short_convolution"}
SPARSE_ATTENTION = {"indexed_latent", "indexed_grouped", "deepseek_v4"}


def architecture_of(keys: Keys) -> Architecture:
    """Return the architecture of a file's keys; with a text_config, that of the language model and its tower."""
    row = families()[keys.kind]
    if "text" not in row:
        return _language_model(keys, row, keys.flag("tie_word_embeddings"))

    # The language model has keys and a kind; the outer file says whether its projection is the embedding.
    inside = keys.inside("text_config")
    kind = inside.get("model_type")
    kind = kind if isinstance(kind, str) and "text" not in families().get(kind, {"text": 0}) else row["text"]
    text = keys.inside("text_config", kind, is_whole=False)
    notes = [] if inside.content else [NO_TEXT]
    tower = 0
    if "tower" in row:
        tower = TOWERS[row["tower"]](keys, keys.inside("vision_config"), text.size("hidden_size"))
        notes += [TOWER] * (tower > 0)
    elif keys.content.get("vision_config"):
        notes.append(TEXT_ONLY)
    tied = (keys if "tower" in row else text).flag("tie_word_embeddings")
    tied |= row.get("tied") == "either" and text.flag("tie_word_embeddings")
    model = _language_model(text, families()[kind], tied, vector(tower), notes)
    if "tower" not in row or tied or row.get("causal"):
        return model
    return with_projection(model, model.vocabulary * model.width)


def with_projection(model: Architecture, projection: int) -> Architecture:
    """Return an architecture whose output projection is planned, and which AutoModel builds without it."""
    note = (
        f"{model.parameters - projection:,} parameters, as transformers' AutoModel builds the file; the output"
        f" projection is planned, too, with which the model has {model.parameters:,}"
    )
    return replace(model, projection_alone=projection, approximations=(note, *model.approximations))


def _language_model(
    keys: Keys, row: Mapping[str, Any], tied: bool, tower: Part = NOTHING, notes: list[str] | None = None
) -> Architecture:
    """Return the architecture of a language model. tied: its output projection is the embedding, if its class can."""
    family = Family(keys, row)
    types = layer_types(family)
    sparse = sparse_layers(family, len(types))
    kinds = list(dict.fromkeys(zip(types, sparse, strict=True)))
    blocks = {kind: _block(family, *kind) for kind in kinds}
    numbers = {kind: number for number, kind in enumerate(kinds)}

    positions = keys.size("max_position_embeddings", 10**6)
    learned = family.has("positions")
    first, last = _outside(family, positions if learned else 0)
    mixers = {_mixer(family, kind) for kind in types}
    unread = [key for key in EXPERTS if keys.content.get(key) and "experts" not in row]
    notes = [*(notes or []), *[STATES] * bool(mixers & WITHOUT_ATTENTION), *[CHOSEN] * bool(mixers & SPARSE_ATTENTION)]
    notes += [f"{key} {shown(keys.get(key))} has no effect: a {keys.kind} model has no experts" for key in unread]
    has_experts = any(sparse) or "moe" in types
    shared = family.size("shared", "", 0) or family.size("shared_inner", "", 0) // max(family.expert_inner, 1)
    return Architecture(
        layers=len(types),
        width=family.width,
        heads=family.heads,
        vocabulary=keys.size("vocab_size"),
        positions=positions,
        inner=family.inner,
        gated=family.has("gated", True),
        kv_heads=family.kv_heads,
        head_size=family.head_size,
        tied=tied and row.get("tied", True),
        learned_positions=learned,
        experts=family.experts if has_experts else 0,
        top_k=family.top_k,
        expert_groups=(keys.size("n_group", 1), keys.size("topk_group", 1)),
        expert_inner=family.expert_inner or None,
        shared_experts=shared,
        latent=latent_sizes(family) if "kv_lora_rank" in keys.defaults else None,
        blocks=tuple(blocks[kind] for kind in kinds),
        pattern=tuple(numbers[kind] for kind in zip(types, sparse, strict=True)),
        first=together(first, tower),
        last=last,
        approximations=tuple(notes),
    )


def _mixer(family: Family, type: str) -> str:
    """Return the name of what computes over positions in a type of layer."""
    mixers = family.row.get("mixers")
    if mixers is None:
        return str(family.row.get("mixer", "grouped"))
    if type not in mixers:
        raise family.keys.wrong("layer_types", f"a layer of {family.keys.kind} must be {', '.join(mixers)}")
    return str(mixers[type])


def _block(family: Family, type: str, is_sparse: bool) -> Block:
    """Return a kind of layer."""
    mixed, scores = MIXERS[_mixer(family, type)](family, type)
    parts = [mixed, family.norms(), vector(family.row.get("layer_more", 0))]
    if "mlp" not in family.row:
        parts.append(family.mixture() if is_sparse else family.dense())
    part = together(*parts)
    is_mlp = _mixer(family, type) in ("experts", "dense")
    has_mlp = is_mlp or family.row.get("mlp", "") in ("", "inside")
    return Block(part, scores, part.expert > 0, _window(family, type), not is_mlp, has_mlp)


def _window(family: Family, type: str) -> int | None:
    """Return how many positions a type of layer attends to; of a chunk these are half of it on average."""
    if "chunked" in type:
        chunk = family.keys.maybe("attention_chunk_size")
        return None if chunk is None else -(-chunk // 2)
    if "sliding" in type or family.row.get("window"):
        return family.keys.maybe("sliding_window")
    return None


# Outside the layers ---------------------------------------------------------------------------------------------------


def _opt(family: Family) -> tuple[Part, Part]:
    """Return what OPT has: an embedding of another width than the layers, and a last norm that some have not."""
    keys, h = family.keys, family.width
    low, words = keys.size("word_embed_proj_dim", h), keys.size("vocab_size")
    # The embedding is counted with the width of the layers, so what it has less is subtracted; so is the projection's.
    less = Part(split=words * (low - h))
    first = together(less, Part(replicated=2 * h + 2 * low * h * (low != h)))
    norm = keys.flag("do_layer_norm_before") and not keys.flag("_remove_final_layer_norm")
    return first, together(family.norm() if norm else NOTHING, NOTHING if keys.flag("tie_word_embeddings") else less)


def _deepseek_v4(family: Family) -> tuple[Part, Part]:
    """Return the head that joins the streams of hyper-connections, with the last norm."""
    streams = family.keys.size("hc_mult")
    return NOTHING, together(family.norm(), whole(streams * family.width, streams), vector(streams + 1))


def _gemma4(family: Family) -> tuple[Part, Part]:
    """Return the embeddings of tokens for each layer, and their projection."""
    keys, low = family.keys, family.keys.size("hidden_size_per_layer_input", 0, least=0)
    if not low:
        return NOTHING, family.norm()
    all_layers = keys.size("num_hidden_layers") * low
    words = keys.size("vocab_size_per_layer_input") * all_layers
    return together(vector(words), whole(family.width, all_layers), vector(low)), family.norm()


def _bert(family: Family) -> tuple[Part, Part]:
    """Return the embedding of sentences with its norm, and the dense layer with a norm before the projection."""
    first = together(vector(family.keys.size("type_vocab_size") * family.width), family.norm())
    # A projection that is not the embedding has one more bias.
    more = vector(0 if family.keys.flag("tie_word_embeddings") else family.keys.size("vocab_size"))
    return first, together(whole(family.width, family.width, True), family.norm(), more)


OUTSIDE: Mapping[str, Callable[[Family], tuple[Part, Part]]] = {
    "norm": lambda family: (family.norm(), family.norm()),
    "opt": _opt,
    "deepseek_v4": _deepseek_v4,
    "gemma4": _gemma4,
    "bert": _bert,
}


def _outside(family: Family, positions: int) -> tuple[Part, Part]:
    """Return what stands next to the embedding of tokens and positions, and next to the output projection."""
    rule = family.row.get("outside")
    first, last = OUTSIDE[rule](family) if rule else (NOTHING, family.norm())
    return first, together(last, vector(family.has("head_bias") * family.keys.size("vocab_size")))
