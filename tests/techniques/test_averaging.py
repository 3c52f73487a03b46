"""Averages of weights every N steps: their replay on one device, their bytes, and what is refused."""

import numpy as np
import pytest

from minidist.collectives.closed_forms import volume
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.core.nn.flat import FlatParameters
from minidist.optim import SGD
from minidist.techniques.local_sgd.averaging import PeriodicModelAverager
from tests.cases import each
from tests.parallel.replicas import Nested, batch


def local_steps(comm, every, steps, algorithm="ordered"):
    model = Nested(np.float64, seed=comm.rank)
    flat = FlatParameters(model.parameters())
    average, optimizer = PeriodicModelAverager(flat, comm, every, algorithm=algorithm), SGD(flat, lr=0.05)
    done = []
    for step in range(steps):
        _descend(model, flat, optimizer, step * comm.size + comm.rank)
        done.append(average.step())
    return flat.data.copy(), done, flat.version


def _descend(model, flat, optimizer, number):
    inputs, gradient = batch(number, dtype=np.float64)
    flat.zero_grad()
    model(Tensor(inputs)).backward(gradient / 50)
    optimizer.step()


@each("ranks", [1, 2, 3])
@each("every", [1, 3])
def test_local_sgd_is_its_replay_on_one_device(ranks, every):
    """The replicas one after the other, averaged in rank order: the same bits, also between two averages."""
    steps = 7
    replicas = [Nested(np.float64, seed=0) for _ in range(ranks)]
    flats = [FlatParameters(model.parameters()) for model in replicas]
    optimizers = [SGD(flat, lr=0.05) for flat in flats]
    for step in range(steps):
        for rank in range(ranks):
            _descend(replicas[rank], flats[rank], optimizers[rank], step * ranks + rank)
        if (step + 1) % every == 0:
            total = flats[0].data.copy()
            for flat in flats[1:]:
                total = total + flat.data
            for flat in flats:
                flat.data[...] = total / ranks
                flat.updated()
    world = SimWorld(ranks)
    for rank, (weights, done, version) in enumerate(world.run(local_steps, every, steps)):
        assert version == steps + sum(done)  # an average is an update, too: what a tape saw before it is stale
        assert weights.tobytes() == flats[rank].data.tobytes()
        assert done == [(step + 1) % every == 0 for step in range(steps)]
        sent = sum(m.nbytes for m in world.traces[rank].sent("parameter_gather"))
        assert sent == sum(done) * volume("all_reduce", "ring", weights.size, ranks, rank).elements * 8


def test_wrong_arguments():
    with pytest.raises(UsageError, match="every=0; it must be a whole number"):
        SimWorld(2).run(lambda comm: PeriodicModelAverager(FlatParameters(Nested().parameters()), comm, 0))
