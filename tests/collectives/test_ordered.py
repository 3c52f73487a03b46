"""Ordered sums have the bits of additions in rank order, wherever buckets end (museum 23); those of a ring do not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.comm import SimWorld
from minidist.core.collectives import all_reduce

SIZE = 96


def gradients(ranks):
    return [np.random.default_rng(rank).standard_normal(SIZE).astype(np.float32) for rank in range(ranks)]


def reduce_in_buckets(comm, cuts, algorithm):
    """The sum of all ranks' gradients, all-reduced in buckets that end at `cuts`."""
    mine = gradients(comm.size)[comm.rank]
    for start, end in zip([0, *cuts], [*cuts, SIZE], strict=True):
        all_reduce(comm, mine[start:end], algorithm=algorithm)
    return mine


def in_rank_order(ranks):
    total, *rest = gradients(ranks)
    for other in rest:
        total = total + other
    return total


@given(st.integers(1, 9), st.lists(st.integers(0, SIZE), max_size=5))
def test_the_bits_of_a_sum_do_not_depend_on_the_buckets(ranks, cuts):
    for result in SimWorld(ranks).run(reduce_in_buckets, sorted(cuts), "ordered"):
        assert result.tobytes() == in_rank_order(ranks).tobytes()


@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
def test_a_rings_bits_do_and_stay_within_the_float_tier(ranks):
    """Of 3 ranks on; the difference is a rounding error, which is why it is easily overlooked."""
    one, four = (SimWorld(ranks).run(reduce_in_buckets, cuts, "ring")[0] for cuts in ([], [24, 48, 72]))
    assert 0.05 < np.mean(one != four) < 0.6
    assert np.max(np.abs(one - four)) <= 4 * np.finfo(np.float32).eps * np.max(np.abs(one))
