"""Names and shapes of other frameworks, as those of minidist's GPT and Llama, which are Hugging Face's.

    their name                                      our name, and what is done to the values
    transformer.h.0.attn.c_attn.weight              the same: minidist, huggingface
    h.0.attn.c_attn.weight                          transformer. in front: huggingface (older files)
    layers.0.attention.wq.weight                    q_proj.weight, rows from pairs into halves: torchtitan, meta
    decoder.layers.0.self_attention.linear_qkv...   q_proj, k_proj and v_proj, cut by groups of heads: megatron

A fused matrix gives several tensors. Every rule is a permutation of elements, so values, gradients and dtypes pass
through unchanged. Which rule is for which name is in dump_names.toml.

Proved by: tests/equality/test_dump_names.py
"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.read_file import parse_toml

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
        for pattern, rule in rules().get((names, model), ()):
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


_MAKERS: dict[str, Callable[..., Rule]] = {
    make.__name__: make for make in (renamed, halves_from_pairs, grouped_qkv, conv1d_qkv, gate_and_up)
}


@cache
def rules() -> dict[tuple[str, str], list[tuple[str, Rule]]]:
    """Return dump_names.toml: (names, model) -> the pattern of a whole name, and the rule of the first that fits."""
    table = parse_toml(Path(__file__).with_name("dump_names.toml").read_text(encoding="utf-8"))
    return {
        (names, model): [(row.pop("name"), _MAKERS[row.pop("rule", "renamed")](row.pop("to"), **row)) for row in found]
        for names, models in table.items()
        for model, found in models.items()
    }


NAMES = ("minidist", *dict.fromkeys(names for names, _ in rules()))
