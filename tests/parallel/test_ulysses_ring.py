"""Ulysses x ring equals one device, and sends what its two parts send."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig
from minidist.parallel.context import UlyssesRingAttention
from minidist.parallel.context.orders import sequence_positions
from tests.jobs import equals_one_device_in_closed_form
from tests.parallel.test_context import KINDS, assert_model


def test_a_group_holds_what_a_rank_of_the_ring_holds():
    for near, far in ((1, 3), (2, 2), (3, 2), (2, 3), (4, 1)):
        for length in (near * far, near * far + 1, 23):
            parts = [sequence_positions(length, rank, near * far, f"zigzag/{near}") for rank in range(near * far)]
            assert all(len(part) > 0 for part in parts)
            for group in range(far):
                together = np.concatenate(parts[group * near : (group + 1) * near])
                assert np.array_equal(together, sequence_positions(length, group, far))
    with pytest.raises(UsageError, match="unknown order 'zigzag/0'"):
        sequence_positions(8, 0, 2, "zigzag/0")
    with pytest.raises(UsageError, match="ulysses=3 does not divide the 2 context-parallel ranks"):
        SimWorld(2).run(lambda comm: UlyssesRingAttention(comm, 8, 3))


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_model_with_dropout_of_weights_equals_one_device(name, monkeypatch):
    """11 tokens: ragged over groups and members."""
    monkeypatch.setitem(KINDS, "2-D", (lambda comm, length: UlyssesRingAttention(comm, length, 2), "zigzag/2"))
    assert_model(4, name, "2-D", "adam", dropout=0.25)


JOB = {"model": "llama", "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "context": 10, "data": "markov"}
JOB |= {"steps": 2, "micro_batch": 2, "cp": 4, "attention": "ulysses-ring"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (4, {"recompute": "selective", "zero": 1}),
        (8, {"tp": 2, "kv_heads": 4, "sequence_parallel": True, "context": 16}),
        (4, {"ulysses": 4, "model": "gpt", "kv_heads": None, "experts": 2}),
        (4, {"ulysses": 1}),
    ],
)
def test_jobs_equal_one_device_with_every_byte_in_the_closed_form(ranks, layout):
    equals_one_device_in_closed_form(ranks, TrainConfig.make(**{**JOB, **layout, "precision": "fp64"}))
