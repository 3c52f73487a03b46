"""Parameters of published models, counted from their config.json, to the last one; and what is refused."""

import json

import pytest

from minidist.base.errors import UsageError
from minidist.planning.architecture import MODELS, Architecture
from minidist.planning.huggingface_config import READERS, read_architecture

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
# The keys of the published files, and the numbers of parameters of the published weights.
FILES = {
    "llama": (LLAMA_8B, 8_030_261_248, 8_030_261_248),
    "mistral": ({**LLAMA_8B, "model_type": "mistral", "vocab_size": 32000}, 7_241_732_096, 7_241_732_096),
    "qwen2": (
        {
            "model_type": "qwen2",
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
            "intermediate_size": 18944,
        },
        7_615_616_512,
        7_615_616_512,
    ),
    "qwen3": (
        {
            "model_type": "qwen3",
            "num_hidden_layers": 36,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "intermediate_size": 12288,
        },
        8_190_735_360,
        8_190_735_360,
    ),
    "qwen3_moe": (QWEN3_MOE, 30_532_122_624, 3_353_032_704),
    "mixtral": (
        {**LLAMA_8B, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2},
        46_702_792_704,
        12_879_925_248,
    ),
    "gpt2": (
        {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
        124_439_808,
        124_439_808,
    ),
    "gpt_neox": (
        {
            "model_type": "gpt_neox",
            "num_hidden_layers": 44,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "vocab_size": 50432,
            "max_position_embeddings": 2048,
            "intermediate_size": 24576,
        },
        20_554_567_680,
        20_554_567_680,
    ),
    "deepseek_v3": (
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 61,
            "hidden_size": 7168,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "intermediate_size": 18432,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
        },
        671_026_419_200,
        37_552_297_472,
    ),
}


def read(tmp_path, content):
    """Return the architecture of a config.json with this content."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return read_architecture(path)


def test_every_kind_of_file_has_a_case():
    assert set(FILES) == set(READERS)


@pytest.mark.parametrize("kind", FILES)
def test_parameters_are_those_of_the_published_weights(kind, tmp_path):
    content, parameters, active = FILES[kind]
    model = read(tmp_path, content)
    assert (model.parameters, model.active_parameters) == (parameters, active)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_models_by_name(name, parameters):
    assert MODELS[name].parameters == parameters


def test_floating_point_operations_are_those_of_narayanan_et_al():
    layers, h, s, vocabulary, batch = 24, 1024, 512, 50_000, 6
    model = Architecture(layers, h, 16, vocabulary, s, 4 * h)
    expected = 72 * batch * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (12 * h * layers))
    assert model.step_flops(batch, s) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": None}, "has no key 'hidden_size'"),
        ({"model_type": "llama4"}, "model_type 'llama4'"),
        ({"model_type": None}, "has no key 'model_type'"),
        ({"hidden_size": "4096"}, "hidden_size in .* is '4096'"),
        ({"num_hidden_layers": 10**9}, "the number of layers is 1000000000"),
        ({"num_attention_heads": 33}, "not divisible by 33 heads"),
        ({"num_key_value_heads": 7}, "not divisible by 7 key-value heads"),
        ({"attention_bias": True}, "attention_bias in .* is true"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings in .* must be true or false"),
    ],
)
def test_a_wrong_key_is_named_with_its_value(change, sentence, tmp_path):
    with pytest.raises(UsageError, match=sentence):
        read(tmp_path, {key: value for key, value in {**LLAMA_8B, **change}.items() if value is not None})


def test_experts_in_some_layers_only_are_refused(tmp_path):
    with pytest.raises(UsageError, match="decoder_sparse_step 2"):
        read(tmp_path, {**QWEN3_MOE, "decoder_sparse_step": 2})


def test_a_file_that_is_no_object(tmp_path):
    with pytest.raises(UsageError, match="is not a JSON object"):
        read(tmp_path, [1, 2])
