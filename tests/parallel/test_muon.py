"""Muon as a job: equal to one device wherever matrices are cut, with every byte in the closed form."""

import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.core.parallel.fsdp import fully_shard, sharded_parameters
from minidist.job.config.train_config import TrainConfig
from minidist.job.equality.compare import compare_rank
from minidist.job.train.trainer import train
from minidist.optim import Muon
from minidist.parallel import WholeMatrices
from minidist.parallel.whole_matrices import muon_volume
from minidist.techniques.parameter_server.loop import compare_served, serve_and_keep
from tests.cases import each
from tests.equality.test_equality import verdict
from tests.jobs import train_in_closed_form
from tests.parallel.models import small_gpt

JOB = {"model": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 6, "data": "markov", "steps": 2}
JOB |= {"micro_batch": 2, "reduction": "ordered", "clip": 0.5, "weight_decay": 0.1}
JOB |= {"optimizer": "muon", "momentum": 0.9, "lr": 0.02}
ALL = {"orthogonalize": "everywhere"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (3, {"nesterov": True}),
        (3, {**ALL}),
        (3, {"zero": 1}),
        (3, {"zero": 1, **ALL}),
        (3, {"zero": 2, "accumulation": 2, "nesterov": True}),
        (3, {"zero": 3}),
        (2, {"zero": 3, **ALL}),
        (4, {"zero": 3, "dp_replicate": 2, "persistence_threshold": 100}),
        (4, {"pp": 2, "zero": 1, "schedule": "dualpipe", "layers": 4, "microbatches": 4}),
        (4, {"pp": 2, "zero": 3}),
        (2, {"zero": 3, "offload": "parameters"}),
        (2, {"zero": 1, "precision": "bf16"}),
        (2, {"dp": 2, "ep": 2, "experts": 2, "precision": "fp64"}),
        (2, {"model": "mlp", "layers": 1, "width": 9, "data": "glyphs", "zero": 2}),
        # Tensor and context parallelism add in another order: the float tier.
        (2, {"tp": 2, "precision": "fp64"}),
        (4, {"tp": 2, "zero": 1, "sequence_parallel": True, "precision": "fp64"}),
        (4, {"tp": 4, "model": "llama", "kv_heads": 2, "heads": 4, "zero": 3, "width": 24, "precision": "fp64"}),
        (4, {"tp": 2, "pp": 2, "precision": "fp64", **ALL}),
        (2, {"cp": 2, "precision": "fp64"}),
    ],
)
def test_jobs_equal_one_device(ranks, layout):
    result = verdict(ranks, **{**JOB, **layout})
    assert result.equal, result.first_difference
    assert result.tier == ("float" if "precision" in layout and layout["precision"] == "fp64" else "ordered")


def test_replicas_of_local_steps_are_bitwise_equal():
    for result in SimWorld(2).run(compare_rank, TrainConfig.make(**{**JOB, "clip": None}, local_steps=2, dp=2)):
        assert result.equal, result.first_difference


def test_a_parameter_server_is_bitwise_equal():
    config = TrainConfig.make(**{**JOB, "clip": None}, strategy="ps", servers=2)
    world = SimWorld(4)
    result = compare_served(config, world.run(serve_and_keep, config), world.traces)
    assert result.equal, result.first_difference


@each(
    ("ranks", "layout"),
    [
        (1, {}),
        (3, {}),
        (3, ALL),
        (3, {"zero": 1}),
        (3, {"zero": 1, **ALL}),
        (4, {"zero": 3, "dp_replicate": 2}),
        (8, {"tp": 2, "pp": 2, "zero": 2}),
        (4, {"tp": 2, **ALL}),
        (4, {"zero": 1, "precision": "fp16", "loss_scale": 2.0**17, "cp": 2}),
    ],
    sampled=6,
)
def test_every_byte_is_in_the_closed_form(ranks, layout):
    config = TrainConfig.make(**{**JOB, **layout})
    _, measured = train_in_closed_form(ranks, config)

    # By hand: the matrices of a block have 12 h^2 elements. Replicas send each once to every other rank, or nothing;
    # gathered everywhere a shard goes to every other rank.
    matrices = config.steps * config.layers * 12 * config.width**2
    if ranks == 3:
        everywhere = (ranks - 1) * matrices * 4
        expected = {(0, "owner"): everywhere, (0, "everywhere"): 0, (1, "everywhere"): everywhere}
        measured_muon = measured["muon"]
        if (config.zero, config.orthogonalize) in expected:
            assert measured_muon == expected[config.zero, config.orthogonalize]
        else:
            assert 0 < measured_muon <= 2 * matrices * 4


def test_owners_send_what_they_do_not_have_there_and_back():
    assert muon_volume([[4, 2, 0], [0, 3, 3]], [0, 2], 3) == 2 * (2 + 3)
    assert muon_volume([[4, 2, 0], [0, 3, 3]], None, 3) == 2 * (6 + 6)
    assert muon_volume([[6] * 3, [6] * 3], [0, 2], 3, replicas=True) == 2 * 12


def test_a_resumed_job_continues_with_the_same_bits_on_another_layout(tmp_path):
    values = {**JOB, "steps": 3, "global_batch": 4, "micro_batch": None}

    def digest(ranks=2, **changed):
        return SimWorld(ranks).run(train, TrainConfig.make(**{**values, **changed}))[0].digest

    straight = digest(zero=1)
    digest(zero=3, steps=1, save=str(tmp_path))
    assert digest(zero=1, save=str(tmp_path), resume=True, keep=None) == straight


def test_matrices_of_shards_are_refused_without_a_way_to_gather_them():
    def program(comm):
        with pytest.raises(UsageError, match=r"Muon orthogonalises the whole of .* pass whole_matrices="):
            Muon(sharded_parameters(fully_shard(small_gpt(), mesh=comm)), lr=0.05)

    SimWorld(2).run(program)
    with pytest.raises(UsageError, match="form='all'; it must be 'owner' or 'everywhere'"):
        WholeMatrices([], form="all")
