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
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.read_file import parse_toml

Named = dict[str, np.ndarray]


class Heads(NamedTuple):
    """What a rule must know of the model: query heads, and key-value heads."""

    query: int
    keys: int


Rule = Callable[..., Sequence[np.ndarray]]


def to_ours(names: str, model: str, tensors: Named, heads: Heads) -> Named:
    """Return the tensors under our names. names: one of NAMES. model: gpt or llama. Unknown names are kept."""
    if names not in NAMES:
        raise UsageError(f"names {quoted(names)}{nearest(names, NAMES)}; there are {', '.join(NAMES)}")
    result: Named = {}
    for name, value in tensors.items():
        for pattern, rule, ours in rules().get((names, model), ()):
            if match := re.fullmatch(pattern, name):
                try:
                    parts = rule(value, heads)
                except ValueError:
                    raise UsageError(
                        f"{names} tensor {quoted(name)} of shape {value.shape} does not fit {heads.query} heads and"
                        f" {heads.keys} key-value heads; give the model's --heads and --kv-heads"
                    ) from None
                result |= {our.format(*match.groups()): part for our, part in zip(ours, parts, strict=True)}
                break
        else:
            result[name] = value
    return result


def renamed(value: np.ndarray, heads: Heads, transposed: bool = False) -> Sequence[np.ndarray]:
    """Return a tensor that has another name only, or a matrix the other way round."""
    return [value.T if transposed and value.ndim == 2 else value]


def halves_from_pairs(value: np.ndarray, heads: Heads, of_keys: bool = False) -> Sequence[np.ndarray]:
    """Return rows that rotate as neighbours (2i, 2i+1) as ours, where row i rotates with row i + n/2 of a head."""
    count = heads.keys if of_keys else heads.query
    rows, rest = value.shape[0], value.shape[1:]
    by_pair = value.reshape(count, rows // count // 2, 2, *rest)
    return [by_pair.swapaxes(1, 2).reshape(rows, *rest)]


def grouped_qkv(value: np.ndarray, heads: Heads) -> Sequence[np.ndarray]:
    """Return the queries, keys and values of Megatron's fused rows (groups x (queries per group + 2) x head size, ...).

    Of each group of heads the queries come first, then the key and the value.
    """
    each = heads.query // heads.keys
    size = value.shape[0] // (heads.keys * (each + 2))
    by_group = value.reshape(heads.keys, each + 2, size, *value.shape[1:])
    parts = by_group[:, :each], by_group[:, each : each + 1], by_group[:, each + 1 :]
    return [part.reshape(-1, *value.shape[1:]) for part in parts]


def conv1d_qkv(value: np.ndarray, heads: Heads) -> Sequence[np.ndarray]:
    """Return GPT-2's fused columns of Megatron's fused rows: all queries, all keys, all values."""
    fused = np.concatenate(grouped_qkv(value, heads), axis=0)
    return [fused.T if fused.ndim == 2 else fused]


def gate_and_up(value: np.ndarray, heads: Heads) -> Sequence[np.ndarray]:
    """Return the parts of a fused first matrix of SwiGLU: the rows of the gate, then those of the other half."""
    return np.split(value, 2, axis=0)


_RULES = {rule.__name__: rule for rule in (renamed, halves_from_pairs, grouped_qkv, conv1d_qkv, gate_and_up)}


@cache
def rules() -> dict[tuple[str, str], list[tuple[str, Rule, list[str]]]]:
    """Return dump_names.toml: (names, model) -> the pattern of a whole name, its rule and our names, in their order."""
    table = parse_toml(Path(__file__).with_name("dump_names.toml").read_text(encoding="utf-8"))
    return {
        (names, model): [_rule(**row) for row in found] for names, of in table.items() for model, found in of.items()
    }


def _rule(name: str, to: str | list[str], rule: str = "renamed", **options: Any) -> tuple[str, Rule, list[str]]:
    return name, partial(_RULES[rule], **options), [to] if isinstance(to, str) else to


NAMES = ("minidist", *dict.fromkeys(names for names, _ in rules()))
