"""The array functions that autograd, nn, optim and the strategies use, for NumPy, CuPy and meta arrays.

NumPy's functions pass CuPy arrays (and any other array type that implements `__array_ufunc__` and `__array_function__`)
to their own library, so one name serves both. This file adds what the protocols do not cover: creating an array *like*
another one, scattering into rows, and sums that are fast on both.

Proved by: tests/base/test_arrays.py, tests/base/test_array_interface.py
"""

# Other modules take NumPy's names from here.
# ruff: noqa: F401, F811

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from numpy import arange, dtype, float32, float64, generic, inf, int64, ndarray

from minidist.core.base import hooks

# Annotations name NumPy's type, so that its own functions accept it. minidist/base/array_interface.py lists what is
# used of it.
Array = np.ndarray[Any, np.dtype[Any]]

# NumPy's functions that other modules get here.
add, subtract, multiply, divide, matmul = np.add, np.subtract, np.multiply, np.divide, np.matmul
exp, log, sqrt, square, tanh, reciprocal = np.exp, np.log, np.sqrt, np.square, np.tanh, np.reciprocal
maximum, minimum, where, array_equal = np.maximum, np.minimum, np.where, np.array_equal
concatenate, stack, take, copyto = np.concatenate, np.stack, np.take, np.copyto
broadcast_to, moveaxis, swapaxes = np.broadcast_to, np.moveaxis, np.swapaxes
empty_like, ones_like = np.empty_like, np.ones_like

# What makes new arrays that are not made like another one: NumPy, or the device that device.py sets.
creating: ContextVar[Any] = ContextVar("minidist_creating", default=np)

# Multiplies two matrices on the host; mkl.py sets another function.
host_product: Callable[..., Array] = matmul
_kept_full = lru_cache(64)(np.full)  # see `constant`

# Elements that an operation on a GPU takes at once: a kernel costs microseconds to launch, however short its array is.
GPU_BLOCK = 1 << 24


def is_array(value: Any) -> bool:
    """True for NumPy arrays and for CuPy arrays, false for Python and NumPy scalars, lists and tensors."""
    return isinstance(value, ndarray) or bool(getattr(value, "__array_ufunc__", 0) and not isinstance(value, generic))


def array(value: Any, dtype: Any = None) -> Array:
    """A new array with the values of `value`; a CuPy array stays on its device."""
    if is_array(value):
        return value.astype(dtype or value.dtype, copy=True)  # type: ignore[no-any-return]
    return np.array(value, dtype=dtype)


def as_array(value: Any, dtype: Any = None) -> Array:
    """`value` as an array, without a copy when it is one of that dtype already."""
    if isinstance(value, ndarray) or (not isinstance(value, generic) and is_array(value)):
        return value if dtype is None or value.dtype == dtype else value.astype(dtype)
    made = np.asarray(value, dtype=dtype)
    return made if creating.get() is np else to_device(made)


def device_arange(*arguments: Any) -> Array:
    """NumPy's arange, on the device on which new arrays are made."""
    return to_device(np.arange(*arguments))


def to_device(value: Array) -> Array:
    """One of NumPy's arrays, on the device on which new arrays are made."""
    device = creating.get()
    return value if device is np else device.asarray(value)


def empty(shape: Any, dtype: Any, like: Array | None = None) -> Array:
    """An uninitialised C-contiguous array on the device of `like` (the host when None)."""
    if like is None:
        return creating.get().empty(shape, dtype)  # type: ignore[no-any-return]
    return np.empty(shape, dtype) if type(like) is ndarray else np.empty(shape, dtype, like=like)


def zeros(shape: Any, dtype: Any, like: Array | None = None) -> Array:
    """An array of zeros on the device of `like`."""
    if like is None:
        return creating.get().zeros(shape, dtype)  # type: ignore[no-any-return]
    return np.zeros(shape, dtype) if type(like) is ndarray else np.zeros(shape, dtype, like=like)


def full(shape: Any, value: Any, dtype: Any, like: Array | None = None) -> Array:
    """An array filled with `value` on the device of `like`."""
    result = empty(shape, dtype, like)
    result.fill(value)
    return result


def constant(n: int, value: float, like: Array) -> Array:
    """A vector of the dtype of `like`. NumPy's is kept for later calls, so nothing may be written into it."""
    return _kept_full(n, value, like.dtype) if type(like) is ndarray else full(n, value, like.dtype, like)


def is_meta(value: Any) -> bool:
    """Whether an array has a shape and no data, so that what would only compute values can be skipped.

    `meta.py`, which makes such arrays, is loaded by dry runs alone.
    """
    return type(value) is not ndarray and getattr(value, "is_meta", False)


def kernels_of(value: Array) -> Any:
    """The module of whole operations: cuda.py for CuPy's arrays, meta_kernels.py for meta arrays.

    None for all others, for which the array functions next to each call are the operation.
    """
    return None if type(value) is ndarray else hooks.kernels_of(type(value))


def block_length(value: Array, block: int) -> int:
    """How many elements of a 1-D array a loop takes at once: `block`, which fits into the cache, and more on a GPU."""
    return block if type(value) is ndarray or is_meta(value) else max(block, GPU_BLOCK)


def blocks(value: Array, block: int) -> Iterator[slice]:
    """The blocks of `block_length` elements of a 1-D array; of a meta array only the first: all use the same memory."""
    block = block_length(value, block)
    for start in range(0, min(value.size, 1) if is_meta(value) else value.size, block):
        yield slice(start, min(start + block, value.size))


def owner(value: Array) -> Array:
    """The array that owns the memory that `value` is a view of (itself when it is not a view)."""
    base: Any = value
    while is_array(getattr(base, "base", None)):
        base = base.base
    return base  # type: ignore[no-any-return]


def as_rows(value: Array) -> Array:
    """A view as a matrix whose rows are the last dim: (..., n) as (product of the others, n); may be empty."""
    return value if value.ndim == 2 else value.reshape(-1 if value.size else prod(value.shape[:-1]), value.shape[-1])


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """a @ b of two matrices, in `out` when it is given."""
    kernels = None if type(a) is ndarray else hooks.kernels_of(type(a))
    return host_product(a, b, out=out) if not kernels else kernels.product(a, b, out)


def sum_rows(value: Array, out: Array | None = None) -> Array:
    """Sums over all but the last dim: one product with a vector of ones, several times faster than `sum(axis=0)`."""
    matrix = as_rows(value)
    if type(matrix) is ndarray:
        return matmul(_kept_full(matrix.shape[0], 1, matrix.dtype), matrix, out=out)
    if kernels := hooks.kernels_of(type(matrix)):
        return kernels.sum_rows(matrix, out)  # type: ignore[no-any-return]
    return matmul(full(matrix.shape[0], 1, matrix.dtype, matrix), matrix, out=out)


def dot_rows(a: Array, b: Array) -> Array:
    """Sum of a*b over the last axis, which stays with length 1. (CuPy has no vecdot.)"""
    if type(a) is ndarray:
        return np.vecdot(a, b)[..., None]  # type: ignore[no-any-return]
    return (a * b).sum(axis=-1, keepdims=True)  # type: ignore[no-any-return]


def scatter_add(target: Array, index: Any, values: Array) -> None:
    """`target[index] += values` where an index that occurs twice is added twice, in index order.

    `values` has the shape of target[index].
    """
    if kernels := kernels_of(target):
        kernels.scatter_add(target, index, values)
    else:
        np.add.at(target, index, values)


def scatter_add_rows(target: Array, rows: Array, values: Array) -> None:
    """`target[rows[i]] += values[i]` for each i, repeats included: target (n, width), rows (m,), values (m, width).

    The order of addition depends on the rows alone, so equal calls give equal bits.
    """
    if kernels := kernels_of(target):
        kernels.scatter_add_rows(target, rows, values)
    elif type(target) is not ndarray:
        np.add.at(target, rows, values)
    elif rows.size:
        order = np.argsort(rows, kind="stable")
        rows, values = rows[order], values[order]
        starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
        target[rows[starts]] += values if starts.size == rows.size else np.add.reduceat(values, starts, axis=0)


# --- half precision: the sums and products of 16-bit floats are done in float32, see half.py ---


def is_half(dtype: Any) -> bool:
    """Whether it is a 16-bit float. (bfloat16 is of NumPy's kind "V", because ml_dtypes defines it.)"""
    return dtype.itemsize == 2 and dtype.kind in "fV"


def upcast(value: Array) -> Array:
    """`value` itself, or its exact values in a new float32 array (memory purpose workspace) when it is 16-bit."""
    if value.itemsize != 2 or not is_half(value.dtype):
        return value
    return hooks.half().widened(value)  # type: ignore[no-any-return]


def downcast(value: Array, dtype: Any) -> Array:
    """`value` itself when it is of `dtype`, or its values rounded to the nearest (ties to even) in a new array.

    What is too large becomes infinite, without a warning: a loss scaler looks for it.
    """
    if value.dtype is dtype or value.dtype == dtype:
        return value
    return hooks.half().rounded(value, dtype)  # type: ignore[no-any-return]


def add_into(total: Array, contribution: Array) -> Array:
    """total += contribution; returns `total`. Each sum of 16-bit floats is rounded once."""
    if contribution.itemsize == 2 and is_half(contribution.dtype):
        return hooks.half().add_into(total, contribution)  # type: ignore[no-any-return]
    total += contribution
    return total
