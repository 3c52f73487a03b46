"""Tests of a mistake rather than of a module: each shows what a program with the mistake would not do.

Each passes here; the museum's exhibits name those that fail when the mistake is injected.
"""

import weakref

import numpy as np
import pytest

from minidist.base.coordinates import batch_coordinates
from minidist.comm import SimWorld
from minidist.core.autograd import Parameter, Tensor
from minidist.core.autograd.backward import WeightGradStore
from minidist.core.nn import FlatParameters, Linear, Sequential
from minidist.core.pipeline.runtime import PipelineStage
from minidist.course.museum import jobs, pipelines, split_jobs
from minidist.course.museum.memory import saved
from minidist.job.config.train_config import TrainConfig
from minidist.nn import Dropout, checkpoint
from minidist.pipeline.runtime.pipeline import Pipeline
from tests.jobs import equals_one_device
from tests.pipeline import test_runtime
from tests.pipeline.cases import plan_of


def one_device_of(**settings):
    """The MLP of `jobs.replicas` on one device, on the same rows."""
    return jobs.replicas(1, **settings)


def same(one, many, bound=1e-6):
    for tensors in many.tensors:
        for kind in tensors:
            for name, array in tensors[kind].items():
                expected = one.tensors[0][kind][name]
                assert np.max(np.abs(array - expected)) <= bound * max(1, np.max(np.abs(expected))), f"{kind} {name}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_ragged_shards_train_like_one_device(ranks):
    same(one_device_of(), jobs.replicas(ranks))


def test_masked_labels_train_like_one_device():
    same(one_device_of(masked=0.5), jobs.replicas(3, masked=0.5))


def test_micro_batches_of_any_length_are_one_batch():
    """The gradient of the mean over all tokens, computed in one piece: shorter texts filled up with what counts for
    nothing.
    """
    counts, tokens = (8, 2, 5, 1), jobs.tokens(0, 4)
    model = jobs.GPT(jobs.GPTConfig(jobs.WORDS, jobs.LENGTH, 16, 1, 2), dtype=np.float32, seed=3)
    flat = FlatParameters(model.parameters())
    targets = tokens[1].copy()
    for row, count in enumerate(counts):
        targets[row, count:] = -100
    model(tokens[0], targets, float(sum(counts))).backward()
    accumulated = jobs.accumulating().tensors[0]["gradients"]
    for parameter in flat.parameters:
        assert np.max(np.abs(accumulated[parameter.name] - parameter.grad)) < 1e-6, parameter.name


class TwoSites:
    """x @ w @ w: one weight at two sites of one stage."""

    def __init__(self):
        self.w = Parameter(np.array([[1.0, 2.0], [3.0, -1.0]]), name="w")

    def parameters(self):
        return [self.w]

    def __call__(self, x):
        return x @ self.w @ self.w


def test_two_sites_under_zero_bubble():
    def main(comm):
        stage = PipelineStage(TwoSites(), 0)
        ones = [np.ones((1, 2))] * 2
        Pipeline(comm, plan_of("zb-h1", 1, 2), [stage], lambda y, t: (y * Tensor(t)).sum()).step(ones, ones)
        return stage.flat.grad.copy()

    w, one = np.array([[1.0, 2.0], [3.0, -1.0]]), np.ones((1, 2))
    once = (one @ w).T @ one + one.T @ (one @ w.T)
    assert np.array_equal(SimWorld(1).run(main)[0], 2 * once.reshape(-1))


@pytest.mark.parametrize("mode", ["now", "deferred"])
def test_a_weight_at_two_sites(mode):
    """sum(x @ w @ w): the gradient of w is the sum of two terms, one per site."""
    x, w = np.array([[1.0, 2.0]]), Parameter(np.array([[1.0, 3.0], [2.0, 5.0]]), name="w")
    deferred = (Tensor(x) @ w @ w).sum().backward(weight_gradients=mode)
    assert (deferred is None) == (mode == "now")
    if isinstance(deferred, WeightGradStore):
        deferred.run()
    ones = np.ones((1, 2))
    np.testing.assert_array_equal(w.grad, x.T @ (ones @ w.data.T) + (x @ w.data).T @ ones)


def test_a_replayed_mask():
    model = Sequential(Linear(8, 8), Dropout(0.5)).initialize(1)
    x = np.ones((4, 8), np.float32)
    gradients = []
    for run in (model, lambda t: checkpoint(model, t)):
        leaf = Tensor(x, requires_grad=True)
        with batch_coordinates(step=1):
            run(leaf).sum().backward()
        gradients.append(leaf.grad)
    np.testing.assert_array_equal(*gradients)


def test_every_rank_saves():
    assert len(saved().losses) == jobs.STEPS


def test_released_weights_are_gone():
    layer = Linear(3, 3)
    flat = FlatParameters(layer.parameters())
    loss = layer(Tensor(np.ones((2, 3), np.float32), requires_grad=True)).sum()
    dead = weakref.ref(flat.release())
    assert dead() is None
    assert loss.requires_grad


def test_an_exchange_ends_clean():
    numbers = [tensors["numbers"]["from the left"][0] for tensors in jobs.exchange().tensors]
    assert numbers == [2.0, 0.0, 1.0]


def test_a_halved_gradient_arrives():
    assert jobs.half_of_the_gradient().tensors[1]["numbers"]["gradient"].tolist() == [0, 0.5, 1, 1.5]


def test_float32_stays_float32():
    w = Parameter(np.ones(3, np.float32), name="w")
    y = w * np.float64(0.5) + np.float64(1)
    assert y.dtype == np.float32
    y.sum().backward()
    assert w.grad.dtype == np.float32


def test_sums_of_all_ranks():
    assert jobs.sums().losses == [6.0, 46.0, 86.0]


@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_a_pipeline_equals_one_device(model):
    data = "markov" if model == "gpt" else "glyphs"
    config = TrainConfig.make(
        **{
            **jobs.SMALL,
            "model": model,
            "data": data,
            "layers": 3,
            "pp": 2,
            "microbatches": 4,
            "steps": 2,
            "schedule": "gpipe",
            "reduction": "ordered",
        }
    )
    equals_one_device(2, config)


def test_a_pipeline_with_a_short_micro_batch_equals_one_device():
    test_runtime.equal_gpt(plan_of("1f1b", 2, 3), steps=1)


def test_the_plan_of_the_exhibit_can_run():
    assert pipelines.why_rejected(pipelines.plan_text()) == ""


def test_a_split_sequence_trains_like_one_device():
    one = jobs.recorded(1, whole_sequence)
    same(one, split_jobs.long_context(), 1e-12)


def whole_sequence(comm):
    model = jobs.GPT(jobs.GPTConfig(jobs.WORDS, jobs.LENGTH, 16, 2, 4), dtype=np.float64, seed=3)
    flat = FlatParameters(model.parameters())
    return jobs.loop(model, lambda step: model(*jobs.tokens(step), jobs.BATCH * jobs.LENGTH), flat, lr=0.3)
