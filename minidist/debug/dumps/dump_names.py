"""Names and shapes of other frameworks, as those of minidist's GPT and Llama, which are Hugging Face's.

    their name                                      our name, and what is done to the values
    transformer.h.0.attn.c_attn.weight              the same: minidist, huggingface
    h.0.attn.c_attn.weight                          transformer. in front: huggingface (older files)
    layers.0.attention.wq.weight                    q_proj.weight, rows from pairs into halves: torchtitan, meta
    decoder.layers.0.self_attention.linear_qkv...   q_proj, k_proj and v_proj, cut by groups of heads: megatron

A fused matrix gives several tensors. Every rule is a permutation of elements, so values, gradients and dtypes pass
through unchanged.

Proved by: tests/equality/test_dump_names.py
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from minidist.core.base.errors import UsageError, nearest, quoted

Named = dict[str, np.ndarray]


class Heads(NamedTuple):
    """What a rule must know of the model: query heads, and key-value heads."""

    query: int
    keys: int


Rule = Callable[[np.ndarray, Heads, re.Match[str]], Named]


def to_ours(names: str, model: str, tensors: Named, heads: Heads) -> Named:
    """Return the tensors under our names. names: one of NAMES. model: gpt or llama. Unknown names are kept."""
    if names not in NAMES:
        raise UsageError(f"names {quoted(names)}{nearest(names, NAMES)}; there are {', '.join(NAMES)}")
    result: Named = {}
    for name, value in tensors.items():
        for pattern, rule in RULES.get((names, model), ()):
            if match := re.fullmatch(pattern, name):
                try:
                    result |= rule(value, heads, match)
                except ValueError:
                    raise UsageError(
                        f"{names} tensor {quoted(name)} of shape {value.shape} does not fit {heads.query} heads and"
                        f" {heads.keys} key-value heads; give the model's --heads and --kv-heads"
                    ) from None
                break
        else:
            result[name] = value
    return result


def renamed(template: str, transposed: bool = False) -> Rule:
    """Return the rule that gives a tensor another name; {0} is the number of the layer."""

    def rule(value: np.ndarray, heads: Heads, match: re.Match[str]) -> Named:
        return {template.format(*match.groups()): value.T if transposed and value.ndim == 2 else value}

    return rule


def halves_from_pairs(template: str, of_keys: bool = False) -> Rule:
    """Return the rule for rows that rotate as neighbours (2i, 2i+1): ours rotate row i with row i + n/2 of a head."""

    def rule(value: np.ndarray, heads: Heads, match: re.Match[str]) -> Named:
        count = heads.keys if of_keys else heads.query
        rows, rest = value.shape[0], value.shape[1:]
        by_pair = value.reshape(count, rows // count // 2, 2, *rest)
        return {template.format(*match.groups()): by_pair.swapaxes(1, 2).reshape(rows, *rest)}

    return rule


def grouped_qkv(names: tuple[str, str, str]) -> Rule:
    """Return the rule for Megatron's fused rows: of each group of heads its queries, then its key and its value."""

    def rule(value: np.ndarray, heads: Heads, match: re.Match[str]) -> Named:
        query, key, content = _groups(value, heads)
        number = match.group(1)
        return {name.format(number): part for name, part in zip(names, (query, key, content), strict=True)}

    return rule


def conv1d_qkv(template: str) -> Rule:
    """Return the rule for Megatron's fused rows into GPT-2's fused columns: all queries, all keys, all values."""

    def rule(value: np.ndarray, heads: Heads, match: re.Match[str]) -> Named:
        fused = np.concatenate(_groups(value, heads), axis=0)
        return {template.format(match.group(1)): fused.T if fused.ndim == 2 else fused}

    return rule


def _groups(value: np.ndarray, heads: Heads) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the queries, keys and values of (groups x (queries per group + 2) x head size, ...) rows."""
    each = heads.query // heads.keys
    size = value.shape[0] // (heads.keys * (each + 2))
    by_group = value.reshape(heads.keys, each + 2, size, *value.shape[1:])
    parts = by_group[:, :each], by_group[:, each : each + 1], by_group[:, each + 1 :]
    query, key, content = (part.reshape(-1, *value.shape[1:]) for part in parts)
    return query, key, content


def gate_and_up(names: tuple[str, str]) -> Rule:
    """Return the rule for a fused first matrix of SwiGLU: the rows of the gate, then those of the other half."""

    def rule(value: np.ndarray, heads: Heads, match: re.Match[str]) -> Named:
        gate, up = np.split(value, 2, axis=0)
        return {names[0].format(match.group(1)): gate, names[1].format(match.group(1)): up}

    return rule


_L, _G = "model.layers.{0}.", "transformer.h.{0}."
_MEGATRON = r"(?:module\.)*decoder\.layers\.(\d+)\."
_TITAN = r"layers\.(\d+)\."

RULES: dict[tuple[str, str], list[tuple[str, Rule]]] = {
    ("huggingface", "gpt"): [(r"((?:wte|wpe|ln_f)\..*|h\.\d+(?:\..*)?)", renamed("transformer.{0}"))],
    ("torchtitan", "llama"): [
        (r"layers\.(\d+)", renamed("model.layers.{0}")),
        (r"tok_embeddings\.weight", renamed("model.embed_tokens.weight")),
        (r"norm\.weight", renamed("model.norm.weight")),
        (r"output\.weight", renamed("lm_head.weight")),
        (_TITAN + r"attention\.wq\.weight", halves_from_pairs(_L + "self_attn.q_proj.weight")),
        (_TITAN + r"attention\.wk\.weight", halves_from_pairs(_L + "self_attn.k_proj.weight", of_keys=True)),
        (_TITAN + r"attention\.wv\.weight", renamed(_L + "self_attn.v_proj.weight")),
        (_TITAN + r"attention\.wo\.weight", renamed(_L + "self_attn.o_proj.weight")),
        (_TITAN + r"feed_forward\.w1\.weight", renamed(_L + "mlp.gate_proj.weight")),
        (_TITAN + r"feed_forward\.w2\.weight", renamed(_L + "mlp.down_proj.weight")),
        (_TITAN + r"feed_forward\.w3\.weight", renamed(_L + "mlp.up_proj.weight")),
        (_TITAN + r"attention_norm\.weight", renamed(_L + "input_layernorm.weight")),
        (_TITAN + r"ffn_norm\.weight", renamed(_L + "post_attention_layernorm.weight")),
    ],
    ("megatron", "llama"): [
        (r"(?:module\.)*decoder\.layers\.(\d+)", renamed("model.layers.{0}")),
        (r"(?:module\.)*embedding\.word_embeddings\.weight", renamed("model.embed_tokens.weight")),
        (r"(?:module\.)*decoder\.final_layernorm\.weight", renamed("model.norm.weight")),
        (r"(?:module\.)*output_layer\.weight", renamed("lm_head.weight")),
        (
            _MEGATRON + r"self_attention\.linear_qkv\.weight",
            grouped_qkv(
                (_L + "self_attn.q_proj.weight", _L + "self_attn.k_proj.weight", _L + "self_attn.v_proj.weight")
            ),
        ),
        (_MEGATRON + r"self_attention\.linear_proj\.weight", renamed(_L + "self_attn.o_proj.weight")),
        (_MEGATRON + r"mlp\.linear_fc1\.weight", gate_and_up((_L + "mlp.gate_proj.weight", _L + "mlp.up_proj.weight"))),
        (_MEGATRON + r"mlp\.linear_fc2\.weight", renamed(_L + "mlp.down_proj.weight")),
        (
            _MEGATRON + r"(?:input_layernorm\.|self_attention\.linear_qkv\.layer_norm_)weight",
            renamed(_L + "input_layernorm.weight"),
        ),
        (
            _MEGATRON + r"(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)weight",
            renamed(_L + "post_attention_layernorm.weight"),
        ),
    ],
    ("megatron", "gpt"): [
        (r"(?:module\.)*decoder\.layers\.(\d+)", renamed("transformer.h.{0}")),
        (r"(?:module\.)*embedding\.word_embeddings\.weight", renamed("transformer.wte.weight")),
        (r"(?:module\.)*embedding\.position_embeddings\.weight", renamed("transformer.wpe.weight")),
        (r"(?:module\.)*decoder\.final_layernorm\.(weight|bias)", renamed("transformer.ln_f.{0}")),
        (_MEGATRON + r"self_attention\.linear_qkv\.(?:weight)", conv1d_qkv(_G + "attn.c_attn.weight")),
        (_MEGATRON + r"self_attention\.linear_qkv\.(?:bias)", conv1d_qkv(_G + "attn.c_attn.bias")),
        (_MEGATRON + r"self_attention\.linear_proj\.(weight|bias)", renamed(_G + "attn.c_proj.{1}", transposed=True)),
        (_MEGATRON + r"mlp\.linear_fc1\.(weight|bias)", renamed(_G + "mlp.c_fc.{1}", transposed=True)),
        (_MEGATRON + r"mlp\.linear_fc2\.(weight|bias)", renamed(_G + "mlp.c_proj.{1}", transposed=True)),
        (
            _MEGATRON + r"(?:input_layernorm\.|self_attention\.linear_qkv\.layer_norm_)(weight|bias)",
            renamed(_G + "ln_1.{1}"),
        ),
        (_MEGATRON + r"(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)(weight|bias)", renamed(_G + "ln_2.{1}")),
    ],
}
NAMES = tuple(dict.fromkeys(("minidist", "huggingface", *(names for names, _ in RULES))))
