"""The training loop with sharded state: the same promise and the same closed forms as data parallelism."""

import pytest

from minidist.comm import SimWorld
from minidist.train.compare import compare_rank, expected_snapshots
from minidist.train.config import TrainConfig, resolve_batches
from minidist.train.trainer import train
from minidist.train.volumes import closed_form_bytes

GPT = {"model": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 6, "data": "markov", "steps": 3, "clip": 0.5}
SMALL = {"micro_batch": 1, "accumulation": 2, "reduce_bucket_size": 3000}
STAGES = [1, 2, 3]


def verdict(ranks, **values):
    config = TrainConfig.make(**values)
    return SimWorld(ranks).run(compare_rank, config, expected_snapshots(config, ranks))[0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("zero", STAGES)
def test_compare_is_equal_bit_for_bit(zero, ranks):
    result = verdict(ranks, **GPT, **SMALL, zero=zero, reduction="ordered", dropout=0.1)
    assert result.equal, result.first_difference
    assert set(result.max_difference.values()) == {0.0}


@pytest.mark.parametrize("zero", STAGES)
def test_the_ring_is_equal_in_the_float_tier(zero):
    result = verdict(3, **GPT, **SMALL, zero=zero, precision="fp64")
    assert result.equal, result.first_difference


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("zero", STAGES)
def test_every_byte_is_in_the_closed_form(zero, ranks):
    config = TrainConfig.make(**GPT, **SMALL, zero=zero)
    world = SimWorld(ranks)
    results = world.run(train, config)
    measured: dict[str, int] = {}
    for trace in world.traces:
        for purpose, volume in trace.bytes_by_purpose().items():
            measured[purpose] = measured.get(purpose, 0) + volume
    assert measured == closed_form_bytes(config, resolve_batches(config, ranks), [result.sizes for result in results])


@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_is_equal_bit_for_bit(recompute, zero):
    """The reference keeps all activations."""
    result = verdict(2, **GPT, **SMALL, zero=zero, reduction="ordered", dropout=0.1, recompute=recompute)
    assert result.equal, result.first_difference


@pytest.mark.mpi(2)
@pytest.mark.parametrize("zero", STAGES)
def test_mpi_trains_to_the_simulated_bits(comm, zero):
    config = TrainConfig.make(**GPT, **SMALL, zero=zero)
    simulated = SimWorld(comm.size).run(train, config)[comm.rank]
    real = train(comm, config)
    assert (real.losses, real.digest) == (simulated.losses, simulated.digest)
