"""Conversions between float32 and floats of two bytes, held against NumPy's and ml_dtypes' own."""

import ml_dtypes
import numpy as np
import pytest

from minidist.base.half import all_finite, is_floating, named_dtype
from minidist.base.memory import account_memory
from minidist.core.base.arrays import add_into, downcast, is_half, upcast

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
HALVES = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)


def every(dtype):
    """All 65,536 values of a dtype."""
    return np.arange(2**16, dtype=np.uint16).view(dtype)


def every_finite(dtype):
    return every(dtype)[np.isfinite(every(dtype).astype(np.float32))]


def bits(array):
    return array.view(np.uint16 if array.itemsize == 2 else np.uint32)


@HALVES
def test_widening_is_exact_for_every_value(dtype):
    values = every(dtype)
    assert np.array_equal(upcast(values), values.astype(np.float32), equal_nan=True)
    finite = every_finite(dtype)  # without infinities another way is taken
    assert np.array_equal(bits(upcast(finite)), bits(finite.astype(np.float32)))
    assert np.array_equal(upcast(finite.reshape(2, -1).T), finite.astype(np.float32).reshape(2, -1).T)  # strides


@HALVES
def test_rounding_is_to_nearest_even_for_every_value_its_neighbours_and_the_middle(dtype):
    values = np.sort(every_finite(dtype).astype(np.float32))
    middles = (values[1:].astype(np.float64) + values[:-1]) / 2
    candidates = np.concatenate(
        [values, np.nextafter(values, np.inf, dtype=np.float32), middles.astype(np.float32), -values]
    )
    any_bits = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32).view(np.float32)
    for x in (
        candidates,
        np.nextafter(candidates, -np.inf, dtype=np.float32),
        any_bits,
        np.float32([np.nan, np.inf, -np.inf, 65520.0]),
    ):
        with np.errstate(all="ignore"):
            expected = x.astype(dtype)
        assert np.array_equal(downcast(x, dtype).astype(np.float32), expected.astype(np.float32), equal_nan=True)
    assert downcast(np.float32(3).reshape(()), dtype).shape == ()
    assert np.array_equal(downcast(candidates[:6].reshape(2, 3).T, dtype), candidates[:6].astype(dtype).reshape(2, 3).T)


def test_what_needs_no_conversion_is_handed_back():
    whole, tokens, small = np.ones(3, np.float32), np.ones(3, np.int16), np.ones(3, np.float16)
    assert upcast(whole) is whole
    assert upcast(tokens) is tokens  # two bytes, and no float
    assert downcast(small, FLOAT16) is small


@HALVES
def test_a_sum_of_two_is_rounded_once(dtype):
    with np.errstate(all="ignore"):
        a, b = np.random.default_rng(1).normal(size=(2, 40_000)).astype(dtype)
        total = a.copy()
        add_into(total, b)
        assert np.array_equal(bits(total), bits(downcast(a.astype(np.float32) + b.astype(np.float32), dtype)))
        for shape in ((200, 200), (40_000,)):  # strided; and with infinities of both signs
            a[:4], b[:4] = [np.inf, np.inf, -np.inf, np.nan], [1, -np.inf, -np.inf, 1]
            total, other = a.reshape(shape).copy().T, b.reshape(shape).T
            expected = total + other
            add_into(total, other)
            assert np.array_equal(bits(np.ascontiguousarray(total)), bits(np.ascontiguousarray(expected)))


@HALVES
def test_one_value_that_is_not_finite_is_found(dtype):
    values = np.full(1000, 3e4, dtype)
    assert all_finite(values)
    assert all_finite(values[:0])
    for bad in (np.inf, -np.inf, np.nan):
        values[777] = bad
        assert not all_finite(values)
    assert not all_finite(np.float32([1.0, np.nan]))


def test_names_and_kinds():
    assert named_dtype("bfloat16") == BFLOAT16
    assert is_half(named_dtype("float16"))
    assert not is_half(np.dtype(np.int16))
    assert is_floating(BFLOAT16)
    assert not is_floating(np.dtype(np.int64))


def test_the_widened_copy_is_workspace():
    with account_memory() as account:
        copy = upcast(np.ones(1000, np.float16))
        assert account.by_purpose == {"workspace": copy.nbytes}
        del copy
        assert account.by_purpose == {"workspace": 0}
