"""The training loop with sharded state: equal to one device, and volumes equal to the closed forms."""

from collections import Counter

import pytest

from minidist.comm import SimWorld
from minidist.job.config.train_config import TrainConfig, resolve_batches
from minidist.job.equality.compare import compare_rank
from minidist.job.equality.expected import expected_snapshots
from minidist.job.train.trainer import train
from minidist.planning.volumes import closed_form_bytes
from tests.cases import each

GPT = {"model": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 6, "data": "markov", "steps": 3, "clip": 0.5}
SMALL = {"micro_batch": 1, "accumulation": 2, "reduce_bucket_size": 3000}
STAGES = [1, 2, 3]


def verdict(ranks, **values):
    config = TrainConfig.make(**values)
    return SimWorld(ranks).run(compare_rank, config, expected_snapshots(config, ranks))[0]


@each("ranks", [1, 2, 3])
@each("zero", STAGES)
def test_every_byte_is_in_the_closed_form(zero, ranks):
    config = TrainConfig.make(**GPT, **SMALL, zero=zero)
    world = SimWorld(ranks)
    results = world.run(train, config)
    measured: dict[str, int] = {}
    for trace in world.traces:
        for purpose, volume in trace.bytes_by_purpose().items():
            measured[purpose] = measured.get(purpose, 0) + volume
    assert measured == closed_form_bytes(config, resolve_batches(config, ranks), [result.sizes for result in results])


FLAGS = [
    {"dp_replicate": 2},
    {"dp_replicate": 4},
    {"reshard_after_forward": "false"},
    {"reshard_after_forward": "2"},
    {"reshard_after_forward": "false", "recompute": "full"},
    {"reshard_after_forward": "2", "recompute": "budget:300000"},
    {"persistence_threshold": 100},
    {"dp_replicate": 2, "persistence_threshold": 300, "prefetch": 2},
    {"offload": "parameters"},
    {"offload": "parameters", "dp_replicate": 2, "recompute": "sqrt"},
]


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2, "zero": 3}], ids=str)
def test_segments_send_again_what_their_blocks_send(layout):
    config = TrainConfig.make(**{**GPT, "clip": None}, **layout, micro_batch=1, recompute="sqrt")
    world = SimWorld(2)
    results = world.run(train, config)
    measured: Counter[str] = Counter()
    for trace in world.traces:
        measured.update(trace.bytes_by_purpose())
    assert measured == closed_form_bytes(config, resolve_batches(config, 2), [r.sizes for r in results])


@each("flags", FLAGS, ids=str, sampled=6)
def test_every_way_to_shard_fully_is_equal_and_in_the_closed_form(flags):
    config = TrainConfig.make(**{**GPT, "steps": 2}, **SMALL, zero=3, reduction="ordered", dropout=0.1, **flags)
    expected = expected_snapshots(config, 4)
    result = SimWorld(4).run(compare_rank, config, expected)[0]
    assert result.equal, result.first_difference
    world = SimWorld(4)
    results = world.run(train, config)
    measured: dict[str, int] = {}
    for trace in world.traces:
        for purpose, volume in trace.bytes_by_purpose().items():
            measured[purpose] = measured.get(purpose, 0) + volume
    assert measured == closed_form_bytes(config, resolve_batches(config, 4), [r.sizes for r in results])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("recompute", ["full", "selective", "sqrt", "budget:9000"])
def test_recomputation_is_equal_bit_for_bit(recompute, zero):
    """The reference keeps all activations."""
    result = verdict(2, **GPT, **SMALL, zero=zero, reduction="ordered", dropout=0.1, recompute=recompute)
    assert result.equal, result.first_difference
