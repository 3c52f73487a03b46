"""Reads the `config.json` that Hugging Face stores beside a model's weights into an `Architecture`.

Every key that changes a size is either read, or refused with its name: a model that is counted wrongly without a word
is worse than none. Keys that change no size (dropout, the rotary base, token numbers) are not read.

Proved by: tests/planning/test_architecture.py
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.read_file import read_json
from minidist.planning.architecture import Architecture, LatentAttention, checked

REMEDY = "give the config.json of a Hugging Face model"


class _Keys:
    """The keys of a file; a missing or wrong one is an error that names it."""

    def __init__(self, content: Mapping[str, Any], file: str) -> None:
        self.content, self.file = content, file

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number of at least 0."""
        value = self.content.get(key)
        if value is None:
            if default is None:
                raise UsageError(f"{self.file} has no key {key!r}; add it, or {REMEDY}")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UsageError(f"{key} in {self.file} is {quoted(value)}; it must be a whole number of at least 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.content.get(key, default)
        if not isinstance(value, bool):
            raise UsageError(f"{key} in {self.file} is {quoted(value)}; it must be true or false")
        return value

    def maybe(self, key: str) -> int | None:
        """Return a whole number, or None for a key that is missing or null."""
        return None if self.content.get(key) is None else self.size(key)


def read_architecture(path: str | Path) -> Architecture:
    """Return the architecture that a config.json describes; UsageError for one that cannot be counted."""
    content = read_json(path, "--config", REMEDY)
    file = quoted(str(path))
    if not isinstance(content, dict):
        raise UsageError(f"--config {file} is not a JSON object; {REMEDY}")
    kind = content.get("model_type")
    if kind is None:
        raise UsageError(f"{file} has no key 'model_type'; add it ({', '.join(READERS)}), or {REMEDY}")
    if kind not in READERS:
        raise UsageError(
            f"model_type {quoted(kind)} in {file} is unknown{nearest(str(kind), READERS)}; it must be one of"
            f" {', '.join(READERS)}; or describe the model with --layers, --hidden, --heads"
        )
    return checked(READERS[kind](_Keys(content, file)))


def _llama(keys: _Keys, **more: Any) -> Architecture:
    """Return a model of LLaMA's kind of block."""
    heads = keys.size("num_attention_heads")
    return Architecture(
        layers=keys.size("num_hidden_layers"),
        width=keys.size("hidden_size"),
        heads=heads,
        vocabulary=keys.size("vocab_size"),
        positions=keys.size("max_position_embeddings"),
        inner=keys.size("intermediate_size"),
        gated=True,
        kv_heads=keys.size("num_key_value_heads", heads),
        head_size=keys.maybe("head_dim"),
        tied=keys.flag("tie_word_embeddings", False),
        **more,
    )


def _plain_llama(keys: _Keys) -> Architecture:
    for key in ("attention_bias", "mlp_bias"):
        if keys.flag(key, False):
            raise UsageError(
                f"{key} in {keys.file} is true; biases of a llama block are not counted, so it must be false"
            )
    return _llama(keys)


def _qwen3(keys: _Keys) -> Architecture:
    return _llama(keys, query_norm=True, qkv_bias=keys.flag("attention_bias", False))


def _qwen3_moe(keys: _Keys) -> Architecture:
    step, dense = keys.size("decoder_sparse_step", 1), keys.content.get("mlp_only_layers") or []
    if step != 1 or dense:
        raise UsageError(
            f"decoder_sparse_step {step} and mlp_only_layers {quoted(dense)} in {keys.file}; only models in which every"
            " layer has experts are counted"
        )
    return _llama(
        keys,
        query_norm=True,
        experts=keys.size("num_experts"),
        top_k=keys.size("num_experts_per_tok"),
        expert_inner=keys.size("moe_intermediate_size"),
    )


def _mixtral(keys: _Keys) -> Architecture:
    return _llama(keys, experts=keys.size("num_local_experts"), top_k=keys.size("num_experts_per_tok"))


def _gpt2(keys: _Keys) -> Architecture:
    width = keys.size("n_embd")
    return Architecture(
        layers=keys.size("n_layer"),
        width=width,
        heads=keys.size("n_head"),
        vocabulary=keys.size("vocab_size"),
        positions=keys.size("n_positions", keys.maybe("n_ctx")),
        inner=keys.maybe("n_inner") or 4 * width,
        tied=keys.flag("tie_word_embeddings", True),
    )


def _gpt_neox(keys: _Keys) -> Architecture:
    if not keys.flag("attention_bias", True):
        raise UsageError(f"attention_bias in {keys.file} is false; a gpt_neox block is counted with its biases")
    return Architecture(
        layers=keys.size("num_hidden_layers"),
        width=keys.size("hidden_size"),
        heads=keys.size("num_attention_heads"),
        vocabulary=keys.size("vocab_size"),
        positions=keys.size("max_position_embeddings"),
        inner=keys.size("intermediate_size"),
        tied=keys.flag("tie_word_embeddings", False),
        learned_positions=False,
    )


def _deepseek_v3(keys: _Keys) -> Architecture:
    attention = LatentAttention(
        q_rank=keys.maybe("q_lora_rank"),
        kv_rank=keys.size("kv_lora_rank"),
        nope=keys.size("qk_nope_head_dim"),
        rope=keys.size("qk_rope_head_dim"),
        value=keys.size("v_head_dim"),
    )
    return _llama(
        keys,
        latent=attention,
        experts=keys.size("n_routed_experts"),
        top_k=keys.size("num_experts_per_tok"),
        expert_inner=keys.size("moe_intermediate_size"),
        shared_experts=keys.size("n_shared_experts", 0),
        dense_layers=keys.size("first_k_dense_replace", 0),
        router_bias=True,
    )


READERS: dict[str, Callable[[_Keys], Architecture]] = {
    "llama": _plain_llama,
    "mistral": _plain_llama,
    "qwen2": lambda keys: _llama(keys, qkv_bias=True),
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "deepseek_v3": _deepseek_v3,
}
