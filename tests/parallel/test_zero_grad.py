"""`zero_grad` of a model, a unit or a parameter reaches the shards that hold the reduced gradient."""

import numpy as np

from minidist.comm import SimWorld
from minidist.core.autograd import Tensor
from minidist.core.nn import MLP
from minidist.core.parallel.fsdp import fully_shard, sharded_parameters
from minidist.optim import SGD
from minidist.parallel.zero import ZeroOptimizer
from tests.cases import each

STEPS, RATE = 3, 0.25


def rows(step):
    return np.random.default_rng(step).standard_normal((6, 3))


def by_hand():
    """The weights after SGD on one device, plain arrays."""
    model = MLP([3, 4, 2], dtype=np.float64)
    for step in range(STEPS):
        model.zero_grad()
        (model(Tensor(rows(step))) ** 2).sum().backward()
        for parameter in model.parameters():
            parameter.data[...] -= RATE * parameter.grad
            parameter.updated()
    return np.concatenate([p.data.reshape(-1) for p in model.parameters()])


def each_parameter(model, flat):
    for parameter in model.parameters():
        parameter.zero_grad()


@each("stage", [1, 2, 3])
@each("clear", [lambda m, f: m.zero_grad(), lambda m, f: f.zero_grad(), each_parameter])
def test_every_way_to_zero_the_gradient(stage, clear):
    def program(comm):
        model = MLP([3, 4, 2], dtype=np.float64)
        if stage == 3:
            optimizer = SGD(sharded_parameters(fully_shard(model, mesh=comm, reduction="sum", alignment=4)), lr=RATE)
            flat = next(model.parameters()).flat
        else:
            optimizer = ZeroOptimizer(model, SGD, comm=comm, stage=stage, reduction="sum", alignment=4, lr=RATE)
            flat = optimizer.flat
        for step in range(STEPS):
            clear(model, flat)
            (model(Tensor(rows(step)[comm.rank :: comm.size])) ** 2).sum().backward()
            optimizer.step()
        return flat.shard.data.copy()

    weights = np.concatenate(SimWorld(2).run(program))
    expected = by_hand()
    assert np.allclose(weights[: expected.size], expected, rtol=1e-12, atol=1e-12)
