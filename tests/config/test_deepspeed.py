"""DeepSpeed's file: each key applies or is named, the batch follows DeepSpeed's rules, and figures are counted."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.base.errors import UsageError
from minidist.cli import main
from minidist.comm import SimWorld
from minidist.config.deepspeed import apply_deepspeed, read_deepspeed, translate
from minidist.config.train_config import TrainConfig, resolve_batches
from minidist.equality.compare import compare_rank
from minidist.equality.expected import expected_snapshots

EXAMPLE = Path(__file__).parents[2] / "mpi_examples" / "ds_config.json"
SMALL = {"train_batch_size": 8}


def keys_of(content, prefix=""):
    """Every leaf of a file by its dotted name."""
    found = []
    for key, value in content.items():
        if isinstance(value, dict) and value:
            found += keys_of(value, f"{prefix}{key}.")
        else:
            found.append(prefix + key)
    return found


FULL = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 30, "warmup_num_steps": 3, "warmup_min_ratio": 0.1},
    },
    "bf16": {"enabled": False},
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 1,
        "reduce_bucket_size": 5e8,
        "overlap_comm": True,
        "allgather_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
    },
    "gradient_clipping": 1.0,
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": False, "profile": False},
    "steps_per_print": 100,
    "flops_profiler": {"enabled": True, "detailed": True},
    "wall_clock_breakdown": False,
}


def test_every_key_that_matters_becomes_a_setting():
    said = translate(FULL)
    assert said.settings == {
        "global_batch": 16,
        "micro_batch": 2,
        "accumulation": 2,
        "optimizer": "adam",
        "lr": 0.001,
        "weight_decay": 0.1,
        "decay": "cosine",
        "warmup": 3,
        "steps": 30,
        "zero": 1,
        "reduce_bucket_size": 500_000_000,
        "offload": "optimizer",
        "clip": 1.0,
        "recompute": "full",
    }
    assert [key for key, _ in said.ignored] == [
        "optimizer.params.betas",
        "scheduler.params.warmup_min_ratio",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_param.device",
        "activation_checkpointing.partition_activations",
        "steps_per_print",
        "flops_profiler.enabled",
        "flops_profiler.detailed",
        "wall_clock_breakdown",
    ]


VALUES = st.one_of(st.booleans(), st.integers(0, 9), st.just("auto"), st.text("ab", max_size=2))
SECTIONS = [
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "zero_optimization",
    "activation_checkpointing",
    "tensorboard",
    "comms_logger",
]


@given(
    st.dictionaries(
        st.sampled_from(SECTIONS),
        st.dictionaries(st.sampled_from(["enabled", "type", "x", "overlap_comm"]), VALUES, max_size=3),
    ),
    st.dictionaries(st.sampled_from(["steps_per_print", "y", "prescale_gradients"]), VALUES),
)
def test_every_key_is_applied_or_listed(sections, rest):
    content = {**SMALL, **sections, **rest}
    if any(sections.get(name, {}).get("enabled", False) not in (True, False, "auto") for name in ("fp16", "bf16")):
        with pytest.raises(UsageError, match="must be true or false"):
            translate(content)
        return
    if sections.get("fp16", {}).get("enabled") in (True,) and sections.get("bf16", {}).get("enabled") in (True,):
        with pytest.raises(UsageError, match="enable one of them"):
            translate(content)
        return
    said = translate(content)
    named = {key for key, *_ in said.applied} | {key for key, _ in said.ignored}
    for key in keys_of(content):
        section = key.partition(".")[0]
        off = section in ("fp16", "bf16") and sections[section].get("enabled", False) not in (True, "auto")
        empty = key == section and content[key] == {}
        if not off and not empty:
            assert key in named or any(key.startswith(f"{name}.") for name in named), key


def deepspeeds_triple(total, micro, steps, world):
    """runtime/config.py, _set_batch_related_parameters, by hand."""
    if total and micro and steps:
        return (total, micro, steps) if total == micro * steps * world else None
    if total and micro:
        steps = total // micro // world
    elif total and steps:
        micro = total // world // steps
    elif micro and steps:
        total = micro * steps * world
    elif total:
        steps, micro = 1, total // world
    elif micro:
        total, steps = micro * world, 1
    else:
        return None
    return (total, micro, steps) if total == micro * steps * world else None


@given(
    st.sampled_from([None, 4, 8, 12, 16]),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([None, 1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
)
def test_the_batch_triple_has_deepspeeds_rules(total, micro, steps, world, pp):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    content = {name: value for name, value in zip(names, (total, micro, steps), strict=True) if value}
    expected = deepspeeds_triple(total, micro, steps, world)
    if expected is None:
        with pytest.raises(UsageError):
            resolve_batches(apply_deepspeed(TrainConfig.make(pp=pp), translate(content), set()), world * pp)
        return
    got = resolve_batches(apply_deepspeed(TrainConfig.make(pp=pp), translate(content), set()), world * pp)
    assert (got.global_batch, got.micro_batch, got.accumulation) == expected


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "DeepSpeed needs one of them"),
        ({"gradient_accumulation_steps": 2}, "does not determine the batch"),
        ({"train_batch_size": 0}, "at least 1"),
        ({**SMALL, "zero_optimization": {"stage": 4}}, "must be 0, 1, 2 or 3"),
        ({**SMALL, "zero_optimization": 2}, "is a JSON object, not 2"),
        ({**SMALL, "gradient_clipping": "much"}, "must be a number"),
        ({"train_batch_size": True}, "must be a whole number"),
        ({**SMALL, "optimizer": {"type": "Adam", "params": [1]}}, "optimizer.params is a JSON object"),
        ({**SMALL, "optimizer": {"type": "Adam", "params": None}}, "optimizer.params is a JSON object"),
        ({**SMALL, "optimizer": {"type": "Adam", "params": {"lr": True}}}, "must be a number"),
        ({**SMALL, "scheduler": {"type": "WarmupLR", "params": [1]}}, "scheduler.params is a JSON object"),
        ({**SMALL, "zero_optimization": {"stage": 1, "reduce_bucket_size": "x"}}, "reduce_bucket_size is 'x'"),
        ({**SMALL, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1.5}}, "must be a whole number"),
        ({**SMALL, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": None}}, "threshold is None"),
        ({**SMALL, "fp16": {"enabled": True, "initial_scale_power": 5000}}, "from 0 to 1000"),
        ({**SMALL, "fp16": {"enabled": "yes"}}, "must be true or false"),
        ({**SMALL, "optimizer": {"type": "Adam", "params": {"lr": "fast"}}}, "optimizer.params.lr is 'fast'"),
    ],
)
def test_wrong_files(content, words):
    with pytest.raises(UsageError, match=words):
        translate(content)


def test_an_unusual_beta_is_listed_whatever_it_is():
    for betas in (0.9, [0.9], None):
        assert (
            "optimizer.params.betas"
            in translate({**SMALL, "optimizer": {"type": "Adam", "params": {"betas": betas}}}).warning()
        )


def test_flags_determine_what_is_auto():
    said = translate(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        }
    )
    assert said.settings == {"optimizer": "adamw"}
    assert [key for key, _ in said.ignored] == [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "optimizer.params.lr",
    ]


def test_deepspeeds_own_adam_is_adamw_and_its_warmup_logarithmic():
    said = translate(
        {**SMALL, "optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}}
    )
    assert said.settings["optimizer"] == "adamw"
    assert (
        "scheduler.params.warmup_type",
        "DeepSpeed's default is a logarithmic warm-up; minidist's is linear",
    ) in said.ignored
    assert translate({**SMALL, "optimizer": {"type": "Lamb", "params": {"lr": 1}}}).settings == {
        "global_batch": 8,
        "accumulation": 1,
    }


def test_precision_comes_from_the_section_that_is_enabled():
    assert translate({**SMALL, "bf16": {"enabled": True}, "fp16": {"enabled": False}}).settings["precision"] == "bf16"
    scale = {"loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 100, "hysteresis": 3, "min_loss_scale": 2}
    said = translate({**SMALL, "fp16": {"enabled": True, "auto_cast": True, **scale}})
    assert said.settings["precision"] == "fp16"
    assert {key: value for key, value in said.settings.items() if key.startswith("loss_scale")} == {
        "loss_scale": 4096.0,
        "loss_scale_interval": 100,
        "loss_scale_hysteresis": 3,
        "loss_scale_floor": 2,
    }
    assert [key for key, _ in said.ignored] == ["fp16.auto_cast"]
    fixed = translate({**SMALL, "fp16": {"enabled": True, "loss_scale": 128}})
    assert "loss_scale" not in fixed.settings
    assert [key for key, _ in fixed.ignored] == ["fp16.loss_scale"]


def test_stage_3s_threshold():
    stage = {"stage": 3, "stage3_param_persistence_threshold": 1000, "stage3_max_live_parameters": 1}
    said = translate({**SMALL, "zero_optimization": stage})
    assert said.settings["persistence_threshold"] == 1000
    assert [key for key, _ in said.ignored] == ["zero_optimization.stage3_max_live_parameters"]


def test_flags_and_file_do_not_contradict_each_other():
    config = TrainConfig.make(zero=3, global_batch=8)
    with pytest.raises(UsageError, match="--zero 3 on the command line and 1 in the DeepSpeed file"):
        apply_deepspeed(config, translate({**SMALL, "zero_optimization": {"stage": 1}}), {"zero"})
    assert apply_deepspeed(config, translate({**SMALL, "zero_optimization": {"stage": 1}}), set()).zero == 1


def test_the_example_trains_as_one_device():
    job = TrainConfig.make(layers=2, width=16, heads=2, context=8, data="markov", steps=2, reduction="ordered")
    config = apply_deepspeed(job, read_deepspeed(EXAMPLE), set())
    assert (config.zero, config.clip, config.warmup) == (2, 1.0, 2)
    verdict = SimWorld(4).run(compare_rank, config, expected_snapshots(config, 4))[0]
    assert verdict.equal, verdict.first_difference


def test_the_commands(tmp_path, capsys):
    flags = ["--width", "16", "--heads", "2", "--context", "8", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["explain", str(EXAMPLE), "--ranks", "4", "--params", "1000", *flags])
    assert not end.value.code
    answer = json.loads(capsys.readouterr().out)
    assert answer["batch"] == {"global_batch": 16, "micro_batch": 2, "accumulation": 2, "dp": 4}
    assert set(answer["purposes"]) == {"clip_norm", "gradient_reduce", "metrics", "parameter_gather", "startup"}
    for row in answer["purposes"].values():
        assert row["bytes"] == row["closed_form"] > 0
        assert row["messages"] > 0
    # ZeRO 2: each of 2 micro-batches' buckets are reduced by sends of n - 1 parts from each of 4 ranks; one gather a
    # step.
    assert answer["purposes"]["parameter_gather"]["messages"] == 4 * 3
    assert answer["purposes"]["gradient_reduce"]["bytes"] == 2 * answer["purposes"]["parameter_gather"]["bytes"]
    assert answer["peak_by_purpose"]["optimizer"] > 0
    assert answer["model_states"] == {"parameters": 2000, "gradients": 500, "optimizer": 3000, "total": 5500}
    with pytest.raises(SystemExit):
        main(
            [
                "train",
                "--deepspeed",
                str(EXAMPLE),
                "--dp",
                "2",
                "--steps",
                "1",
                "--trace",
                str(tmp_path / "t.jsonl"),
                *flags,
            ]
        )
    captured = capsys.readouterr()
    assert "not honoured: zero_optimization.contiguous_gradients, steps_per_print" in captured.err
    assert json.loads(captured.out)["ranks"] == 2
    with pytest.raises(SystemExit) as end:
        main(["train", "--deepspeed", str(tmp_path / "none.json")])
    assert end.value.code == 2
