"""--model cnn: images through batch norms equal one device in every layout, are saved, resumed, timed and cut."""

import json

import numpy as np
import pytest

from minidist.commands.generation import load_model
from minidist.commands.runner import run_comparison, run_training
from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.data import glyphs, load_dataset
from minidist.job.checkpoint import Checkpoint
from minidist.job.config.models import make_model
from minidist.job.config.train_config import TrainConfig
from minidist.nn import BatchNorm
from minidist.planning.profiler import profile_layers
from tests.cases import each

SMALL = {"model": "cnn", "layers": 2, "width": 4, "steps": 2, "global_batch": 24, "evaluate_every": 1}
PIPELINE = {"pp": 2, "accumulation": 2}


def job(**settings):
    return TrainConfig.make(**{**SMALL, **settings})


@each(
    "settings",
    [
        {"dp": 2, "accumulation": 2, "zero": 2, "recompute": "budget:300000"},
        {"dp": 4, "zero": 3, "dp_replicate": 2, "recompute": "full"},
        {"dp": 2, "precision": "bf16", "zero": 1, "recompute": "sqrt"},
        {"dp": 2, "local_steps": 2},
        {"dp": 2, "batch_norm": "none", "offload": "activations"},
        {**PIPELINE, "dp": 2, "zero": 2, "schedule": "zb-h1", "clip": 1.0},
        {**PIPELINE, "accumulation": 4, "schedule": "dualpipe"},
        {**PIPELINE, "dp": 2, "zero": 3, "partition": "parameters", "recompute": "full"},
        {"dp": 3, "weights": "3,2,1", "accumulation": 2, "offload": "activations"},
        {"pp": 2, "schedule": "pipedream", "evaluate_every": None},
    ],
    ids=str,
    sampled=4,
)
def test_every_layout_equals_one_device_bit_for_bit_and_sends_the_closed_form(settings):
    config = job(reduction="ordered", **settings)
    verdict = run_comparison(config, None, 60)
    assert verdict.tier == "ordered"
    assert verdict.equal, verdict.sentence()
    assert run_training(config.model_copy(update={"steps": 1}), None, 60, None).volumes_hold()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 3, "accumulation": 2, "zero": 1, "recompute": "sqrt"},
        {"dp": 4, "zero": 3, "dp_replicate": 2, "recompute": "full"},
        {**PIPELINE, "dp": 2, "accumulation": 4, "schedule": "dualpipe"},
        {**PIPELINE, "dp": 2, "recompute": "full", "global_batch": 23},
    ],
    ids=str,
)
def test_synchronised_norms_equal_one_device_on_the_global_batch_and_send_the_closed_form(settings):
    config = job(batch_norm="sync", precision="fp64", **settings)
    verdict = run_comparison(config, None, 60)
    assert verdict.equal, verdict.sentence()
    summary = run_training(config.model_copy(update={"steps": 1}), None, 60, None)
    assert summary.volumes_hold()
    assert summary.bytes_by_purpose["batch_norm"]["measured"] > 0


def test_one_micro_batch_per_rank_with_synchronised_norms_is_the_global_batch():
    """Four micro-batches of one device give other losses; synchronised, they give those of one large micro-batch."""
    of_batch, of_parts, synchronised = (
        run_training(job(precision="fp64", **settings), None, 60, None)
        for settings in ({"accumulation": 1}, {"accumulation": 4}, {"dp": 4, "batch_norm": "sync"})
    )
    assert synchronised.losses == pytest.approx(of_batch.losses, rel=1e-12)
    assert synchronised.held_out[2] == pytest.approx(of_batch.held_out[2], rel=1e-12)
    assert abs(of_parts.losses[0] - of_batch.losses[0]) > 1e-4


@pytest.mark.parametrize("settings", [{**PIPELINE, "dp": 2}, {"dp": 2, "batch_norm": "sync"}], ids=str)
def test_a_resumed_job_has_the_losses_and_statistics_of_the_undisturbed_one(settings, tmp_path):
    def run(steps, **more):
        return run_training(job(**{**settings, **more}, steps=steps), None, 60, None)

    straight = run(3)
    run(1, save=str(tmp_path))
    resumed = run(3, save=str(tmp_path), resume=True)
    assert (resumed.losses, resumed.held_out[3]) == (straight.losses, straight.held_out[3])
    names = {name for name in Checkpoint(tmp_path).tensors if name.startswith("buffers/")}
    assert len(names) == 2 * (1 + 2 * settings.get("layers", 2))


def test_a_server_saves_the_mean_of_its_workers_statistics(tmp_path):
    server = {"strategy": "ps", "evaluate_every": None, "save": str(tmp_path), "dp": 2, "precision": "fp64"}
    assert run_training(job(**server, steps=1), None, 60, None).volumes_hold()
    mean = Checkpoint(tmp_path).tensor("buffers/stem.first.norm.running_mean")

    # In the first step all ranks have the same weights, so the mean over rows is the mean over workers.
    run_training(job(dp=2, precision="fp64", steps=1, evaluate_every=None, save=str(tmp_path / "dp")), None, 60, None)
    np.testing.assert_allclose(
        mean, Checkpoint(tmp_path / "dp").tensor("buffers/stem.first.norm.running_mean"), rtol=1e-12, atol=1e-15
    )
    assert len(run_training(job(**server, resume=True), None, 60, None).losses) == 2


def test_it_learns():
    losses = run_training(job(steps=30, lr=0.02, evaluate_every=None, global_batch=48), None, 60, None).losses
    assert np.mean(losses[-5:]) < 0.85 * np.mean(losses[:5])


def test_its_blocks_are_timed_and_cut_by_the_times(tmp_path):
    layers = profile_layers(job(layers=3), 1)
    assert [layer.op for layer in layers] == ["stem + block 0", "block 1", "block 2 + head"]
    assert layers[0].act_bytes == 24 * 4 * 6 * 6 * 4
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps([vars(layer) for layer in layers]))
    assert run_training(job(layers=3, **PIPELINE, partition=str(profile)), None, 60, None).volumes_hold()


def test_recomputation_keeps_less():
    kept = [run_training(job(recompute=how, layers=5), None, 60, None).peak_bytes for how in ("none", "sqrt")]
    assert max(kept[1]) < 0.85 * max(kept[0])


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (3, 5, 4)])
def test_images_of_files_have_their_channels_where_the_model_looks_for_them(shape, tmp_path):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=draw.integers(0, 256, (6, *shape), dtype=np.uint8), y=np.arange(6) % 3)
    config = TrainConfig.make(model="cnn", layers=1, width=4, data=f"npz:{tmp_path}/d.npz", global_batch=6, steps=1)
    data = load_dataset(config.data)
    assert data.image == ((1, 5, 4) if len(shape) == 2 else (3, 5, 4))
    stem = make_model(config, data).stem
    seen = []
    stem.first.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].data))
    pixels = data.inputs[:1].reshape(1, -1).astype(np.float32)
    stem.eval()(Tensor(pixels))
    image = np.moveaxis(data.inputs[0], -1, 0) if shape[-1] == 3 else data.inputs[0]
    np.testing.assert_array_equal(seen[0][0], image.reshape(-1, 5, 4))
    assert run_training(config, None, 60, None).losses[0] > 0


def test_without_norms_there_are_none_and_the_convolutions_have_a_bias():
    with_norms, without = (make_model(job(batch_norm=how), glyphs()) for how in ("local", "none"))
    assert sum(isinstance(module, BatchNorm) for module in with_norms.modules()) == 5
    assert not any(isinstance(module, BatchNorm) for module in without.modules())
    assert (with_norms.stem.first.conv.bias is None, without.stem.first.conv.bias is None) == (True, False)


def test_a_classifier_of_images_generates_no_text(tmp_path):
    run_training(job(steps=1, layers=1, save=str(tmp_path), evaluate_every=None), None, 60, None)
    with pytest.raises(UsageError, match=r"holds a classifier \(--model cnn\), which generates no text"):
        load_model(tmp_path)


def test_a_comparison_in_bits_of_synchronised_norms_is_refused():
    with pytest.raises(UsageError, match=r"--batch-norm sync adds the rows of all ranks .* --precision fp64"):
        run_comparison(job(dp=2, batch_norm="sync", reduction="ordered"), None, 60)
