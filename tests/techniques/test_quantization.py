"""`--quantize int8`: every layout has the bits of one device, every byte is counted, INT8 evaluates what trained."""

import json

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.commands.generation import load_model
from minidist.core.base.errors import UsageError
from minidist.core.nn import Linear
from minidist.job.checkpoint import Checkpoint
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.metrics import read_metrics
from minidist.job.train.trainer import train
from minidist.techniques.quantization.layers import Int8Linear, load_ranges, observers_of, prepare_qat
from tests.cases import each
from tests.jobs import SMALL_GPT, equals_one_device_in_closed_form, has_the_bits_of

JOB = SMALL_GPT | {"steps": 3, "lr": 0.03, "micro_batch": 2, "quantize": "int8", "reduction": "ordered"}
SIZES = "weight_bytes", "float_bytes"
LAYOUTS = {
    "one rank": (1, {"accumulation": 3}),
    "dp 3": (3, {"dropout": 0.1, "clip": 0.5}),
    "dp 2, fp64, one scale, min and max": (
        2,
        {"precision": "fp64", "quantize_weights": "per-tensor", "quantize_observer": "min-max", "accumulation": 2},
    ),
    "zero 1": (4, {"zero": 1, "clip": 0.5}),
    "zero 2": (3, {"zero": 2, "accumulation": 2, "recompute": "selective"}),
    "recomputed blocks": (2, {"recompute": "full", "accumulation": 2}),
    "recomputed within a budget": (2, {"recompute": "budget:40000", "layers": 3}),
    "offload": (2, {"zero": 1, "offload": "optimizer"}),
    "llama": (2, {"model": "llama", "synchronize_each": True, "accumulation": 2}),
    "mlp": (3, {"model": "mlp", "data": "glyphs", "heads": 4, "context": 64, "recompute": "sqrt"}),
    "cp 2": (2, {"cp": 2, "precision": "fp64"}),
    "pp 2": (2, {"pp": 2, "accumulation": 3, "clip": 0.5}),
    "pp 2, dp 2, zero 2": (4, {"pp": 2, "dp": 2, "zero": 2, "accumulation": 2, "recompute": "full"}),
    "tp 2": (2, {"tp": 2, "precision": "fp64", "accumulation": 2, "clip": 0.5}),
    "tp 2, one scale, min and max": (
        2,
        {"tp": 2, "precision": "fp64", "quantize_weights": "per-tensor", "quantize_observer": "min-max"},
    ),
    "tp 2, sequence parallel": (2, {"tp": 2, "precision": "fp64", "sequence_parallel": True, "recompute": "full"}),
    "tp 4, llama": (4, {"tp": 4, "precision": "fp64", "model": "llama", "heads": 4, "kv_heads": 2, "accumulation": 2}),
    "tp 2, llama, sequence parallel": (
        2,
        {"tp": 2, "precision": "fp64", "model": "llama", "sequence_parallel": True, "accumulation": 2},
    ),
    "tp 2, mlp": (2, {"tp": 2, "precision": "fp64", "model": "mlp", "data": "glyphs", "heads": 4, "context": 64}),
    "tp 2, cp 2": (4, {"tp": 2, "cp": 2, "precision": "fp64"}),
    "tp 2, dp 2, zero 2": (4, {"tp": 2, "dp": 2, "zero": 2, "precision": "fp64", "accumulation": 2}),
    "tp 2, pp 2, dp 2": (
        8,
        {"tp": 2, "pp": 2, "dp": 2, "zero": 1, "precision": "fp64", "accumulation": 3, "clip": 0.5},
    ),
    "interleaved": (2, {"pp": 2, "schedule": "interleaved", "chunks": 2, "layers": 4, "accumulation": 2}),
    "pp 2, mlp": (2, {"pp": 2, "model": "mlp", "data": "glyphs", "heads": 4, "context": 64, "accumulation": 2}),
}


def config_of(layout, **more):
    return TrainConfig.make(**{**JOB, **LAYOUTS[layout][1], **more})


@each("layout", LAYOUTS, sampled=6)
def test_every_layout_equals_one_device_and_every_byte_is_in_the_closed_form(layout):
    ranks, config = LAYOUTS[layout][0], config_of(layout, evaluate_every=2)
    check_rules(config, resolve_batches(config, ranks))
    _, sent = equals_one_device_in_closed_form(ranks, config)
    assert (sent["quantization_range"] > 0) == (ranks > 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["dp 3", "zero 1", "mlp", "pp 2", "pp 2, dp 2, zero 2", "tp 2, pp 2, dp 2"])
def test_all_ranks_evaluate_the_same_int8_model_which_is_near_the_one_that_trained(layout):
    ranks, config = LAYOUTS[layout][0], config_of(layout, evaluate_every=1, dropout=0.0)
    results = SimWorld(ranks).run(train, config)
    first = results[0]
    assert list(first.measured["int8"]["held_out"]) == [1, 2, 3]
    assert all(result.measured == first.measured for result in results)
    assert first.measured["int8"]["held_out"] == pytest.approx(first.held_out, rel=1e-5)
    alone = SimWorld(1).run(train, config.model_copy(update={"tp": 1, "pp": 1, "dp": 1, "zero": 0}))[0].measured["int8"]
    assert [first.measured["int8"][name] for name in SIZES] == [alone[name] for name in SIZES]
    assert first.measured["int8"]["weight_bytes"] < 0.4 * first.measured["int8"]["float_bytes"]


def test_it_is_another_model_than_the_one_in_floats_and_it_learns():
    config = TrainConfig.make(**{**JOB, "steps": 30, "micro_batch": 8, "lr": 0.01})
    rounded, floats = (SimWorld(1).run(train, config.model_copy(update={"quantize": q})) for q in ("int8", "none"))
    assert rounded[0].losses != floats[0].losses
    assert "int8" not in floats[0].measured
    assert rounded[0].losses[-1] < rounded[0].losses[0] - 0.3
    assert np.abs(np.subtract(rounded[0].losses, floats[0].losses)).max() < 0.1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "layout", ["pp 2, dp 2, zero 2", "dp 3", "zero 1", "dp 2, fp64, one scale, min and max", "tp 2, sequence parallel"]
)
def test_a_resumed_job_has_the_bits_of_the_uninterrupted_one(layout, tmp_path):
    ranks, settings = LAYOUTS[layout][0], {"steps": 6, "save": str(tmp_path), "every": 3, "evaluate_every": 2}
    whole = SimWorld(ranks).run(train, config_of(layout, **settings))
    (tmp_path / "latest").write_text("step-00000003")
    resumed = SimWorld(ranks).run(train, config_of(layout, **settings, resume=True))
    assert resumed[0].first_step == 3
    has_the_bits_of(resumed, whole)
    assert resumed[0].measured["int8"]["held_out"][6] == whole[0].measured["int8"]["held_out"][6]


def test_a_checkpoint_of_one_layout_resumes_in_another_but_not_with_other_rounding(tmp_path):
    settings = {"save": str(tmp_path), "global_batch": 6, "micro_batch": None}
    first = SimWorld(3).run(train, config_of("dp 3", dropout=0.0, **settings))
    more = {**settings, "steps": 4, "resume": True}
    for change, sentence in (
        ({"quantize": "none"}, "made with --quantize int8, this job has none; resume with --quantize int8"),
        ({"quantize_observer": "min-max"}, "resume with --quantize-observer moving-average"),
    ):
        with pytest.raises(UsageError, match=sentence):
            SimWorld(2).run(train, config_of("zero 1", **more, **change))
    losses = []
    for layout, split in (("zero 1", {}), ("dp 3", {"tp": 2, "dp": 1})):
        again = SimWorld(2).run(train, config_of(layout, **{"dropout": 0.0, **more, **split}))
        assert again[0].losses[:3] == first[0].losses
        losses.append(again[0].losses[3])
        (tmp_path / "latest").write_text("step-00000003")
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_saved_job_generates_with_integers_and_ranges_that_are_none_are_refused(tmp_path):
    SimWorld(2).run(train, config_of("zero 1", save=str(tmp_path)))
    model, config = load_model(tmp_path)
    assert config.quantize == "int8"
    layers = [layer for layer in model.modules() if isinstance(layer, Int8Linear)]
    assert len(layers) == 8
    scalars = Checkpoint(tmp_path).state["scalars"]
    low, high = (scalars[f"range.transformer.h.0.attn.c_attn.{end}"] for end in ("low", "high"))
    assert low < 0 < high
    assert layers[0].grid.scale == np.float32(np.float32(high) - np.float32(low)) / np.float32(255)

    observers = observers_of(prepare_qat(Linear(2, 2)))
    for state in ({"range..low": 1.0}, {"range..low": 2.0, "range..high": 1.0}):
        with pytest.raises(UsageError, match=r"the range of layer '' in the checkpoint is from .* another checkpoint"):
            load_ranges(observers, state)


def test_a_model_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from minidist.core.nn import MLP, Embedding, Linear\n"
        "def net(config, data):\n    return Linear(data.features, data.classes)\n"
        "def table(config, data):\n    return Embedding(data.features, data.classes)\n"
    )
    config = TrainConfig.make(model="mine.py:net", data="glyphs", quantize="int8", steps=2)
    check_rules(config, resolve_batches(config, 2))
    results = SimWorld(2).run(train, config)
    assert results[0].measured["int8"]["weight_bytes"] < results[0].measured["int8"]["float_bytes"]
    with pytest.raises(UsageError, match="Embedding has no Linear or Conv1D layer to quantise"):
        check_rules(config.model_copy(update={"model": "mine.py:table"}), resolve_batches(config, 2))


def test_the_command_says_what_int8_costs_and_saves(minidist, tmp_path):
    job = ["train", "--model", "mlp", "--dp", "2", "--steps", "4", "--quantize", "int8", "--evaluate-every", "2"]
    job += ["--trace", "none", "--metrics", tmp_path / "m.jsonl"]
    printed = json.loads(minidist(*job, "--json").out)
    assert list(printed["int8"]["held_out"]) == ["2", "4"]
    # Three layers, two numbers of 4 B each, from both ranks, in 4 steps.
    assert printed["bytes_by_purpose"]["quantization_range"] == {"measured": 192, "closed_form": 192}
    assert all(volume["measured"] == volume["closed_form"] for volume in printed["bytes_by_purpose"].values())
    second, fourth = printed["int8"]["held_out"].values()
    records = read_metrics(tmp_path / "m.jsonl")
    assert [r.get("held_out_loss_int8") for r in records] == [None, second, None, fourth]
    assert "INT8: weights " in minidist(*job).out
