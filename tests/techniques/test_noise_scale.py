"""`--noise-scale`: the number that one device computes from the same micro-batches, for 8 bytes a step, and no other
weights.
"""

import json

import numpy as np
import pytest

from minidist.base.coordinates import batch_coordinates
from minidist.commands.runner import run_training
from minidist.core.base.errors import UsageError
from minidist.core.nn import FlatParameters
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.train.job import build
from minidist.techniques import of_job
from minidist.techniques.adaptive_batch.noise_scale import NoiseScale, estimate
from tests.cases import each
from tests.jobs import train_in_closed_form

SMALL = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "context": 8,
    "steps": 1,
    "micro_batch": 2,
    "accumulation": 2,
    "noise_scale": True,
    "precision": "fp64",
}


def config(**values):
    return TrainConfig.make(**{**SMALL, **values})


BUCKETS = {"bucket_cap_mb": 0.004, "clip": 1e-3}
STAGES = {"pp": 2, "layers": 2}


@each(
    ("ranks", "layout"),
    [
        *((ranks, {**BUCKETS, "reduction": order}) for ranks in (2, 3) for order in ("ring", "ordered")),
        (3, {"zero": 1, "reduce_bucket_size": 1000, "clip": 1e-3}),
        (2, {"experts": 2, "aux_loss_weight": 0.0}),
        # A norm's weight is on both tensor-parallel ranks, and a tied weight on both stages: each counts once.
        (4, {**BUCKETS, "tp": 2}),
        (4, {**BUCKETS, **STAGES}),
        (4, {**STAGES, "zero": 1, "schedule": "zb-h1"}),
        (8, {**STAGES, "zero": 1, "tp": 2, "sequence_parallel": True}),
    ],
)
def test_it_is_what_one_device_computes(ranks, layout):
    made = config(**layout)
    batches = resolve_batches(made, ranks)
    results, _ = train_in_closed_form(ranks, made)

    # One device computes each replica's gradient on its own.
    job, ranks = build(made, batches), batches.dp
    flat, shares = FlatParameters(job.model.parameters()), []
    for rank in range(ranks):
        flat.zero_grad()
        for number in (2 * rank, 2 * rank + 1):
            with batch_coordinates(0, 2 * number, made.seed):
                job.loss(*job.micro_batch(0, number)).backward()
        shares.append(ranks * flat.grad)  # the mean gradient of the rank's 4 samples
    whole = np.mean(shares, axis=0)
    expected = estimate(4, np.mean([share @ share for share in shares]), 4 * ranks, whole @ whole)
    for result in results:
        assert result.measured["noise_scale"]["gradient_square"] == pytest.approx(expected.gradient, rel=1e-9)
        assert result.measured["noise_scale"]["noise"] == pytest.approx(expected.noise, rel=1e-9)


def test_it_costs_one_number_and_changes_nothing(tmp_path):
    with_it, without = (
        run_training(config(dp=3, steps=4, noise_scale=on), None, 60.0, tmp_path / "t.jsonl") for on in (True, False)
    )
    assert with_it.digest == without.digest
    assert with_it.volumes_hold()
    more = with_it.bytes_by_purpose["metrics"]["measured"] - without.bytes_by_purpose["metrics"]["measured"]
    assert more == 4 * 2 * 2 * 8  # steps x 2 (n-1) x 8 B
    assert json.loads(json.dumps(with_it.as_dict()))["noise_scale"].keys() == {"samples", "gradient_square", "noise"}
    assert "gradient noise scale" in with_it.table()
    assert "noise_scale" not in without.as_dict()


def test_a_gradient_that_is_lost_in_its_noise():
    (extension,) = of_job(config(dp=2, noise_scale=True))
    (line,) = extension.lines({"noise_scale": {"samples": None, "gradient_square": -1.0, "noise": 4.0}})
    assert "lost in its noise" in line
    assert NoiseScale().simple == float("inf")


@each(
    "values",
    [
        {},
        {"zero": 2, "dp": 2},
        {"tp": 2},
        {"cp": 2, "dp": 1},
        {"dp": 2, "compression": "sign"},
        {"dp": 2, "synchronize_each": True},
        {"strategy": "ps"},
    ],
)
def test_what_it_does_not_go_with(values):
    made = config(**values)
    with pytest.raises(UsageError, match="--noise-scale compares"):
        check_rules(made, resolve_batches(made, 1 if not values else 2))
