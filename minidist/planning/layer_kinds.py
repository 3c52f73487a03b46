"""What each layer of a model is, and which layers have experts: the rules of the families that have several kinds.

Proved by: tests/planning/test_families.py
"""

from collections.abc import Callable
from typing import Any

from minidist.base.limits import MAX_LAYERS
from minidist.planning.config_keys import Keys
from minidist.planning.family import Family

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
NEMOTRON = {"M": LINEAR, "*": FULL, "E": "moe", "-": "mlp"}
DEEPSEEK_V4 = {0: SLIDING, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def _entries(keys: Keys, key: str, layers: int, kind: type) -> list[Any] | None:
    """Return a list that has an entry for each layer, or None; entries for further modules are left out."""
    found = keys.items(key, kind)
    if found is not None and len(found) < layers:
        raise keys.wrong(key, f"it must have an entry for each of the {layers} layers")
    return None if found is None else found[:layers]


def listed(family: Family, key: str) -> list[str] | None:
    """Return what a list says of each layer, or None."""
    found = _entries(family.keys, key, family.keys.size("num_hidden_layers"), str)
    return None if found is None else [OLD_NAMES.get(kind, kind) for kind in found]


def _every(number: int) -> Callable[[int], bool]:
    """Return the rule of every layer whose number, counted from 1, is a multiple."""
    return lambda layer: (layer + 1) % number == 0


def _by_rule(family: Family, is_full: Callable[[int], bool], other: str = LINEAR) -> list[str]:
    """Return that some layers have full attention, and all others are `other`."""
    return [FULL if is_full(layer) else other for layer in range(family.keys.size("num_hidden_layers"))]


def _listed_or(family: Family, is_full: Callable[[int], bool], other: str = LINEAR) -> list[str]:
    """Return layer_types; without them what the rule says."""
    return listed(family, "layer_types") or _by_rule(family, is_full, other)


def _layer_types(family: Family) -> list[str]:
    """Return layer_types; without them every second layer of minimax is linear, and every layer of granite a mamba."""
    default = {"minimax": lambda i: i % 2 == 0, "step3p5": lambda i: True}
    return _listed_or(family, default.get(family.keys.kind, lambda i: False))


def _gemma4(family: Family) -> list[str]:
    """Return the types; the last layers use the keys and values of earlier ones, and are other kinds of layers."""
    keys, layers = family.keys, family.keys.size("num_hidden_layers")
    types = _listed_or(family, _every(6), SLIDING)
    types[-1] = FULL
    shared = min(keys.size("num_kv_shared_layers", 0, least=0), layers)
    return types[: layers - shared] + [f"{kind} shared" for kind in types[layers - shared :]]


def _indexer(family: Family) -> list[str]:
    """Return whether each layer chooses positions itself (full), or uses the choice of an earlier one (shared)."""
    keys, layers = family.keys, family.keys.size("num_hidden_layers")
    types = listed(family, "indexer_types")
    pattern = keys.letters("index_topk_pattern")
    if types is None and pattern is not None:
        types = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern][:layers]
    every, offset = keys.size("index_topk_freq", 1), keys.size("index_skip_topk_offset", 2, least=0)
    return types or ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(layers)]


def _deepseek_v4(family: Family) -> list[str]:
    keys, layers = family.keys, family.keys.size("num_hidden_layers")
    types, ratios = listed(family, "layer_types"), keys.items("compress_ratios", int)
    if types is None and ratios is not None:
        if not set(ratios) <= set(DEEPSEEK_V4) or len(ratios) < layers:
            raise keys.wrong("compress_ratios", "it must be 0, 4 or 128 for each layer")
        types = [DEEPSEEK_V4[ratio] for ratio in ratios[:layers]]
    sparse, heavy = DEEPSEEK_V4[4], DEEPSEEK_V4[128]
    return types or [sparse if i > 2 and i % 2 else heavy for i in range(layers)]


def _kimi_linear(family: Family) -> list[str]:
    full = family.keys.inside("linear_attn_config").items("full_attn_layers", int)  # counted from 1
    return _listed_or(family, lambda i: i > 0 and i % 4 == 0 if full is None else i + 1 in full)


def _nemotron_h(family: Family) -> list[str]:
    """Return the types of layers_block_type, or of a pattern such as "M-M*"; num_hidden_layers has no effect."""
    keys = family.keys
    types, pattern = keys.items("layers_block_type"), keys.letters("hybrid_override_pattern")
    if types is None and pattern is not None:
        types = [NEMOTRON.get(letter, letter) for letter in pattern]
    types = [LINEAR, "moe", FULL, "mlp"] if types is None else [OLD_NAMES.get(kind, kind) for kind in types]
    if not types or len(types) > MAX_LAYERS:
        raise keys.wrong("hybrid_override_pattern", f"it must describe 1 to {MAX_LAYERS:,} layers")
    return types


def _jamba(family: Family) -> list[str]:
    every, first = family.keys.size("attn_layer_period"), family.keys.size("attn_layer_offset", least=0)
    return _by_rule(family, lambda i: i % every == first)


def _lfm2(family: Family) -> list[str]:
    full = family.keys.items("full_attn_idxs", int)
    return _listed_or(family, lambda i: full is None or i in full, "conv")


def _minimax_m3(family: Family) -> list[str]:
    """Return layer_types, or the older list of ones for the layers that choose blocks of positions."""
    layers, chosen = family.keys.size("num_hidden_layers"), family.keys.inside("sparse_attention_config")
    flags = _entries(chosen, "sparse_attention_freq", layers, int) or [0] * layers
    return _listed_or(family, lambda i: not flags[i], "minimax_m3_sparse")


def _qwen_windows(family: Family) -> list[str]:
    """Return layer_types, or that the layers from max_window_layers on have windows, if use_sliding_window is true."""
    keys, layers = family.keys, family.keys.size("num_hidden_layers")
    full = keys.size("max_window_layers", layers, least=0) if keys.flag("use_sliding_window") else layers
    return _listed_or(family, lambda i: i < full, SLIDING)


TYPES: dict[str, Callable[[Family], list[str]]] = {
    "layer_types": _layer_types,
    "interval": lambda family: _listed_or(family, _every(family.keys.size("full_attention_interval", 4))),
    "gemma4": _gemma4,
    "indexer": _indexer,
    "deepseek_v4": _deepseek_v4,
    "kimi_linear": _kimi_linear,
    "nemotron_h": _nemotron_h,
    # The first layer and every sixth see all positions, the others a window.
    "mimo": lambda family: _listed_or(family, lambda i: i == 0 or (i + 1) % 6 == 0, SLIDING),
    "jamba": _jamba,
    "bamba": lambda family: _by_rule(family, lambda i: i in (family.keys.items("attn_layer_indices", int) or [])),
    "lfm2": _lfm2,
    "minimax_m3": _minimax_m3,
    "windows": lambda family: _listed_or(family, _every(family.row["full_every"]), SLIDING),
    "qwen_windows": _qwen_windows,
}


def layer_types(family: Family) -> list[str]:
    """Return what each layer is."""
    rule = family.row.get("types")
    return TYPES[rule](family) if rule else _by_rule(family, lambda i: True)


# Which layers have experts -------------------------------------------------------------------------------------------


def _qwen(family: Family) -> Callable[[int], bool]:
    dense, every = set(family.keys.items("mlp_only_layers", int) or []), family.keys.size("decoder_sparse_step", 1)
    return lambda i: i not in dense and (i + 1) % every == 0


def _first(family: Family) -> Callable[[int], bool]:
    every = family.keys.size("moe_layer_freq", 1) if "moe_layer_freq" in family.keys.defaults else 1
    dense = family.keys.size("first_k_dense_replace", 0, least=0)
    return lambda i: i >= dense and i % every == 0


def _mlp_types(family: Family) -> Callable[[int], bool]:
    """Return what mlp_layer_types says, or its older forms: a list of the sparse layers, or how many are dense."""
    keys, types = family.keys, listed(family, "mlp_layer_types")
    if types is not None:
        return lambda i: types[i] == "sparse"
    if isinstance(keys.get("moe_layer_freq"), list):
        flags = _entries(keys, "moe_layer_freq", keys.size("num_hidden_layers"), int) or []
        return lambda i: flags[i] != 0
    sparse = keys.letters("moe_layers_enum", ",")
    if sparse is not None:
        numbers = set(sparse)
        return lambda i: str(i) in numbers
    entry = family.row["dense_layers"]
    dense = keys.size(entry, 1, least=0) if isinstance(entry, str) else entry
    return lambda i: i >= dense


def _ernie(family: Family) -> Callable[[int], bool]:
    keys = family.keys
    end, every = keys.get("moe_layer_end_index"), keys.size("moe_layer_interval")
    first, last = keys.size("moe_layer_start_index", least=0), keys.size("num_hidden_layers") - 1
    if end != -1:
        last = keys.size("moe_layer_end_index", least=0)
    return lambda i: (i + 1) % every == 0 and first <= i <= last


def _jamba_experts(family: Family) -> Callable[[int], bool]:
    every, first = family.keys.size("expert_layer_period"), family.keys.size("expert_layer_offset", least=0)
    return lambda i: family.experts > 1 and i % every == first


def _llama4(family: Family) -> Callable[[int], bool]:
    layers, every = family.keys.items("moe_layers", int), family.keys.size("interleave_moe_layer_step", 1, least=0)
    return lambda i: i in layers if layers is not None else every > 0 and (i + 1) % every == 0


SPARSE: dict[str, Callable[[Family], Callable[[int], bool]]] = {
    "all": lambda family: lambda i: True,
    "none": lambda family: lambda i: False,
    "qwen": _qwen,
    "first": _first,
    "mlp_types": _mlp_types,
    "ernie": _ernie,
    "jamba": _jamba_experts,
    "llama4": _llama4,
}


def sparse_layers(family: Family, layers: int) -> list[bool]:
    """Return which layers have experts in place of an MLP."""
    is_sparse = SPARSE[family.row.get("sparse", "all")](family) if family.experts else SPARSE["none"](family)
    return [is_sparse(layer) for layer in range(layers)]
