"""`--sparsity`: every layout has the bits of one device, kept entries alone are reduced, and the masks resume."""

import json

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.job.checkpoint import Checkpoint
from minidist.job.config.rules import check_rules, notices
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.metrics import read_metrics
from minidist.job.train.trainer import train
from minidist.planning.volumes import closed_form_bytes
from minidist.techniques import Moment
from minidist.techniques.pruning.extension import Pruning
from tests.cases import each
from tests.jobs import SMALL_GPT, has_the_bits_of, in_closed_form, sent_bytes, train_compared

JOB = SMALL_GPT | {
    "steps": 4,
    "lr": 0.03,
    "micro_batch": 2,
    "bucket_cap_mb": 0.004,
    "sparsity": 0.7,
    "sparsity_schedule": "1,3",
    "reduction": "ordered",
}
PATTERN = {"sparsity": 0.0, "sparsity_pattern": "2:4", "sparsity_schedule": "2"}
SHARDS = {"zero": 3, "bucket_cap_mb": 25.0}
MLP = {"model": "mlp", "data": "glyphs", "heads": 4, "context": 64}
LAYOUTS = {
    "one rank": (1, {"accumulation": 3}),
    "dp 3": (3, {"dropout": 0.1, "clip": 0.5, "weight_decay": 0.1}),
    "dp 2, global": (2, {"sparsity_scope": "global", "optimizer": "sgd", "momentum": 0.9, "lr": 0.3}),
    "dp 2, pattern": (2, PATTERN),
    "dp 2, fp16": (2, {"precision": "fp16", "loss_scale": 2.0**18, "accumulation": 2, "synchronize_each": True}),
    "zero 1": (4, {"zero": 1, "clip": 0.5, "bucket_cap_mb": 25.0}),
    "zero 2, bf16, pattern": (3, {"zero": 2, "precision": "bf16", "bucket_cap_mb": 25.0, **PATTERN}),
    "zero 3": (3, {**SHARDS, "clip": 0.5}),
    "zero 3, global": (2, {**SHARDS, "sparsity_scope": "global", "accumulation": 2, "recompute": "full"}),
    "zero 3, copies": (4, {**SHARDS, "dp_replicate": 2, "precision": "fp64"}),
    "zero 3, small units": (
        3,
        {**SHARDS, "persistence_threshold": 300, "precision": "bf16", "sparsity_scope": "global"},
    ),
    "zero 3, on the host": (2, {**SHARDS, "offload": "parameters", "optimizer": "adam", "weight_decay": 0.1}),
    "pp 2, dp 2": (4, {"pp": 2, "accumulation": 2, "micro_batch": 1}),
    "pp 2, zero 3": (4, {**SHARDS, "pp": 2, "accumulation": 2, "micro_batch": 1}),
    "llama, int8": (2, {"model": "llama", "quantize": "int8"}),
    "mlp": (3, {**MLP, "recompute": "sqrt"}),
    "cp 2": (2, {"cp": 2, "precision": "fp64", "lr": 0.003}),
}


def config_of(layout, **more):
    return TrainConfig.make(**{**JOB, **LAYOUTS[layout][1], **more})


def closed_and_measured(config, ranks, first_step=0):
    world, batches = SimWorld(ranks), resolve_batches(config, ranks)
    results = world.run(train, config)
    ran = config.model_copy(update={"steps": config.steps - first_step})
    sizes = [result.sizes for result in results]
    return results, closed_form_bytes(ran, batches, sizes, results[0].skipped, first_step), sent_bytes(world)


@each("layout", LAYOUTS, sampled=8)
def test_every_layout_equals_one_device_and_reduces_no_pruned_entries(layout):
    ranks, config = LAYOUTS[layout][0], config_of(layout)
    check_rules(config, resolve_batches(config, ranks))
    results, _, measured = train_compared(SimWorld(ranks), config)
    in_closed_form(config, results, measured)
    assert (measured["pruning"] > 0) == (config.zero == 3)
    dense = config.model_copy(update={"sparsity": 0.0, "sparsity_schedule": None, "sparsity_pattern": None})
    less = closed_and_measured(dense, ranks)[2]["gradient_reduce"] - measured["gradient_reduce"]
    assert (less > 0) == (ranks > 1)
    if layout in ("dp 3", "zero 1", "zero 3"):  # of what is pruned in steps 1 to 3, in float32; after step 1 nothing is
        schedule = [0, 0, 0.7 * (1 - (1 / 2) ** 3), 0.7]
        pruned = sum(round(s * size) for s in schedule for size in results[0].sizes[0].more["prunable"])
        assert less == (2 * (ranks - 1) if layout == "dp 3" else ranks - 1) * 4 * pruned


@pytest.mark.parametrize("layout", ["dp 3", "zero 3, global", "zero 2, bf16, pattern", "pp 2, dp 2"])
def test_saved_weights_are_zero_where_their_masks_are(layout, tmp_path):
    config = config_of(layout, save=str(tmp_path))
    result = SimWorld(LAYOUTS[layout][0]).run(train, config)[0]
    checkpoint = Checkpoint(tmp_path)
    masks = {name[6:]: checkpoint.tensor(name) for name in checkpoint.tensors if name.startswith("masks/")}
    assert len(masks) == 8
    zeros = 0
    for name, mask in masks.items():
        weight = checkpoint.tensor(f"weights/{name}")
        assert mask.dtype == bool
        assert np.array_equal(weight.astype(float) != 0, mask)
        zeros += int((~mask).sum())
        if config.sparsity_pattern:  # along the inputs, the first dim of a Conv1D
            assert (mask.T.reshape(-1, 4).sum(axis=1) == 2).all()
    stored = {
        name: sum(piece.get("kept", -1) for piece in entry["pieces"]) for name, entry in checkpoint.tensors.items()
    }
    assert {stored[f"masks/{name}"] for name in masks} == {0}  # bits alone
    assert all(stored[f"weights/{name}"] == mask.sum() for name, mask in masks.items())
    sparsity = result.measured["sparsity"]
    assert sparsity == {"pruned": zeros, "of": sum(mask.size for mask in masks.values())}
    assert zeros / sparsity["of"] == pytest.approx(config.sparsity or 0.5, abs=1e-3)


@each("layout", ["dp 3", "dp 2, fp16", "zero 1", "zero 3, global", "zero 3, on the host", "pp 2, zero 3"], sampled=8)
@each("saved", [2, 5])
def test_a_resumed_job_has_the_bits_of_the_uninterrupted_one(layout, saved, tmp_path):
    """In the middle of the schedule, and after it."""
    ranks, settings = LAYOUTS[layout][0], {"steps": 6, "sparsity_schedule": "1,4", "save": str(tmp_path)}
    settings["every"] = saved
    whole = SimWorld(ranks).run(train, config_of(layout, **settings))
    (tmp_path / "latest").write_text(f"step-{saved:08d}")
    resumed, closed, measured = closed_and_measured(config_of(layout, **settings, resume=True), ranks, saved)
    assert resumed[0].first_step == saved
    has_the_bits_of(resumed, whole)
    measured.pop("checkpoint", None)
    assert measured == closed


def test_masks_of_one_layout_resume_in_another(tmp_path, monkeypatch):
    settings = {"save": str(tmp_path), "global_batch": 6, "micro_batch": None, "accumulation": None, "clip": None}
    first = SimWorld(3).run(train, config_of("zero 3", **settings))
    more = {**settings, "steps": 5, "resume": True, "dropout": 0.0, "weight_decay": 0.0}
    with pytest.raises(UsageError, match=r"made with --sparsity 0\.7, this job has 0\.5; resume with --sparsity 0\.7"):
        SimWorld(2).run(train, config_of("zero 1", **more, sparsity=0.5))
    results = {}
    for layout in ("zero 1", "dp 3", "zero 3"):
        (tmp_path / "latest").write_text("step-00000004")
        results[layout] = SimWorld(2).run(train, config_of(layout, **more))[0].losses
    assert results["zero 1"] == results["dp 3"] == results["zero 3"]
    assert results["zero 1"][:4] == first[0].losses

    (tmp_path / "latest").write_text("step-00000004")

    class WithoutMasks(Checkpoint):
        def __init__(self, directory, step=None):
            super().__init__(directory, step=step)
            self.tensors = {name: entry for name, entry in self.tensors.items() if not name.startswith("masks/")}

    monkeypatch.setattr("minidist.job.checkpoint.resume.Checkpoint", WithoutMasks)
    with pytest.raises(UsageError, match=r"masks/transformer\.h\.0\.attn\.c_attn\.weight"):
        SimWorld(2).run(train, config_of("zero 1", **more))


def test_it_learns_with_a_fifth_of_the_weights():
    settings = {**JOB, "steps": 40, "micro_batch": 8, "lr": 0.01, "bucket_cap_mb": 25.0}
    sparse = SimWorld(1).run(train, TrainConfig.make(**{**settings, "sparsity": 0.8, "sparsity_schedule": "5,25,5"}))[0]
    dense = SimWorld(1).run(train, TrainConfig.make(**{**settings, "sparsity": 0.0, "sparsity_schedule": None}))[0]
    assert "sparsity" not in dense.measured
    assert sparse.losses[-1] < sparse.losses[0] - 0.3
    assert sparse.losses[-1] < dense.losses[-1] + 0.2


def test_a_schedule_that_ends_after_the_job_is_named():
    def lines(**more):
        config = TrainConfig.make(**{**JOB, **more})
        return notices(config, resolve_batches(config, 2))

    assert lines() == []
    assert lines(sparsity_schedule="2,6") == [
        "--sparsity 0.7 is not reached, because --sparsity-schedule 2,6 ends after --steps 4"
    ]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"sparsity_schedule": "3,1"}, "from step 3 to 1 every 1 steps; begin at step 1 or later"),
        ({"sparsity_schedule": "soon"}, "sparsity schedule 'soon'; it must be BEGIN,END"),
        ({"sparsity": 0.0, "sparsity_pattern": "two of four"}, "it must be N:M"),
        ({**PATTERN, **MLP, "width": 10}, r"'layers.1.weight' multiplies 10 inputs, .* of 4"),
    ],
)
def test_wrong_settings_are_one_sentence(values, sentence):
    config = TrainConfig.make(**{**JOB, **values})
    with pytest.raises(UsageError, match=sentence):
        check_rules(config, resolve_batches(config, 2))


def test_a_model_without_linear_layers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from minidist.core.nn import Embedding\n"
        "def net(config, data):\n    return Embedding(data.features, data.classes)\n"
    )
    config = TrainConfig.make(model="mine.py:net", data="glyphs", sparsity=0.5, sparsity_schedule="1")
    with pytest.raises(UsageError, match="Embedding has no Linear or Conv1D layer to prune"):
        check_rules(config, resolve_batches(config, 2))


def test_the_command_says_what_is_pruned(minidist, tmp_path):
    job = ["train", "--model", "mlp", "--dp", "2", "--steps", "4", "--sparsity", "0.5", "--sparsity-schedule", "2,3"]
    job += ["--trace", "none", "--metrics", tmp_path / "m.jsonl"]
    printed = json.loads(minidist(*job, "--json").out)
    assert printed["sparsity"]["pruned"] == pytest.approx(0.5 * printed["sparsity"]["of"], abs=2)
    assert all(volume["measured"] == volume["closed_form"] for volume in printed["bytes_by_purpose"].values())
    assert [round(record["sparsity"], 3) for record in read_metrics(tmp_path / "m.jsonl")] == [0, 0, 0.5, 0.5]
    assert "weights of linear layers (50.0%)" in minidist(*job).out


def test_weights_that_were_pruned_are_noted_as_changed():
    """What keeps a copy of the weights (a gathered unit, a cache) asks whether they have been updated since."""
    seen = []

    def main(comm):
        config = TrainConfig.make(**{**JOB, "steps": 2, "sparsity": 0.5, "sparsity_schedule": "1,2"})
        train(comm, config, [lambda state: seen.append(state.strategy)])
        strategy = seen[-1]
        (axis,) = strategy.data_axes
        extension = next(one for one in strategy.job.extensions if isinstance(one, Pruning))
        noted = [flat.version for flat in axis.flats]
        extension.after_update(Moment(comm, range(1, 2), strategy))
        return [flat.version - before for flat, before in zip(axis.flats, noted, strict=True)]

    assert SimWorld(1).run(main) == [[1]]


def test_a_checkpoint_of_before_the_first_masks_is_resumed(tmp_path):
    values = {**JOB, "sparsity_schedule": "3,5", "save": str(tmp_path)}
    SimWorld(1).run(train, TrainConfig.make(**{**values, "steps": 2}))
    straight = SimWorld(1).run(train, TrainConfig.make(**{**values, "save": None, "steps": 6}))[0]
    resumed = SimWorld(1).run(train, TrainConfig.make(**{**values, "steps": 6, "resume": True}))[0]
    assert resumed.digest == straight.digest
