"""Every axis with every other: a sample of layouts at 2 to 8 ranks, each equal to one device in every tensor of every
step.
"""

import pytest

from minidist.comm import SimWorld
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.start import number_of_ranks
from minidist.job.train.trainer import train
from tests.equality.test_equality import verdict
from tests.jobs import SMALL_GPT

SIZES = {"width": 24, "heads": 4, "context": 8, "steps": 2, "micro_batch": 2}
SMALL = SMALL_GPT | SIZES | {"reduction": "ordered", "clip": 0.1}
DOUBLE = {"precision": "fp64"}


def holds(ranks, tier, **values):
    values = {**SMALL, **values}
    assert number_of_ranks(TrainConfig.make(**values), ranks) == ranks
    result = verdict(ranks, **values)
    assert result.equal, result.first_difference
    assert (result.tier, result.ranks, result.steps) == (tier, ranks, 2)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (6, {"pp": 3, "layers": 3, "zero": 1, "microbatches": 3, "dropout": 0.1}),
        (4, {"pp": 2, "schedule": "zb-h1", "zero": 1, "offload": "optimizer"}),
        (4, {"pp": 2, "schedule": "dualpipe", "layers": 4, "zero": 1, "microbatches": 4}),
        (2, {"pp": 2, "recompute": "selective", "zero": 1}),
        (2, {"pp": 2, "schedule": "zb-h1", "recompute": "full", "offload": "activations"}),
        (2, {"pp": 2, "schedule": "zb-h1", "offload": "activations"}),
        (6, {"pp": 2, "zero": 2, "microbatches": 3, "dropout": 0.1}),
        (4, {"pp": 2, "zero": 2, "schedule": "zb-v", "layers": 4}),
        (4, {"pp": 2, "zero": 2, "schedule": "dualpipe", "layers": 4, "microbatches": 4}),
        (6, {"pp": 3, "zero": 3, "layers": 3, "microbatches": 3, "recompute": "full"}),
        (4, {"pp": 2, "zero": 3, "schedule": "interleaved", "chunks": 2, "layers": 4}),
        (4, {"pp": 2, "zero": 3, "experts": 4}),
        (4, {"pp": 2, "zero": 3, "schedule": "zb-h1", "recompute": "full", "offload": "parameters"}),
        (4, {"pp": 2, "zero": 3, "schedule": "dualpipe", "layers": 4, "microbatches": 4}),
        (8, {"pp": 2, "zero": 3, "dp_replicate": 2, "persistence_threshold": 100, "microbatches": 2}),
        (4, {"model": "llama", "pp": 2, "kv_heads": 2, "ffn": 90}),
        (2, {"model": "llama", "zero": 3}),
        (2, {"experts": 4, "zero": 3, "recompute": "sqrt", "top_k": 2, "layers": 3}),
        (2, {"experts": 4, "recompute": "full", "dropout": 0.1}),
        (2, {"experts": 4, "pp": 2, "recompute": "full", "offload": "activations"}),
        (4, {"experts": 4, "pp": 2, "zero": 1, "recompute": "full", "schedule": "zb-h1", "top_k": 2}),
    ],
)
def test_what_cuts_no_sum_is_bitwise_equal(ranks, values):
    holds(ranks, "ordered", **values)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (2, {"tp": 2, "sequence_parallel": True, "dropout": 0.1, "recompute": "full"}),
        (3, {"tp": 3, "heads": 6, "recompute": "selective"}),
        (4, {"tp": 2, "zero": 2, "accumulation": 2}),
        (4, {"tp": 2, "zero": 3, "optimizer": "sgd"}),
        (6, {"tp": 3, "heads": 6, "pp": 2}),
        (8, {"tp": 2, "pp": 2, "sequence_parallel": True, "zero": 1, "dropout": 0.1}),
        (4, {"tp": 2, "pp": 2, "model": "llama", "sequence_parallel": True, "kv_heads": 2, "ffn": 90}),
        (8, {"tp": 2, "pp": 2, "sequence_parallel": True, "zero": 3}),
        (4, {"tp": 4, "model": "llama", "kv_heads": 2, "attention_dropout": 0.1, "zero": 1}),
        (4, {"tp": 2, "pp": 2, "model": "mlp", "data": "glyphs", "layers": 3, "heads": 4, "context": 64}),
    ],
)
def test_tensor_parallel_with_every_other_axis(ranks, values):
    holds(ranks, "float", **DOUBLE, **values)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (3, {"cp": 3, "accumulation": 2, "dropout": 0.1, "attention_dropout": 0.1}),
        (4, {"cp": 2, "attention": "ulysses", "zero": 1, "recompute": "selective"}),
        (4, {"cp": 2, "pp": 2, "schedule": "zb-h1", "recompute": "full", "dropout": 0.1}),
        (8, {"cp": 2, "tp": 2, "zero": 3, "model": "llama", "sequence_parallel": True}),
    ],
)
def test_context_parallel_with_every_other_axis(ranks, values):
    holds(ranks, "float", **DOUBLE, **values)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (4, {"ep": 2, "zero": 1, "top_k": 2}),
        (4, {"ep": 2, "zero": 2, "accumulation": 2}),
        (4, {"ep": 2, "pp": 2}),
        (4, {"ep": 2, "zero": 3, "accumulation": 2, "persistence_threshold": 100, "offload": "parameters"}),
        (8, {"ep": 2, "dp": 8, "zero": 3, "dp_replicate": 2, "recompute": "full"}),
        (8, {"ep": 2, "pp": 2, "dp": 4, "zero": 3, "schedule": "zb-h1"}),
        (8, {"ep": 2, "dp": 4, "tp": 2, "zero": 1}),
        (8, {"ep": 2, "cp": 2, "tp": 2, "sequence_parallel": True, "top_k": 2}),
        (3, {"cp": 3, "context": 10}),
        (8, {"ep": 2, "pp": 2, "tp": 2, "model": "llama", "layers": 2, "sequence_parallel": True, "top_k": 2}),
        (4, {"ep": 2, "cp": 2, "model": "llama", "kv_heads": 1, "recompute": "full"}),
    ],
)
def test_expert_parallel_with_every_other_axis(ranks, values):
    holds(ranks, "float", **DOUBLE, experts=4, **values)


def test_zero_2_gives_a_stages_gradients_back_while_backward_runs():
    """ZeRO 1 has all gradients of the stage and its shard of the sums; ZeRO 2 the shard, a bucket that travels and one
    that fills.
    """

    def most(zero):
        config = TrainConfig.make(
            **{**SMALL, "pp": 2, "layers": 8, "width": 32, "zero": zero, "microbatches": 2, "reduce_bucket_size": 2000}
        )
        return SimWorld(8).run(train, config)[0].peak_by_purpose["gradient"]

    assert most(2) < 0.5 * most(1)
