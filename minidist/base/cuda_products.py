"""Products of CuPy's arrays as one call of cuBLAS, which reads each operand where it lies.

    (..., m, k) @ (..., k, n) -> (..., m, n)

    operand        its last two dims                      its other dims
    one matrix     rows or columns are contiguous         none
    a batch        the same                               one stride between the matrices
    heads          the same                               (batch, heads) with a stride each: a pointer for each matrix

`cupy.matmul` copies the heads of a packed projection, because they have no common stride, and its own preparation takes
several times as long as starting the product. cuBLAS stores matrices by columns, and a matrix stored by rows is its own
transpose stored by columns: it computes C^T = B^T A^T, so the operands change places.

Proved by: tests/cupy/test_kernels.py
"""

from functools import cache, lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import cupy
import numpy as np
from cupy.cuda import cublas
from cupy.cuda.device import get_cublas_handle

Array = Any  # one of CuPy's
Dims = tuple[int, ...]

# By dtype: of one matrix, of matrices with one stride, and of matrices with a pointer each.
_GEMM = {
    "f": (cublas.sgemm, cublas.sgemmStridedBatched, cublas.sgemmBatched),
    "d": (cublas.dgemm, cublas.dgemmStridedBatched, cublas.dgemmBatched),
}
_GEMV = {"f": cublas.sgemv, "d": cublas.dgemv}
_factors: list[np.ndarray] = []  # what `_number` returns addresses of
_ones: dict[str, Array] = {}  # by dtype the longest vector of ones so far


class _Operand(NamedTuple):
    """How cuBLAS reads the matrices of an array."""

    transposed: int  # 1 where the columns are contiguous, 0 where the rows are
    leading: int  # elements from one row (column) to the next
    strides: Dims  # elements from one matrix to the next, in each of the other dims
    stride: int | None  # the same where one number says it, else None


class _Plan(NamedTuple):
    """One call of cuBLAS: sizes and operands, already in its order of columns."""

    sizes: tuple[int, int, int]
    first: _Operand
    second: _Operand
    out: _Operand
    matrices: int
    swap: bool  # the operands change places


def product(a: Array, b: Array, out: Array | None = None, scale: float = 1.0, add: bool = False) -> Array:
    """Return scale a @ b, in `out` or a new array; add: out += scale a @ b.

    a (..., m, k), b (..., k, n), out (..., m, n). One call of cuBLAS for float32 and float64 whose other dims are equal
    and at most two; cupy.matmul, and another kernel for scale and add, for all others.
    """
    if out is None:
        out, add = cupy.empty((*a.shape[:-1], b.shape[-1]), a.dtype), False
    kind = a.dtype.char
    plan = None
    if kind in _GEMM and a.dtype == b.dtype == out.dtype:
        plan = _plan(a.itemsize, (a.shape, a.strides), (b.shape, b.strides), (out.shape, out.strides))
    if plan is None:
        value = cupy.matmul(a, b)
        value = value if scale == 1.0 else value * scale
        out[...] = out + value if add else value
        return out

    first, second = (b, a) if plan.swap else (a, b)
    factor, kept = _number(kind, scale), _number(kind, float(add))  # out = factor * a @ b + kept * out
    matrix, batch, pointers = _GEMM[kind]
    call = (get_cublas_handle(), plan.first.transposed, plan.second.transposed, *plan.sizes, factor)
    one, two, three = plan.first, plan.second, plan.out
    at = first.data.ptr, second.data.ptr, out.data.ptr
    if plan.matrices == 1:
        matrix(*call, at[0], one.leading, at[1], two.leading, kept, at[2], three.leading)
    elif one.stride is not None and two.stride is not None and three.stride is not None:
        batch(
            *(*call, at[0], one.leading, one.stride, at[1], two.leading, two.stride),
            *(kept, at[2], three.leading, three.stride, plan.matrices),
        )
    else:
        places = _pointers(at, (one, two, three), plan.matrices, out.shape[1], out.itemsize)
        where = places.data.ptr, 8 * plan.matrices
        pointers(
            *(*call, where[0], one.leading, where[0] + where[1], two.leading),
            *(kept, where[0] + 2 * where[1], three.leading, plan.matrices),
        )
    return out


def sum_rows(matrix: Array, out: Array | None = None) -> Array:
    """Return the sums over the rows of (m, n), in `out` (n,) or a new array: a product with a vector of ones."""
    rows, columns = matrix.shape
    kind = matrix.dtype.char
    if out is None:
        out = cupy.empty(columns, matrix.dtype)
    if kind not in _GEMV or not matrix.size or not matrix.flags.c_contiguous or not out.flags.c_contiguous:
        out[...] = matrix.sum(axis=0)
        return out
    ones = _ones.get(kind)
    if ones is None or ones.size < rows:
        ones = _ones[kind] = cupy.ones(rows, matrix.dtype)
    one, zero = _number(kind, 1.0), _number(kind, 0.0)
    call = (get_cublas_handle(), cublas.CUBLAS_OP_N, columns, rows, one, matrix.data.ptr, columns)
    _GEMV[kind](*call, ones.data.ptr, 1, zero, out.data.ptr, 1)
    return out


@lru_cache(4096)
def _plan(itemsize: int, a: tuple[Dims, Dims], b: tuple[Dims, Dims], c: tuple[Dims, Dims]) -> _Plan | None:
    """Return the call for operands of these shapes and strides (bytes), or None where cuBLAS has none."""
    (m, k), n = a[0][-2:], b[0][-1]
    others = c[0][:-2]
    if a[0][:-2] != others or b[0][:-2] != others or b[0][-2] != k or not prod(c[0]) or not k or len(others) > 2:
        return None
    left, right, out = (_operand(itemsize, *operand) for operand in (a, b, c))
    if left is None or right is None or out is None:
        return None

    # A result stored by columns is A B as cuBLAS counts; one stored by rows is its transpose, B^T A^T.
    count = prod(others)
    if out.transposed:
        left, right = (operand._replace(transposed=1 - operand.transposed) for operand in (left, right))
        return _Plan((m, n, k), left, right, out, count, False)
    return _Plan((n, m, k), right, left, out, count, True)


def _operand(itemsize: int, shape: Dims, strides: Dims) -> _Operand | None:
    """Return how cuBLAS reads an array; None where neither rows nor columns are contiguous."""
    rows, columns = shape[-2:]
    *others, down, along = (stride // itemsize for stride in strides)
    if (along == 1 or columns == 1) and (rows == 1 or down >= columns):
        transposed, leading = 0, columns if rows == 1 else down
    elif (down == 1 or rows == 1) and (columns == 1 or along >= rows):
        transposed, leading = 1, rows if columns == 1 else along
    else:
        return None

    # One stride serves all matrices when each dim begins where the dim after it ends.
    dims = [(size, step) for size, step in zip(shape[:-2], others, strict=True) if size != 1]
    together = all(outer[1] == size * step for outer, (size, step) in pairwise(dims))
    return _Operand(transposed, leading, tuple(others), (dims[-1][1] if dims else 0) if together else None)


@cache
def _number(kind: str, value: float) -> int:
    """Return the address of a factor, which cuBLAS reads in the host's memory."""
    _factors.append(np.array(value, kind))
    return _factors[-1].ctypes.data


def _pointers(at: tuple[int, ...], operands: tuple[_Operand, ...], count: int, inner: int, itemsize: int) -> Array:
    """Return the addresses (3, count) of the matrices of three operands with two dims of matrices."""
    places = cupy.empty((3, count), cupy.int64)
    steps = [step * itemsize for operand in operands for step in operand.strides]
    _addresses()((-(-count // 64),), (64,), (places, count, inner, *at, *steps))
    return places


@cache
def _addresses() -> Any:
    return cupy.RawKernel(
        r"""
        extern "C" __global__ void minidist_addresses(
            long long* places, long long count, long long inner, long long a, long long b, long long c,
            long long a0, long long a1, long long b0, long long b1, long long c0, long long c1
        ) {
            const long long i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i >= count) return;
            const long long outer = i / inner, own = i % inner;
            places[i] = a + outer * a0 + own * a1;
            places[count + i] = b + outer * b0 + own * b1;
            places[2 * count + i] = c + outer * c0 + own * c1;
        }
        """,
        "minidist_addresses",
    )
