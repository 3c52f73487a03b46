"""Other frameworks' names: what they call and lay out in their way comes back as ours, element by element."""

import numpy as np
import pytest

from minidist.core.base.errors import UsageError
from minidist.debug.dumps.dump_names import Heads, to_ours
from tests.cases import each

HEADS, KEYS, SIZE, WIDTH, INNER = 4, 2, 6, 24, 40
DRAW = np.random.default_rng(0)


def draw(*shape):
    return DRAW.standard_normal(shape)


def llama():
    layer = "model.layers.7."
    return {
        "model.embed_tokens.weight": draw(11, WIDTH),
        layer + "self_attn.q_proj.weight": draw(HEADS * SIZE, WIDTH),
        layer + "self_attn.k_proj.weight": draw(KEYS * SIZE, WIDTH),
        layer + "self_attn.v_proj.weight": draw(KEYS * SIZE, WIDTH),
        layer + "self_attn.o_proj.weight": draw(WIDTH, HEADS * SIZE),
        layer + "mlp.gate_proj.weight": draw(INNER, WIDTH),
        layer + "mlp.up_proj.weight": draw(INNER, WIDTH),
        layer + "mlp.down_proj.weight": draw(WIDTH, INNER),
        layer + "input_layernorm.weight": draw(WIDTH),
        layer + "post_attention_layernorm.weight": draw(WIDTH),
        "model.norm.weight": draw(WIDTH),
        "lm_head.weight": draw(11, WIDTH),
    }


def pairs(weight, heads):
    """Row i of the first half of a head becomes row 2i, row i of the second half row 2i + 1."""
    result = np.empty_like(weight)
    for head in range(heads):
        rows = weight[head * SIZE : (head + 1) * SIZE]
        for i in range(SIZE // 2):
            result[head * SIZE + 2 * i] = rows[i]
            result[head * SIZE + 2 * i + 1] = rows[SIZE // 2 + i]
    return result


def test_torchtitan():
    ours = llama()
    get = {name.removeprefix("model.layers.7."): value for name, value in ours.items()}
    theirs = {
        "tok_embeddings.weight": get["model.embed_tokens.weight"],
        "layers.7.attention.wq.weight": pairs(get["self_attn.q_proj.weight"], HEADS),
        "layers.7.attention.wk.weight": pairs(get["self_attn.k_proj.weight"], KEYS),
        "layers.7.attention.wv.weight": get["self_attn.v_proj.weight"],
        "layers.7.attention.wo.weight": get["self_attn.o_proj.weight"],
        "layers.7.feed_forward.w1.weight": get["mlp.gate_proj.weight"],
        "layers.7.feed_forward.w2.weight": get["mlp.down_proj.weight"],
        "layers.7.feed_forward.w3.weight": get["mlp.up_proj.weight"],
        "layers.7.attention_norm.weight": get["input_layernorm.weight"],
        "layers.7.ffn_norm.weight": get["post_attention_layernorm.weight"],
        "norm.weight": get["model.norm.weight"],
        "output.weight": get["lm_head.weight"],
    }
    equal(to_ours("torchtitan", "llama", theirs, Heads(HEADS, KEYS)), ours)


def fused(query, key, value):
    """For each key-value head: the rows of its queries, its key, its value."""
    each, parts = HEADS // KEYS, []
    for group in range(KEYS):
        for head in range(group * each, (group + 1) * each):
            parts.append(query[head * SIZE : (head + 1) * SIZE])
        parts += [key[group * SIZE : (group + 1) * SIZE], value[group * SIZE : (group + 1) * SIZE]]
    return np.concatenate(parts)


@each("prefix", ["", "module.", "module.module."])
@each("fused_norms", [False, True])
def test_megatron_llama(prefix, fused_norms):
    ours = llama()
    get = {name.removeprefix("model.layers.7."): value for name, value in ours.items()}
    norms = ("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_")
    first, second = norms if fused_norms else ("input_layernorm.", "pre_mlp_layernorm.")
    layer = prefix + "decoder.layers.7."
    theirs = {
        prefix + "embedding.word_embeddings.weight": get["model.embed_tokens.weight"],
        layer + "self_attention.linear_qkv.weight": fused(
            get["self_attn.q_proj.weight"], get["self_attn.k_proj.weight"], get["self_attn.v_proj.weight"]
        ),
        layer + "self_attention.linear_proj.weight": get["self_attn.o_proj.weight"],
        layer + "mlp.linear_fc1.weight": np.concatenate([get["mlp.gate_proj.weight"], get["mlp.up_proj.weight"]]),
        layer + "mlp.linear_fc2.weight": get["mlp.down_proj.weight"],
        layer + first + "weight": get["input_layernorm.weight"],
        layer + second + "weight": get["post_attention_layernorm.weight"],
        prefix + "decoder.final_layernorm.weight": get["model.norm.weight"],
        prefix + "output_layer.weight": get["lm_head.weight"],
    }
    equal(to_ours("megatron", "llama", theirs, Heads(HEADS, KEYS)), ours)


def test_megatron_gpt():
    """GPT-2 has the matrices transposed, and all queries before all keys before all values."""
    layer, full = "transformer.h.3.", HEADS * SIZE
    ours = {
        layer + "attn.c_attn.weight": draw(WIDTH, 3 * full),
        layer + "attn.c_attn.bias": draw(3 * full),
        layer + "attn.c_proj.weight": draw(full, WIDTH),
        layer + "attn.c_proj.bias": draw(WIDTH),
        layer + "mlp.c_fc.weight": draw(WIDTH, INNER),
        layer + "ln_1.bias": draw(WIDTH),
        "transformer.ln_f.weight": draw(WIDTH),
        "transformer.wpe.weight": draw(9, WIDTH),
    }
    theirs_layer, parts = "decoder.layers.3.", []
    rows, bias = ours[layer + "attn.c_attn.weight"].T, ours[layer + "attn.c_attn.bias"]
    for values in (rows, bias):
        q, k, v = np.split(values, 3)
        parts.append(np.concatenate([x[h * SIZE : (h + 1) * SIZE] for h in range(HEADS) for x in (q, k, v)]))
    theirs = {
        theirs_layer + "self_attention.linear_qkv.weight": parts[0],
        theirs_layer + "self_attention.linear_qkv.bias": parts[1],
        theirs_layer + "self_attention.linear_proj.weight": ours[layer + "attn.c_proj.weight"].T,
        theirs_layer + "self_attention.linear_proj.bias": ours[layer + "attn.c_proj.bias"],
        theirs_layer + "mlp.linear_fc1.weight": ours[layer + "mlp.c_fc.weight"].T,
        theirs_layer + "self_attention.linear_qkv.layer_norm_bias": ours[layer + "ln_1.bias"],
        "decoder.final_layernorm.weight": ours["transformer.ln_f.weight"],
        "embedding.position_embeddings.weight": ours["transformer.wpe.weight"],
    }
    equal(to_ours("megatron", "gpt", theirs, Heads(HEADS, HEADS)), ours)


def test_huggingface_without_the_prefix():
    theirs = {"h.0.ln_1.weight": draw(3), "wte.weight": draw(2, 3), "transformer.ln_f.bias": draw(3), "h.1": draw(2)}
    found = to_ours("huggingface", "gpt", theirs, Heads(1, 1))
    assert set(found) == {
        "transformer.h.0.ln_1.weight",
        "transformer.wte.weight",
        "transformer.ln_f.bias",
        "transformer.h.1",
    }


def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="did you mean 'megatron'"):
        to_ours("megatorn", "gpt", {}, Heads(1, 1))
    with pytest.raises(UsageError, match="does not fit 4 heads and 2 key-value heads"):
        to_ours("torchtitan", "llama", {"layers.0.attention.wq.weight": draw(7, 3)}, Heads(4, 2))


def equal(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert np.array_equal(found[name], value), name
