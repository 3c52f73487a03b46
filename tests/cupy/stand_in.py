"""A strict stand-in for CuPy's arrays, for machines without a GPU.

A `DeviceArray` has NumPy's values inside and CuPy's interface outside: only the functions, ufuncs, methods and
parameters that interface.json lists (read from CuPy's wheel by read_interface.py), no implicit conversion to a NumPy
array, and no operation on it and a NumPy array together. Of these it has only what minidist's own list has
(minidist/base/array_interface.py), so that no program uses a name that the list lacks. A reduction to one value is an
array of shape (), not a scalar. What passes here calls nothing that CuPy does not have; whether a GPU gives the same
numbers, only a GPU tells.
"""

import json
from pathlib import Path

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from minidist.base import array_interface

INTERFACE = json.loads((Path(__file__).parent / "interface.json").read_text())
UFUNCS, FUNCTIONS, METHODS = set(INTERFACE["ufuncs"]), INTERFACE["functions"], INTERFACE["methods"]
# What base/ uses of CuPy in addition to the list: host copies, arrays like others, and the pieces of its functions.
BASE_METHODS, BASE_FUNCTIONS = {"get", "set"}, {"empty", "zeros"}
UFUNC_PARAMETERS = {"out", "dtype", "casting", "where"}
# matmul is a function of CuPy's that NumPy has as a ufunc.
AT = {"add", "subtract", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor"}


def check(name, known, arguments, keywords, what):
    """Raise TypeError for a parameter that CuPy's function does not have."""
    if known is None or any(parameter.startswith("*") for parameter in known):
        return
    if len(arguments) > len(known):
        raise TypeError(f"cupy: {what} {name} takes {len(known)} arguments, not {len(arguments)}")
    for keyword in keywords:
        if keyword not in known:
            raise TypeError(f"cupy: {what} {name} has no parameter {keyword!r}")


def inner(value):
    """Return the NumPy array inside; TypeError for a NumPy array, which is not on the device."""
    if isinstance(value, DeviceArray):
        return value.held
    if isinstance(value, np.ndarray):
        raise TypeError(f"cupy: unsupported type numpy.ndarray, of shape {value.shape}, among device arrays")
    if isinstance(value, (list, tuple)):
        return type(value)(inner(one) for one in value)
    return value


def outer(value, base=None):
    """Return a result as the device has it: arrays, also of one value."""
    if isinstance(value, np.ndarray):
        return DeviceArray(value, base)
    if isinstance(value, np.generic):
        return DeviceArray(np.asarray(value))
    if isinstance(value, (list, tuple)):
        return type(value)(outer(one) for one in value)
    return value


class Flags:
    """The three flags that CuPy's arrays have."""

    def __init__(self, flags):
        self.c_contiguous, self.f_contiguous, self.owndata = flags.c_contiguous, flags.f_contiguous, flags.owndata


class DeviceArray(NDArrayOperatorsMixin):
    """An array with CuPy's interface. held: its values; base: the array whose memory it is a view of."""

    __array_priority__ = 100

    def __init__(self, held, base=None):
        self.held, self.base = held, base

    def view_of(self, held):
        """Return a result that may be a view of this array."""
        if held is self.held:
            return self
        root = self if self.base is None else self.base
        return DeviceArray(held, root if np.may_share_memory(held, self.held) and held.size else None)

    shape = property(lambda self: self.held.shape)
    dtype = property(lambda self: self.held.dtype)
    size = property(lambda self: self.held.size)
    ndim = property(lambda self: self.held.ndim)
    itemsize = property(lambda self: self.held.itemsize)
    nbytes = property(lambda self: self.held.nbytes)
    strides = property(lambda self: self.held.strides)
    flags = property(lambda self: Flags(self.held.flags))
    T = property(lambda self: self.view_of(self.held.T))

    def __len__(self):
        return len(self.held)

    def __repr__(self):
        return f"DeviceArray({self.held!r})"

    def __array__(self, *_, **__):
        raise TypeError("cupy: implicit conversion to a NumPy array is not allowed; use get()")

    def __getattr__(self, name):
        if name.startswith("__") or name in ("held", "base"):
            raise AttributeError(name)
        if name not in METHODS:
            raise AttributeError(f"cupy.ndarray has no attribute {name!r}")
        if name not in BASE_METHODS and name not in array_interface.METHODS:
            raise AttributeError(f"cupy.ndarray has {name!r}, and METHODS does not list it")

        def method(*arguments, **keywords):
            check(name, METHODS[name], arguments, keywords, "method")
            return self.call(name, arguments, keywords)

        return method

    def call(self, name, arguments, keywords):
        """Run a method that CuPy has."""
        if name == "get":
            return self.held.copy()
        if name == "set":
            self.held[...] = arguments[0]
            return None
        if name == "scatter_add":
            np.add.at(self.held, inner(arguments[0]), inner(arguments[1]))
            return None
        out = keywords.get("out")
        result = getattr(self.held, name)(
            *map(inner, arguments), **{key: inner(value) for key, value in keywords.items()}
        )
        if out is not None:
            return out
        return self.view_of(result) if isinstance(result, np.ndarray) else outer(result)

    # one value --------------------------------------------------------------------------------------------------------

    def __float__(self):
        return float(self.held)

    def __int__(self):
        return int(self.held)

    def __index__(self):
        return self.held.__index__()

    def __bool__(self):
        return bool(self.held)

    # elements ---------------------------------------------------------------------------------------------------------

    def __getitem__(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        # CuPy indexes with its own arrays and with NumPy's; lists are refused.
        if any(isinstance(part, list) for part in parts):
            raise IndexError("cupy: only integers, slices, ellipsis, None and arrays are indices")
        result = self.held[tuple(part.held if isinstance(part, DeviceArray) else part for part in parts)]
        return self.view_of(np.asarray(result))

    def __setitem__(self, index, value):
        parts = index if isinstance(index, tuple) else (index,)
        if isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("cupy: a NumPy array cannot be assigned to a device array; use set()")
        self.held[tuple(part.held if isinstance(part, DeviceArray) else part for part in parts)] = inner(value)

    # NumPy's protocols ------------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc, method, *inputs, **keywords):
        name = ufunc.__name__
        if name not in UFUNCS and name not in FUNCTIONS:
            raise TypeError(f"cupy has no ufunc {name}")
        for keyword in keywords:
            if method == "__call__" and keyword not in UFUNC_PARAMETERS:
                raise TypeError(f"cupy: ufunc {name} has no parameter {keyword!r}")
        if method == "at":
            if name not in AT:
                raise TypeError(f"cupy: ufunc {name} has no method at")
            ufunc.at(inner(inputs[0]), *(inner(value) for value in inputs[1:]))
            return None
        if method not in ("__call__", "reduce"):
            raise TypeError(f"cupy: ufunc {name} has no method {method}")
        if method == "reduce" and "initial" in keywords:
            raise TypeError(f"cupy: {name}.reduce has no parameter 'initial'")
        out = keywords.pop("out", None)
        targets = out if isinstance(out, tuple) else (out,) if out is not None else None
        if targets is not None:
            keywords["out"] = tuple(inner(target) for target in targets)
        if isinstance(keywords.get("where"), (DeviceArray, np.ndarray)):
            keywords["where"] = inner(keywords["where"])
        result = getattr(ufunc, method)(*map(inner, inputs), **keywords)
        if targets is not None:
            return targets[0] if len(targets) == 1 else targets
        return outer(result)

    def __array_function__(self, function, types, arguments, keywords):
        name = function.__name__
        if function.__module__ not in ("numpy", None) and not function.__module__.startswith("numpy"):
            raise TypeError(f"cupy has no function {name}")
        if name in ("shape", "ndim", "size"):
            return getattr(arguments[0], name)
        if function.__module__ == "numpy.linalg":
            raise TypeError(f"cupy.linalg.{name} is not used here")
        if name not in FUNCTIONS:
            raise TypeError(f"cupy has no function {name}")
        if name not in BASE_FUNCTIONS and name not in array_interface.FUNCTIONS:
            raise TypeError(f"cupy has {name}, and FUNCTIONS does not list it")
        keywords = {key: value for key, value in keywords.items() if key != "like"}
        check(name, FUNCTIONS[name], arguments, keywords, "function")
        out = keywords.get("out")
        # Whether the result is a view is NumPy's to say; then it keeps the memory of its argument.
        result = function(*map(inner, arguments), **{key: inner(value) for key, value in keywords.items()})
        if out is not None:
            return out
        first = next((one for one in arguments if isinstance(one, DeviceArray)), None)
        if isinstance(result, np.ndarray) and first is not None:
            return first.view_of(result)
        return outer(result)


class Device:
    """Makes device arrays, as the module cupy does."""

    def empty(self, shape, dtype):
        return DeviceArray(np.empty(shape, dtype))

    def zeros(self, shape, dtype):
        return DeviceArray(np.zeros(shape, dtype))

    def asarray(self, value):
        return value if isinstance(value, DeviceArray) else DeviceArray(np.array(value))
