"""Arrays with a shape and no data: what a program sends, and when, without the memory to hold it.

A collective moves bytes and adds numbers; which bytes and how many does not depend on the numbers. So the very code
that reduces a real array can be run on a `Phantom` of 64 MiB, or 64 GiB, on each of 64 simulated ranks: messages,
volumes and virtual time come out exact, and nothing is allocated, copied or added.

    SimWorld(64, checks=False).run(lambda comm: all_reduce(comm, Phantom(2**24, np.float32)))

Proved by: tests/base/test_phantom.py
"""

from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from minidist.base.errors import UsageError, quoted


class _Flags(NamedTuple):
    """What a collective asks of an array's memory, as `numpy.ndarray.flags` answers it."""

    c_contiguous: bool = True
    writeable: bool = True


class Phantom(NDArrayOperatorsMixin):
    """`shape`, `dtype`, `size`, `nbytes` and slices of a C-contiguous array; assignments and sums check shapes only."""

    flags = _Flags()

    def __init__(self, shape: int | tuple[int, ...], dtype: Any = np.float64) -> None:
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.dtype = np.dtype(dtype)
        self.size, self.itemsize, self.ndim = prod(self.shape), self.dtype.itemsize, len(self.shape)
        self.nbytes = self.size * self.itemsize

    def __repr__(self) -> str:
        return f"Phantom({self.shape}, {self.dtype})"

    def __len__(self) -> int:
        return self.shape[0]

    def reshape(self, *shape: Any) -> "Phantom":
        """The same elements in another shape; one length may be -1."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        known = prod(length for length in wanted if length != -1)
        result = tuple(self.size // max(known, 1) if length == -1 else length for length in wanted)
        if prod(result) != self.size:
            raise ValueError(f"cannot reshape {self.size} elements into {wanted}")
        return Phantom(result, self.dtype)

    def copy(self) -> "Phantom":
        return Phantom(self.shape, self.dtype)

    def __getitem__(self, index: Any) -> "Phantom":
        if index is Ellipsis:
            return self
        if not isinstance(index, slice):
            raise UsageError(
                f"a phantom array has no elements, only slices of its first dim; got index {quoted(index)}"
            )
        return Phantom((len(range(*index.indices(self.shape[0]))), *self.shape[1:]), self.dtype)

    def __setitem__(self, index: Any, value: Any) -> None:
        target = self[index]
        if np.shape(value) not in ((), target.shape):
            raise ValueError(f"cannot assign shape {np.shape(value)} to {target.shape}")

    def view(self, *_: Any) -> Any:
        raise UsageError("a phantom array has no bytes to look at; run it in SimWorld(..., checks=False)")

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise UsageError("a phantom array has no values; compute with its shape only")

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = (), **_: Any) -> "Phantom":
        if method != "__call__":
            return NotImplemented  # type: ignore[no-any-return]
        shape = np.broadcast_shapes(*(np.shape(value) for value in inputs))
        if out:
            if out[0].shape != shape:
                raise ValueError(f"{ufunc.__name__}: result of shape {shape} into {out[0].shape}")
            return out[0]  # type: ignore[no-any-return]
        return Phantom(shape, self.dtype)

    def __array_function__(self, function: Any, _: Any, arguments: Any, keywords: Any) -> Any:
        if function is np.empty_like:
            shape = keywords.get("shape")
            return Phantom(arguments[0].shape if shape is None else shape, keywords.get("dtype") or arguments[0].dtype)
        if function is np.shape:
            return arguments[0].shape
        return NotImplemented
