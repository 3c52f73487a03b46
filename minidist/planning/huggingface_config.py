"""Reads the `config.json` that Hugging Face stores beside a model's weights into an `Architecture`.

Every key that changes a size or the work of a layer is either read, or refused with its name: a model that is counted
wrongly without a word is worse than none. Keys that change neither (dropout, rotary positions, the order of residuals,
token numbers, the format of stored weights) are not read. The module of DeepSeek-V3 that predicts further tokens is not
counted, as in `transformers`, which does not load it.

The sizes that define a model must be given. Any other key that is missing has the default of its class in
`transformers`, because that is the model that `transformers` makes of the file.

Proved by: tests/planning/test_architecture.py
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted, quoted_path
from minidist.base.limits import MAX_LAYERS
from minidist.base.read_file import read_json
from minidist.planning.architecture import MAX_EXPERTS, MAX_SIZE, Architecture, LatentAttention, checked, named

REMEDY = "give the config.json of a Hugging Face model"
MAX_HEAD_SIZE = 10**5  # of a head, or of a latent vector

# The fields of an Architecture that `checked` names -> their keys; and the keys of a kind with other ones.
NAMES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "positions": "max_position_embeddings",
    "inner": "intermediate_size",
    "kv_heads": "num_key_value_heads",
    "top_k": "num_experts_per_tok",
    "experts": "num_local_experts",
    "head_size": "head_dim",
}
GPT2_NAMES = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "positions": "n_positions", "inner": "n_inner"}
OWN_NAMES = {
    "gpt2": GPT2_NAMES,
    "qwen3_moe": {"experts": "num_experts"},
    "deepseek_v3": {"experts": "n_routed_experts"},
}

# Second names of a key, which `transformers` takes as well (`attribute_map` of the classes).
ALIASES = {
    "gpt2": {NAMES[field]: key for field, key in GPT2_NAMES.items() if field != "inner"},
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "mixtral": {"num_experts": "num_local_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts"},
}

# Keys that change a size or the work of a layer: a file that has one which its kind of model does not read is refused.
COUNTED = (
    "add_cross_attention", "attention_bias", "decoder_sparse_step", "first_k_dense_replace", "head_dim",
    "is_encoder_decoder", "kv_lora_rank", "layer_types", "mlp_bias", "mlp_only_layers", "moe_intermediate_size",
    "moe_layer_freq", "n_inner", "n_routed_experts", "n_shared_experts", "num_experts", "num_experts_per_tok",
    "num_key_value_heads", "num_local_experts", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "shared_expert_intermediate_size", "sliding_window", "text_config", "use_sliding_window", "v_head_dim",
    "vision_config",
)  # fmt: skip


class _Keys:
    """The keys of a file; a missing or wrong one is an error that names it."""

    def __init__(self, content: Mapping[str, Any], file: str, aliases: Mapping[str, str]) -> None:
        self.content, self.file = dict(content), file
        self.read: set[str] = set()
        self.written: dict[str, str] = {}  # key -> the second name that the file has for it
        for alias, key in aliases.items():
            if alias in content:
                self._take_alias(alias, key)

    def _take_alias(self, alias: str, key: str) -> None:
        """Move the value of a second name to the key."""
        value = self.content.pop(alias)
        if self.content.setdefault(key, value) != value:
            raise UsageError(
                f"{alias} in {self.file} is {_shown(value)}, and {key}, which means the same, is"
                f" {_shown(self.content[key])}; leave one of them out"
            )
        self.written[key] = alias

    def name(self, key: str) -> str:
        """Return what a sentence calls a key: its name in the file, or that its value is a default."""
        return self.written.get(key, key) if key in self.content else f"the default {key}"

    def wrong(self, key: str, rule: str) -> UsageError:
        """Return the error for a key whose value breaks a rule."""
        return UsageError(f"{self.name(key)} in {self.file} is {_shown(self.content[key])}; {rule}")

    def size(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return a whole number from `least` to `most`; default: of a key that is missing."""
        self.read.add(key)
        if key not in self.content:
            if default is None:
                raise UsageError(f"{self.file} has no key {key!r}; add it, or {REMEDY}")
            return default
        value = self.content[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"it must be a whole number from {least:,} to {most:,}")
        return value

    def maybe(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int | None:
        """Return a whole number, or None for null; default: of a key that is missing, which may be None as well."""
        self.read.add(key)
        if self.content.get(key, default) is None:
            return None
        return self.size(key, default, least, most)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        self.read.add(key)
        value = self.content.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "it must be true or false")
        return value

    def must_be(self, key: str, value: Any, because: str) -> None:
        """Refuse any value but one, and but a missing key."""
        self.read.add(key)
        given = self.content.get(key, value)
        if given != value or isinstance(given, bool) != isinstance(value, bool):
            raise self.wrong(key, f"it must be {_shown(value)}, because {because}")

    def check_all_read(self, kind: str) -> None:
        """Refuse a key that would change the count, and that this kind of model does not have."""
        for key in COUNTED:
            if self.content.get(key) and key not in self.read:
                raise self.wrong(
                    key,
                    f"a {kind} model has no such key, so it would not be counted; leave it out, or correct model_type",
                )


def _shown(value: Any) -> str:
    """Return a value as JSON writes it where Python writes a word of its own."""
    return str(json.dumps(value)) if value is None or isinstance(value, bool) else quoted(value)


def read_model(name: str) -> Architecture:
    """Return the architecture of a config.json, or of a published model; UsageError for an unknown name."""
    return read_architecture(name) if name.endswith(".json") else named(name)


def read_architecture(path: str | Path) -> Architecture:
    """Return the architecture that a config.json describes; UsageError for one that cannot be counted."""
    content = read_json(path, "the model file", REMEDY)
    file = quoted_path(path)
    if not isinstance(content, dict):
        raise UsageError(f"the model file {file} is not a JSON object; {REMEDY}")
    kind = content.get("model_type")
    if kind is None:
        raise UsageError(f"{file} has no key 'model_type'; add it ({', '.join(READERS)}), or {REMEDY}")
    if not isinstance(kind, str):
        raise UsageError(f"model_type {_shown(kind)} in {file} is not a string; it must be one of {', '.join(READERS)}")
    if kind not in READERS:
        raise UsageError(
            f"model_type {quoted(kind)} in {file} is unknown{nearest(kind, READERS)}; it must be one of"
            f" {', '.join(READERS)}; or describe the model with --layers, --hidden, --heads"
        )

    # A key that means nothing to the kind of model is found after those that the kind reads.
    keys = _Keys(content, file, ALIASES.get(kind, {}))
    model = READERS[kind](keys)
    keys.check_all_read(kind)
    names = {field: keys.name(key) for field, key in {**NAMES, **OWN_NAMES.get(kind, {})}.items()}
    if "head_dim" not in keys.read:
        del names["head_size"]
    return checked(model, names, f" in {file}")


def _sizes(keys: _Keys) -> dict[str, Any]:
    """Return the fields that all models but GPT-2 have under the same keys."""
    return {
        "layers": keys.size("num_hidden_layers", most=MAX_LAYERS),
        "width": keys.size("hidden_size"),
        "heads": keys.size("num_attention_heads"),
        "vocabulary": keys.size("vocab_size"),
        "positions": keys.size("max_position_embeddings"),
        "inner": keys.size("intermediate_size"),
        "tied": keys.flag("tie_word_embeddings", False),
    }


def _gated(keys: _Keys, kv_heads: int | None = None, head_size: int | None = None, **more: Any) -> Architecture:
    """Return a model of LLaMA's kind of block. kv_heads: the class's default, None for as many as heads."""
    sizes = _sizes(keys)
    return Architecture(
        **sizes,
        gated=True,
        kv_heads=keys.maybe("num_key_value_heads", kv_heads) or sizes["heads"],
        head_size=keys.maybe("head_dim", most=MAX_HEAD_SIZE) if head_size is None else head_size,
        **more,
    )


def _llama(keys: _Keys) -> Architecture:
    bias = keys.flag("attention_bias", False)
    return _gated(keys, qkv_bias=bias, output_bias=bias, mlp_bias=keys.flag("mlp_bias", False))


def _mistral(keys: _Keys) -> Architecture:
    return _gated(keys, kv_heads=8, window=keys.maybe("sliding_window", 4096))


def _mixtral(keys: _Keys) -> Architecture:
    return _gated(
        keys,
        kv_heads=8,
        window=keys.maybe("sliding_window"),
        experts=keys.size("num_local_experts", 8, most=MAX_EXPERTS),
        top_k=keys.size("num_experts_per_tok", 2, most=MAX_EXPERTS),
    )


def _qwen_window(keys: _Keys) -> int | None:
    """Return the window of a Qwen model; without use_sliding_window the key sliding_window has no effect."""
    window = keys.maybe("sliding_window", 4096)
    layers = keys.content.get("layer_types") or []
    keys.read.add("layer_types")
    if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers):
        raise keys.wrong("layer_types", "it must be 'full_attention' for each layer, because no other kind is counted")
    return window if keys.flag("use_sliding_window", False) and not layers else None


def _qwen2(keys: _Keys) -> Architecture:
    return _gated(keys, kv_heads=32, qkv_bias=True, window=_qwen_window(keys))


def _with_query_norm(keys: _Keys, **more: Any) -> Architecture:
    """Return a model of Qwen3's kind of block."""
    bias = keys.flag("attention_bias", False)
    return _gated(keys, query_norm=True, qkv_bias=bias, output_bias=bias, window=_qwen_window(keys), **more)


def _qwen3(keys: _Keys) -> Architecture:
    return _with_query_norm(keys, kv_heads=32, head_size=keys.size("head_dim", 128, most=MAX_HEAD_SIZE))


def _qwen3_moe(keys: _Keys) -> Architecture:
    all_sparse = "only models in which every layer has experts are counted"
    keys.must_be("decoder_sparse_step", 1, all_sparse)
    if keys.content.get("mlp_only_layers") is not None:
        keys.must_be("mlp_only_layers", [], all_sparse)
    # Unlike Qwen3Config, Qwen3MoeConfig has no default for head_dim: a head has width / heads elements.
    return _with_query_norm(
        keys,
        kv_heads=4,
        experts=keys.size("num_experts", 128, most=MAX_EXPERTS),
        top_k=keys.size("num_experts_per_tok", 8, most=MAX_EXPERTS),
        expert_inner=keys.size("moe_intermediate_size", 768),
    )


def _gpt2(keys: _Keys) -> Architecture:
    width = keys.size("n_embd")
    return Architecture(
        layers=keys.size("n_layer", most=MAX_LAYERS),
        width=width,
        heads=keys.size("n_head"),
        vocabulary=keys.size("vocab_size"),
        positions=keys.size("n_positions", 1024),
        inner=keys.maybe("n_inner") or 4 * width,
        tied=keys.flag("tie_word_embeddings", True),
    )


def _gpt_neox(keys: _Keys) -> Architecture:
    keys.must_be("attention_bias", True, "a gpt_neox block is counted with its biases")
    return Architecture(**_sizes(keys), learned_positions=False)


def _deepseek_v3(keys: _Keys) -> Architecture:
    sizes = _sizes(keys)
    keys.must_be("num_key_value_heads", sizes["heads"], "latent attention has keys and values for each head")
    keys.must_be("moe_layer_freq", 1, "every layer after first_k_dense_replace is counted with experts")
    keys.read.add("head_dim")  # `transformers` writes there what qk_rope_head_dim says
    bias = keys.flag("attention_bias", False)
    experts = keys.size("n_routed_experts", 256, most=MAX_EXPERTS)
    dense = keys.size("first_k_dense_replace", 3, least=0, most=sizes["layers"])
    return Architecture(
        **sizes,
        gated=True,
        kv_heads=sizes["heads"],
        latent=LatentAttention(
            q_rank=keys.maybe("q_lora_rank", 1536, most=MAX_HEAD_SIZE),
            kv_rank=keys.size("kv_lora_rank", 512, most=MAX_HEAD_SIZE),
            nope=keys.size("qk_nope_head_dim", 128, most=MAX_HEAD_SIZE),
            rope=keys.size("qk_rope_head_dim", 64, most=MAX_HEAD_SIZE),
            value=keys.size("v_head_dim", 128, most=MAX_HEAD_SIZE),
        ),
        qkv_bias=bias,
        output_bias=bias,
        # Where no layer is left for experts, there is nothing that expert parallelism divides.
        experts=experts if dense < sizes["layers"] else 0,
        top_k=keys.size("num_experts_per_tok", 8, most=MAX_EXPERTS),
        expert_inner=keys.size("moe_intermediate_size", 2048),
        shared_experts=keys.size("n_shared_experts", 1, least=0, most=MAX_EXPERTS),
        dense_layers=dense,
        router_bias=True,
    )


READERS: dict[str, Callable[[_Keys], Architecture]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "deepseek_v3": _deepseek_v3,
}
