"""Uneven shares of the batch: the step is that of one device bit for bit, and bytes equal the closed form."""

from collections import Counter

import numpy as np

from minidist.comm import SimWorld
from minidist.data import cut_batch
from minidist.job.config.rules import check_rules
from minidist.job.config.train_config import TrainConfig, resolve_batches, resolve_dims
from minidist.job.train.trainer import train
from minidist.planning.volumes import closed_form_bytes, evaluation_bytes
from tests.cases import each
from tests.jobs import equals_one_device_in_closed_form, sent_bytes

JOB = {"layers": 2, "width": 8, "heads": 2, "context": 4, "data": "markov", "steps": 2, "reduction": "ordered"}
FLOAT = {"precision": "fp64", "reduction": "ring"}


def config_of(**values):
    config = TrainConfig.make(**{**JOB, **values})
    ranks = resolve_dims(config).ranks
    batches = resolve_batches(config, ranks)
    check_rules(config, batches)
    return config, batches, ranks


def check_bytes(config, batches, world, results, runs=None):
    """Assert that every purpose's bytes equal the closed form."""
    sizes = [result.sizes for result in results]
    closed = Counter(closed_form_bytes(config, batches, sizes, runs=runs))
    closed.update(evaluation_bytes(config, batches, sizes, 0))
    assert +sent_bytes(world) == +closed


@each(
    "values",
    [
        {"global_batch": 9, "dp": 2, "ep": 2, "experts": 4, "weights": "2,1", "accumulation": 2, **FLOAT},
        {"global_batch": 8, "dp": 3},
        {"global_batch": 8, "dp": 3, "weights": "2,1,1", "clip": 0.1, "evaluate_every": 1},
        {"global_batch": 9, "dp": 2, "weights": "2,1", "accumulation": 2, "zero": 1, "prefetch_batches": 1},
        {"global_batch": 9, "dp": 2, "accumulation": 2, "zero": 3, "precision": "bf16", "dropout": 0.1},
        {"global_batch": 11, "dp": 2, "pp": 2, "microbatches": 2, "zero": 2, "weights": "3,1", "evaluate_every": 2},
        {"global_batch": 8, "dp": 2, "pp": 2, "microbatches": 2, "zero": 3, "weights": "3,1"},
        {"global_batch": 5, "pp": 2, "microbatches": 2, "schedule": "pipedream-2bw"},
        {"global_batch": 5, "dp": 2, "tp": 2, "cp": 2, "experts": 2, "layers": 1, "steps": 1, **FLOAT},
        {"global_batch": 9, "dp": 4, "ep": 2, "experts": 2, "zero": 3, "top_k": 2, "evaluate_every": 1, **FLOAT},
        {"global_batch": 7, "dp": 2, "ep": 2, "tp": 2, "experts": 2, "recompute": "full", **FLOAT},
        {
            "global_batch": 10,
            "weights": "3,2",
            "dp": 2,
            "ep": 2,
            "pp": 2,
            "experts": 2,
            "microbatches": 2,
            "zero": 1,
            **FLOAT,
        },
        {"global_batch": 5, "dp": 3, "ep": 3, "cp": 2, "experts": 3, "model": "llama", "layers": 1, **FLOAT},
        {
            "global_batch": 5,
            "dp": 2,
            "pp": 2,
            "microbatches": 2,
            "model": "mlp",
            "heads": 4,
            "data": "glyphs",
            "context": 64,
        },
    ],
    sampled=3,
)
def test_uneven_shares_equal_one_device_and_send_the_closed_form(values):
    config, batches, ranks = config_of(**values)
    assert not batches.shares.is_even or "weights" in values
    equals_one_device_in_closed_form(ranks, config)


def test_the_gradient_is_that_of_the_whole_batch_whatever_the_shares_are():
    found = []
    for values in ({"dp": 1}, {"dp": 3}, {"dp": 3, "weights": "5,2,1"}, {"dp": 2, "accumulation": 3}):
        config, _, ranks = config_of(global_batch=8, optimizer="sgd", lr=1.0, steps=1, precision="fp64", **values)
        tensors = []
        SimWorld(ranks).run(train, config, [lambda state: tensors.append((state.loss, state.strategy.tensors()))])  # noqa: B023
        found.append(tensors[0])
    for loss, tensors in found[1:]:
        assert abs(loss - found[0][0]) < 1e-12
        for name, gradient in tensors["gradients"].items():
            assert np.abs(gradient - found[0][1]["gradients"][name]).max() < 1e-12


def test_a_resumed_job_may_have_other_shares(tmp_path):
    """Which samples a step trains on does not depend on who computes them."""
    whole = {"global_batch": 8, "dp": 3, "precision": "fp64", "steps": 4}
    expected = SimWorld(3).run(train, config_of(**whole)[0])[0].losses
    saved = {**whole, "save": str(tmp_path)}
    SimWorld(3).run(train, config_of(**{**saved, "steps": 2})[0])
    resumed = SimWorld(3).run(train, config_of(**saved, resume=True, weights="2,1,1")[0])[0].losses
    assert np.abs(np.array(resumed) - expected).max() < 1e-12
    assert resumed[:2] == expected[:2]


def test_large_micro_batches_come_first_and_neighbours_differ_by_one_row():
    """The largest is the first, so that memory is known after the first of them."""
    assert cut_batch(11, 2, 3).rows == ((2, 2, 2), (2, 2, 1))
    assert cut_batch(10, 1, 4).rows == ((3, 3, 2, 2),)
    assert cut_batch(7, 1, 2, (1.0,)).rows == ((4, 3),)
