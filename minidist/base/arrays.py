"""The array functions of core/base/arrays.py, and those that the core does without.

Proved by: tests/base/test_arrays.py, tests/base/test_array_interface.py
"""

# ruff: noqa: F403, F405

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import numpy as np

from minidist.base.errors import UsageError, quoted
from minidist.core.base.arrays import *

absolute, sign, floor, frexp, sin, cos = np.absolute, np.sign, np.floor, np.frexp, np.sin, np.cos
argsort, bincount, compress, isfinite, isnan = np.argsort, np.bincount, np.compress, np.isfinite, np.isnan
packbits, unpackbits, place, put_along_axis = np.packbits, np.unpackbits, np.place, np.put_along_axis
transpose, zeros_like = np.transpose, np.zeros_like


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype: "float32", "bfloat16". Cached, because `str(dtype)` takes a microsecond."""
    return str(dtype)


class Device(Protocol):
    """Makes arrays. `asarray` copies one of NumPy's to the device."""

    def empty(self, shape: Any, dtype: Any) -> Any: ...

    def zeros(self, shape: Any, dtype: Any) -> Any: ...

    def asarray(self, value: Any) -> Any: ...


def named_dtype(name: str) -> Any:
    """The dtype called `name`, "bfloat16" among them (which NumPy knows once ml_dtypes is imported)."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def numbers_of(value: Any) -> Array:
    """`value` as the array of a Tensor; UsageError where it would not hold numbers."""
    try:
        made = as_array(value)
    except ValueError:  # of lists of unequal lengths
        made = None
    if made is None or made.dtype.kind in "OSU":
        raise UsageError(f"Tensor({quoted(value)}); pass an array, or numbers in lists of equal lengths")
    return made


def to_host(value: Any) -> Any:
    """A device's array as one of NumPy's; NumPy's own as it is."""
    return value.get() if type(value) is not ndarray and hasattr(value, "get") else value


def store(place: Array, value: Array) -> None:
    """Copy values into an array, from the host to a device or back where they lie elsewhere."""
    place[...] = on_device_of(place, value)


def on_device_of(other: Array, value: Array) -> Array:
    """`value` on the host or on the device, where `other` is."""
    if type(value) is type(other):
        return value
    return to_host(value) if type(other) is ndarray else to_device(value)


def quiet_overflow() -> AbstractContextManager[object]:
    """Inside the block an overflow or a NaN is not a warning (NumPy warns once an operation; CuPy never does)."""
    return np.errstate(over="ignore", invalid="ignore")
