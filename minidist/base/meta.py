"""Arrays with a shape, a dtype and a memory layout, and no data: the meta arrays of a dry run.

What a training program allocates, sends and waits for depends on shapes, not on values. So the same program that trains
(model, tape, strategies, pipeline, optimizer) also runs on `MetaArray`s. Its bytes, messages, peaks of memory and
virtual time are those of the real run, and nothing is computed. PyTorch has the same idea in its meta device.

    with creating_meta():            # arrays.empty, zeros, ... and initial weights make meta arrays
        model = GPT(...)

A value that a program asks for is 1 (a norm, a scale) or true (all elements are finite, replicas are equal).

Views need no data either. NumPy makes them from an array of one element that has the strides of the whole array; the
element is never read.

Proved by: tests/base/test_meta.py, tests/train/test_dry_run.py
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.lib.stride_tricks import as_strided

from minidist.base.device import creating_on
from minidist.core.base.errors import UsageError

MAX_VALUES = 100_000  # elements of a meta array that may become a NumPy array
MAX_REMEMBERED = 2**16  # layouts and plans of ufuncs that are kept
_ONE: dict[np.dtype[Any], np.ndarray] = {}


class NoDevice:
    """Makes the arrays of a dry run. Floats have no data; integers have, because programs compute indices with them."""

    is_meta = True

    def empty(self, shape: Any, dtype: Any) -> Any:
        return empty_meta(shape, dtype)

    zeros = empty

    def asarray(self, value: Any) -> Any:
        return MetaArray(value.shape, value.dtype) if value.dtype.kind == "f" else value


def creating_meta() -> AbstractContextManager[None]:
    """Return a context manager in which new arrays are meta arrays, unless they are made like another array."""
    return creating_on(NoDevice())


@lru_cache(MAX_REMEMBERED)
def _layout(shape: tuple[int, ...], dtype: np.dtype[Any], order: tuple[int, ...] | None = None) -> np.ndarray:
    """Return a NumPy array with this shape, dtype and memory order over a single element. It must not be read.

    order: the axes from the slowest to the fastest; None means C order. Arrays share their layouts, because a layer
    makes the same shapes in every pass.
    """
    one = _ONE.get(dtype)
    if one is None:
        one = _ONE[dtype] = np.zeros(1, dtype)
    strides, step = [0] * len(shape), dtype.itemsize
    for axis in reversed(range(len(shape)) if order is None else order):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return as_strided(one, shape, strides)


def _shape(value: Any) -> tuple[int, ...]:
    return value.shape if isinstance(value, (MetaArray, np.ndarray)) else np.shape(value)


@lru_cache(MAX_REMEMBERED)
def _moved(
    shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...], source: int, destination: int
) -> np.ndarray:
    """Return the layout of such an array with an axis in another place."""
    return np.moveaxis(as_strided(_layout((), dtype), shape, strides), source, destination)


@lru_cache(MAX_REMEMBERED)
def _reshaped(
    shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[np.ndarray, bool]:
    """Return the layout of such an array in another shape, and whether NumPy returns a view of it."""
    size, known = math.prod(shape), math.prod(length for length in wanted if length != -1)
    exact = tuple(size // max(known, 1) if length == -1 else int(length) for length in wanted)
    if math.prod(exact) != size:
        raise ValueError(f"cannot reshape array of size {size} into shape {wanted}")
    try:
        return as_strided(_layout((), dtype), shape, strides).reshape(exact, copy=False), True
    except ValueError:  # a copy would be needed
        return _layout(exact, dtype), False


_broadcast_shapes = lru_cache(MAX_REMEMBERED)(np.broadcast_shapes)


Described = tuple[tuple[int, ...], Any, tuple[int, ...]]  # shape, dtype (of a Python scalar its type), strides


def _described(value: Any) -> Described:
    """Return what the result of a ufunc depends on."""
    if type(value) is MetaArray:
        value = value._layout
    elif type(value) in (int, float, complex, bool):
        return (), np.dtype(np.bool_) if type(value) is bool else type(value), ()
    return value.shape, value.dtype, value.strides


def _keep_order(inputs: Sequence[Described], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the order of a result's axes in memory, which is that of the inputs (NumPy's order "K").

    The axes are listed from the slowest to the fastest; None means C order.
    """
    for own, dtype, strides in inputs:
        if own == shape != () and strides != _layout(shape, dtype).strides:
            return tuple(sorted(range(len(shape)), key=lambda axis: -abs(strides[axis])))
    return None


def _result(shape: tuple[int, ...], dtype: np.dtype[Any], order: Sequence[int] | None = None) -> Any:
    """Return the result of an operation: a new meta array, or for shape () the NumPy scalar 1.

    order: the axes from the slowest to the fastest; None means C order.
    """
    return dtype.type(1) if shape == () else MetaArray._of(_layout(shape, dtype, order))


class MetaArray(NDArrayOperatorsMixin):
    """An array without data. `base` is the array that owns the memory if this one is a view, otherwise None."""

    __slots__ = ("__weakref__", "_layout", "base")
    is_meta = True

    def __init__(self, shape: int | tuple[int, ...], dtype: Any = np.float64) -> None:
        wanted = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        self._layout = _layout(wanted, np.dtype(dtype))
        self.base: MetaArray | None = None

    @classmethod
    def _of(cls, layout: np.ndarray, base: "MetaArray | None" = None) -> "MetaArray":
        """Return an array with this layout: a view of `base`, or without `base` an array with its own memory."""
        result = cls.__new__(cls)
        result._layout, result.base = layout, base
        return result

    def _view(self, layout: np.ndarray) -> "MetaArray":
        return MetaArray._of(layout, self if self.base is None else self.base)

    # what it is -------------------------------------------------------------------------------------------------------

    # Read many times for each array, so no frame of Python's is made for them.
    shape: Any = property(attrgetter("_layout.shape"))
    dtype: Any = property(attrgetter("_layout.dtype"))
    size: Any = property(attrgetter("_layout.size"))
    ndim: Any = property(attrgetter("_layout.ndim"))
    itemsize: Any = property(attrgetter("_layout.itemsize"))
    nbytes: Any = property(attrgetter("_layout.nbytes"))
    strides: Any = property(attrgetter("_layout.strides"))

    @property
    def flags(self) -> Any:
        # A program may make this array read-only, and new arrays share their layouts.
        self._layout = self._layout.view()
        return self._layout.flags

    def __repr__(self) -> str:
        return f"MetaArray({self.shape}, {self.dtype})"

    def __len__(self) -> int:
        return len(self._layout)

    # values: there are none -------------------------------------------------------------------------------------------

    def item(self) -> Any:
        """Return 1 or true, for a program that decides by a value."""
        if self.size != 1:
            raise ValueError(f"can only convert an array of size 1 to a Python scalar, not one of shape {self.shape}")
        return self.dtype.type(1).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return ones, for a program that decides by a few numbers. Raises UsageError above MAX_VALUES elements."""
        if self.size > MAX_VALUES:
            raise UsageError(
                f"a meta array of shape {self.shape} has no values; NumPy may look at {MAX_VALUES:,} of them at most"
            )
        return np.ones(self.shape, dtype or self.dtype)

    def nonzero(self) -> Any:
        """Errors: UsageError, because the size of the result depends on values."""
        raise UsageError("nonzero() has a size that depends on values, which a meta array does not have")

    def tolist(self) -> Any:
        """Return a list of ones of the array's shape."""
        return np.ones(self.shape, self.dtype).tolist()

    # views ------------------------------------------------------------------------------------------------------------

    def reshape(self, *shape: Any, order: str = "C") -> "MetaArray":
        """Return the same elements in another shape: a view if NumPy returns a view, otherwise a copy."""
        wanted = shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)) else shape
        layout, is_view = _reshaped(self.shape, self.dtype, self.strides, tuple(wanted))
        return self._view(layout) if is_view else MetaArray._of(layout)._view(layout)  # NumPy returns a view of a copy

    def ravel(self) -> "MetaArray":
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> "MetaArray":
        return self._view(self._layout.transpose(*axes))

    def swapaxes(self, first: int, second: int) -> "MetaArray":
        return self._view(self._layout.swapaxes(first, second))

    @property
    def T(self) -> "MetaArray":
        return self.transpose()

    def view(self, dtype: Any = None) -> "MetaArray":
        return self._view(self._layout.view() if dtype is None else self._layout.view(dtype))

    def __getitem__(self, index: Any) -> Any:
        shape = _indexed_shape(self, index)
        if shape is not None:
            return _result(shape, self.dtype)
        # One element is a scalar. NumPy would read it from the layout, so the scalar is made here.
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) == self.ndim and all(isinstance(part, (int, np.integer)) for part in parts):
            return self.dtype.type(1)
        return self._view(self._layout[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        shape = _indexed_shape(self, index)
        target = self._layout[index].shape if shape is None else shape
        if _broadcast_shapes(target, _shape(value)) != target:
            raise ValueError(f"could not broadcast input array from shape {np.shape(value)} into shape {target}")

    # copies and reductions --------------------------------------------------------------------------------------------

    def copy(self, order: str = "C") -> "MetaArray":
        return MetaArray(self.shape, self.dtype)

    def astype(self, dtype: Any, order: Any = "K", copy: bool = True, **_: Any) -> "MetaArray":
        if not copy and np.dtype(dtype) == self.dtype and (order == "K" or self.flags.c_contiguous):
            return self
        layout = self._layout
        keeps = order == "K" and not layout.flags.c_contiguous
        axes = _keep_order([_described(self)], layout.shape) if keeps else None
        return MetaArray._of(_layout(layout.shape, np.dtype(dtype), axes))

    def round(self, decimals: int = 0, out: Any = None) -> Any:
        return MetaArray(self.shape, self.dtype) if out is None else out

    def cumsum(self, axis: Any = None, **_: Any) -> "MetaArray":
        return MetaArray(self.shape if axis is not None else self.size, self.dtype)

    def fill(self, value: Any) -> None:
        """Returns without an effect: a meta array has no data to fill."""

    def tobytes(self) -> bytes:
        """Return no bytes, so the fingerprints of a dry run are those of empty data."""
        return b""

    def _reduced(self, dtype: Any, axis: Any = None, out: Any = None, keepdims: bool = False, **_: Any) -> Any:
        if out is not None:
            return out
        axes = range(self.ndim) if axis is None else [a % self.ndim for a in np.atleast_1d(axis)]
        if keepdims:
            shape = tuple(1 if a in axes else length for a, length in enumerate(self.shape))
        else:
            shape = tuple(length for a, length in enumerate(self.shape) if a not in axes)
        return _result(shape, np.dtype(dtype))

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        kind = self.dtype if self.dtype.kind == "f" else np.dtype(np.int64)
        return self._reduced(dtype or kind, axis, out, keepdims)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False, **more: Any) -> Any:
        return self._reduced(self.dtype, axis, out, keepdims)

    min = max

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return self._reduced(dtype or self.dtype, axis, out, keepdims)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return self._reduced(bool, axis, out, keepdims)

    def argmax(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        """Return the indices 0, 1, 2, ... in turn, so the tokens of a dry run choose all experts equally often."""
        shape = self._reduced(np.int64, axis, None, keepdims).shape
        lengths = self.size if axis is None else self.shape[axis]
        return (np.arange(math.prod(shape)) % lengths).reshape(shape)

    # NumPy's protocols ------------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **more: Any) -> Any:
        if method == "at":
            return None
        if method in ("reduce", "accumulate", "reduceat"):
            return _reduce(ufunc, method, inputs, out, more)
        if method != "__call__":
            return NotImplemented
        where = _shape(more["where"]) if "where" in more else ()
        shape, dtypes, order = _plan(ufunc, more.get("dtype"), where, *[_described(value) for value in inputs])
        if out is None and ufunc.nout == 1:
            return _result(shape, dtypes[0], order)
        targets = (out if isinstance(out, tuple) else (out,)) if out is not None else (None,) * ufunc.nout
        results = []
        for target, dtype in zip(targets, dtypes, strict=True):
            if target is None:
                target = _result(shape, dtype, order)
            elif target.shape != shape and _broadcast_shapes(shape, target.shape) != target.shape:
                raise ValueError(f"{ufunc.__name__}: result of shape {shape} into an array of shape {target.shape}")
            results.append(target)
        return results[0] if ufunc.nout == 1 else tuple(results)

    def __array_function__(self, function: Any, types: Any, arguments: Any, keywords: Any) -> Any:
        rule = _FUNCTIONS.get(function)
        if rule is None:
            raise UsageError(f"numpy.{function.__name__} has no rule for meta arrays; add one to minidist/base/meta.py")
        return rule(*arguments, **keywords)


_BASIC = frozenset({int, slice, type(None), type(Ellipsis)})


def _indexed_shape(array: MetaArray, index: Any) -> tuple[int, ...] | None:
    """Return the shape of the copy that indexing makes, or None if it makes a view."""
    parts = index if type(index) is tuple else (index,)
    if _BASIC.issuperset(map(type, parts)):
        return None
    if not any(type(part) not in _BASIC and isinstance(part, (np.ndarray, MetaArray, list)) for part in parts):
        return None
    # NumPy's rules. Index arrays are broadcast together, and their shape takes the place of the axes that they index.
    # It comes first where a slice is between two of them. An integer next to an index array is one, too.
    missing = array.ndim - sum(_axes_of(part) for part in parts)
    before: list[int] = []
    after: list[int] = []
    indices: list[tuple[int, ...]] = []
    axis, last = 0, -1
    for place, part in enumerate(parts):
        kept = after if indices else before
        if part is None:
            kept.append(1)
        elif part is Ellipsis:
            kept += array.shape[axis : axis + missing]
            axis += missing
        elif isinstance(part, slice):
            kept.append(len(range(*part.indices(array.shape[axis]))))
        else:
            # Where an index follows a slice that follows an index, the shape of all indices comes first.
            if indices and last != place - 1:
                before, after = [], before + after
            shape = _index_shape(part)
            indices.append(shape)
            last = place
        axis += _axes_of(part)
    return (*before, *np.broadcast_shapes(*indices), *after, *array.shape[axis:])


def _axes_of(part: Any) -> int:
    """Return how many axes a part of an index takes: a mask takes as many as it has, None and an ellipsis no axis."""
    if part is None or part is Ellipsis:
        return 0
    return int(part.ndim) if getattr(part, "dtype", None) == np.bool_ else 1


def _index_shape(part: Any) -> tuple[int, ...]:
    """Return the shape of an index array. A real mask selects its true elements; a meta mask selects all elements."""
    if getattr(part, "dtype", None) != np.bool_:
        return np.shape(part)
    return (math.prod(part.shape) if isinstance(part, MetaArray) else int(np.count_nonzero(part)),)


@lru_cache(MAX_REMEMBERED)
def _plan(
    ufunc: np.ufunc, dtype: Any, where: tuple[int, ...], *inputs: Described
) -> tuple[tuple[int, ...], Sequence[np.dtype[Any]], tuple[int, ...] | None]:
    """Return the shape, the dtypes and the order in memory of a ufunc's results, by NumPy's own rules."""
    shapes = [shape for shape, _, _ in inputs]
    if ufunc is np.matmul or ufunc is np.vecdot:
        shape = _product_shape(ufunc, *shapes)
    else:
        shape = np.broadcast_shapes(*shapes, where)
    if dtype is not None:
        dtypes: Sequence[np.dtype[Any]] = [np.dtype(dtype)] * ufunc.nout
    else:  # NEP 50: Python scalars are weak
        known = (*(of for _, of, _ in inputs), *(None,) * ufunc.nout)
        dtypes = ufunc.resolve_dtypes(known)[ufunc.nin :]
    return shape, dtypes, _keep_order(inputs, shape)


def _product_shape(ufunc: np.ufunc, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the result of matmul or of vecdot."""
    if ufunc is np.vecdot:
        if first[-1] != second[-1]:
            raise ValueError(f"vecdot of shapes {first} and {second}")
        return np.broadcast_shapes(first[:-1], second[:-1])
    if first[-1] != second[-2 if len(second) > 1 else 0]:
        raise ValueError(f"matmul of shapes {first} and {second}")
    rows = first[-2:-1]
    columns = second[-1:] if len(second) > 1 else ()
    return (*np.broadcast_shapes(first[:-2], second[:-2]), *rows, *columns)


def _reduce(ufunc: np.ufunc, method: str, inputs: Sequence[Any], out: Any, more: dict[str, Any]) -> Any:
    """Return the result of ufunc.reduce, accumulate or reduceat."""
    if out is not None:
        return out[0] if isinstance(out, tuple) else out
    array = inputs[0]
    dtype = more.get("dtype") or (np.int64 if ufunc is np.add and array.dtype.kind in "bi" else array.dtype)
    if method == "reduce":
        return array._reduced(dtype, more.get("axis", 0), None, more.get("keepdims", False))
    if method == "accumulate":
        return MetaArray(array.shape, dtype)
    shape = list(array.shape)
    shape[more.get("axis", 0)] = len(inputs[1])
    return MetaArray(tuple(shape), dtype)


# the rules of NumPy's functions other than ufuncs: each returns a result without values -------------------------------


def _like(prototype: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, **_: Any) -> Any:
    if shape is not None:
        return MetaArray(shape, dtype or prototype.dtype)
    axes = _keep_order([_described(prototype)], prototype.shape)
    return MetaArray._of(_layout(prototype.shape, np.dtype(dtype or prototype.dtype), axes))


def empty_meta(shape: Any, dtype: Any = np.float64, *_: Any, **__: Any) -> Any:
    """Return a new array. Arrays of integers are real, because programs compute indices with them."""
    return np.zeros(shape, dtype) if np.dtype(dtype).kind in "iu" else MetaArray(shape, dtype)


def _concatenate(arrays: Sequence[Any], axis: int = 0, out: Any = None, dtype: Any = None, **_: Any) -> Any:
    if out is not None:
        return out
    shape = list(arrays[0].shape)
    shape[axis] = sum(array.shape[axis] for array in arrays)
    return MetaArray(tuple(shape), dtype or np.result_type(*(array.dtype for array in arrays)))


def _stack(arrays: Sequence[Any], axis: int = 0, out: Any = None, **_: Any) -> Any:
    shape = list(arrays[0].shape)
    shape.insert(axis % (len(shape) + 1), len(arrays))
    return MetaArray(tuple(shape), arrays[0].dtype) if out is None else out


def _bincount(array: Any, weights: Any = None, minlength: int = 0) -> Any:
    # Indices are real in a dry run, so the number of bins is known; of meta indices, `minlength` bins.
    bins = 1 + int(array.max()) if isinstance(array, np.ndarray) and array.size else 0
    return MetaArray((max(bins, minlength),), np.int64 if weights is None else np.float64)


def _take(array: Any, indices: Any, axis: Any = None, out: Any = None, **_: Any) -> Any:
    if out is not None:
        return out
    shape = np.shape(indices) if axis is None else (*array.shape[:axis], *np.shape(indices), *array.shape[axis + 1 :])
    return MetaArray(shape, array.dtype)


def _where(condition: Any, *values: Any) -> Any:
    if not values:
        raise UsageError("where(mask) has a size that depends on values, which a meta array does not have")
    shape = np.broadcast_shapes(*(np.shape(value) for value in (condition, *values)))
    dtypes = [value.dtype if hasattr(value, "dtype") else value for value in values]
    return MetaArray(shape, np.result_type(*dtypes))


def _copyto(target: Any, source: Any, **_: Any) -> None:
    shape, wanted = _shape(source), _shape(target)
    if shape != wanted and _broadcast_shapes(wanted, shape) != wanted:
        raise ValueError(f"could not broadcast shape {shape} into shape {wanted}")


def _broadcast_to(array: Any, shape: Any, **_: Any) -> Any:
    return array._view(np.broadcast_to(array._layout, shape))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.shape: lambda array: array.shape,
    np.empty: empty_meta,
    np.zeros: empty_meta,
    np.empty_like: _like,
    np.zeros_like: _like,
    np.ones_like: _like,
    np.concatenate: _concatenate,
    np.stack: _stack,
    np.take: _take,
    np.put_along_axis: lambda *_, **__: None,
    np.compress: lambda mask, array, axis=None, out=None: out,
    np.place: lambda *_: None,
    np.where: _where,
    np.copyto: _copyto,
    np.broadcast_to: _broadcast_to,
    np.array_equal: lambda a, b, **_: np.shape(a) == np.shape(b),
    np.argsort: lambda array, *_, **__: MetaArray(array.shape, np.int64),
    np.bincount: _bincount,
    np.transpose: lambda array, axes=None: array.transpose() if axes is None else array.transpose(axes),
    np.swapaxes: lambda array, first, second: array.swapaxes(first, second),
    np.moveaxis: lambda array, *axes: array._view(_moved(array.shape, array.dtype, array.strides, *axes)),
    np.packbits: lambda bits: MetaArray(-(-bits.size // 8), np.uint8),
    np.unpackbits: lambda packed: MetaArray(8 * packed.size, np.uint8),
}
