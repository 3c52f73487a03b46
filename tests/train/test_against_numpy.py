"""A run against a few lines of NumPy: the batch, the divisor of the loss, the schedule and clipping."""

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.autograd import Tensor
from minidist.core.nn import MLP
from minidist.data import GlobalBatchSampler, load_dataset
from minidist.job.config.train_config import TrainConfig
from minidist.job.train.trainer import train
from tests.cases import each

SMALL = {"model": "mlp", "layers": 1, "width": 9, "data": "glyphs", "precision": "fp64", "optimizer": "sgd", "lr": 0.5}
GLOBAL = 12


def snapshots(ranks, **values):
    """[(gradients, weights)] after each step, as rank 0 has them."""
    config = TrainConfig.make(**SMALL | values)

    def program(comm):
        seen = []
        train(comm, config, [lambda state: seen.append(state.strategy.tensors())])
        return [(tensors["gradients"], tensors["weights"]) for tensors in seen]

    return SimWorld(ranks).run(program)[0]


@each(("ranks", "micro", "accumulation"), [(1, 12, 1), (1, 3, 4), (2, 6, 1), (2, 2, 3), (3, 2, 2), (4, 1, 3)])
@each("zero", [0, 2])
def test_any_split_gives_the_gradient_of_the_global_batch(ranks, micro, accumulation, zero):
    ((gradients, _),) = snapshots(ranks, steps=1, micro_batch=micro, accumulation=accumulation, zero=zero)
    dataset = load_dataset("glyphs")
    inputs, labels = GlobalBatchSampler(dataset, GLOBAL, 64, 0).batch(0, 0, GLOBAL)
    model = MLP([dataset.features, 9, dataset.classes], dtype=np.float64, seed=0)
    outputs = model(Tensor(np.asarray(inputs, np.float64)))
    chances = np.exp(outputs.data) / np.exp(outputs.data).sum(axis=1, keepdims=True)
    outputs.backward((chances - np.eye(dataset.classes)[labels]) / GLOBAL)
    assert set(gradients) == {parameter.name for parameter in model.parameters()}
    for parameter in model.parameters():
        assert np.allclose(gradients[parameter.name], parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_warm_up_scales_each_step(zero):
    """SGD moves the weights by lr (t + 1) / 4 times the gradient of step t, and by lr times it from the fourth on."""
    seen = snapshots(2, steps=6, micro_batch=3, warmup=4, zero=zero)
    for t in range(1, 6):
        for name, gradient in seen[t][0].items():
            expected = seen[t - 1][1][name] - 0.5 * min(1.0, (t + 1) / 4) * gradient
            assert np.allclose(seen[t][1][name], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_the_gradient_that_is_stepped_is_clipped(zero):
    for gradients, _ in snapshots(2, steps=2, micro_batch=3, clip=0.01, zero=zero):
        norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients.values()))
        assert abs(norm - 0.01) < 1e-6


@pytest.mark.parametrize("setting", [{"dropout": 0.5}, {"weight_decay": 0.5}])
def test_a_setting_changes_the_run(setting):
    def losses(**values):
        config = TrainConfig.make(
            model="gpt", layers=1, width=8, heads=2, context=6, data="markov", steps=3, micro_batch=2, **values
        )
        return SimWorld(2).run(train, config)[0].losses

    assert losses(**setting) != losses()
