"""Every kind of model is counted as `transformers` counts it, to the last parameter, whatever its file says.

counted_by_transformers.json has small configurations of each kind, and what changes when one key does, with the numbers
of parameters that `transformers` 5.24 gives the module which it builds of them on PyTorch's meta device; "default" is
that of a file without any size. Buffers are not among them.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from minidist.core.base.errors import UsageError
from minidist.planning.cluster.gpus import machine_of
from minidist.planning.cluster.layout import ClusterLayout, Job
from minidist.planning.cluster.memory import block_activations, memory_by_rank, rank_parameters
from minidist.planning.cluster.step_time import StepModel
from minidist.planning.config_keys import Keys
from minidist.planning.decoder import architecture_of
from minidist.planning.family import families
from minidist.planning.huggingface_config import read_architecture

COUNTED = json.loads(Path(__file__).with_name("counted_by_transformers.json").read_text(encoding="utf-8"))
NOT_IN_TRANSFORMERS = {"kimi_k2", "internlm", "internlm2", "baichuan", "mimo"}


def model(kind, *contents):
    """Return the architecture of a file with the keys of several objects; those of an object inside are added."""
    whole = {}
    for content in contents:
        for key, value in content.items():
            whole[key] = {**whole.get(key, {}), **value} if isinstance(value, dict) else value
    return architecture_of(Keys(whole, "f", kind, is_whole=False))


def test_each_family_and_each_key_is_counted_as_transformers_counts_it():
    wrong = []
    for kind, case in COUNTED.items():
        found = [("as it is", model(kind, case["config"]).parameters, case["parameters"])]
        found += [(change, model(kind, case["config"], change).parameters, n) for change, n in case["changes"]]
        if case["default"] is not None:
            found.append(("defaults", model(kind).parameters, case["default"]))
        wrong += [(kind, *item) for item in found if item[1] != item[2]]
    assert wrong == []


def test_a_file_has_the_parameters_that_automodel_builds():
    """The output projection is in the count where AutoModelForCausalLM builds the tower, too; it is always planned."""
    text = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "head_dim": 16}
    text |= {"num_hidden_layers": 4, "intermediate_size": 80}
    vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"patch_size": 4, "image_size": 16}
    for kind, counted, planned in (("mistral3", 214976, 221120), ("gemma3", 220512, 220512)):
        found = model(kind, {"text_config": text, "vision_config": vision, "tie_word_embeddings": False})
        assert (found.counted_parameters, found.parameters) == (counted, planned), kind
        assert found.active_parameters == counted, kind
        # The first sentence has both numbers.
        assert kind != "mistral3" or re.match("214,976 parameters, .* 221,120$", found.approximations[0])


def test_each_family_is_counted():
    """What only occurs inside another file is counted there."""
    inside = {row["text"] for row in families().values() if "text" in row}
    inside |= {kind for kind in families() if kind.endswith("_text")}
    assert set(families()) - set(COUNTED) - inside == NOT_IN_TRANSFORMERS


def test_a_layout_holds_every_parameter_once_and_each_family_is_planned():
    machine = machine_of("h100")
    for kind, case in COUNTED.items():
        architecture = model(kind, case["config"])
        job = Job(architecture, 32, 4, gpus=2)
        layout = ClusterLayout(pp=2, microbatches=4)
        half = (architecture.layers + 1) // 2
        stages = [list(range(half)), list(range(half, architecture.layers))]
        held = sum(rank_parameters(layout, job, rank, layers).total for rank, layers in enumerate(stages))
        copied = architecture.vocabulary * architecture.width if architecture.is_tied else 0
        assert held == architecture.parameters + copied, kind
        assert all(rank.peak > 0 for rank in memory_by_rank(layout, job)), kind
        assert StepModel(layout, job, machine).step().seconds > 0, kind
        assert 0 < architecture.active_parameters <= architecture.parameters, kind
        # Heads change no count where their size follows from the width, but what a layout divides.
        config = case["config"].get("text_config", case["config"])
        heads = {config[key] for key in ("num_attention_heads", "n_head", "n_heads", "num_heads") if key in config}
        assert kind == "mamba2" or not heads or {architecture.heads} == heads, kind


def test_experts_that_a_token_does_not_use_are_not_active():
    case = COUNTED["mixtral"]["config"]
    every = model("mixtral", case, {"num_experts_per_tok": 6})
    two = model("mixtral", case)
    assert every.active_parameters == every.parameters == two.parameters
    # Four layers, four of six experts, three matrices of 64 x 80.
    assert every.parameters - two.active_parameters == 4 * 4 * 3 * 64 * 80


def test_a_window_limits_the_pairs_of_positions():
    """A causal mask leaves half of all pairs, and a window of w leaves w positions for each: as 2 w of all pairs."""
    case = COUNTED["mistral"]["config"]
    long, windowed = (model("mistral", case, {"sliding_window": window}) for window in (None, 8))
    scores = 2 * 4 * 16
    assert long.layer_scores(0, 40) == 40 * scores
    assert windowed.layer_scores(0, 40) == 16 * scores
    assert windowed.layer_scores(0, 10) == 10 * scores
    assert long.forward_flops(40) - windowed.forward_flops(40) == 4 * 2 * 24 * scores
    # Of gemma 3's layers every sixth sees all positions; a list in the file says otherwise.
    kinds = {"num_hidden_layers": 12, "sliding_window": 8}
    gemma = model("gemma3_text", COUNTED["gemma3_text"]["config"], kinds)
    assert [layer for layer in range(12) if gemma.kinds[gemma.kind(layer)].window is None] == [5, 11]
    full = model("gemma3_text", COUNTED["gemma3_text"]["config"], kinds, {"layer_types": ["full_attention"] * 12})
    assert {block.window for block in full.kinds} == {None}


def test_a_layer_that_is_an_mlp_alone_keeps_what_the_mlp_of_another_layer_keeps():
    """Attention in one layer and the MLP in the next keep as much as one layer with both."""
    change = {"layers_block_type": ["attention", "mlp"], "head_dim": 16}
    nemotron = model("nemotron_h", COUNTED["nemotron_h"]["config"], change)
    both = replace(nemotron, blocks=(nemotron.blocks[0]._replace(has_mlp=True),), pattern=(0, 0))
    layout = ClusterLayout(microbatches=2)
    apart, together = (
        sum(block_activations(layout, Job(one, 32, 2, gpus=1), layer) for layer in range(2)) for one in (nemotron, both)
    )
    assert 0 < apart == together / 2


def test_layers_without_attention_have_no_scores():
    mamba = model("mamba2", COUNTED["mamba2"]["config"])
    assert mamba.layer_scores(0, 1000) == 0
    assert any("without attention" in sentence for sentence in mamba.approximations)
    assert model("llama", COUNTED["llama"]["config"]).approximations == ()


def test_what_is_not_counted_or_has_no_effect_is_said(tmp_path):
    def sentences(kind, *contents):
        return " ".join(model(kind, *contents).approximations)

    assert "vision tower is not" in sentences("llama4", COUNTED["llama4"]["config"], {"vision_config": {"depth": 2}})
    assert "the tower before the language model is counted" in sentences("qwen3_vl", COUNTED["qwen3_vl"]["config"])
    assert "no text_config" in sentences("step3p7")
    assert "num_experts 8 has no effect" in sentences("llama", COUNTED["llama"]["config"], {"num_experts": 8})


def test_keys_that_nothing_reads_do_not_matter(tmp_path):
    path = tmp_path / "config.json"
    llama = {"model_type": "llama", **COUNTED["llama"]["config"]}
    strange = '"limit": [0.0, Infinity], "low": 1e308, "not": NaN, "quantization_config": {"groups": {"a": [1, null]}}'
    path.write_text(json.dumps(llama)[:-1] + f", {strange}}}", encoding="utf-8")
    assert read_architecture(path).parameters == COUNTED["llama"]["parameters"]


def test_older_names_of_keys_mean_the_same():
    nemotron = COUNTED["nemotron_h"]["config"]
    listed = {"layers_block_type": ["mamba", "mlp", "attention", "moe"]}
    assert model("nemotron_h", nemotron, listed) == model("nemotron_h", nemotron, {"hybrid_override_pattern": "M-*E"})
    step = COUNTED["step3p7"]["config"]
    by_number, by_kind = {"moe_layers_enum": "1,3"}, {"mlp_layer_types": ["dense", "sparse"] * 2}
    assert (
        model("step3p7", step, {"text_config": by_number}).parameters
        == model("step3p7", step, {"text_config": by_kind}).parameters
    )
    kimi = COUNTED["kimi_linear"]["config"]
    full = {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 2, "head_dim": 8}}
    types = ["linear_attention"] * 3 + ["full_attention"]
    assert (
        model("kimi_linear", kimi, full).parameters
        == model("kimi_linear", kimi, {"layer_types": types, "linear_num_heads": 2, "linear_head_dim": 8}).parameters
    )


def test_older_forms_of_a_file_are_read():
    """Hunyuan's files have a list of equal numbers, and those of the large BLOOM a name that only its class knows."""
    moe = COUNTED["hunyuan_v1_moe"]
    once = model("hunyuan_v1_moe", moe["config"], {"moe_topk": 2})
    assert model("hunyuan_v1_moe", moe["config"], {"moe_topk": [2, 2, 2, 2]}) == once
    with pytest.raises(UsageError, match=r"moe_topk in f is \[2, 1\]; it must be a whole number"):
        model("hunyuan_v1_moe", moe["config"], {"moe_topk": [2, 1]})
    bloom = {"n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880}
    assert model("bloom", bloom).parameters == 176_247_271_424


def test_a_wrong_list_of_layers_is_refused():
    for kind, change, sentence in (
        ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types in f is .*; it must have an entry for each"),
        ("minimax_m3_vl_text", {"moe_layer_freq": [0]}, r"moe_layer_freq in f is .*; it must have an entry"),
        ("qwen3_next", {"layer_types": ["mamba"] * 3 + ["x"]}, "a layer of qwen3_next must be full_attention, linear"),
        ("glm_moe_dsa", {"mlp_layer_types": "dense"}, "mlp_layer_types in f is 'dense'; it must be a list with"),
        ("deepseek_v4", {"compress_ratios": [0, 4, 8, 4]}, "compress_ratios in f is .*; it must be 0, 4 or 128"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "a layer of nemotron_h must be full_attention"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention in f is true; such a gpt2 model is not counted"),
        ("llama", {"num_attention_heads": None}, "num_attention_heads in f is null; it must be a whole number from 1"),
        ("qwen3_vl", {"vision_config": 3}, "vision_config in f is 3; it must be an object"),
        ("jamba", {"mamba_expand": "2"}, "mamba_expand in f is '2'; it must be a number from"),
    ):
        with pytest.raises(UsageError, match=sentence):
            model(kind, COUNTED[kind]["config"], change)


def test_a_kind_of_layer_with_its_own_sizes_is_planned_apart():
    """What layouts share is kept for each kind of layer: a model of several kinds takes as long as its parts."""
    large = {"hidden_size": 4096, "intermediate_size": 20_000, "head_dim": 128}  # more than the launch of its kernels
    nemotron = model("nemotron_h", COUNTED["nemotron_h"]["config"], large)
    assert len(nemotron.kinds) == 4
    step = StepModel(ClusterLayout(microbatches=2), Job(nemotron, 8192, 2, gpus=1), machine_of("h100"))
    forward = [step.layer_pass(layer).forward for layer in range(4)]
    assert len(set(forward)) == 4
    alone = []
    for layer in range(4):
        one = replace(nemotron, layers=1, pattern=(nemotron.kind(layer),))
        alone.append(StepModel(step.layout, replace(step.job, model=one), step.machine).layer_pass(0).forward)
    assert forward == alone
