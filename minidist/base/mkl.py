"""Products of matrices by Intel's MKL, where its wheel is installed and `MINIDIST_BLAS=mkl` asks for it.

    linear ──▶ arrays.product ──▶ arrays.host_product = numpy.matmul        NumPy's OpenBLAS
                                                      = mkl.product ──▶ cblas_sgemm of libmkl_rt, by ctypes

On Intel processors with AVX-512 a product takes about 0.92 of NumPy's time; `minidist doctor` measures it. The bits
differ from NumPy's, so the variable must be the same on all ranks, and MKL is used only where it is set. They are the
same in every run: conditional numerical reproducibility is switched on, which costs no time in mode AUTO.

Source: Intel oneMKL Developer Reference, cblas_?gemm and mkl_cbwr_set.
Proved by: tests/base/test_mkl.py
"""

import ctypes
import importlib.metadata
import os
import time
from functools import cache

import numpy as np

from minidist.base.errors import UsageError, quoted
from minidist.core.base import arrays as xp

_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112  # of cblas.h
_SEQUENTIAL, _CBWR_AUTO = 1, 2  # of mkl_service.h and mkl_types.h
_SMALLEST = 1 << 22  # multiplications; below this the call by ctypes, 4 microseconds, takes what MKL saves
_FLOAT32 = np.dtype(np.float32)


def use_products_of(variable: str | None) -> None:
    """Choose the library that multiplies matrices in this process: "mkl", or "numpy", the default for "" and None.

    Raises UsageError for another name, and where MKL cannot be loaded.
    """
    if variable not in (None, "", "numpy", "mkl"):
        raise UsageError(f"MINIDIST_BLAS={quoted(variable)} names no library; it is 'numpy' or 'mkl'")
    if variable == "mkl" and library() is None:
        raise UsageError("MINIDIST_BLAS=mkl, but MKL cannot be loaded; install it: pip install 'minidist[mkl]'")
    xp.host_product = product if variable == "mkl" else xp.matmul


@cache
def library() -> ctypes.CDLL | None:
    """Return MKL of the wheel `mkl`, with one thread and reproducible bits; None where it cannot be loaded."""
    try:
        files = importlib.metadata.files("mkl") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name.startswith(("libmkl_rt.so", "mkl_rt.")):
            try:
                mkl = ctypes.CDLL(os.fspath(file.locate()))
            except OSError:  # a file of the wheel is missing
                return None
            mkl.MKL_Set_Threading_Layer(_SEQUENTIAL)
            mkl.MKL_CBWR_Set(_CBWR_AUTO)
            number, real, matrix = ctypes.c_int, ctypes.c_float, (ctypes.c_void_p, ctypes.c_int)
            mkl.cblas_sgemm.argtypes = (*[number] * 6, real, *matrix, *matrix, real, *matrix)
            mkl.cblas_sgemm.restype = None
            return mkl
    return None


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return a @ b of two matrices, in `out` when it is given; by NumPy if they are small or not of float32."""
    (rows, inner), columns = a.shape, b.shape[1]
    if rows * inner * columns < _SMALLEST or not a.dtype == b.dtype == _FLOAT32 or b.shape[0] != inner:
        return np.matmul(a, b, out=out)
    if out is None:
        out = np.empty((rows, columns), _FLOAT32)
    left, right = _order(a), _order(b)
    fits = out.flags.carray and out.dtype == _FLOAT32 and out.shape == (rows, columns)
    if not (left and right and fits) or np.may_share_memory(a, out) or np.may_share_memory(b, out):
        return np.matmul(a, b, out=out)
    mkl = library()
    assert mkl is not None
    mkl.cblas_sgemm(
        _ROW_MAJOR, left[0], right[0], rows, columns, inner,
        1.0, a.ctypes.data, left[1], b.ctypes.data, right[1], 0.0, out.ctypes.data, columns,
    )  # fmt: skip
    return out


def _order(matrix: np.ndarray) -> tuple[int, int] | None:
    """Return how a matrix lies in memory: by rows or by columns, and elements from one to the next; None: neither."""
    (rows, columns), (down, right), size = matrix.shape, matrix.strides, matrix.itemsize
    if right == size and down >= columns * size and down % size == 0:
        return _PLAIN, down // size
    if down == size and right >= rows * size and right % size == 0:
        return _TRANSPOSED, right // size
    return None


def time_of_mkl(repeats: int = 7) -> float:
    """Return the time of MKL over NumPy's for a product of a GPT's layer, each the least of `repeats` in turn."""
    a, b, out = np.ones((1024, 256), _FLOAT32), np.ones((256, 1024), _FLOAT32), np.empty((1024, 1024), _FLOAT32)
    seconds: dict[str, list[float]] = {"mkl": [], "numpy": []}
    for _ in range(repeats):
        for name, multiply in (("mkl", product), ("numpy", np.matmul)):
            start = time.perf_counter()
            multiply(a, b, out=out)
            seconds[name].append(time.perf_counter() - start)
    return min(seconds["mkl"]) / min(seconds["numpy"])
