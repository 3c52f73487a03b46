"""A learning rate that follows the global batch: Goyal's factors, one device in every layout, resumed, no messages."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.commands.runner import run_comparison
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.job import build
from minidist.job.train.metrics import MetricsFile, read_metrics
from minidist.job.train.trainer import train
from minidist.techniques import own_loop
from minidist.techniques.lr_scaling.extension import exponent_and_steps
from tests.cases import each
from tests.train.test_shares import JOB as SMALL
from tests.train.test_shares import check_bytes, config_of

JOB = {"layers": 1, "steps": 4, "optimizer": "sgd", "lr": 0.5, "global_batch": 8, "base_batch": 2}
GROWS = {**JOB, "dp": 2, "global_batch": 2, "adaptive_batch": 16, "base_batch": None, "steps": 5}


def factors_of(count, told=(), **values):
    """The factors of the learning rate in the first steps. told: the samples of each step; none: those of the job."""
    config, batches, _ = config_of(**{**JOB, **values})
    job, factors = build(config, batches), []
    for step in range(count):
        for extension in job.extensions:
            extension.before_step(told[step] if told else batches.global_batch)
        factors.append(job.lr_factor(step))
    return factors


def test_the_factor_climbs_by_equal_amounts_to_that_of_the_batch():
    assert factors_of(3, lr_scaling="linear") == [4, 4, 4]
    assert factors_of(3, lr_scaling="sqrt") == [2, 2, 2]
    assert factors_of(5, lr_scaling="linear:3") == [2, 3, 4, 4, 4]
    assert factors_of(3, lr_scaling="sqrt:2") == [1.5, 2, 2]
    # A smaller batch than that of --lr takes a smaller rate.
    assert factors_of(2, lr_scaling="linear", base_batch=16) == [0.5, 0.5]
    # The schedule multiplies it.
    assert factors_of(3, lr_scaling="linear", warmup=2) == [2, 4, 4]


def test_each_growth_of_the_batch_has_its_ramp():
    told = (2, 2, 4, 4, 4, 4, 16)
    assert factors_of(7, told, **{**GROWS, "lr_scaling": "linear:4"}) == [1, 1, 1.25, 1.5, 1.75, 2, 3.5]
    # With a stated base batch the first batch has one, too.
    assert factors_of(4, told, **{**GROWS, "base_batch": 1, "lr_scaling": "linear:2"}) == [1.5, 2, 3, 4]


@pytest.mark.parametrize("grown", [{"dp": 4}, {"accumulation": 4}, {"dp": 2, "accumulation": 2}])
def test_a_batch_that_grows_by_ranks_or_by_accumulation_is_the_job_with_that_rate(grown):
    job = {**JOB, "global_batch": None, "micro_batch": 2, **grown}
    config, batches, ranks = config_of(**job, lr_scaling="linear")
    assert batches.global_batch == 8
    by_hand = config_of(**{**job, "base_batch": None, "lr": 4 * JOB["lr"]})[0]
    worlds = SimWorld(ranks), SimWorld(ranks)
    scaled, fixed = worlds[0].run(train, config), worlds[1].run(train, by_hand)
    assert (scaled[0].digest, scaled[0].losses) == (fixed[0].digest, fixed[0].losses)
    # Not one message more.
    check_bytes(config, batches, worlds[0], scaled)
    sent = [[trace.bytes_by_purpose() for trace in world.traces] for world in worlds]
    assert sent[0] == sent[1]


@each(
    "values",
    [
        {"dp": 2, "zero": 1, "clip": 0.5},
        {"dp": 2, "zero": 3, "warmup": 2, "decay": "cosine"},
        {"pp": 2, "layers": 2, "microbatches": 4},
        {"pp": 2, "layers": 2, "schedule": "pipedream", "microbatches": 1},
        {"dp": 2, "local_steps": 2},
        {"dp": 2, "precision": "fp16"},
        {**GROWS, "zero": 1},
        {"dp": 2, "tp": 2, "precision": "fp64", "reduction": "ring"},
    ],
    sampled=8,
)
def test_every_layout_equals_one_device(values):
    config, _, ranks = config_of(**{**JOB, **values, "lr_scaling": "linear:2"})
    verdict = run_comparison(config, ranks, 60)
    assert verdict.equal, verdict.first_difference


def test_a_server_and_its_workers_have_the_rate_of_the_batch():
    job, losses = {**SMALL, **JOB, "dp": 2, "strategy": "ps", "servers": 1}, []
    for values in ({"lr_scaling": "linear"}, {"base_batch": None, "lr": 4 * JOB["lr"]}, {"base_batch": None}):
        config = TrainConfig.make(**{**job, **values})
        losses.append(SimWorld(3).run(lambda comm, config=config: own_loop(config).train(comm, [])).pop(0).losses)
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("values", [{**JOB, "dp": 2, "steps": 5}, {**GROWS, "base_batch": 1}])
def test_a_resumed_job_goes_on_in_its_ramp(values, tmp_path):
    values = {**values, "lr_scaling": "linear:3"}
    whole = SimWorld(2).run(train, config_of(**values)[0])[0]
    saved = {**values, "save": str(tmp_path)}
    SimWorld(2).run(train, config_of(**{**saved, "steps": 2})[0])
    rest = SimWorld(2).run(train, config_of(**saved, resume=True)[0])[0]
    assert (rest.losses, rest.digest, rest.first_step) == (whole.losses, whole.digest, 2)
    with pytest.raises(UsageError, match="--lr-scaling linear:3"):
        SimWorld(2).run(train, config_of(**{**saved, "lr_scaling": "sqrt", "steps": 6}, resume=True)[0])


def test_metrics_and_the_result_say_the_rate(tmp_path):
    with MetricsFile(tmp_path / "m") as metrics:
        result = SimWorld(2).run(train, config_of(**{**GROWS, "base_batch": 2, "lr_scaling": "sqrt"})[0], [metrics])[0]
    records = read_metrics(tmp_path / "m")
    assert [record["samples"] for record in records] == np.cumsum([sum(record["rows"]) for record in records]).tolist()
    for record in records:
        assert record["lr"] == pytest.approx(0.5 * (sum(record["rows"]) / 2) ** 0.5)
    assert records[-1]["lr"] > 0.5
    found = result.measured["lr_scaling"]
    assert found["factor"] == pytest.approx(records[-1]["lr"] / 0.5)
    assert (found["base_batch"], found["last_batch"]) == (2, sum(records[-1]["rows"]))


@pytest.mark.parametrize("text", ["cubic", "linear:0", "linear:x", "none:3", "sqrt:"])
def test_a_scaling_that_is_none(text):
    with pytest.raises(UsageError, match=r"--lr-scaling .*it must be none, linear or sqrt"):
        exponent_and_steps(text)
    with pytest.raises(UsageError, match=r"--lr-scaling .*it must be none, linear or sqrt"):
        config_of(**JOB, lr_scaling=text)
