"""What a program may use of an array, and of the module that computes with it, on NumPy, CuPy and meta arrays.

`ATTRIBUTES`, `METHODS` and `OPERATORS` list what an array has, and `FUNCTIONS` the functions on arrays. autograd, nn,
optim, the collectives, the strategies and the pipeline's runtime use these and nothing else, through
`minidist.core.base.arrays`; so what trains on NumPy's arrays trains on a GPU and runs without data. A name is added
here when a program needs it and all three implementations have it with the parameters that are written here:

    NumPy       numpy.ndarray                  the host
    CuPy        cupy.ndarray                   a GPU (--device cuda)
    MetaArray   minidist/base/meta.py          shapes and dtypes only (--dry-run)

Parameters are written as in a `def`: those before `/` are given by position, those after `*` by name.

Proved by: tests/base/test_array_interface.py
"""

# `base` is the array whose memory this one is a view of, or None.
ATTRIBUTES = {"shape", "dtype", "size", "ndim", "itemsize", "nbytes", "strides", "flags", "base", "T"}

# By name the parameters. Without elements, `max` and `min` raise ValueError; `arrays.largest` does not. CuPy 14.2 takes
# the `out` of `min` for a dtype, so `min` has none here.
METHODS = {
    # Views where the memory allows it, and copies.
    "reshape": "*shape",
    "ravel": "",
    "transpose": "*axes",
    "swapaxes": "axis1, axis2, /",
    "view": "dtype, /",
    "astype": "dtype, order='K', copy=True",
    "copy": "",
    "__getitem__": "index, /",
    # Writes.
    "fill": "value, /",
    "__setitem__": "index, value, /",
    # Reductions, and what keeps the shape.
    "sum": "axis=None, dtype=None, out=None, keepdims=False",
    "max": "axis=None, out=None, keepdims=False",
    "min": "axis=None, *, keepdims=False",
    "mean": "axis=None, dtype=None, out=None, keepdims=False",
    "all": "axis=None, out=None, keepdims=False",
    "argmax": "axis=None",
    "cumsum": "axis=None",
    "round": "decimals=0",
    "nonzero": "",
    # Values, which a GPU must send to the host.
    **dict.fromkeys(("item", "tolist", "tobytes", "__float__", "__int__", "__bool__", "__len__"), ""),
}

# The methods behind operators, which are elementwise except `@`: with another operand, and without one.
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "rshift")
TURNED = ("radd", "rsub", "rmul", "rtruediv", "iadd", "isub", "imul", "itruediv")
OPERATORS = {
    **dict.fromkeys([f"__{name}__" for name in (*BINARY, *TURNED, "lt", "le", "gt", "ge")], "other, /"),
    **dict.fromkeys(["__neg__", "__invert__"], ""),
}

# Elementwise, with one array or two, which are broadcast.
OF_ONE = (
    "absolute",
    "cos",
    "exp",
    "floor",
    "isfinite",
    "isnan",
    "log",
    "reciprocal",
    "sign",
    "sin",
    "sqrt",
    "square",
    "tanh",
)
OF_TWO = ("add", "divide", "maximum", "minimum", "multiply", "subtract")

# By name the parameters. A result is on the device of the arguments; `out` is written and returned.
FUNCTIONS = {
    **dict.fromkeys(OF_ONE, "x, /, *, out=None"),
    **dict.fromkeys(OF_TWO, "x1, x2, /, *, out=None"),
    "frexp": "x, /",
    "where": "condition, x, y, /",
    # Sums and order.
    "matmul": "x1, x2, /, *, out=None",
    "bincount": "x, weights=None, minlength=0",
    "argsort": "a, axis=-1, kind=None",
    "array_equal": "a1, a2, /",
    # Shapes: views.
    "broadcast_to": "array, shape",
    "moveaxis": "a, source, destination",
    "swapaxes": "a, axis1, axis2",
    "transpose": "a, axes=None",
    # New arrays like others, and pieces put together and taken apart.
    **dict.fromkeys(("empty_like", "zeros_like", "ones_like"), "prototype, /, dtype=None, shape=None"),
    **dict.fromkeys(("concatenate", "stack"), "arrays, /, axis=0"),
    "take": "a, indices, axis=None",
    "compress": "condition, a, axis=None, out=None",
    "place": "arr, mask, vals",
    "put_along_axis": "arr, indices, values, axis",
    "copyto": "dst, src, /",
    "packbits": "a, /",
    "unpackbits": "a, /",
}
