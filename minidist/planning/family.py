"""A kind of model: its row in families.toml, the keys of a file, and the sizes that all of its layers have.

    families.toml   [qwen3]  query_norm = "head", ...         what a layer is made of
    config.json     {"model_type": "qwen3", "hidden_size": 1024, ...}
                       |
    Family             v
      layer_kinds.py   what each layer is, and which layers have experts
      mixers.py        attention, or what takes its place
      decoder.py       the layers, and what is outside them, as parts (parts.py)

Buffers are not parameters: the correction that DeepSeek-V3's router adds to its scores is not trained by the gradient,
and is not counted. Modules that predict further tokens are not counted either, because `transformers` does not load
them.

Proved by: tests/planning/test_families.py
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from minidist.base.read_file import read_toml
from minidist.planning.config_keys import Keys
from minidist.planning.parts import Part, experts, mlp, together, vector, whole


@cache
def families() -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of families.toml, with the entries of the row that each one is like."""
    rows = read_toml(Path(__file__).with_name("families.toml"), "minidist's file", "install minidist again")

    def with_likes(entries: Mapping[str, Any]) -> dict[str, Any]:
        like = entries.get("like")
        return {**(with_likes(rows[like]) if like else {}), **entries}

    return {name: with_likes(entries) for name, entries in rows.items()}


class Family:
    """What a row and a file say of each layer."""

    def __init__(self, keys: Keys, row: Mapping[str, Any]) -> None:
        self.keys, self.row = keys, row
        if self.has("without"):
            raise keys.wrong(row["without"], f"such a {keys.kind} model is not counted; set it to false")
        self.width = keys.size("hidden_size")
        self.inner = self._inner()
        self.heads, self.head_size = self._heads()
        self.head = self.head_size or self.width // self.heads
        self.kv_heads = self._kv_heads()
        self.experts = self.size("experts", "", 0) if self.has("experts_if", True) else 0
        self.top_k = self.size("top_k", "num_experts_per_tok", 0) if self.experts else 0
        self.expert_inner = self.size("expert_inner", "moe_intermediate_size", self.inner) if self.experts else 0

    def has(self, entry: str, default: bool = False) -> bool:
        """Return whether an entry of the row holds: true, or a key of the file that is true."""
        value = self.row.get(entry, default)
        return self.keys.flag(value) if isinstance(value, str) else bool(value)

    def size(self, entry: str, key: str, default: int) -> int:
        """Return the size whose key an entry of the row names; key: without the entry; default: without a value."""
        key = self.row.get(entry, key)
        return self.keys.size(key, default, least=0) if key else default

    def _heads(self) -> tuple[int, int | None]:
        """Return the number of heads, and their size unless it is width / heads."""
        if self.keys.get("num_attention_heads") is None and "num_attention_heads" not in self.keys.defaults:
            # A model without attention is planned as if its layers had heads of 64 elements.
            return max(1, self.inner // 64), 64
        reads_size = self.row.get("head_dim", True)
        return self.keys.size("num_attention_heads"), self.keys.maybe("head_dim") if reads_size else None

    def _kv_heads(self) -> int:
        key = self.row.get("kv_heads", "num_key_value_heads")
        if key == "multi_query":
            return 1 if self.keys.flag("multi_query") else self.heads
        return (self.keys.maybe(key) if key else None) or self.heads

    def _inner(self) -> int:
        key = self.row.get("inner", "intermediate_size")
        if key == "expand":
            return int(self.keys.number(key) * self.width)  # a factor
        if key == "lfm2":
            return self._adjusted_inner()
        return self.size("inner", "intermediate_size", 4 * self.width)

    def _adjusted_inner(self) -> int:
        """Return what LFM2 makes of its size: two thirds, times a factor, rounded up to a multiple."""
        keys, inner = self.keys, self.keys.size("intermediate_size")
        if not keys.flag("block_auto_adjust_ff_dim"):
            return inner
        multiple = keys.size("block_multiple_of")
        inner = int(2 * inner / 3)
        if keys.get("block_ffn_dim_multiplier") is not None:
            inner = -(-int(keys.number("block_ffn_dim_multiplier") * inner) // multiple) * multiple
        return inner

    def norm(self, size: int | None = None) -> Part:
        """Return a norm of the family's kind, of the width or of another size."""
        if not self.has("norm_if", True):
            return Part()
        weights = {"none": 0, "rms": 1, "layer": 2}[self.row.get("norm", "rms")]
        return vector(weights * (self.width if size is None else size))

    def norms(self) -> Part:
        """Return the norms of a layer."""
        return self.norm().times(self.row.get("norms", 2) - self.has("parallel"))

    def query_norms(self) -> Part:
        """Return the norms of queries and keys."""
        kind = self.row.get("query_norm")
        if kind is None or not self.has("query_norm_if", True):
            return Part()
        sizes = {
            "head": 2 * self.head,
            "layer": 4 * (self.width // self.heads),
            "all": (self.heads + self.kv_heads) * self.head,
        }
        return vector(sizes[kind])

    def dense(self) -> Part:
        """Return an MLP."""
        return mlp(self.width, self.inner, self.has("gated", True), self.has("mlp_bias"))

    def mixture(self, latent: int | None = None) -> Part:
        """Return experts, their router, and the experts that every token uses. latent: the experts' width."""
        gated, bias, h = self.has("gated", True), self.has("expert_bias"), self.width
        shared = self.size("shared", "", 0) * self.expert_inner + self.size("shared_inner", "", 0)
        return together(
            whole(h, self.experts, self.has("router_bias")),
            experts(self.experts, self.top_k, mlp(latent or h, self.expert_inner, gated, bias)),
            mlp(h, shared, gated, self.has("shared_bias")) if shared else Part(),
            whole(h, 1) if shared and self.has("shared_gate") else Part(),
        )
