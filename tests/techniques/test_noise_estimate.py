"""The gradient noise scale: unbiased by counting every outcome, by Monte Carlo, and as data parallelism measures it."""

import itertools
from math import inf

import numpy as np
import pytest

from minidist.collectives.closed_forms import volume
from minidist.comm import SimWorld
from minidist.core.autograd import Tensor
from minidist.core.base.errors import UsageError
from minidist.parallel.data_parallel import DistributedDataParallel
from minidist.techniques.adaptive_batch.noise_scale import (
    AdaptiveBatch,
    Estimate,
    LocalGradient,
    NoiseScale,
    estimate,
    estimate_of_shares,
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


@each("reduction", ["sum", "mean"])
@each("ranks", [2, 3, 5])
def test_data_parallelism_measures_what_one_device_computes(reduction, ranks):
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
        ddp = DistributedDataParallel(Nested(np.float64), comm, reduction=reduction, bucket_cap_mb=2e-4)
        local = LocalGradient(ddp.reducer)
        divisor, first = rows if reduction == "sum" else 15, comm.rank * 15
        with ddp.no_sync():
            ddp(Tensor(inputs[first : first + 5])).backward(output[first : first + 5] / divisor)
        ddp(Tensor(inputs[first + 5 : first + 15])).backward(output[first + 5 : first + 15] / divisor)
        assert len(ddp.reducer.buckets) > 2
        found = step_estimate(comm, local.take(), ddp.flat.grad, rows, reduction)
        assert local.take() == 0
        return found

    world = SimWorld(ranks)
    results = world.run(program)
    for found in results:
        assert found == results[0]
        assert found == pytest.approx(expected, rel=1e-9)
    for rank, trace in enumerate(world.traces):
        assert sum(m.nbytes for m in trace.sent("metrics")) == 8 * volume("all_reduce", "ring", 1, ranks, rank).elements


def test_the_average_decays_and_starts_empty():
    scale = NoiseScale(decay=0.5)
    assert scale.simple == inf
    scale.add(Estimate(-1.0, 4.0))
    assert (scale.gradient, scale.noise, scale.simple) == (-1.0, 4.0, inf)
    scale.add(Estimate(2.0, 1.0))
    assert scale.gradient == (2 - 0.5) / 1.5
    assert scale.noise == (1 + 2) / 1.5
    assert scale.simple == 3 / 1.5
    scale.add(Estimate(9.0, -90.0))
    assert scale.simple == 0


def test_an_adaptive_batch_follows_the_noise_scale():
    adaptive = AdaptiveBatch(8, 16, 80)
    assert [adaptive.next(scale) for scale in (3.0, 26.0, 500.0, inf, 5.0)] == [16, 24, 48, 80, 80]


BAD = {
    "one size": (lambda: estimate(4, 1.0, 4, 1.0), "got 4 and 4 samples"),
    "decay": (lambda: NoiseScale(1.0), "decay=1.0; it must be at least 0 and below 1"),
    "unit": (lambda: AdaptiveBatch(8, 12, 80), "12 to 80 samples in units of 8"),
    "one rank": (lambda: SimWorld(1).run(lambda c: step_estimate(c, 1.0, np.ones(2), 4)), "4 samples on 1 ranks"),
    "ragged": (lambda: SimWorld(2).run(lambda c: step_estimate(c, 1.0, np.ones(2), 5)), "5 samples on 2 ranks"),
}


@pytest.mark.parametrize("what", BAD)
def test_wrong_arguments(what):
    with pytest.raises(UsageError, match=BAD[what][1]):
        BAD[what][0]()


def test_uneven_shares_have_the_same_line():
    """Every sample's gradient is 1 or -1 with a mean of G: squares of all shares, averaged over all 2^6 batches."""
    shares, signs = (3, 2, 1), list(itertools.product((3.0, 1.0), repeat=6))  # G = 2, Sigma = 1
    found = []
    for rows in signs:
        parts = np.split(np.array(rows), np.cumsum(shares)[:-1])
        squares = sum(float(part.sum() / 6) ** 2 for part in parts)
        found.append(estimate_of_shares(shares, squares, float(np.mean(rows)) ** 2))
    assert np.allclose(np.mean(found, axis=0), [4.0, 1.0])
    equal = estimate_of_shares((2, 2), 0.5, 0.4)
    assert np.allclose(equal, estimate(2, 0.5 / 2 * 4, 4, 0.4))
