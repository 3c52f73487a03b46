"""DeepSpeed's file: each key applies or is named, the batch follows DeepSpeed's rules, and figures are counted."""

import itertools
import json
import math
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.commands import explanation
from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError
from minidist.job.config.deepspeed import apply_deepspeed, read_deepspeed, translate
from minidist.job.config.deepspeed_keys import APPLIED, NOTED
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.job import build, make_optimizer
from minidist.job.train.start import number_of_ranks
from minidist.job.train.trainer import train
from tests.cases import each
from tests.jobs import equals_one_device

ROOT = Path(__file__).parents[2]
SCRIPT = spec_from_file_location("deepspeed_keys", ROOT / "docs" / "deepspeed_keys.py")
table = module_from_spec(SCRIPT)
SCRIPT.loader.exec_module(table)

EXAMPLE = ROOT / "mpi_examples" / "ds_config.json"
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
        "params": {"total_num_steps": 30, "warmup_num_steps": 3, "warmup_min_ratio": 0.1, "warmup_type": "linear"},
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
        "optimizer": "adamw",
        "lr": 0.001,
        "betas": "0.8,0.999",
        "eps": 1e-8,
        "weight_decay": 0.1,
        "decay": "cosine",
        "warmup": 3,
        "warmup_start": 0.1,
        "warmup_curve": "deepspeed-linear",
        "decay_steps": 30,
        "zero": 1,
        "reduce_bucket_size": 500_000_000,
        "offload": "optimizer",
        "clip": 1.0,
        "recompute": "full",
    }
    assert [key for key, _ in said.ignored] == [
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.offload_param.device",
        "activation_checkpointing.partition_activations",
        "steps_per_print",
        "flops_profiler.enabled",
        "flops_profiler.detailed",
    ]


VALUES = st.one_of(st.booleans(), st.integers(0, 9), st.just("auto"), st.text("ab", max_size=2))
SECTIONS = [
    *("optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "activation_checkpointing"),
    *("tensorboard", "comms_logger"),
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


@each(
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


def test_betas_and_eps_apply_to_the_optimizers_that_have_them():
    file = {**SMALL, "optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.95], "eps": 1e-6}}}
    config = apply_deepspeed(TrainConfig.make(), translate(file), set())
    optimizer = make_optimizer(build(config, resolve_batches(config, 1)), [Parameter(np.ones(2))])
    assert (optimizer.betas, optimizer.eps) == ((0.8, 0.95), 1e-6)
    with pytest.raises(UsageError, match=r"--betas 0.9,0.95 from a flag, .* and 0.8,0.95 in the DeepSpeed file"):
        apply_deepspeed(TrainConfig.make(betas="0.9, 0.95"), translate(file), {"betas"})
    plain = translate({**SMALL, "optimizer": {"type": "SGD", "params": {"eps": 1e-6, "betas": [0.8, 0.95]}}})
    assert {"optimizer.params.eps", "optimizer.params.betas"} <= dict(plain.ignored).keys()


def test_what_are_no_betas_is_listed_whatever_it_is():
    for betas in (0.9, [0.9], [0.9, 1], [0.9, "0.99"], None):
        assert "optimizer.params.betas" in translate(
            {**SMALL, "optimizer": {"type": "Adam", "params": {"betas": betas}}}
        ).warning(TrainConfig())


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


def test_lamb_and_muon_are_minidists_with_the_defaults_of_deepspeed():
    def job(kind, **params):
        said = translate({**SMALL, "optimizer": {"type": kind, "params": params}})
        config = apply_deepspeed(TrainConfig.make(), said, set())
        return make_optimizer(build(config, resolve_batches(config, 1)), [Parameter(np.ones(2))]), dict(said.ignored)

    lamb, ignored = job("Lamb", lr=0.01, betas=[0.8, 0.9], weight_decay=0.1, max_coeff=10)
    assert (type(lamb).__name__, lamb.lr, lamb.betas, lamb.eps) == ("LAMB", 0.01, (0.8, 0.9), 1e-8)
    assert {"optimizer.params.max_coeff", "optimizer.params.min_coeff (default)"} <= ignored.keys()
    muon, ignored = job("muon")
    assert (type(muon).__name__, muon.lr, muon.momentum, muon.nesterov) == ("Muon", 3e-4, 0.95, True)
    assert (muon.betas, muon.eps) == ((0.9, 0.95), 1e-10)
    assert "0.2 sqrt(max(rows, columns))" in ignored["optimizer.params.lr (of matrices)"]
    assert job("Muon", lr=0.02, momentum=0.9)[0].momentum == 0.9


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "Lion", 3])
def test_what_trains_in_the_place_of_an_unknown_optimizer_or_schedule_is_said(kind, tmp_path, minidist):
    content = {**SMALL, "optimizer": {"type": kind, "params": {"lr": 0.01}}, "scheduler": {"type": "OneCycle"}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    small = ["--data", "markov", "--width", "8", "--heads", "1", "--context", "8", "--steps", "1", "--json"]
    said = []
    for command in (["train", "--deepspeed"], ["explain"]):
        captured = minidist(*command, tmp_path / "ds.json", *small, "--optimizer", "sgd", "--lr", "0.5")
        said.append(captured.err if command[0] == "train" else captured.out)
    for text in said:
        assert f"--optimizer sgd with --lr 0.5 trains in the place of {kind!r}" in text
        assert "--decay constant with --warmup 0 trains in the place of 'OneCycle'" in text
    assert "minidist has Adam, AdamW, SGD, Adagrad, RMSprop, Lamb and Muon of these" in said[1]


def test_comments_are_no_keys():
    comments = {"_comment": "x", "//": {"lr": 1}, "_a": 1e9}
    content = {
        **SMALL,
        **comments,
        "fp16": {"enabled": True, **comments},
        "zero_optimization": {"stage": 1, **comments},
    }
    plain = {**SMALL, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    assert translate(content) == translate(plain)


def test_a_number_beyond_the_limits_matters_only_where_it_is_read(tmp_path):
    text = '{"train_batch_size": 8, "notes": [Infinity, NaN, -1e308, 1e400, %s], "gradient_clipping": %s}'
    for wrong in ("Infinity", "1e400", "1e308", "NaN", "1" * 5000):
        (tmp_path / "ds.json").write_text(text % (wrong, "1.0"))
        assert [key for key, _ in read_deepspeed(tmp_path / "ds.json").ignored] == ["notes"]
        (tmp_path / "ds.json").write_text(text % ("1", wrong))
        with pytest.raises(UsageError, match=r"gradient_clipping is '.*; it must be a number") as error:
            read_deepspeed(tmp_path / "ds.json")
        assert len(str(error.value)) < 300


def test_a_flag_shortens_the_run_and_not_the_schedule(tmp_path):
    decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 4}}
    content = {**SMALL, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "scheduler": decay}
    small = {"data": "markov", "width": 8, "heads": 1, "context": 8, "layers": 1}

    def run(given, **settings):
        config = apply_deepspeed(TrainConfig.make(**small, **settings), translate(content), given)
        return SimWorld(1).run(train, config)[0].losses

    whole, folder = run(set()), str(tmp_path)
    assert len(whole) == 10
    assert run({"steps"}, steps=7) == whole[:7]
    # A shorter job that is resumed has the rates of the whole one, also beyond the end of the schedule.
    assert run({"steps"}, steps=7, save=folder) + run({"steps"}, steps=10, save=folder, resume=True)[7:] == whole
    assert run({"steps"}, steps=12)[:10] == whole


def rates(content, steps):
    """Learning rates of a job's first steps."""
    config = apply_deepspeed(TrainConfig.make(), translate({**SMALL, **content}), set())
    job = build(config, resolve_batches(config, 1))
    return [config.lr * job.lr_factor(step) for step in range(steps)]


def rates_of_deepspeed(kind, steps, lr, warmup, curve, total=None, least=1e-4):
    """deepspeed/runtime/lr_schedules.py, and engine.py, which steps it after the optimizer."""
    warmup, found, last_batch_iteration = max(2, warmup), [], -1
    for _ in range(steps):
        last = last_batch_iteration
        if last < 0:
            ratio = 0.0
        elif last < warmup:
            ratio = last / warmup if curve == "linear" else math.log(last + 1) / math.log(warmup)
        elif kind == "WarmupLR":
            ratio = 1.0
        elif kind == "WarmupDecayLR":
            ratio = max(0.0, (total - last) / max(1, total - warmup))
        else:
            progress = min(1.0, (last - warmup + 1) / max(1, total - warmup))
            ratio = least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2
        found.append(lr * ratio)
        last_batch_iteration += 1
    return found


@each("warmup", [0, 1, 4, 15])
@each("curve", ["linear", "log", None])
def test_the_warmup_has_the_steps_of_deepspeed(warmup, curve):
    """The first two steps have rate 0: the schedule is stepped after the optimizer."""
    common = {"warmup_num_steps": warmup, **({"warmup_type": curve} if curve else {})}
    constant = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    constant["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25, **common}}
    assert rates(constant, 12) == pytest.approx(rates_of_deepspeed("WarmupLR", 12, 0.25, warmup, curve or "log"))
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, **common}}
    expected = rates_of_deepspeed("WarmupCosineLR", 12, 0.5, warmup, curve or "log", 10)
    assert rates({**constant, "scheduler": cosine}, 12) == pytest.approx(expected)
    line = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_max_lr": 0.25, **common}}
    expected = rates_of_deepspeed("WarmupDecayLR", 13, 0.25, warmup, curve or "log", 10)
    assert rates({**constant, "scheduler": line}, 13) == pytest.approx(expected)


def test_the_maximum_of_the_warmup_is_the_rate_whatever_comes_first():
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.25}}}
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}
    assert translate({**SMALL, **scheduler, **optimizer}).settings["lr"] == 0.25
    assert translate({**SMALL, **optimizer, **scheduler}).settings["lr"] == 0.25
    plain = translate({**SMALL, **optimizer, "scheduler": {"type": "WarmupLR"}})
    assert plain.settings["lr"] == 0.5
    assert "until 2025 it was 0.001" in dict(plain.ignored)["scheduler.params.warmup_max_lr (default)"]


def test_defaults_that_differ_are_deepspeeds_and_are_listed():
    """Unless a flag says otherwise."""
    said = translate(
        {
            **SMALL,
            "optimizer": {"type": "AdamW"},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 3000}},
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": 3},
        }
    )
    expected = {
        "lr": 1e-3,
        "warmup_curve": "deepspeed-log",
        "warmup": 1000,
        "final_lr": 1e-4,
        "steps": 3000,
        "loss_scale_interval": 1000,
        "persistence_threshold": 100_000,
        "loss_scale_floor_limit": 1,
    }
    assert said.defaults == expected
    listed = {key.removesuffix(" (default)"): becomes for key, _, becomes in said.applied if key.endswith("(default)")}
    assert listed["optimizer.params.lr"] == "--lr 0.001"
    assert listed["scheduler.params.warmup_num_steps"] == "--warmup 1000"
    assert len(listed) == len(expected)
    config = apply_deepspeed(TrainConfig.make(lr=0.2, warmup=7), said, {"lr"})
    assert (config.lr, config.warmup, config.loss_scale_interval) == (0.2, 1000, 1000)
    assert not translate({**SMALL, "fp16": {"enabled": True, "loss_scale": 128}}).defaults
    for kind, rate in {"SGD": 1e-3, "Adagrad": 1e-2}.items():
        assert translate({**SMALL, "optimizer": {"type": kind}}).defaults == {"lr": rate}


def zero(**section):
    said = translate({**SMALL, "zero_optimization": section})
    return said.settings.get("offload"), said.ignored


@pytest.mark.parametrize("order", [1, -1])
def test_parameters_are_offloaded_with_their_optimizer(order):
    host = {"device": "cpu"}
    both = dict([("offload_param", host), ("offload_optimizer", host)][::order])
    assert zero(stage=3, **both) == ("parameters", [])
    assert zero(stage=3, offload_param=host) == ("parameters", [])
    assert zero(stage=3, offload_param={"device": "none"}, offload_optimizer=host) == ("optimizer", [])
    assert zero(stage=3, offload_optimizer=host, offload_param={"device": "none"}) == ("optimizer", [])
    assert "host's memory, not to a drive" in zero(stage=3, offload_param={"device": "nvme"})[1][0][1]
    assert "at stage 3 only" in zero(stage=2, offload_param=host)[1][0][1]
    said = translate(
        {
            **SMALL,
            "zero_optimization": {"stage": 1, "offload_optimizer": host},
            "activation_checkpointing": {"cpu_checkpointing": True},
        }
    )
    assert said.settings["offload"] == "optimizer"
    assert said.ignored == [
        ("activation_checkpointing.cpu_checkpointing", "minidist offloads one kind, and the file says optimizer before")
    ]


# What must stand next to a key so that it means something.
NEEDED = {
    "optimizer": {"type": "Adam", "params": {}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}},
    "fp16": {"enabled": True},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "expert_parallel": {"enabled": True},
}
SECTIONS_OF_OTHERS = ("tensor_parallel", "expert_parallel", "optimizer.params", "scheduler.params")
OF_COSINE = ("warmup_min_ratio", "total_num_steps", "cos_min_ratio")


def file_with(key, value):
    """A file in which the key means something."""
    section, *rest = key.split(".")
    content = json.loads(json.dumps({**SMALL, **{name: NEEDED[name] for name in [section] if name in NEEDED}}))
    place = content
    for name in [section, *rest][:-1]:
        place = place.setdefault(name, {})
    place[key.rpartition(".")[2]] = value
    if rest and rest[-1] in OF_COSINE:
        content["scheduler"]["type"] = "WarmupCosineLR"
    if rest and rest[-1] in ("momentum", "nesterov"):
        content["optimizer"]["type"] = "SGD"
    if rest == ["reduce_bucket_size"]:
        content["zero_optimization"]["stage"] = 2
    return content


@each("key", APPLIED)
def test_every_key_of_the_page_that_is_honoured_is(key):
    said = translate(file_with(key, APPLIED[key].example))
    becomes = {name: how for name, _, how in said.applied}[key]
    assert key not in dict(said.ignored)
    flags = re.findall(r"--[a-z-]+", APPLIED[key].becomes)
    shown = becomes if becomes != "as it is" else " ".join(how for *_, how in said.applied)
    assert not flags or any(flag in shown for flag in flags), (flags, shown)


@each("key", NOTED)
def test_every_key_of_the_page_that_is_noted_is(key):
    # A value that is none of those that minidist has anyway.
    inner = f"{key}.other" if key in SECTIONS_OF_OTHERS else key
    said = translate(file_with(inner, "other"))
    assert dict(said.ignored)[inner] == NOTED[key].why
    for value in NOTED[key].values:
        said = translate(file_with(key, value))
        assert key in [name for name, *_ in said.applied]
        assert key not in dict(said.ignored)


@each(("key", "content", "why"), table.REFUSED)
def test_every_key_of_the_page_that_is_refused_is(key, content, why):
    content = content if key == "train_batch_size" else {**SMALL, **content}
    with pytest.raises(UsageError):
        translate(content)


def test_the_page_of_keys_is_current():
    page = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
    assert page == table.as_markdown(), "run python docs/deepspeed_keys.py"


ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "auto"}}
DECAY = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
AUTO_FP16 = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
AUTO_BATCH = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
HOST = {"device": "cpu", "pin_memory": True}
# Forms of the files that trainers, tutorials and DeepSpeed's own pages show.
PEOPLES = {
    "stage 0": {**SMALL, "zero_optimization": {"stage": 0, "reduce_bucket_size": 5e7, "offload_optimizer": HOST}},
    "a bool": {**SMALL, "zero_optimization": True, "zero_allow_untested_optimizer": True},
    "a small bucket": {**SMALL, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1, "allgather_bucket_size": 1}},
    "filled in by a trainer": {
        **AUTO_BATCH,
        "fp16": AUTO_FP16,
        "bf16": {"enabled": "auto"},
        "optimizer": ADAMW,
        "scheduler": {"type": "WarmupDecayLR", "params": DECAY},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": HOST,
            "offload_param": HOST,
            "overlap_comm": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    },
    "fp16 with a static scale": {
        **SMALL,
        "fp16": {"enabled": True, "loss_scale": 1024, "loss_scale_window": 1000, "min_loss_scale": 1},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e6},
        "gradient_clipping": 0.3,
    },
    "fp16 without a floor": {**SMALL, "fp16": {"enabled": True, "loss_scale": 0, "min_loss_scale": 0.0}},
    "stage 3 with a bucket and neighbours": {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1e6, "zero_hpz_partition_size": 2},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-5, "warmup_max_lr": 1e-3}},
    },
    "recomputation and neighbours": {
        **SMALL,
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "stage3_prefetch_bucket_size": 0},
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False, "profile": False},
    },
    "lamb": {**SMALL, "optimizer": {"type": "Lamb", "params": {"lr": 1, "max_coeff": 10, "bias_correction": False}}},
    "muon": {**SMALL, "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3, "ns_method": "gram"}}},
    "an optimizer that is not here": {**SMALL, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1}}},
    "a schedule that is not here": {**SMALL, "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}},
}


@each("name", PEOPLES)
def test_files_as_people_have_them_describe_a_job_that_can_run(name):
    """No rule refuses the job, and every key of the file is in one of the two lists."""
    said = translate(PEOPLES[name])
    config = apply_deepspeed(TrainConfig.make(width=16, heads=2, context=8), said, set())
    assert number_of_ranks(config.model_copy(update={"dp": 4}), 4) == 4
    named = {key for key, *_ in said.applied} | dict(said.ignored).keys()
    for key in keys_of(PEOPLES[name]):
        section = key.partition(".")[0]
        section = "zero_optimization.stage" if PEOPLES[name][section] is True else section  # its old form
        assert key in named or section in named or key.rpartition(".")[0] in named, key


def test_values_of_peoples_files():
    def settings(name):
        return translate(PEOPLES[name]).settings

    assert settings("a bool")["zero"] == 1
    assert "reduce_bucket_size" not in settings("stage 0")
    assert "offload" not in settings("stage 0")
    static = settings("fp16 with a static scale")
    assert (static["loss_scale"], static["static_loss_scale"], static["precision"]) == (1024.0, True, "fp16")
    assert translate(PEOPLES["fp16 with a static scale"]).defaults == {}
    assert 0 < settings("fp16 without a floor")["loss_scale_floor"] < 1e-29
    neighbours = settings("stage 3 with a bucket and neighbours")
    assert neighbours["reshard_after_forward"] == "2"
    assert neighbours["warmup_start"] == pytest.approx(0.01)
    assert "reshard_after_forward" not in settings("recomputation and neighbours")
    assert settings("recomputation and neighbours")["prefetch"] == 0
    assert settings("filled in by a trainer")["offload"] == "parameters"
    unknown = translate({**SMALL, "zero_optimization": {"stage": 1, "overlap_com": True}})
    assert "did you mean 'zero_optimization.overlap_comm'" in dict(unknown.ignored)["zero_optimization.overlap_com"]


def test_a_warmup_begins_with_the_minimum_and_torchs_adam_decays():
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4}}
    scheduler["params"]["warmup_type"] = "linear"
    assert rates({"scheduler": scheduler}, 7) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    decay = {"type": "WarmupDecayLR", "params": {**scheduler["params"], "total_num_steps": 6}}
    assert rates({"scheduler": decay}, 9) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.1])
    said = translate({**SMALL, "optimizer": {"type": "Adam", "params": {"torch_adam": True, "lr": 0.1}}})
    assert (said.settings["optimizer"], said.defaults) == ("adamw", {"weight_decay": 0.01})
    assert translate({**SMALL, "optimizer": {"type": "Adam"}}).settings["optimizer"] == "adamw"
    plain = {"torch_adam": True, "adam_w_mode": False}
    assert translate({**SMALL, "optimizer": {"type": "Adam", "params": plain}}).settings["optimizer"] == "adam"


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
    assert said.ignored == []


@pytest.mark.parametrize("way", ["--set", "--config"])
def test_a_setting_of_a_file_or_of_set_does_not_lose_in_silence(way, tmp_path, minidist, monkeypatch):
    (tmp_path / "ds.json").write_text('{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.001}}}')
    (tmp_path / "job.toml").write_text("[opt]\nlr = 1.0\n")
    given = ["--set", "opt.lr=1"] if way == "--set" else ["--config", str(tmp_path / "job.toml")]
    assert (
        "--lr 1.0 from a flag, --set or --config, and 0.001 in the DeepSpeed file"
        in minidist("train", "--deepspeed", tmp_path / "ds.json", *given, code=2).err
    )


def test_flags_and_file_do_not_contradict_each_other():
    config = TrainConfig.make(zero=3, global_batch=8)
    with pytest.raises(UsageError, match="--zero 3 from a flag, --set or --config, and 1 in the DeepSpeed file"):
        apply_deepspeed(config, translate({**SMALL, "zero_optimization": {"stage": 1}}), {"zero"})
    assert apply_deepspeed(config, translate({**SMALL, "zero_optimization": {"stage": 1}}), set()).zero == 1


def test_the_example_trains_as_one_device():
    job = TrainConfig.make(layers=2, width=16, heads=2, context=8, data="markov", steps=4, reduction="ordered")
    config = apply_deepspeed(job, read_deepspeed(EXAMPLE), set())
    assert (config.zero, config.clip, config.warmup) == (2, 1.0, 2)
    equals_one_device(4, config)


def test_the_commands(tmp_path, minidist):
    flags = ["--width", "16", "--heads", "2", "--context", "8", "--json"]
    answer = json.loads(minidist("explain", EXAMPLE, "--ranks", "4", "--params", "1000", "--run", *flags).out)
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
    captured = minidist(
        "train", "--deepspeed", EXAMPLE, "--dp", "2", "--steps", "1", "--trace", tmp_path / "t.jsonl", *flags
    )
    assert "not honoured: steps_per_print" in captured.err
    assert json.loads(captured.out)["ranks"] == 2
    minidist("train", "--deepspeed", tmp_path / "none.json", code=2)


MORE = ({}, {"fp16": {"enabled": True}}, {"gradient_clipping": 1.0}, {"bf16": {"enabled": True}})


@each(("stage", "more"), list(itertools.product(range(4), MORE)), sampled=12)
def test_a_step_of_many_micro_batches_is_explained_from_few(stage, more, monkeypatch):
    """Bytes, messages and memory are those of the real run of all."""
    content = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 7, **more}
    said = translate({**content, "zero_optimization": {"stage": stage}})
    job = {"width": 16, "heads": 2, "context": 8, "layers": 2, "data": "markov", "synchronize_each": stage == 0}
    config = apply_deepspeed(TrainConfig.make(**job), said, set())
    figures = explanation.explain_job(config, said, 2, run=True)
    monkeypatch.setattr(explanation, "MAX_MICROBATCHES", 100)
    assert figures == explanation.explain_job(config, said, 2, run=True)

    world = SimWorld(2)
    world.run(train, explanation.trial(config, 1))
    for name, row in figures["purposes"].items():
        assert row["bytes"] == row["closed_form"] == sum(t.bytes_by_purpose().get(name, 0) for t in world.traces)
        assert row["messages"] == sum(t.messages_by_purpose().get(name, 0) for t in world.traces)
    warm = SimWorld(2).run(train, explanation.trial(config, 2))
    assert figures["peak_bytes"] == [result.peak_bytes for result in warm]
    assert figures["batch"]["accumulation"] == 7


def test_without_run_the_bytes_are_those_of_the_run_and_no_step_is_executed(monkeypatch, capsys):
    """Whatever the batch: a step of 60,000 samples, with one micro-batch per rank, would take minutes."""
    said = translate({"train_batch_size": 16, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0})
    config = apply_deepspeed(TrainConfig.make(width=16, heads=2, context=8, layers=2, data="markov"), said, set())
    ran = explanation.explain_job(config, said, 4, run=True)["purposes"]
    formula = explanation.explain_job(config, said, 4)
    assert {name: row["closed_form"] for name, row in formula["purposes"].items()} == {
        name: row["bytes"] for name, row in ran.items()
    }
    assert "bytes, by formula" in explanation.table(formula)
    assert "peak_bytes" not in formula
    steps = []
    original = explanation.train
    monkeypatch.setattr(explanation, "train", lambda comm, job: steps.append(job.steps) or original(comm, job))
    large = translate({"train_batch_size": 60_000, "fp16": {"enabled": True}})
    figures = explanation.explain_job(apply_deepspeed(config, large, set()), large, 4)
    assert figures["batch"]["micro_batch"] == 15_000
    assert set(steps) == {0}


def test_a_template_is_said_to_be_one(tmp_path):
    path = tmp_path / "ds.json"
    for value, name in (("${zero_stage}", r"\$\{zero_stage\}"), ("{{ stage }}", "{{ stage }}"), ("<STAGE>", "<STAGE>")):
        path.write_text('{"train_batch_size": 8,\n "zero_optimization": {"stage": ' + value + "}}")
        with pytest.raises(
            UsageError, match=f"is a template: {name} in line 2 stands for a value; put one in its place"
        ):
            read_deepspeed(path)
    path.write_text('{"train_batch_size": 8,}')
    with pytest.raises(UsageError, match="is not JSON"):
        read_deepspeed(path)


def test_a_value_of_any_kind_in_any_place_is_taken_or_one_sentence():
    """Also a list or an object where a word belongs, which has no hash."""
    places = [(key,) for key in FULL]
    places += [
        (*place, key) for place in places for key in (FULL[place[0]] if isinstance(FULL[place[0]], dict) else ())
    ]
    places += [("optimizer", "params", key) for key in FULL["optimizer"]["params"]]
    places += [("scheduler", "params", key) for key in FULL["scheduler"]["params"]]
    for *outer, key in places:
        for value in ([], [1], {}, {"a": 1}, None, True, "x", -1, 0.5, 1e30, 10**30):
            content = json.loads(json.dumps(FULL))
            section = content
            for name in outer:
                section = section[name]
            section[key] = value
            try:
                said = translate(content).warning(TrainConfig())
            except UsageError as error:
                said = str(error)
            assert len(said) < 600


def test_the_keys_of_a_warning_are_few_and_short():
    warning = translate({**SMALL, **{f"{'k' * 1000}{number}": 1 for number in range(100)}}).warning(TrainConfig())
    assert len(warning) < 3_000
    assert warning.endswith(" and 80 more, which minidist explain lists")
