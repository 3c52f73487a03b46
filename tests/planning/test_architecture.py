"""Parameters of published models, counted from their config.json, to the last one; and what is refused."""

import json
from pathlib import Path

import pytest

from minidist.core.base.errors import UsageError
from minidist.planning.architecture import Architecture
from minidist.planning.huggingface_config import read_architecture

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
# The keys of the published files, and the numbers of parameters of the published weights; test_families.py counts the
# other kinds as `transformers` does.
FILES = {
    "llama": (LLAMA_8B, 8_030_261_248, 8_030_261_248),
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
        671_026_404_352,
        37_552_282_624,
    ),
}


def read(tmp_path, content):
    """Return the architecture of a config.json with this content."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    return read_architecture(path)


def check_refused(content, sentence):
    """Assert that a config.json in the current folder, so that its path is short, is refused with a sentence."""
    Path("config.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="^.*" + sentence.replace("FILE", "'config.json'")):
        read_architecture("config.json")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Errors name the file, so its path is short."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", FILES)
def test_parameters_are_those_of_the_published_weights(kind, tmp_path):
    content, parameters, active = FILES[kind]
    model = read(tmp_path, content)
    assert (model.parameters, model.active_parameters) == (parameters, active)


def test_floating_point_operations_are_those_of_narayanan_et_al():
    layers, h, s, vocabulary, batch = 24, 1024, 512, 50_000, 6
    model = Architecture(layers, h, 16, vocabulary, s, 4 * h)
    expected = 72 * batch * s * layers * h * h * (1 + s / (6 * h) + vocabulary / (12 * h * layers))
    assert model.step_flops(batch, s) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    [
        ("llama", {"hidden_size": None}, "has no key 'hidden_size'"),
        ("gpt2", {"n_layer": None}, "has no key 'n_layer'"),
        ("llama", {"model_type": None}, "has no key 'model_type'"),
        ("llama", {"hidden_size": "4096"}, "hidden_size in FILE is '4096'"),
        ("llama", {"model_type": ["llama"]}, r"model_type \['llama'\] in FILE is not a string; it must be a kind"),
        (
            "llama",
            {"model_type": "lama"},
            "model_type 'lama' in FILE is not in minidist's table of models .did you mean",
        ),
        (
            "llama",
            {"num_hidden_layers": 0},
            "num_hidden_layers in FILE is 0; it must be a whole number from 1 to 10,000",
        ),
        ("llama", {"num_hidden_layers": 10**9}, "is 1000000000; it must be a whole number from 1 to 10,000"),
        ("llama", {"num_attention_heads": 33}, "4096 in FILE is not divisible by num_attention_heads 33; change one"),
        ("llama", {"num_key_value_heads": 7}, "heads 32 in FILE is not divisible by num_key_value_heads 7; give"),
        ("llama", {"head_dim": 0}, "head_dim in FILE is 0; it must be a whole number from 1 to 100,000"),
        ("llama", {"attention_bias": "yes"}, "attention_bias in FILE is 'yes'; it must be true or false"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings in FILE is 'no'; it must be true or false"),
        ("qwen2", {"num_key_value_heads": None}, "28 in FILE is not divisible by the default num_key_value_heads 32"),
        ("gpt2", {"n_inner": -1}, "n_inner in FILE is -1; it must be a whole number from 0 to 100,000,000"),
        ("gpt2", {"n_head": 7}, "n_embd 768 in FILE is not divisible by n_head 7; change one of them"),
        ("gpt2", {"hidden_size": 64}, "n_embd in FILE is 768, and hidden_size, which means the same, is 64; leave one"),
        ("mixtral", {"num_local_experts": 10**9}, "num_local_experts in FILE is 1000000000; it must be a whole number"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 in FILE does not fit num_local_experts 8; give"),
        ("deepseek_v3", {"n_shared_experts": 10**9}, "is 1000000000; it must be a whole number from 0 to 100,000"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank in FILE is 0; it must be a whole number from 1 to 100,000"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank in FILE is 0; it must be a whole number from 1 to 100,000"),
    ],
)
def test_a_wrong_key_is_named_with_its_value(kind, change, sentence):
    check_refused({key: value for key, value in {**FILES[kind][0], **change}.items() if value is not None}, sentence)


def test_a_model_with_dense_layers_alone_has_no_experts(tmp_path):
    model = read(tmp_path, {**FILES["deepseek_v3"][0], "first_k_dense_replace": 61})
    assert model.experts == 0
    assert model.parameters == model.active_parameters


def test_groups_of_experts_are_read(tmp_path):
    content = {**FILES["deepseek_v3"][0], "n_group": 8, "topk_group": 3}
    assert read(tmp_path, content).expert_groups == (8, 3)
    assert read(tmp_path, FILES["deepseek_v3"][0]).expert_groups == (8, 4)  # the defaults of its class


def test_second_names_of_keys_are_read(tmp_path):
    content, parameters, _ = FILES["gpt2"]
    names = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads"}
    assert read(tmp_path, {names.get(key, key): value for key, value in content.items()}).parameters == parameters


def test_a_file_that_is_no_object(tmp_path):
    with pytest.raises(UsageError, match="is not a JSON object"):
        read(tmp_path, [1, 2])
