"""Batches that change while a job trains: equal to one device that is told them, resumed, counted in closed form."""

from collections import Counter
from math import inf
from types import SimpleNamespace

import pytest

from minidist.comm import SimWorld
from minidist.comm.sim.links import LinkModel
from minidist.core.base.errors import UsageError
from minidist.data import cut_batch
from minidist.job.checkpoint.directory import Checkpoint
from minidist.job.checkpoint.resume import read_job_state
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.planning.volumes import phases_bytes
from minidist.techniques.adaptive_batch.noise_scale import NoiseScale
from minidist.techniques.adaptive_batch.plan import VaryingPlan
from tests.cases import each
from tests.jobs import sent_bytes
from tests.train.test_shares import check_bytes, config_of

SLOWDOWN = (1.0, 2.0, 4.0, 1.0)
MEASURED = {"global_batch": 14, "dp": 3, "weights": "measured:2", "steps": 5, "layers": 1}
GROWS = {"global_batch": 2, "dp": 2, "adaptive_batch": 16, "steps": 5, "layers": 1, "optimizer": "sgd", "lr": 0.5}
PIPELINE = {**GROWS, "pp": 2, "layers": 2, "microbatches": 1}
BOTH = {**GROWS, "global_batch": 4, "accumulation": 2, "zero": 1, "weights": "measured:2", "lr_scaling": "sqrt:2"}


def world(ranks):
    return SimWorld(ranks, links=LinkModel(slowdown=SLOWDOWN.__getitem__))


@each(
    "values",
    [
        {**MEASURED, "evaluate_every": 2, "clip": 0.5},
        {**MEASURED, "dp": 2, "accumulation": 2, "zero": 3, "precision": "bf16", "steps": 4},
        {**GROWS, "lr_scaling": "linear"},
        {**BOTH, "dropout": 0.1, "evaluate_every": 2},
        {**MEASURED, "dp": 2, "ep": 2, "experts": 2, "precision": "fp64", "reduction": "ring"},
        {**GROWS, "tp": 2, "steps": 3, "precision": "fp64", "reduction": "ring"},
        {**PIPELINE, "evaluate_every": 1, "lr_scaling": "linear", "dropout": 0.1},
        {
            **PIPELINE,
            "zero": 1,
            "schedule": "interleaved",
            "layers": 4,
            "chunks": 2,
            "microbatches": 2,
            "global_batch": 4,
            "seed": 2,
            "precision": "fp64",
        },
        {**PIPELINE, "tp": 2, "schedule": "zb-h1", "recompute": "full", "precision": "fp64", "reduction": "ring"},
    ],
    sampled=8,
)
def test_changing_batches_equal_one_device_that_is_told_them_and_send_the_closed_form(values):
    config, batches, ranks = config_of(**values)
    sim = SimWorld(ranks, links=LinkModel(slowdown=lambda rank: SLOWDOWN[rank // config.tp % 3]))
    verdict = sim.run(compare_rank, config)[0]
    assert verdict.equal, verdict.sentence()
    assert verdict.steps == config.steps

    results = sim.run(train, config)
    assert len(results[0].runs) > 1
    assert {str(result.runs) for result in results} == {str(results[0].runs)}
    check_bytes(config, batches, sim, results, results[0].runs)


def test_shares_follow_the_measured_speeds():
    result = world(3).run(train, config_of(**MEASURED)[0])[0]
    assert [(sum(map(sum, shares.rows)), steps) for shares, steps in result.runs] == [(14, 2), (14, 3)]
    assert [[sum(rows) for rows in shares.rows] for shares, _ in result.runs] == [[5, 5, 4], [8, 4, 2]]


def test_a_batch_grows_by_micro_batches_within_its_bounds():
    runs = SimWorld(2).run(train, config_of(**{**GROWS, "adaptive_batch": 6})[0])[0].runs
    samples = [shares.samples for shares, _ in runs]
    assert samples == sorted(set(samples))
    assert (samples[0], samples[-1]) == (2, 6)
    assert all(shares == cut_batch(shares.samples, 2, shares.samples // 2) for shares, _ in runs)


@pytest.mark.parametrize(("values", "done"), [(MEASURED, 3), (BOTH, 3), ({**PIPELINE, "steps": 6}, 5)])
def test_a_resumed_job_has_the_same_batches_and_bits(values, done, tmp_path):
    ranks, saved = values["dp"] * values.get("pp", 1), {"save": str(tmp_path / "a"), "every": done}
    whole = world(ranks).run(train, config_of(**values, **saved)[0])[0]
    resumed = {**saved, "save": str(tmp_path / "b")}
    world(ranks).run(train, config_of(**{**values, "steps": done}, **resumed)[0])
    config, batches, _ = config_of(**values, **resumed, resume=True)
    sim = world(ranks)
    results = sim.run(train, config)
    rest = results[0]
    assert (rest.losses, rest.digest, rest.first_step) == (whole.losses, whole.digest, done)
    # In a pipeline also with the plan of the first batch, by which no step is made.
    closed = phases_bytes(config, batches, [result.phases for result in results], done, rest.runs)
    assert sent_bytes(sim) - Counter(checkpoint=16 * (ranks - 1)) == closed
    # Saving begins a new measurement.
    plan = VaryingPlan(*config_of(**values)[:2], NoiseScale())
    plan.seconds = [1.0]
    plan.state()
    assert plan.seconds == []
    assert rest.runs[-1][0] == whole.runs[-1][0] != whole.runs[0][0]


def test_a_growing_batch_in_a_pipeline_is_evaluated_on_the_first_one():
    """Held-out losses are those of data parallelism, whose steps are the same."""
    steps = {"evaluate_every": 1, "precision": "fp64"}
    piped = SimWorld(4).run(train, config_of(**PIPELINE, **steps)[0])[0]
    flat = SimWorld(2).run(train, config_of(**{**GROWS, "layers": 2}, **steps)[0])[0]
    assert len({shares.samples for shares, _ in piped.runs}) > 1
    assert piped.runs == flat.runs
    assert piped.losses == pytest.approx(flat.losses, rel=1e-9)
    assert piped.held_out == pytest.approx(flat.held_out, rel=1e-9)


def test_an_adaptive_batch_follows_the_noise_scale():
    values = {**GROWS, "global_batch": 16, "accumulation": 2, "adaptive_batch": 80}
    plan, sizes = VaryingPlan(*config_of(**values)[:2], SimpleNamespace()), []
    for scale in (3.0, 26.0, 500.0, inf, 5.0):
        plan.noise.simple = scale
        plan.grow()
        sizes.append(plan.next().shares.samples)
    assert sizes == [16, 24, 48, 80, 80]


def test_a_pipeline_takes_over_the_multiple_below_a_saved_batch():
    values = {**PIPELINE, "global_batch": 4, "microbatches": 2}
    plan = VaryingPlan(*config_of(**values)[:2], NoiseScale())
    plan.load({"weights": None, "samples": [4, 6], "next": 10, "noise": [1.0, 1.0, 1.0]}, 2)
    assert plan.next().shares == cut_batch(8, 2, 4)


def test_a_checkpoint_with_other_batches_than_steps_is_refused(tmp_path):
    config, batches, _ = config_of(**GROWS)
    SimWorld(2).run(train, config_of(**GROWS, save=str(tmp_path))[0])
    plan = read_job_state(Checkpoint(tmp_path)).batch_plan
    for samples in (plan["samples"][:-1], [*plan["samples"], 2]):
        with pytest.raises(ValueError, match=f"it has {len(samples)} batches of 5 steps"):
            VaryingPlan(config, batches, NoiseScale()).load({**plan, "samples": samples}, 5)


@pytest.mark.parametrize("text", ["measured:0", "measured", "measured:x"])
def test_a_measurement_without_steps(text):
    with pytest.raises(UsageError, match=f"--weights '{text}'; write the steps"):
        resolve_batches(TrainConfig.make(weights=text), 2)
