"""Products of MKL: what the library is asked for, the refusals, and MKL itself where its wheel is installed."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from minidist.base import mkl
from minidist.core.base import arrays as xp
from minidist.core.base.errors import UsageError
from tests.cases import each


class Recorder:
    """Stands for the library: computes what cblas_sgemm is asked for, from the addresses that it gets."""

    def __init__(self):
        self.calls = 0

    def cblas_sgemm(self, order, left, right, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
        def matrix(address, rows, columns, apart, transposed):
            shape = (columns, rows) if transposed else (rows, columns)
            memory = (ctypes.c_float * ((shape[0] - 1) * apart + shape[1])).from_address(address)
            whole = np.lib.stride_tricks.as_strided(np.frombuffer(memory, np.float32), shape, (4 * apart, 4))
            return whole.T if transposed else whole

        assert (order, alpha, beta) == (101, 1.0, 0.0)
        self.calls += 1
        product = matrix(a, m, k, lda, left == 112) @ matrix(b, k, n, ldb, right == 112)
        matrix(c, m, n, ldc, False)[...] = product


def operand(rng, shape, kind):
    rows, columns = shape
    match kind:
        case "by columns":
            return rng.standard_normal((columns, rows), np.float32).T
        case "part of rows":
            return rng.standard_normal((rows, columns + 3), np.float32)[:, 1 : 1 + columns]
        case "every other":
            return rng.standard_normal((rows, 2 * columns), np.float32)[:, ::2]
        case "float64":
            return rng.standard_normal(shape)
        case "broadcast":
            return np.broadcast_to(rng.standard_normal(columns, np.float32), shape)
    return rng.standard_normal(shape, np.float32)


KINDS = ["by rows", "by columns", "part of rows", "every other", "float64", "broadcast"]


@each("left, right, asked", [(a, b, {a, b} <= set(KINDS[:3])) for a in KINDS for b in KINDS])
def test_the_library_multiplies_large_float32_matrices_of_any_order(monkeypatch, left, right, asked):
    recorder, rng = Recorder(), np.random.default_rng(0)
    monkeypatch.setattr(mkl, "library", lambda: recorder)
    monkeypatch.setattr(mkl, "_SMALLEST", 11 * 13 * 17)
    a, b = operand(rng, (11, 13), left), operand(rng, (13, 17), right)
    out = np.empty((11, 17), np.result_type(a, b))
    for given in (None, out):
        result = mkl.product(a, b, given)
        assert result is given or given is None
        np.testing.assert_allclose(result, a @ b, rtol=1e-5, atol=1e-5)
    assert recorder.calls == 2 * asked
    mkl.product(a[:10], b)  # smaller
    mkl.product(a, b, np.empty((17, 11), np.result_type(a, b)).T)  # a result by columns
    assert recorder.calls == 2 * asked


def test_shapes_that_do_not_fit_are_numpy_s_to_refuse(monkeypatch):
    monkeypatch.setattr(mkl, "library", Recorder)
    monkeypatch.setattr(mkl, "_SMALLEST", 1)
    with pytest.raises(ValueError, match="mismatch"):
        mkl.product(np.ones((3, 4), np.float32), np.ones((5, 6), np.float32))
    with pytest.raises(ValueError, match="Output operand"):
        mkl.product(np.ones((3, 4), np.float32), np.ones((4, 6), np.float32), np.ones((2, 6), np.float32))


def test_the_variable_chooses_and_a_wrong_one_is_refused(monkeypatch):
    monkeypatch.setattr(xp, "host_product", xp.host_product)
    monkeypatch.setattr(mkl, "library", lambda: None)
    with pytest.raises(UsageError, match=r"MKL cannot be loaded; install it: pip install 'minidist\[mkl\]'"):
        mkl.use_products_of("mkl")
    with pytest.raises(UsageError, match="MINIDIST_BLAS='blis' names no library"):
        mkl.use_products_of("blis")
    monkeypatch.setattr(mkl, "library", Recorder)
    mkl.use_products_of("mkl")
    assert xp.host_product is mkl.product
    for variable in ("numpy", "mkl", ""):
        mkl.use_products_of(variable)
        assert (xp.host_product is np.matmul) == (variable != "mkl")


def test_a_result_that_cannot_be_written_is_numpy_s_to_refuse_and_one_that_overlaps_is_right(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(mkl, "library", lambda: recorder)
    monkeypatch.setattr(mkl, "_SMALLEST", 1)
    square = np.arange(16, dtype=np.float32).reshape(4, 4)
    expected = square @ square
    mkl.product(square, square.copy(), square)
    assert np.array_equal(square, expected)
    square.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        mkl.product(expected, expected, square)
    assert recorder.calls == 0


def test_a_wheel_without_its_library_is_as_none(monkeypatch, tmp_path):
    lost = SimpleNamespace(name="libmkl_rt.so.3", locate=lambda: tmp_path / "libmkl_rt.so.3")
    monkeypatch.setattr(mkl.importlib.metadata, "files", lambda name: [lost])
    assert mkl.library.__wrapped__() is None


@pytest.mark.skipif(mkl.library() is None, reason="the wheel mkl is not installed")
def test_mkl_multiplies_and_its_bits_do_not_depend_on_where_an_array_lies():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((256, 300), np.float32), rng.standard_normal((300, 128), np.float32)
    first = mkl.product(a, b)
    np.testing.assert_allclose(first, a @ b, rtol=1e-4, atol=1e-4)
    for start in range(1, 16):
        moved = np.empty(a.size + 16, np.float32)[start : start + a.size].reshape(a.shape)
        moved[...] = a
        assert mkl.product(moved, b).tobytes() == first.tobytes()
