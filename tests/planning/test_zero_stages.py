"""Bytes on paper: the papers' numbers, the published parameter counts, the command line."""

import json
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.cli import main
from minidist.core.base.errors import UsageError
from minidist.planning.architecture import MODELS
from minidist.planning.cluster.gpus import MACHINES
from minidist.planning.cluster.layout import ATTENTION, KERNELS, RECOMPUTE, ClusterLayout, Job
from minidist.planning.cluster.memory import block_activations
from minidist.planning.cluster.search import Plan
from minidist.planning.zero_stages import (
    block_forms,
    deepspeed_offload,
    layout_stages,
    model_states,
    whole_number,
    with_total,
)

KINDS = json.loads(Path(__file__).with_name("counted_by_transformers.json").read_text(encoding="utf-8"))


def job(name, layout, length, **more):
    """Return the job that a layout's batch belongs to."""
    model = MODELS[name] if isinstance(name, str) else name
    return Job(model, length, layout.dp * layout.micro_batch * layout.microbatches, "bf16", layout.ranks, **more)


def stages_of(name, ranks=1, length=1024, recompute="none", accounting="megatron", **more):
    """Return the stages of a model on data-parallel ranks."""
    layout = ClusterLayout(ranks, recompute=recompute)
    return totals(job(name, layout, length, **more), layout, accounting)


def totals(of, layout, accounting="megatron"):
    """Return the bytes of each stage by kind, with their sum."""
    return {stage: with_total(rank.by_kind) for stage, rank in layout_stages(of, layout, accounting).items()}


def gigabytes(stages):
    return {stage: parts["total"] / 1e9 for stage, parts in stages.items()}


def test_figure_1_of_the_zero_paper():
    """7.5 B parameters on 64 devices: 120, 31.4, 16.6 and 1.9 GB."""
    assert gigabytes(model_states(7_500_000_000, 64)) == {
        "stage0": 120,
        "stage1": 31.40625,
        "stage2": 16.640625,
        "stage3": 1.875,
    }


def test_other_accountings():
    assert gigabytes(model_states(10**9, 1, "fp32-accumulation")) == dict.fromkeys(
        ["stage0", "stage1", "stage2", "stage3"], 20
    )
    estimate = model_states(11_000_000_000, 32, "deepspeed", largest_layer=32_000_000)
    assert estimate["stage2"]["total"] == 4 * 11_000_000_000 + 16 * 11_000_000_000 // 32
    assert estimate["stage3"]["total"] == 4 * 32_000_000 + 18 * 11_000_000_000 // 32
    assert "stage0" not in estimate


def test_estimators_of_deepspeed_with_states_on_the_host(minidist):
    """Its documentation's formulas: stage 2 2 P and P max(4 n, 16) 1.5; stage 3 4 L + 2 P / N and
    P max(4 n, 16 / nodes) 1.5, or with parameters on the host too 4 L and P max(4 n, 18 / nodes) 1.5.
    """
    p, layer = 2_851_000_000, 32_000_000
    rows = deepspeed_offload(p, 16, layer)
    assert rows["stage2 offload_optimizer"] == {"device": 2 * p, "host": p * 32 * 3 // 2}
    assert rows["stage3 offload_optimizer"] == {"device": 4 * layer + p // 8, "host": p * 32 * 3 // 2}
    assert rows["stage3 offload_optimizer zero_init"]["host"] == p * 8 * 3 // 2
    assert rows["stage3 offload_optimizer offload_param zero_init"] == {"device": 4 * layer, "host": int(p * 9 * 1.5)}
    assert deepspeed_offload(p, 2)["stage2 offload_optimizer"]["host"] == p * 16 * 3 // 2
    few = deepspeed_offload(p, 2, layer)  # of one node: 4 n is 8, so the states decide
    assert few["stage3 offload_optimizer"] == {"device": 4 * layer + p, "host": p * 16 * 3 // 2}
    assert few["stage3 offload_optimizer offload_param"] == {"device": 4 * layer, "host": p * 18 * 3 // 2}
    assert (
        "stage3 offload_optimizer offload_param"
        in minidist("memory", "--model", "gpt2-xl", "--dp", "8", "--accounting", "deepspeed").out
    )


def own_parameters(model):
    """Parameters of each module that are not those of a module inside it."""
    sums = Counter()
    for name, parameter in model.named_parameters():
        sums[name.rpartition(".")[0]] += parameter.size
    return sums


@pytest.mark.parametrize("vocabulary", [11, 500])
@pytest.mark.parametrize("gated", [False, True])
def test_the_largest_layer_of_deepspeed_is_one_module_not_a_block(gated, vocabulary):
    """DeepSpeed takes the largest sum of `module.parameters(recurse=False)` over all modules."""
    from minidist.core.nn import GPT, GPTConfig
    from minidist.nn import Llama, LlamaConfig
    from minidist.planning.architecture import Architecture

    llama = LlamaConfig(vocabulary, 8, 20, 3, 2, max_position_embeddings=7)
    model = Llama(llama) if gated else GPT(GPTConfig(vocabulary, 7, 8, 3, 2))
    architecture = Architecture(3, 8, 2, vocabulary, 7, 20 if gated else 32, gated)
    assert architecture.largest_module == max(own_parameters(model).values())


def test_the_estimate_of_gpt3_on_1024_ranks():
    """4 x 618 M, the embedding, and 18 x 174.6 B / 1024; its block has 1,812 M."""
    states = stages_of("gpt3-175b", 1024, accounting="deepspeed")["stage3"]
    bare = states["parameters"] + states["gradients"] + states["optimizer"]
    assert bare == pytest.approx(4 * 50257 * 12288 + 18 * MODELS["gpt3-175b"].parameters / 1024, abs=64)
    assert bare / 1e9 == pytest.approx(5.54, abs=0.005)


def test_ranks_is_another_name_of_dp(minidist):
    by_dp, by_ranks = (minidist("memory", "--params", "7e9", flag, "8").out for flag in ("--dp", "--ranks"))
    assert by_dp == by_ranks != minidist("memory", "--params", "7e9").out


def test_shards_are_whole_elements():
    assert model_states(10, 4)["stage3"] == {"parameters": 6, "gradients": 6, "optimizer": 36, "total": 48}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("llama-7b", 6_738_415_616),
        ("llama-65b", 65_285_660_672),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_models_have_the_published_numbers_of_parameters(name, parameters):
    assert MODELS[name].parameters == parameters


def test_our_gpt_has_the_same_blocks():
    from minidist.core.nn import GPT, GPTConfig
    from minidist.planning.architecture import Architecture

    model = GPT(GPTConfig(vocab_size=11, n_positions=7, n_embd=8, n_layer=3, n_head=2))
    assert sum(p.size for p in model.parameters()) == Architecture(3, 8, 2, 11, 7, 32).parameters


@given(
    kind=st.sampled_from(sorted(KINDS)),
    head_size=st.none() | st.sampled_from([5, 12, 24, 33]),
    axes=st.tuples(*(st.sampled_from(sizes) for sizes in ((1, 2, 4), (1, 1, 2), (1, 1, 2, 3), (1, 1, 2), (1, 1, 2)))),
    recompute=st.sampled_from(RECOMPUTE),
    kernels=st.tuples(st.sampled_from(ATTENTION), st.sampled_from(sorted(KERNELS)), st.booleans()),
)
def test_memory_is_that_of_the_plan_to_the_byte(tmp_path_factory, kind, head_size, axes, recompute, kernels):
    """Of any kind of model, each stage of `minidist memory` is the peak of `minidist plan` for the same layout, in each
    kind of bytes; or both commands say the same of it.
    """
    content = {**KINDS[kind]["config"], **({} if head_size is None else {"head_dim": head_size}), "model_type": kind}
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(content))
    same = ["--seq", "24", "--gpu", "h100", "--model", str(path), "--recompute", recompute, "--json"]
    same += [
        word
        for name, size in zip(("dp", "tp", "pp", "cp", "ep"), axes, strict=True)
        for word in ("--" + name, str(size))
    ]
    same += ["--attention", kernels[0], "--kernels", kernels[1], *["--dropout"] * kernels[2]]
    code, stages = answered("memory", "--batch", "2", *same)
    for zero in range(4):
        layout = ["--vp", "1", "--zero", str(zero), "--micro-batch", "2", "--global-batch", str(2 * axes[0] * axes[2])]
        layout += ["--sequence-parallel" if axes[1] > 1 else "--no-sequence-parallel"]
        planned_code, plan = answered("plan", *same, *layout)
        assert planned_code == code
        if code:
            assert plan == stages
            continue
        memory, counted = plan["layouts"][0]["memory"], dict(stages[f"stage{zero}"])
        assert (counted.pop("total"), counted) == (memory["peak_bytes"], memory["by_kind"])
        assert stages["fits"][f"stage{zero}"] == "yes"
        assert plan["layouts"][0]["fits_with_range"]


def answered(*arguments):
    """Return the exit code of a command, and its JSON object or its sentence."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(list(arguments))
    code = ended.value.code
    return code, json.loads(out.getvalue()) if code == 0 else err.getvalue()


def test_attention_is_fused_unless_it_is_said_not_to_be():
    """Llama 3.1 8B with 8,192 tokens: 36.7 GB; unfused kernels add 6 bytes per score in each of 32 layers."""
    fused, unfused = (
        stages_of("llama-3.1-8b", 8, 8192, fused_attention=fused)["stage2"]["activations"] for fused in (True, False)
    )
    assert round(fused / 1e9, 1) == 36.7
    assert unfused - fused == 32 * 8192 * 32 * (6 * 8192 - 4)


def test_square_root_segments_keep_their_inputs_and_one_segment():
    """48 layers are 7 segments of at most 7, and the fullest rank of two stages has 24: 5 segments of at most 5."""
    s, h = 1024, 1600
    for pp, segments in ((1, 7), (2, 5)):
        layout = ClusterLayout(pp=pp, recompute="sqrt")
        of = job("gpt2-xl", layout, s, dropout=False)
        parts = totals(of, layout)["stage0"]
        # The last rank is the fullest; it also keeps the inputs of the last norm and of the projection.
        assert parts["activations"] == segments * 2 * s * h + 4 * s * h
        # The segment exists whole, with the gradient of its MLP's inner values, when the logits are gone.
        whole = segments * block_activations(layout, of, 0, "none") + 2 * s * 4 * h
        assert parts["workspace"] == max(0, whole - parts["logits"])
        assert (parts["workspace"] > 0) == (pp == 1)


def test_both_forms_of_a_block_are_printed(minidist):
    from minidist.planning import block_bytes

    block = block_forms(job("gpt2", ClusterLayout(micro_batch=2), 100), 2)
    assert block == {
        "unfused": 34 * 100 * 2 * 768 + 5 * 12 * 100 * 100 * 2,
        "fused": block_bytes.fused(100, 2, 768, 12, 2, True),
    }
    assert "34 s b h + 5 a s^2 b = 6.42 MB" in minidist("memory", "--model", "gpt2", "--batch", "2", "--seq", "100").out


def test_the_peak_is_the_sum_and_prefetch_costs_blocks():
    none, two = (stages_of("gpt2-xl", 8, prefetch=d)["stage3"] for d in (0, 2))
    assert none["prefetch"] == 0
    assert two["total"] - none["total"] == two["prefetch"] == 2 * 2 * MODELS["gpt2-xl"].block
    for stage in ("stage0", "stage3"):
        parts = stages_of("gpt2-xl", 8)[stage]
        assert parts["total"] == sum(value for key, value in parts.items() if key != "total")


def test_the_command_prints_one_json_object(minidist):
    stages = json.loads(minidist("memory", "--params", "7.5e9", "--dp", "64", "--json").out)
    assert list(stages) == ["stage0", "stage1", "stage2", "stage3"]
    assert stages["stage1"] == {
        "parameters": 15 * 10**9,
        "gradients": 15 * 10**9,
        "optimizer": 1_406_250_000,
        "total": 31_406_250_000,
    }


def test_the_command_draws_the_bars(tmp_path, minidist):
    minidist("memory", "--model", "gpt2-xl", "--seq", "64", "--dp", "8", "--format", "svg", "-o", tmp_path / "bars.svg")
    text = (tmp_path / "bars.svg").read_text()
    assert text.count('id="optimizer"') == 4
    assert text.count('id="prefetch"') == 1


def test_without_a_file_the_picture_goes_to_standard_output(minidist):
    assert minidist("memory", "--params", "1e9", "--dp", "8", "--format", "svg").out.rstrip().endswith("</svg>")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give either --params"),
        (["--params", "1e9", "--model", "gpt2"], "give either --params"),
        (["--params", "0.5"], "not a number of parameters"),
        (["--params", "1e9", "--dp", "0"], "at least 1"),
        (["--params", "1e9", "--accounting", "zeros"], "did you mean 'zero'"),
        (["--model", "gpt2-xxl"], "--model 'gpt2-xxl' is unknown"),
        (["--model", "gpt2", "--seq", "2000"], "the model has learned positions for 1024 tokens"),
        (["--model", "gpt2", "--recompute", "some"], "none, selective, full or sqrt"),
        (["--model", "gpt2", "--recompute", "full"], "--recompute full needs the length of the sequences; give --seq"),
        (
            ["--model", "gpt2", "--gpu", "h100"],
            "--gpu h100 needs the length of the sequences; give --seq, the tokens of",
        ),
        (
            ["--model", "gpt2", "--attention", "flash"],
            "--attention 'flash'; it must be fused, unfused, flash-1 or flash-2",
        ),
        (["--params", "1e9", "--format", "gif"], "text or svg"),
        (["--params", "1e9", "--seq", "128"], "--seq 128 is about a model's activations"),
        (["--params", "1e9", "--recompute", "full"], "give --model NAME"),
        (["--params", "1e999999"], "not a number of parameters"),
        (["--model", "llama-7b", "--tp", "2", "--accounting", "deepspeed"], "--tp 2 has no effect with --accounting"),
        (["--params", "1e9", "--gpu", "h100"], "--gpu h100 is about a model's activations"),
        (["--model", "gpt2", "--accounting", "deepspeed", "--prefetch", "0"], "no effect with --accounting deepspeed"),
        (
            ["--model", "gpt2", "--format", "text", "--output", "bars.svg"],
            "--format text contradicts --output 'bars.svg'",
        ),
        (["--model", "none.json"], "the model file 'none.json' cannot be read"),
    ],
)
def test_wrong_input_is_one_sentence(arguments, sentence, minidist):
    assert sentence in minidist("memory", *arguments, code=2).err


def test_an_mlp_of_another_size_has_no_closed_form():
    """GELU keeps two bytes of its input and two of its output for each element inside the MLP."""
    wide, usual = (stages_of(replace(MODELS["gpt2"], inner=inner), length=64)["stage0"] for inner in (4096, 4 * 768))
    assert wide["activations"] - usual["activations"] == 12 * 64 * 4 * (4096 - 4 * 768)
    assert block_forms(job(replace(MODELS["gpt2"], inner=4096), ClusterLayout(), 64), 1) is None


def test_experts_keep_what_each_copy_of_a_token_needs():
    """Mixtral: two experts per token, each with a separate copy of the input, and a float32 score per expert."""
    model = MODELS["mixtral-8x7b"]
    h, i, s, b = 4096, 14336, 512, 3
    attention = 2 * (4 * h + h + 2 * 1024 + h) + 4 * 32
    layout = ClusterLayout(micro_batch=b)
    kept = s * b * (attention + 2 * 3 * 2 * i + 2 * 2 * h + 4 * 8)
    assert block_activations(layout, job(model, layout, s), 0) == kept
    dense = replace(model, dense_layers=1)
    assert block_activations(layout, job(dense, layout, s), 0) == s * b * (attention + 2 * 3 * i)


def test_a_file_is_written_with_json_too(tmp_path, minidist):
    path = tmp_path / "bars.svg"
    printed = minidist("memory", "--model", "gpt2", "--format", "svg", "-o", path, "--json").out
    assert json.loads(printed)["model"] == "gpt2"
    assert b"<svg" in path.read_bytes()


def test_whole_number():
    assert whole_number("7.5e9") == whole_number("7.5B") == whole_number("7500m") == 7_500_000_000
    assert whole_number("9007199254740993") == 9_007_199_254_740_993  # one more than a float can tell
    with pytest.raises(UsageError):
        whole_number("inf")


def test_what_a_gated_block_keeps_term_by_term():
    """2-byte values of a LLaMA block: the two norms with their outputs, q, k, v, the attention's output; gate, up,
    their product.
    """
    h, i, heads, s, b = 4096, 11008, 32, 512, 3
    layout = ClusterLayout(micro_batch=b)
    norms, attention, mlp = 4 * h, 3 * h + h, 3 * i
    kept = 2 * s * b * (norms + attention + mlp)
    for fused, scores in ((True, 4 * b * heads * s), (False, 6 * b * heads * s * s)):
        of = job("llama-7b", layout, s, fused_attention=fused)
        assert block_activations(layout, of, 0) == kept + scores
        assert block_activations(layout, of, 0, "full") == 2 * s * b * h


def test_memory_says_what_fits(capsys):
    """The verdicts are those of the plan; exit code 1 when no stage fits, as of a plan."""
    for model, dp, verdicts, code in (
        ("llama-3.1-8b", 8, ["no", "no", "no", "may not"], 0),
        ("mixtral-8x7b", 8, ["no"] * 4, 1),
    ):
        with pytest.raises(SystemExit) as done:
            main(["memory", "--model", model, "--dp", str(dp), "--seq", "8192", "--gpu", "h100", "--json"])
        stages = json.loads(capsys.readouterr().out)
        assert (list(stages["fits"].values()), done.value.code) == (verdicts, code), model
        for zero, verdict in enumerate(verdicts):
            layout = ClusterLayout(dp, zero=zero)
            plan = Plan(layout, job(model, layout, stages["seq"]), MACHINES["h100"])
            assert plan.fit.verdict == verdict


@pytest.mark.parametrize("axes", [[], ["--tp", "2", "--cp", "3", "--pp", "2"], ["--accounting", "deepspeed"]])
def test_without_a_length_memory_counts_the_model_states_alone(axes, capsys):
    """They are those of any length, and the command says that activations are not counted."""
    tables = []
    for more in ([], ["--seq", "96"], ["--seq", "960"]):
        with pytest.raises(SystemExit, match="0"):
            main(["memory", "--dp", "8", "--model", "llama-3.1-8b", "--json", *axes, *more])
        tables.append(json.loads(capsys.readouterr().out))
    bare, *whole = tables
    most = "give --seq, the tokens of each (the model can have 131,072)"
    assert bare["not_counted"] == f"not counted: activations, which depend on the length; {most}"
    assert "seq" not in bare
    assert bare["stage3"].keys() == {"parameters", "gradients", "optimizer", "total"}
    for other in whole:
        for stage in ("stage2", "stage3"):
            assert {kind: other[stage][kind] for kind in bare[stage] if kind != "total"}.items() < bare[stage].items()


def test_the_only_layout_that_is_possible_is_planned_on_the_gpu_though_it_does_not_fit(capsys):
    """Its activations are those of `memory`: nothing of it is moved to the host, which would make it another layout."""
    same = ["--model", "llama-3.1-8b", "--seq", "8192", "--dp", "8", "--recompute", "none", "--json"]
    kinds = []
    for command, code in (
        (["memory", *same], 0),
        (["plan", *same, "--ranks", "8", "--global-batch", "8", "--zero", "2", "--micro-batch", "1"], 1),
    ):
        with pytest.raises(SystemExit, match=str(code)):
            main(command)
        found = json.loads(capsys.readouterr().out)
        kinds.append(found["stage2"] if command[0] == "memory" else found["layouts"][0]["memory"]["by_kind"])
    memory, plan = kinds
    assert plan.items() <= memory.items()
    assert plan["activations"] > 36e9


def test_a_length_that_is_not_given_is_asked_for(capsys):
    """A model with 131,072 positions is rarely trained with them."""
    for model, most in (
        (["--model", "llama-3.1-8b"], " (the model can have 131,072)"),
        (["--layers", "2", "--hidden", "64", "--heads", "2"], ""),
    ):
        for batch, also in (
            (["--global-batch", "8"], ""),
            ([], "; the batch is missing; give --global-batch, the sequences of a step"),
        ):
            with pytest.raises(SystemExit, match="2"):
                main(["plan", *model, "--ranks", "8", *batch])
            out, err = capsys.readouterr()
            assert out == ""
            assert f"the length of the sequences is missing; give --seq, the tokens of each{most}{also}\n" in err
