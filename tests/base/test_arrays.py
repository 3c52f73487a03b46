"""The door to NumPy: the few functions that are not NumPy's own."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from minidist.core.base import arrays as xp

PACKAGE = Path(xp.__file__).parents[1]


def test_sums_and_scatter():
    x = np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(xp.sum_rows(x), x.sum(axis=0))
    out = np.empty(4)
    assert xp.sum_rows(x, out) is out
    np.testing.assert_array_equal(xp.sum_rows(np.zeros((0, 2))), [0, 0])
    np.testing.assert_array_equal(xp.dot_rows(x, x), (x * x).sum(-1, keepdims=True))
    for target, rows in (
        (np.zeros((4, 2)), [3, 0, 3, 3]),
        (np.ones((4, 2)), [3, 0, 3, 3]),
        (np.ones((5, 2)), [2, 0, 4, 1]),
    ):
        rows, values = np.array(rows), np.arange(8.0).reshape(4, 2)
        expected = target.copy()
        np.add.at(expected, rows, values)
        xp.scatter_add_rows(target, rows, values)
        np.testing.assert_array_equal(target, expected)
    xp.scatter_add_rows(target, np.zeros(0, int), np.zeros((0, 2)))


def test_a_constant_vector_is_made_once_for_each_length_value_and_dtype():
    single, double = np.zeros(3, np.float32), np.zeros(3)
    assert xp.constant(4, 0.5, single) is xp.constant(4, 0.5, np.empty(7, np.float32))
    for n, value, like in ((4, 0.5, single), (4, 0.5, double), (4, 1, single), (5, 0.5, single), (0, 1, single)):
        made = xp.constant(n, value, like)
        assert (made.shape, made.dtype, made.tolist()) == ((n,), like.dtype, [value] * n)


def test_conversions_and_views():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert xp.as_array(a) is a
    assert xp.as_array(a, np.float32) is a
    assert xp.array(a) is not a
    assert xp.as_array([1, 2], np.float64).dtype == np.float64
    assert xp.owner(a[0][1:]) is a.base
    assert xp.is_array(a)
    assert not xp.is_array(np.float32(1))
    assert not xp.is_array([1])
    assert xp.as_rows(np.zeros((2, 0, 3, 0))).shape == (0, 0)
    assert xp.as_rows(np.zeros((2, 3, 0))).shape == (6, 0)


def test_importing_changes_nothing_and_needs_no_peer():
    code = "import sys; import minidist.nn, minidist.report.bench.step; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)
