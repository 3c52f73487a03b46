"""The training loop with sharded state: equal to one device, and volumes equal to the closed forms."""

import pytest

from minidist.comm import SimWorld
from minidist.job.config.train_config import TrainConfig
from minidist.job.equality.compare import compare_rank
from minidist.job.equality.expected import expected_snapshots
from tests.cases import each
from tests.jobs import equals_one_device_in_closed_form, train_in_closed_form

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
    train_in_closed_form(ranks, config)


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
    train_in_closed_form(2, config)


@each("flags", FLAGS, ids=str, sampled=6)
def test_every_way_to_shard_fully_is_equal_and_in_the_closed_form(flags):
    config = TrainConfig.make(**{**GPT, "steps": 2}, **SMALL, zero=3, reduction="ordered", dropout=0.1, **flags)
    equals_one_device_in_closed_form(4, config)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize("recompute", ["full", "selective", "sqrt", "budget:9000"])
def test_recomputation_is_equal_bit_for_bit(recompute, zero):
    """The reference keeps all activations."""
    result = verdict(2, **GPT, **SMALL, zero=zero, reduction="ordered", dropout=0.1, recompute=recompute)
    assert result.equal, result.first_difference
