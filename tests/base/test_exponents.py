"""Counted exponents against what float16 really does with the numbers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minidist.base.exponents import by_exponent, count_exponents, flushed_share
from minidist.core.base.arrays import downcast


def numbers(seed):
    draw = np.random.default_rng(seed)
    return draw.uniform(1.01, 1.99, 3000) * 2.0 ** draw.integers(-45, 10, 3000) * draw.choice([-1, 1], 3000)


@given(seed=st.integers(0, 99), shift=st.integers(-3, 20))
def test_the_share_that_becomes_zero_is_what_a_conversion_makes(seed, shift):
    values, scale = numbers(seed), 2.0**shift
    small = downcast((values * scale).astype(np.float32), np.dtype(np.float16))
    counts = count_exponents([values[:1000], values[1000:].reshape(40, 50)])
    assert flushed_share(counts, scale) == np.mean(small == 0)
    assert count_exponents([values * scale], scale) == counts


def test_each_entry_is_counted_once():
    values = np.array([0.0, -0.0, 1.0, 1.5, -2.0, 0.25, np.inf, np.nan], np.float32)
    counts = count_exponents([values, np.zeros(0)])
    assert by_exponent(counts) == {-2: 1, 0: 2, 1: 1}
    assert (counts["zero"], counts["not finite"]) == (2, 2)
    assert flushed_share(count_exponents([np.zeros(3)])) == 0
