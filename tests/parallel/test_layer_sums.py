"""LARS and LAMB as jobs: equal to one device on every axis that cuts a layer, with every byte in the closed form."""

from types import SimpleNamespace

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.autograd import Parameter
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from minidist.optim.exact_sums import LIMBS
from minidist.parallel import LayerSums
from minidist.parallel.layer_sums import layer_sums_volume
from minidist.techniques.parameter_server.loop import compare_served, serve_and_keep
from tests.cases import each
from tests.equality.test_equality import verdict
from tests.jobs import SMALL_GPT, train_in_closed_form

GPT = SMALL_GPT | {"steps": 3, "micro_batch": 2, "reduction": "ordered", "clip": 0.5, "weight_decay": 0.1}
LAMB_JOB = {"optimizer": "lamb", "lr": 0.05, "betas": "0.8,0.95", "eps": 1e-4}
LARS_JOB = {"optimizer": "lars", "lr": 2.0, "momentum": 0.9, "trust_coefficient": 0.01}
jobs = pytest.mark.parametrize("job", [LAMB_JOB, LARS_JOB], ids=["lamb", "lars"])


@pytest.mark.sampled(6)
@jobs
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (3, {}),
        (3, {"zero": 1}),
        (3, {"zero": 2, "accumulation": 2}),
        (3, {"zero": 3}),
        (4, {"zero": 3, "dp_replicate": 2, "persistence_threshold": 100}),
        (2, {"pp": 2}),
        (4, {"pp": 2, "zero": 1, "schedule": "dualpipe", "layers": 4, "microbatches": 4}),
        (4, {"pp": 2, "zero": 3}),
        (2, {"zero": 3, "offload": "parameters"}),
        (2, {"zero": 1, "precision": "bf16"}),
        (2, {"model": "mlp", "layers": 1, "width": 9, "data": "glyphs", "zero": 2}),
    ],
)
def test_jobs_are_bitwise_equal(job, ranks, layout):
    result = verdict(ranks, **{**GPT, **job, **layout})
    assert result.equal, result.first_difference
    assert result.tier == "ordered"


@pytest.mark.sampled(4)
@jobs
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"tp": 2}),
        (4, {"tp": 2, "zero": 1, "sequence_parallel": True}),
        (4, {"tp": 4, "model": "llama", "kv_heads": 2, "heads": 4, "zero": 3, "width": 24}),
        (4, {"tp": 2, "pp": 2}),
        (4, {"ep": 2, "dp": 2, "tp": 2, "experts": 4, "zero": 1}),
        (2, {"cp": 2}),
    ],
)
def test_jobs_that_cut_sums_are_equal_in_the_float_tier(job, ranks, layout):
    result = verdict(ranks, **{**GPT, **job, **layout, "precision": "fp64"})
    assert result.equal, result.first_difference


@jobs
def test_a_parameter_server_is_bitwise_equal(job):
    """Betas and eps reach the servers' optimizers too: the reference has them."""
    config = TrainConfig.make(**{**GPT, **job, "clip": None}, strategy="ps", servers=2)
    world = SimWorld(4)
    result = compare_served(config, world.run(serve_and_keep, config), world.traces)
    assert result.equal, result.first_difference


@each(
    ("ranks", "layout"),
    [
        (1, {}),
        (3, {}),
        (3, {"zero": 1}),
        (4, {"zero": 3, "dp_replicate": 2}),
        (8, {"tp": 2, "pp": 2, "zero": 2}),
        (8, {"ep": 2, "dp": 4, "tp": 2, "experts": 4, "zero": 1}),
        (4, {"zero": 1, "precision": "fp16", "loss_scale": 2.0**17, "cp": 2}),
        (4, {"pp": 2, "zero": 1, "schedule": "dualpipe", "layers": 4, "microbatches": 4}),
    ],
    sampled=6,
)
def test_every_byte_is_in_the_closed_form(ranks, layout):
    config = TrainConfig.make(**{**GPT, **LAMB_JOB, **layout})
    _, measured = train_in_closed_form(ranks, config)
    assert ("trust_ratio" in measured) == (config.zero > 0 or config.tp > 1)


def test_one_message_of_288_bytes_per_layer():
    """However many units ZeRO 3 has: one all-reduce per step."""
    ranks, config = 3, TrainConfig.make(**{**GPT, **LAMB_JOB, "zero": 3, "steps": 1})
    world = SimWorld(ranks)
    layers = len(world.run(train, config)[0].sizes[0].parameters)
    sent = [trace.bytes_by_purpose()["trust_ratio"] for trace in world.traces]
    assert sum(sent) == 8 * layer_sums_volume(layers, ranks) == 2 * (ranks - 1) * 288 * layers
    assert len(world.traces[0].sent("trust_ratio")) == 2 * (ranks - 1)  # a ring's messages


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("job", "zero", "other", "sentence"),
    [
        *((LARS_JOB, zero, {"trust_coefficient": 0.02}, r"--trust-coefficient 0\.01") for zero in (0, 1, 3)),
        *((LAMB_JOB, zero, {"weight_decay": 0.3}, r"--weight-decay 0\.") for zero in (2,)),
    ],
)
def test_a_resumed_job_continues_with_the_same_bits_and_the_same_settings(job, zero, other, sentence, tmp_path):
    values = {**GPT, **job, "zero": zero, "steps": 4}

    def digests(**changed):
        return [result.digest for result in SimWorld(2).run(train, TrainConfig.make(**{**values, **changed}))]

    straight = digests()
    digests(steps=2, save=str(tmp_path))
    with pytest.raises(UsageError, match=sentence):
        digests(save=str(tmp_path), resume=True, **other)
    assert digests(save=str(tmp_path), resume=True) == straight


def test_key_value_heads_that_neighbours_share_count_once():
    """Of four tensor-parallel ranks, two and two hold the same heads: the sum has two shards."""
    parameter = Parameter(np.ones(2, np.float32), name="k_proj.weight")
    parameter.layout = SimpleNamespace(axes=("tp",), copies=2)

    def main(comm):
        return LayerSums([parameter], tp=comm)({parameter.name: np.full((2, LIMBS), comm.rank + 1.0)})

    for sums in SimWorld(4).run(main):
        np.testing.assert_array_equal(sums[parameter.name], np.full((2, LIMBS), 1.0 + 3.0))
