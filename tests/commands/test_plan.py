"""`minidist plan`: its JSON object, its tables, and one sentence for whatever is wrong."""

import json
import re
from pathlib import Path

import pytest

from minidist.cli import main
from minidist.planning.architecture import Architecture
from minidist.planning.cluster.gpus import RANGES
from tests.cases import each

GPT3 = ["plan", "--model", "gpt3-175b", "--seq", "2048"]
MEGATRON = [*GPT3, "--gpu", "a100-80gb", "--ranks", "1024", "--global-batch", "1536"]
FEW = ["--seq", "1024", "--ranks", "8", "--global-batch", "8"]
SMALL = ["--layers", "2", "--hidden", "64", "--heads", "4", "--seq", "2048", "--ranks", "1", "--global-batch", "8"]
LAYOUT = ["--dp", "8", "--tp", "8", "--pp", "16", "--cp", "1", "--vp", "1", "--zero", "1", "--micro-batch", "1"]
TOO_LARGE = [*GPT3, "--gpu", "v100", "--global-batch", "1536", *LAYOUT, "--precision", "fp16"]
TOO_LARGE += ["--no-sequence-parallel", "--recompute", "none"]
GPUS = "the number of GPUs is missing; give --ranks, or all of --dp, --tp, --pp and --cp; the length of"


def run(*arguments):
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def printed(capsys, *arguments):
    """Return the JSON object that a command prints; its exit code is 1 when no layout fits."""
    code = run(*arguments, "--json")
    result = json.loads(capsys.readouterr().out)
    assert code == (0 if any(layout["fits"] for layout in result["layouts"]) else 1)
    return result


def test_the_best_layouts_and_the_refused_ones(capsys):
    result = printed(capsys, *MEGATRON)
    assert result["parameters"] == result["parameters_active"] == 174_604_259_328
    assert len(result["layouts"]) == 10
    assert all(layout["fits"] for layout in result["layouts"])
    assert all(layout["reason"] for layout in result["refused"])
    # The list is cut, and has some of both kinds; the numbers are whole.
    total = result["refused_total"]
    assert len(result["refused"]) == 100 < min(total.values())
    assert sum(" needs " in layout["reason"] and " GB" in layout["reason"] for layout in result["refused"]) == 50
    assert result["layouts_total"] > 10
    best = result["layouts"][0]
    assert best["dp"] * best["tp"] * best["pp"] * best["cp"] == 1024
    assert best["dp"] * best["micro_batch"] * best["microbatches"] == 1536
    memory, time = best["memory"], best["time"]
    assert memory["peak_bytes"] == sum(memory["by_kind"].values()) == max(memory["peak_bytes_by_pipeline_rank"])
    assert len(memory["states_bytes_by_pipeline_rank"]) == best["pp"]
    assert memory["low_bytes"] < memory["peak_bytes"] < memory["high_bytes"]
    assert best["margin_bytes"] == 85_000_000_000 - memory["peak_bytes"] - 1_000_000_000
    assert time["low_seconds"] < time["step_seconds"] < time["high_seconds"]
    assert best["tokens_per_second"] == pytest.approx(1536 * 2048 / time["step_seconds"])
    assert best["mfu"] == pytest.approx(best["model_flops_per_step"] / (time["step_seconds"] * 1024 * 312e12))


NUMBER = (int, float)
LAYOUT_TYPES = {
    **dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "vp", "zero", "micro_batch", "microbatches"), int),
    "sequence_parallel": bool,
    "schedule": str,
    "recompute": str,
    "host": str,
}
MEMORY_TYPES = {
    **dict.fromkeys(("peak_bytes", "low_bytes", "high_bytes", "eager_kernels_bytes"), int),
    "by_kind": {str: int},
    "states_bytes_by_pipeline_rank": [int],
}
TIME_TYPES = {
    **dict.fromkeys(("step_seconds", "low_seconds", "high_seconds", "compute_seconds", "bubble_fraction"), NUMBER),
    "exposed_seconds": {str: NUMBER},
}
PLAN_TYPES = {
    "layouts": [
        {
            **LAYOUT_TYPES,
            "fits": bool,
            "margin_bytes": int,
            "fits_with_range": bool,
            "memory": MEMORY_TYPES,
            "time": TIME_TYPES,
            **dict.fromkeys(("tokens_per_second", "mfu", "hfu"), NUMBER),
            "model_flops_per_step": int,
        }
    ],
    "layouts_total": int,
    "equal_within_error": int,
    "refused": [{**LAYOUT_TYPES, "reason": str}],
    "refused_total": {str: int},
    "seq": int,
    "parameters": int,
    "parameters_active": int,
    "commands": {str: str},
}
MORE = {"peak_bytes_by_pipeline_rank", "etp"}  # in addition to what the list above has


def check_types(value, types, at="plan"):
    """Assert that a JSON value has the documented keys, and values of their types."""
    if isinstance(types, list):
        assert isinstance(value, list), at
        for i, one in enumerate(value):
            check_types(one, types[0], f"{at}[{i}]")
    elif isinstance(types, dict) and str in types:
        assert all(isinstance(one, types[str]) for one in value.values()), at
    elif isinstance(types, dict):
        assert set(value) - MORE == set(types), at
        for key, kind in types.items():
            check_types(value[key], kind, f"{at}.{key}")
    else:
        assert isinstance(value, types), (at, value)
        assert types is bool or not isinstance(value, bool), at


@pytest.mark.parametrize(
    "arguments",
    [
        [*MEGATRON, "--pp", "16"],
        ["plan", "--model", "mixtral-8x7b", "--seq", "4096", "--ranks", "16", "--global-batch", "64", "--zero", "1"],
        [*GPT3, "--ranks", "8", "--global-batch", "8"],
    ],
    ids=["fits", "experts", "nothing fits"],
)
def test_the_json_object_has_the_documented_keys(arguments, capsys):
    result = printed(capsys, *arguments)
    check_types(result, PLAN_TYPES)
    for layout in result["layouts"]:
        assert set(layout["time"]["exposed_seconds"]) <= {"tp", "cp", "ep", "pp", "dp"}
        assert 0 <= layout["time"]["bubble_fraction"] < 1
        assert 0 < layout["mfu"] <= layout["hfu"] < 1


def test_what_was_given_is_not_given_as_a_reason(minidist):
    text = minidist("plan", "--model", "gpt2", *FEW, "--tp", "2", "--zero", "1").out
    assert "why the first: it is the fastest with what is given" in text
    assert "without tensor parallelism" not in text


def test_a_layout_that_is_wholly_given_is_the_only_one(capsys):
    result = printed(capsys, *MEGATRON, *LAYOUT, "--sequence-parallel", "--recompute", "selective")
    (layout,) = result["layouts"]
    given = {"dp": 8, "tp": 8, "pp": 16} | dict.fromkeys(("cp", "ep", "vp", "zero", "micro_batch"), 1)
    assert {key: layout[key] for key in given} == given
    assert (layout["schedule"], layout["recompute"], layout["sequence_parallel"]) == ("1f1b", "selective", True)
    assert layout["microbatches"] == 192
    # Without --ranks the degrees are the ranks, and a layout that does not fit is shown with its reason.
    result = printed(capsys, *TOO_LARGE)
    assert [one["fits"] for one in result["layouts"]] == [False]
    assert "v100 has 34 GB" in result["refused"][0]["reason"]


def test_sizes_as_flags_and_a_file_are_the_same_model(capsys, tmp_path):
    keys = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(keys))
    cluster = ["--gpu", "h100", "--ranks", "8", "--global-batch", "64"]
    cluster += ["--micro-batch", "1", "--zero", "3", "--tp", "1"]
    sizes = ["--layers", "32", "--hidden", "4096", "--heads", "32", "--kv-heads", "8", "--ffn", "14336", "--gated"]
    flags = printed(capsys, "plan", *sizes, "--vocab", "128256", "--seq", "8192", *cluster)
    assert flags["parameters"] == 8_030_261_248
    assert printed(capsys, "plan", str(path), "--seq", "8192", *cluster) == flags
    assert printed(capsys, "plan", "--model", str(path), "--seq", "8192", *cluster) == flags


def test_experts_per_token_and_sequences_longer_than_positions(capsys):
    """--top-k is 2 unless it is given, or unless there is one expert; rotary positions do not limit --seq."""

    def active(*flags):
        result = printed(capsys, "plan", *SMALL, *flags)
        return result["parameters"] - result["parameters_active"]

    expert = 2 * 64 * 256 + 256 + 64
    assert active("--experts", "4") == active("--experts", "4", "--top-k", "2") == 2 * 2 * expert
    assert active("--experts", "4", "--top-k", "3") == 2 * expert
    assert active("--experts", "1") == active() == 0
    assert printed(capsys, "plan", "--model", "llama-7b", "--seq", "4096", "--ranks", "64", "--global-batch", "64")


def test_what_people_read(minidist, tmp_path):
    picture = tmp_path / "frontier.svg"
    text = minidist(*MEGATRON, "--tp", "8", "--micro-batch", "1", "--explain", "--best", "3", "-o", str(picture)).out
    assert "174.60e9 parameters on 1,024 x a100-80gb" in text
    assert "why the first: " in text
    assert "layouts do not fit" in text
    assert "Layouts are sorted by step time, with a penalty of 1 % per kind of parallelism." in text
    assert re.search(r"\d to +[\d,]+  [\d.]+ to [\d.]+%  dp", text)
    assert "GB (central estimate): parameters" in text
    assert "a step, s (central estimate): computing" in text
    assert "model FLOPs of a step: 3 x 1,536 sequences x 2,048 tokens" in text
    assert text.count("micro-batch 1 x") >= 3
    drawn = picture.read_text()
    # The corners of the frontier have names, and the GPU's memory is a line; both kinds of layouts have a colour.
    assert drawn.count('id="corner"') > 1
    assert all(drawn.count(f'id="{name}"') == 1 for name in ("memory", "frontier", "sure", "perhaps"))
    assert re.search(r"dp \d+, tp 8, pp \d+", drawn)


def test_the_formulas_of_experts_are_explained(minidist):
    job = ["plan", "--model", "mixtral-8x7b", "--seq", "4096", "--ranks", "16", "--global-batch", "64", "--gpu", "h100"]
    text = minidist(*job, "--ep", "8", "--tp", "1", "--zero", "1", "--explain").out
    assert "a layer with experts permutes the 2 copies of its tokens: 8 times" in text
    assert "an exchange over ep 8, 8 of them in a node" in text
    assert "experts" not in minidist(*MEGATRON, "--tp", "8", "--pp", "16", "--explain").out


def test_a_small_model_is_printed_with_its_digits(minidist):
    text = minidist("plan", *SMALL).out
    sizes = Architecture(2, 64, 4, 51_200, 2048, 256)
    assert text.startswith(f"{sizes.parameters:,} parameters on 1 x h100")
    assert re.search(r"\b\d\.\d\d to +\d", text)


def test_what_may_not_fit_is_marked(capsys, minidist):
    """The central estimate decides whether a layout fits, and its range may be larger than the GPU."""
    result = printed(capsys, *MEGATRON)
    best = result["layouts"][0]
    assert best["fits_with_range"]
    assert best["memory"]["high_bytes"] + 1e9 < 85e9
    text = minidist(*MEGATRON).out
    # The layouts that surely fit come first, and the commands are those of the first one.
    sure, perhaps = text.split("faster if memory is at the low end of its range:\n")
    rows = [[line for line in part.splitlines() if "%  " in line and "fits" not in line] for part in (sure, perhaps)]
    assert all("  yes  " in row for row in rows[0])
    assert (len(rows[0]), len(rows[1])) == (10, 3)
    assert all("  may not  " in row for row in rows[1])
    assert f"--dp {best['dp']} " in result["commands"]["dry_run"]
    assert 10 <= result["equal_within_error"] < result["layouts_total"]
    assert "Rows 1 to 10 are equal within the error: the ranges of their steps overlap." in text
    # Without one that surely fits, the first may not.
    tight = [*GPT3, "--gpu", "a100-80gb", "--ranks", "64", "--global-batch", "96"]
    layout = ["--dp", "1", "--tp", "8", "--pp", "8", "--cp", "1", "--zero", "0", "--micro-batch", "3", "--vp", "1"]
    text = minidist(*tight, *layout, "--recompute", "none").out
    assert re.search(
        r"; it may not fit, because pipeline rank 0 needs \d+ to \d+ GB, and a100-80gb has 85 GB \(79", text
    )
    assert re.search(r"[\d.]+ GB too much at the upper end, [\d.]+ GB free at the lower", text)
    roomy = ["plan", "--model", "gpt2", "--seq", "1024", "--ranks", "8", "--global-batch", "64", "--best", "1"]
    text = minidist(*roomy).out
    assert "  yes  " in text
    assert "may not" not in text
    assert re.search(r"; free 7\d( to 7\d)? GB\n", text)


def test_nothing_fits(capsys, minidist):
    """The layouts that need least are shown, and what makes one fit."""
    job = [*GPT3, "--gpu", "h100", "--ranks", "8", "--global-batch", "8"]
    text = minidist(*job, code=1).out
    large = (
        "pipeline rank 0 needs 168 to 195 GB, and h100 has 85 GB (79 GiB), and pipeline rank 0 keeps 262 GB on the host"
    )
    first = f"  dp 2, tp 4, zero 2, sequence parallel, micro-batch 1 x 4, recompute full, offload optimizer: {large}"
    assert text.splitlines()[1] == f"{first}, which has 125 GB for each GPU"
    assert f"no layout of 8 GPUs fits: with the smallest, {large}, which has" in text.splitlines()[-1]
    assert text.endswith("; something fits with --ranks 32\n")
    assert printed(capsys, *job[:-3], "32", *job[-2:])["layouts"][0]["host"] != "none"
    text = minidist(*job, "--offload", "none", code=1).out
    assert "dp 2, tp 4, zero 3, sequence parallel, micro-batch 1 x 4, recompute full: pipeline rank 0 needs 3" in text
    assert text.endswith("; something fits with --ranks 64\n")
    # What was given is named when it need not be, and so is a larger GPU.
    assert (
        run("plan", "--model", "llama-3.1-8b", "--seq", "8192", "--ranks", "8", "--global-batch", "8", "--dp", "8") == 0
    )
    text = minidist(*job[:6], "h100", "--ranks", "64", "--global-batch", "64", "--pp", "1", "--zero", "0", code=1).out
    assert "; something fits with --pp left out, or --zero left out" in text
    assert "--ranks" not in text.splitlines()[-1]


def test_one_layout_that_does_not_fit(minidist):
    text = minidist(*TOO_LARGE, code=1).out
    assert ": 0 layouts fit\n" in text
    assert "; missing " in text
    assert "1 layout does not fit, 0 are impossible; for example" in text
    assert "dry run" not in text
    assert "; something fits with --" in text.splitlines()[-1]
    assert ": 1 layout fits\n" in minidist(*MEGATRON, *LAYOUT, "--sequence-parallel", "--recompute", "selective").out


def test_the_formulas_that_are_explained_give_the_numbers(capsys, minidist):
    """What stands between the first and the last equals sign, evaluated, is what stands after the last one."""
    pipeline = [*MEGATRON, "--tp", "4", "--pp", "4", "--vp", "8", "--zero", "1"]
    experts = ["plan", "--model", "mixtral-8x7b", "--seq", "4096", "--ranks", "64", "--global-batch", "256"]
    for arguments, names in (
        (pipeline, {"bubble", "tp messages", "pp messages", "dp messages"}),
        ([*experts, "--cp", "2", "--ep", "8", "--zero", "2"], {"cp messages", "ep messages", "dp messages"}),
    ):
        result = printed(capsys, *arguments, "--explain")
        text = minidist(*arguments, "--explain").out
        assert all(line in text for line in result["explanation"])
        found, time = set(), result["layouts"][0]["time"]
        for line in result["explanation"]:
            if match := re.match(
                r"(bubble|.. messages) = (?:.* = )?(.*) = ([\d.e-]+)(?: s(?:;|$)|$)", line.split(";")[0]
            ):
                name, formula, value = match.groups()
                sum_of = re.sub(r"\(the share[^)]*\)|\b[a-z][a-z-]*", "", formula.replace(" x ", " * "))
                assert eval(sum_of) == pytest.approx(float(value), rel=1e-3), line
                real = time["bubble_fraction"] if name == "bubble" else time["exposed_seconds"][name[:2]]
                assert float(value) == pytest.approx(real, rel=1e-3)
                found.add(name)
        assert found == names


@each(
    ("arguments", "sentence"),
    [
        (["--gpu", "h100"], "--layers, --hidden, --heads are missing"),
        (["--gpu", "h100"], GPUS),
        (["--gpu", "h100"], "give --seq, the tokens of each; the batch is missing; give --global-batch"),
        (["--model", "gpt2"], GPUS),
        (["llama-3.1-8b"], "no file 'llama-3.1-8b'; give a config.json, or --model llama-3.1-8b"),
        (["llama-7"], "or --model NAME \\(did you mean 'llama-7b'\\?\\)"),
        (["--model", "gpt2", "--layers", "3"], "--layers describes a model, and 'gpt2' is one"),
        (["--model", "gpt2", "--seq", "64", "--ranks", "8"], "the batch is missing"),
        (["--model", "gpt2", "--global-batch", "8"], "the number of GPUs is missing"),
        (["--model", "gpt5", "--ranks", "8", "--global-batch", "8"], "--model 'gpt5' is unknown"),
        (["--model", "gpt2", *FEW, "--tp", "5"], "no layout of 8 GPUs has tp 5; change one of them"),
        (["--model", "gpt2", *FEW, "--ranks", "16", "--pp", "16"], "more than the model's 12 layers"),
        (["--model", "gpt2", *FEW, "--recompute", "all"], "--recompute 'all'"),
        (["--model", "gpt2", *FEW, "--zero", "4"], "--zero is 4"),
        (["--model", "gpt2", *FEW, "--precision", "fp4"], "--precision 'fp4'"),
        (
            ["--layers", "2", "--hidden", "10", "--heads", "3", "--ranks", "1"],
            "--hidden 10 is not divisible by --heads 3",
        ),
        ([*SMALL, "--layers", "-4"], "--layers is -4; it must be from 1 to 10,000"),
        ([*SMALL, "--layers", "100000"], "--layers is 100000; it must be from 1 to 10,000"),
        ([*SMALL, "--hidden", "0"], "--hidden is 0; it must be from 1 to 100,000,000"),
        ([*SMALL, "--vocab", "0"], "--vocab is 0; it must be from 1 to 100,000,000"),
        ([*SMALL, "--kv-heads", "3"], "--heads 4 is not divisible by --kv-heads 3; give a number of key-value heads"),
        ([*SMALL, "--experts", "200000"], "--experts is 200000; it must be from 0 to 100,000"),
        (
            ["none.json"],
            r"the model file 'none.json' cannot be read \(No such file or directory\); give the config.json",
        ),
        (["none.toml"], r"the job file 'none.toml' cannot be read \(No such file or directory\); correct the file"),
        (["--model", "gpt5.json"], "the model file 'gpt5.json' cannot be read"),
        (["--model", "mixtral-8x7b", "--top-k", "1"], "--top-k describes a model, and 'mixtral-8x7b' is one"),
        ([*SMALL, "--top-k", "1"], "--top-k 1 needs a model with experts; add --experts, or leave --top-k out"),
        ([*SMALL, "--expert-imbalance", "1.2"], "--expert-imbalance 1.2 needs a model with experts; leave it out"),
        (
            ["--model", "mixtral-8x7b", "--seq", "8192", *FEW, "--expert-imbalance", "0.5"],
            "--expert-imbalance 0.5 is out of range: the busiest rank has at least the mean, and at most all tokens;"
            " give 1 to 4",
        ),
        ([*SMALL, "--grad-accum-dtype", "int8"], "--grad-accum-dtype 'int8'; it must be fp32, bf16 or fp16"),
        ([*SMALL, "--etp", "1"], "etp 1 needs a model with experts; change one of them"),
        ([*SMALL, "--experts", "4", "--top-k", "0"], "--top-k 0 does not fit --experts 4; give from 1 to 4 exp"),
        (
            ["--model", "gpt2", "--seq", "2048", "--ranks", "8", "--global-batch", "8"],
            "--seq 2048 is out of range: the model has learned positions for 1024 tokens; give --seq 1024 or less",
        ),
        (
            ["--model", "llama-3.1-405b", "--seq", "8192", "--ranks", "16384", "--global-batch", "128"]
            + ["--dp", "4", "--tp", "8", "--pp", "16", "--cp", "16"],
            "dp 4 x tp 8 x pp 16 x cp 16 is 8,192 ranks, and the job has 16,384 GPUs",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence(arguments, sentence, minidist):
    (line,) = minidist("plan", *arguments, code=2).err.splitlines()
    with pytest.raises(AssertionError, match=sentence):
        raise AssertionError(line)


KEYS = {
    "model_type": "mistral",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 500,
    "max_position_embeddings": 8192,
}
MACHINE = {"fp16": 1e12, "memory": 1e11, "memory_bandwidth": 1e11, "link": 1e10, "network": 1e9}


def test_what_a_model_file_leaves_out_is_said(tmp_path, minidist, monkeypatch):
    """A window shortens a step, and a key without effect is named by both commands."""
    monkeypatch.chdir(tmp_path)
    seconds = []
    for window in (None, 64):
        Path("c.json").write_text(
            json.dumps({**KEYS, "hidden_size": 1024, "sliding_window": window, "num_local_experts": 8})
        )
        layout = ["--dp", "2", "--tp", "1", "--pp", "1", "--cp", "1", "--zero", "0", "--micro-batch", "2"]
        output = minidist("plan", "c.json", "--global-batch", "4", "--seq", "65536", *layout, "--json")
        seconds.append(json.loads(output.out)["layouts"][0]["time"]["step_seconds"])
        assert "num_local_experts 8 has no effect: a mistral model has no experts" in output.err
        assert json.loads(output.out)["approximations"] == [output.err.strip()]
        assert (
            "num_local_experts 8 has no effect" in minidist("memory", "--model", "c.json", "--seq", "64", "--json").err
        )
    assert seconds[1] < seconds[0]


@pytest.mark.parametrize("end", [0, 1], ids=["slowest", "fastest"])
def test_the_ends_of_the_ranges_of_a_machine_are_planned(end, tmp_path, minidist):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({key: values[end] for key, values in RANGES.items()} | {"memory": 1e18}))
    job = ["plan", "--model", "gpt2", *FEW, "--ranks", "2", "--zero", "1", "--micro-batch", "1"]
    text = minidist(*job, "--gpu", str(path), "--json").out
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text)["layouts"]
