"""`--precision fp16` and `bf16`: every layout equals one device bit for bit, skipped steps and loss scale included."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.job.config.train_config import TrainConfig
from minidist.job.equality.compare import compare_rank
from minidist.job.equality.expected import expected_snapshots
from minidist.job.train.trainer import train
from tests.jobs import SMALL_GPT, train_in_closed_form

GPT = SMALL_GPT | {
    "steps": 4,
    "clip": 0.5,
    "lr": 0.03,
    "micro_batch": 1,
    "accumulation": 2,
    "loss_scale": 2.0**18,
    "bucket_cap_mb": 0.001,
    "reduce_bucket_size": 3000,
}
LAYOUTS = {
    "one rank": (1, {}),
    "dp 3": (3, {"dropout": 0.1}),
    "dp 2, each micro-batch": (2, {"synchronize_each": True}),
    "zero 1": (3, {"zero": 1}),
    "zero 2": (5, {"zero": 2}),
    "zero 3": (4, {"zero": 3, "recompute": "full"}),
    "pp 2": (2, {"pp": 2, "schedule": "zb-h1", "accumulation": 3}),
    "pp 2, dp 2, zero 1": (4, {"pp": 2, "zero": 1, "recompute": "full"}),
    "offload": (2, {"zero": 1, "offload": "optimizer"}),
    "llama": (2, {"model": "llama"}),
    "mlp": (3, {"model": "mlp", "data": "glyphs", "loss_scale": 2.0**20}),
}


def config_of(layout, precision, **more):
    return TrainConfig.make(**{**GPT, **LAYOUTS[layout][1], "precision": precision, "reduction": "ordered", **more})


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("layout", "precision"), [*((layout, "fp16") for layout in LAYOUTS), ("pp 2", "bf16"), ("zero 3", "bf16")]
)
def test_compare_is_equal_bit_for_bit_and_every_byte_is_in_the_closed_form(layout, precision):
    ranks, config = LAYOUTS[layout][0], config_of(layout, precision)
    expected = expected_snapshots(config, ranks)
    verdict = SimWorld(ranks).run(compare_rank, config, expected)[0]
    assert verdict.equal, verdict.first_difference
    assert set(verdict.max_difference.values()) == {0.0}
    masters = [array for name, array in expected[-1]["optimizer"].items() if name.endswith(".master")]
    assert masters
    assert all(array.dtype == np.float32 for array in masters)
    results, measured = train_in_closed_form(ranks, config)
    if precision == "fp16":
        assert all(0 < result.skipped < 4 for result in results)
    assert ("overflow" in measured) == (precision == "fp16" and ranks > 1)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("zero 1", "bf16"), ("zero 3", "fp16"), pytest.param("dp 3", "fp16", marks=pytest.mark.exhaustive)],
)
def test_a_resumed_job_has_the_bits_of_the_uninterrupted_one(layout, precision, tmp_path):
    """The loss scale, its counters and the master weights are restored."""
    ranks, folder = LAYOUTS[layout][0], str(tmp_path / "a")
    settings = {"steps": 6, "loss_scale_interval": 2, "save": folder, "every": 3}
    whole = SimWorld(ranks).run(train, config_of(layout, precision, **settings))
    (tmp_path / "a" / "latest").write_text("step-00000003")
    resumed = SimWorld(ranks).run(train, config_of(layout, precision, **settings, resume=True))
    assert resumed[0].first_step == 3
    assert [r.digest for r in resumed] == [r.digest for r in whole]
    assert resumed[0].losses == whole[0].losses
    if precision == "fp16":
        ours, theirs = resumed[0].measured["loss_scale"], whole[0].measured["loss_scale"]
        assert ours["scale"] == theirs["scale"]
        assert ours["skipped"] == resumed[0].skipped < theirs["skipped"]  # of this run alone


def test_a_checkpoint_of_one_layout_resumes_in_another(tmp_path):
    folder = str(tmp_path)
    first = SimWorld(3).run(
        train, config_of("zero 3", "fp16", recompute="none", steps=4, save=folder, global_batch=6, accumulation=None)
    )
    settings = {"steps": 5, "save": folder, "resume": True, "global_batch": 6, "accumulation": None}
    for layout in ("zero 1", "dp 3"):
        (tmp_path / "latest").write_text("step-00000004")
        results = SimWorld(2).run(train, config_of(layout, "fp16", dropout=0.0, **settings))
        assert results[0].losses[:4] == first[0].losses
        assert np.isfinite(results[0].losses[4])
        assert results[0].measured["loss_scale"]["scale"] <= first[0].measured["loss_scale"]["scale"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (4, {"tp": 2, "zero": 1, "sequence_parallel": True}),
        (2, {"cp": 2}),
        (4, {"tp": 2, "pp": 2}),
        (4, {"pp": 2, "experts": 2, "ep": 2}),
    ],
)
def test_axes_that_split_sums_train_as_in_float32_and_every_byte_is_in_the_closed_form(ranks, axes):
    def run(precision):
        config = TrainConfig.make(
            **{**GPT, "lr": 3e-3, "loss_scale": 2.0**10, "steps": 3, "precision": precision, **axes}
        )
        results, measured = train_in_closed_form(ranks, config)
        return np.array(results[0].losses), measured

    (whole, _), (half, measured) = run("fp32"), run("fp16")
    assert np.abs(half - whole).max() < 2e-3
    assert measured["overflow"] == 3 * ranks * {2: 1, 4: 2}[ranks]
