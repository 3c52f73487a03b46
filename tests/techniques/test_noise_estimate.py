"""The gradient noise scale: unbiased by counting every outcome, by Monte Carlo, and as data parallelism measures it."""

import itertools
from math import inf

import numpy as np
import pytest

from minidist.comm import SimWorld
from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.data import Shares, cut_batch
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.techniques.adaptive_batch.noise_scale import (
    DECAY,
    Estimate,
    LocalGradient,
    NoiseScale,
    estimate,
    square,
    step_estimate,
)
from tests.cases import each
from tests.parallel.replicas import Nested, batch


@pytest.mark.parametrize(("small", "big"), [(1, 2), (1, 4), (2, 6)])
def test_both_estimates_are_unbiased_over_every_outcome(small, big):
    """A gradient is one of three equally likely vectors: over all 3^big batches the mean is the expectation."""
    vectors = np.array([[3.0, 1.0], [-1.0, 2.0], [4.0, 0.0]])
    estimates = []
    for choice in itertools.product(range(3), repeat=big):
        rows = vectors[list(choice)]
        groups = rows.reshape(big // small, small, 2).mean(axis=1)
        small_square = (groups**2).sum(axis=1).mean()
        estimates.append(estimate(small, small_square, big, (rows.mean(axis=0) ** 2).sum()))
    true, centred = vectors.mean(axis=0), vectors - vectors.mean(axis=0)
    assert np.mean([e.gradient for e in estimates]) == pytest.approx((true**2).sum(), rel=1e-12)
    assert np.mean([e.noise for e in estimates]) == pytest.approx((centred**2).sum(axis=1).mean(), rel=1e-12)


@each("ranks", [2, 3, 5])
def test_data_parallelism_measures_what_one_device_computes(ranks):
    rows = 15 * ranks  # several buckets, and two passes: the first one stays local

    def gradient_of(part, divisor):
        model = Nested(np.float64)
        inputs, output = batch(rows=rows, dtype=np.float64)
        model(Tensor(inputs[part])).backward(output[part] / divisor)
        return np.concatenate([p.grad.reshape(-1) for p in model.parameters()])

    shares = [gradient_of(slice(r * 15, (r + 1) * 15), 15) for r in range(ranks)]
    whole = gradient_of(slice(None), rows)
    expected = estimate(15, np.mean([g @ g for g in shares]), rows, whole @ whole)

    def program(comm):
        inputs, output = batch(rows=rows, dtype=np.float64)
        ddp = DistributedDataParallel(Nested(np.float64), comm, reduction="sum", bucket_cap_mb=2e-4)
        local = LocalGradient(ddp.reducer)
        first = comm.rank * 15
        with ddp.no_sync():
            ddp(Tensor(inputs[first : first + 5])).backward(output[first : first + 5] / rows)
        ddp(Tensor(inputs[first + 5 : first + 15])).backward(output[first + 5 : first + 15] / rows)
        assert len(ddp.reducer.buckets) > 2
        squares = local.take()
        assert local.take() == 0
        return squares, square(ddp.flat.grad)

    squares, big = zip(*SimWorld(ranks).run(program), strict=True)
    assert step_estimate(sum(squares), big[0], cut_batch(rows, ranks, 1)) == pytest.approx(expected, rel=1e-9)


def test_the_average_decays_and_starts_empty():
    scale = NoiseScale()
    assert scale.simple == inf
    scale.add(Estimate(-1.0, 4.0))
    assert (scale.gradient, scale.noise, scale.simple) == (-1.0, 4.0, inf)
    scale.add(Estimate(2.0, 1.0))
    assert scale.gradient == (2 - DECAY) / (1 + DECAY)
    assert scale.noise == (1 + 4 * DECAY) / (1 + DECAY)
    assert scale.simple == (1 + 4 * DECAY) / (2 - DECAY)
    scale.add(Estimate(9.0, -90.0))
    assert scale.simple == 0


def test_one_size_of_a_batch_is_refused():
    with pytest.raises(UsageError, match="got 4 and 4 samples"):
        estimate(4, 1.0, 4, 1.0)


def test_uneven_shares_have_the_same_line():
    """Every sample's gradient is 1 or -1 with a mean of G: squares of all shares, averaged over all 2^6 batches."""
    shares, signs = Shares(((3,), (2,), (1,))), list(itertools.product((3.0, 1.0), repeat=6))  # G = 2, Sigma = 1
    found = []
    for rows in signs:
        parts = np.split(np.array(rows), [3, 5])
        squares = sum(float(part.sum() / 6) ** 2 for part in parts)
        found.append(step_estimate(squares, float(np.mean(rows)) ** 2, shares))
    assert np.allclose(np.mean(found, axis=0), [4.0, 1.0])
    # Equal shares of micro-batches that differ.
    equal = step_estimate(0.5, 0.4, Shares(((2, 1), (2, 1))))
    assert np.allclose(equal, estimate(3, 0.5 / 2 * 4, 6, 0.4))
