"""SyncBatchNorm: any ranks with any rows normalise as one device does that has all rows, and send the closed form."""

import numpy as np
import pytest

from minidist.base.coordinates import batch_coordinates
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor
from minidist.nn import BatchNorm
from minidist.parallel.sync_batch_norm import convert_sync_batchnorm, sync_batch_norm_bytes

CHANNELS = 3
ROWS = (2, 5, 1, 4)


def pixels(ranks):
    """The images of every rank, as many as ROWS says, and factors for the sum that is the loss."""
    draw = np.random.default_rng(1)
    shapes = [(rows, CHANNELS, 2, 2) for rows in ROWS[:ranks]]
    return [draw.standard_normal(s) + 10 for s in shapes], [draw.standard_normal(s) for s in shapes]


def normalise(norm, x, factor):
    x = Tensor(x, requires_grad=True)
    with batch_coordinates(0, 0):
        y = norm(x)
    (y * y * Tensor(factor)).sum().backward()
    return y.data, x.grad, norm.weight.grad, norm.bias.grad, norm.running


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_it_equals_one_device_with_all_rows(ranks):
    x, factor = pixels(ranks)

    def program(comm):
        norm = convert_sync_batchnorm(BatchNorm(CHANNELS, dtype=np.float64), comm)
        return normalise(norm, x[comm.rank], factor[comm.rank])

    world = SimWorld(ranks)
    results = world.run(program)
    y, dx, dw, db, running = normalise(BatchNorm(CHANNELS, dtype=np.float64), np.concatenate(x), np.concatenate(factor))
    parts = np.cumsum(ROWS[:ranks])[:-1]
    for rank, (mine, dmine, *_, statistics) in enumerate(results):
        np.testing.assert_allclose(mine, np.split(y, parts)[rank], rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(dmine, np.split(dx, parts)[rank], rtol=1e-12, atol=1e-12)
        for a, b, first in zip(statistics, running, results[0][4], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)
            assert np.array_equal(a, first)
    # Data parallelism adds these over the ranks.
    np.testing.assert_allclose(sum(result[2] for result in results), dw, rtol=1e-12)
    np.testing.assert_allclose(sum(result[3] for result in results), db, rtol=1e-12)
    sent = sum(trace.bytes_by_purpose().get("batch_norm", 0) for trace in world.traces)
    assert sent == sum(sync_batch_norm_bytes(CHANNELS, ranks)) == (ranks - 1) * 8 * (7 * ranks + 12)


def test_half_precision_normalises_by_statistics_in_single_precision():
    norm = BatchNorm(2, dtype="float16")
    norm.load_buffers({"running_mean": np.array([1000.25, 0.0]), "running_var": np.array([1.0, 1.0])})
    y = norm.eval()(Tensor(np.full((1, 2), 1000, np.float16))).data
    assert float(y[0, 0]) == pytest.approx(-0.25, rel=1e-3)  # in float16 the mean would be 1000, and y 0
