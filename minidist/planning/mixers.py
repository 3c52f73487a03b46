"""Attention and what takes its place in a layer, as parts: one function for each kind that families.toml names.

A function returns the parameters, and how many elements of a token's queries and outputs meet each other position:
those of attention. It is 0 where a layer keeps a state of constant size instead (Mamba, gated delta rule, lightning
attention, short convolutions). type: what layer_kinds.py calls the layer.

Proved by: tests/planning/test_families.py
"""

from collections.abc import Callable, Mapping

from minidist.planning.family import Family
from minidist.planning.parts import (
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

Mixer = tuple[Part, int]


def grouped(f: Family, type: str = "", heads: int | None = None, query: int = 1) -> Mixer:
    """Return grouped-query attention. query: 2 where queries come with as many gates of the output."""
    heads = heads or f.heads
    q, kv = heads * f.head, f.kv_heads * f.head
    attention = grouped_query(f.width, q, kv, f.has("qkv_bias"), f.has("output_bias"))
    gates = column(f.width, q, f.has("gate_bias", f.has("qkv_bias"))).times(query - 1)
    return together(attention, gates, f.query_norms(), vector(heads * f.has("sinks"))), 2 * q


def gated_grouped(f: Family, type: str = "") -> Mixer:
    """Return attention whose output is multiplied with gates (Qwen3-Next)."""
    return grouped(f, query=2)


def indexed_grouped(f: Family, type: str = "") -> Mixer:
    """Return grouped-query attention with the indexer that chooses blocks of positions (MiniMax-M3)."""
    attention, scores = grouped(f)
    chosen = f.keys.inside("sparse_attention_config")
    heads = chosen.size("sparse_num_index_heads", f.keys.size("index_n_heads"))
    size = chosen.size("sparse_index_dim", f.keys.size("index_head_dim"))
    return together(attention, whole(f.width, heads * size), whole(f.width, size), vector(2 * size)), scores


def latent_sizes(f: Family) -> LatentAttention:
    """Return the sizes of latent attention."""
    keys = f.keys
    rank, nope, rope = (keys.size(key) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
    return LatentAttention(
        keys.maybe("q_lora_rank"), rank, nope, rope, value=keys.size("v_head_dim", f.width // f.heads)
    )


def latent(f: Family, type: str = "") -> Mixer:
    """Return multi-head latent attention."""
    low = latent_sizes(f)
    return low.part(f.width, f.heads, f.has("latent_bias")), f.heads * (low.nope + low.rope + low.value)


def indexed_latent(f: Family, type: str = "") -> Mixer:
    """Return latent attention with the indexer that chooses positions (DeepSeek-V3.2)."""
    attention, scores = latent(f)
    heads, size = f.keys.size("index_n_heads"), f.keys.size("index_head_dim")
    rank = f.keys.size("q_lora_rank")
    indexer = [whole(rank, heads * size), whole(f.width, size), vector(2 * size), whole(f.width, heads)]
    return together(attention, *indexer), scores


def deepseek_v4(f: Family, type: str) -> Mixer:
    """Return attention with one key-value head, whose older positions are compressed (DeepSeek-V4)."""
    keys, h, head = f.keys, f.width, f.head
    rank, groups, low = keys.size("q_lora_rank"), keys.size("o_groups"), keys.size("o_lora_rank")
    inner = f.heads * head
    rates = keys.inside("compress_rates")
    parts = [
        *(vector(f.heads), whole(h, rank), vector(rank), column(rank, inner), whole(h, head), vector(head)),
        *(column(inner // groups, groups * low), row(groups * low, h)),
    ]
    if type == "heavily_compressed_attention":
        rate = keys.size("compress_rate_hca", rates.size(type, 128))
        parts += [vector(rate * head), whole(h, head).times(2), vector(head)]
    elif type == "compressed_sparse_attention":
        rate = keys.size("compress_rate_csa", rates.size(type, 4))
        heads, size = keys.size("index_n_heads"), keys.size("index_head_dim")
        parts += [vector(rate * 2 * head), whole(h, 2 * head).times(2), vector(head)]
        parts += [vector(rate * 2 * size), whole(h, 2 * size).times(2), vector(size)]
        parts += [whole(rank, heads * size), whole(h, heads)]
    # Hyper-connections mix the residual streams around attention and around the MLP.
    streams = keys.size("hc_mult")
    mixes = (2 + streams) * streams
    parts += [together(whole(streams * h, mixes), vector(mixes + 3)).times(2)]
    return together(*parts), 2 * inner


def gemma4(f: Family, type: str) -> Mixer:
    """Return attention with larger heads in full layers, and the MLP with what gemma 4 adds to it."""
    keys, h, is_full = f.keys, f.width, type.startswith("full")
    head = keys.size("global_head_dim", 512) if is_full else f.head
    same = is_full and keys.flag("attention_k_eq_v")  # values are keys
    kv_heads = (keys.maybe("num_global_key_value_heads") if same else None) or f.kv_heads
    bias, q, kv = keys.flag("attention_bias"), f.heads * head, kv_heads * head
    parts = [column(h, q, bias), row(q, h, bias), vector(head)]
    shared = type.endswith("shared")
    if not shared:
        parts += [column(h, kv, bias).times(1 if same else 2), vector(head)]
    parts += [mlp(h, f.inner * (2 if shared and keys.flag("use_double_wide_mlp") else 1))]
    per_layer = keys.size("hidden_size_per_layer_input", 0, least=0)
    if per_layer:
        parts += [whole(h, per_layer), whole(per_layer, h), vector(h)]
    if f.experts:
        # Experts are added to the MLP; their router scales its input and each expert.
        mixture = experts(f.experts, f.top_k, mlp(h, f.expert_inner))
        parts += [whole(h, f.experts), vector(h + f.experts), mixture, vector(3 * h)]
    return together(*parts), 2 * q


def delta(f: Family, type: str = "") -> Mixer:
    """Return the gated delta rule (Qwen3-Next): a convolution over queries, keys and values, decay, gates."""
    keys = f.keys
    heads, size = keys.size("linear_num_value_heads"), keys.size("linear_value_head_dim")
    k, v = keys.size("linear_num_key_heads") * keys.size("linear_key_head_dim"), heads * size
    convolution = (2 * k + v) * keys.size("linear_conv_kernel_dim")
    into = column(f.width, 2 * k + 2 * v + 2 * heads)
    return together(into, vector(convolution + 2 * heads + size), row(v, f.width)), 0


def kimi_delta(f: Family, type: str = "") -> Mixer:
    """Return Kimi's delta attention: as the gated delta rule, with a decay for each element of a key."""
    inside, h = f.keys.inside("linear_attn_config"), f.width
    heads = inside.size("num_heads", f.keys.size("linear_num_heads"))
    size = inside.size("head_dim", f.keys.size("linear_head_dim"))
    kernel = inside.size("short_conv_kernel_size", f.keys.size("linear_conv_kernel_dim"))
    inner = heads * size
    low = together(whole(h, size), column(size, inner)).times(2)
    into = [column(h, inner).times(3), low, whole(h, heads), vector(3 * inner * kernel + inner + heads + size)]
    return together(*into, row(inner, h)), 0


def lightning(f: Family, type: str = "") -> Mixer:
    """Return MiniMax's linear attention with its norm and gate."""
    inner = f.heads * f.head
    return together(column(f.width, 3 * inner), column(f.width, inner), vector(inner), row(inner, f.width)), 0


def mamba(f: Family, type: str = "") -> Mixer:
    """Return Mamba (Gu and Dao, 2023): a selective state-space model with a state for each channel."""
    keys, name = f.keys, f.row["mamba"]
    inner = (keys.maybe(name["inner"]) if "inner" in name else None) or int(keys.number(name["expand"]) * f.width)
    state, rank = keys.size(name["state"]), keys.get(name["rank"])
    rank = -(-f.width // 16) if rank == "auto" else keys.size(name["rank"])
    bias, convolution = keys.flag(name["bias"]), keys.size(name["kernel"]) + keys.flag(name["conv_bias"])
    parts = [column(f.width, 2 * inner, bias), row(inner, rank + 2 * state), column(rank, inner, True)]
    norms = vector(rank + 2 * state) if f.row.get("mamba_norms") else Part()
    return together(*parts, norms, vector(inner * (convolution + state + 1)), row(inner, f.width, bias)), 0


def mamba2(f: Family, type: str = "") -> Mixer:
    """Return Mamba-2 (Dao and Gu, 2024): a state for each head, and one matrix for all inputs."""
    keys, name = f.keys, f.row["mamba2"]
    heads = keys.size(name["heads"])
    expand = name.get("expand")
    inner = int(keys.number(expand) * f.width) if expand else heads * keys.size(name["head"])
    if "inner" in name:
        inner = keys.maybe(name["inner"]) or inner
    mixed = inner + 2 * keys.size(name["groups"]) * keys.size(name["state"])
    convolution = mixed * (keys.size(name["kernel"]) + keys.flag(name["conv_bias"]))
    bias = keys.flag(name["bias"])
    norm = inner if "norm" not in name or keys.flag(name["norm"]) else 0
    into = column(f.width, inner + mixed + heads, bias)
    return together(into, vector(convolution + 3 * heads + norm), row(inner, f.width, keys.flag(name["out_bias"]))), 0


def mamba_with_attention(f: Family, type: str = "") -> Mixer:
    """Return Mamba-2 and attention in one layer (Falcon-H1)."""
    attention, scores = grouped(f)
    return together(attention, mamba2(f)[0]), scores


def short_convolution(f: Family, type: str = "") -> Mixer:
    """Return a gated convolution over a few positions (LFM2)."""
    bias = f.keys.flag("conv_bias")
    kernel = f.width * (f.keys.size("conv_L_cache") + bias)
    return together(column(f.width, 3 * f.width, bias), vector(kernel), row(f.width, f.width, bias)), 0


def falcon(f: Family, type: str = "") -> Mixer:
    """Return Falcon's attention, and one norm less where attention and MLP are side by side."""
    keys = f.keys
    if not keys.flag("new_decoder_architecture"):
        f.kv_heads = 1 if keys.flag("multi_query") else f.heads
    attention = grouped_query(f.width, f.width, f.kv_heads * f.head, f.has("mlp_bias"), f.has("mlp_bias"))
    norms = keys.size("num_ln_in_parallel_attn", 1 + keys.flag("new_decoder_architecture"))
    return together(attention, f.norm().times(2 if not keys.flag("parallel_attn") or norms == 2 else 1)), 2 * f.width


def mimo(f: Family, type: str) -> Mixer:
    """Return attention with larger keys than values; windowed layers have sinks and twice the key-value heads."""
    windowed = type != "full_attention"
    kv = f.kv_heads * (1 + windowed) * f.head
    q, value = f.heads * f.head, f.heads * f.keys.size("v_head_dim")
    attention = grouped_query(f.width, q, kv, f.has("qkv_bias"), False, value)
    return together(attention, vector(f.heads * windowed)), q + value


def step(f: Family, type: str) -> Mixer:
    """Return attention with a gate for each head; windowed layers may have other numbers of heads."""
    heads = f.heads
    if type == "sliding_attention":
        other = f.keys.inside("attention_other_setting").size("num_attention_heads", heads)
        heads = f.keys.size("num_sliding_attention_heads", other)
    attention, scores = grouped(f, heads=heads)
    return together(attention, column(f.width, heads)), scores


def nemotron_experts(f: Family, type: str = "") -> Mixer:
    """Return experts as a layer without attention; they may work on fewer elements than the width."""
    low, bias = f.keys.maybe("moe_latent_size"), f.has("mlp_bias")
    between = [whole(f.width, low, bias), whole(low, f.width, bias)] if low else []
    return together(f.mixture(low), *between), 0


# By the name that families.toml has for each.
MIXERS: Mapping[str, Callable[[Family, str], Mixer]] = {
    **{
        mixer.__name__: mixer
        for mixer in (
            *(grouped, gated_grouped, indexed_grouped, latent, indexed_latent, deepseek_v4, gemma4, delta, kimi_delta),
            *(lightning, mamba, mamba2, mamba_with_attention, short_convolution, falcon, mimo, step),
        )
    },
    "experts": nemotron_experts,
    "dense": lambda f, type: (f.dense(), 0),
}
