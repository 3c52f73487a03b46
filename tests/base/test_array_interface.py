"""The interface of arrays: NumPy, CuPy (its strict stand-in, and a GPU where there is one) and meta arrays have it all.

Every listed function and method is called with every listed parameter, on all of them. The source above base/ uses no
other: a name of NumPy's that is not listed, or NumPy itself where an array may be on a GPU, is found here.
"""

import ast
import inspect
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import minidist
from minidist.base import arrays as xp
from minidist.base.array_interface import ATTRIBUTES, BINARY, FUNCTIONS, METHODS, OPERATORS
from minidist.base.device import creating_on, device_of
from minidist.base.meta import MetaArray
from minidist.core.base.errors import UsageError
from tests.cases import each
from tests.cupy.stand_in import Device, DeviceArray

PACKAGE = Path(minidist.__file__).parent


# --- what every parameter is called with: arguments, and `out` as the shape and dtype of the result ----------------

A = np.arange(1.0, 7.0).reshape(2, 3)
V = np.arange(4)
BITS = np.array([True, False] * 4)
OUT = object()  # an array for the result

ONE, TWO = ((A,), {"out": OUT}), ((A, A + 1), {"out": OUT})
FUNCTION_CALLS = {
    **dict.fromkeys(("absolute", "cos", "exp", "floor", "isfinite", "isnan", "log"), ONE),
    **dict.fromkeys(("reciprocal", "sign", "sin", "sqrt", "square", "tanh"), ONE),
    **dict.fromkeys(("add", "divide", "maximum", "minimum", "multiply", "subtract"), TWO),
    "frexp": ((A,), {}),
    "where": ((A > 2, A, -A), {}),
    "matmul": ((A, A.T.copy()), {"out": OUT}),
    "bincount": ((V,), {"weights": V + 0.5, "minlength": 6}),
    "argsort": ((A,), {"axis": 1, "kind": "stable"}),
    "array_equal": ((A, A), {}),
    "broadcast_to": ((A, (4, 2, 3)), {}),
    "moveaxis": ((A, 0, 1), {}),
    "swapaxes": ((A, 0, 1), {}),
    "transpose": ((A,), {"axes": (1, 0)}),
    **dict.fromkeys(("empty_like", "zeros_like", "ones_like"), ((A,), {"dtype": np.float32, "shape": (5,)})),
    "concatenate": (((A, A),), {"axis": 1}),
    "stack": (((A, A),), {"axis": 1}),
    "take": ((A, V[:2]), {"axis": 1}),
    "compress": ((BITS[:6], A.ravel()), {"axis": 0, "out": OUT}),
    "place": ((A.copy(), A > 2, A.ravel()), {}),
    "put_along_axis": ((A.copy(), np.zeros((2, 1), int), 7.0, 1), {}),
    "copyto": ((A.copy(), A), {}),
    "packbits": ((BITS,), {}),
    "unpackbits": ((np.array([3, 5], np.uint8),), {}),
}
SUM = {"axis": 1, "dtype": np.float32, "out": OUT, "keepdims": True}
METHOD_CALLS = {
    "reshape": ((3, 2), {}),
    "ravel": ((), {}),
    "transpose": ((1, 0), {}),
    "swapaxes": ((0, 1), {}),
    "view": ((np.int64,), {}),
    "astype": ((np.float32,), {"order": "C", "copy": False}),
    "copy": ((), {}),
    "__getitem__": (((slice(None), 1),), {}),
    "fill": ((3,), {}),
    "__setitem__": ((0, 2.0), {}),
    "sum": ((), SUM),
    "mean": ((), SUM),
    **dict.fromkeys(("max", "all"), ((), {"axis": 0, "out": OUT, "keepdims": False})),
    "min": ((), {"axis": 0, "keepdims": False}),
    "argmax": ((), {"axis": 1}),
    "cumsum": ((), {"axis": 1}),
    "round": ((), {"decimals": 1}),
    "nonzero": ((), {}),
    **dict.fromkeys(("tolist", "tobytes", "__len__"), ((), {})),
    **{name: ((A.T.copy() if name == "__matmul__" else A,), {}) for name, takes in OPERATORS.items() if takes},
    "__neg__": ((), {}),
}
# Of whole numbers, and of one element.
SELF = {"__and__": V, "__or__": V, "__rshift__": V, "__mod__": V + 1, "__floordiv__": V + 1, "__invert__": V}
SELF |= dict.fromkeys(("item", "__float__", "__int__", "__bool__"), np.ones((1, 1)).reshape(()))
METHOD_CALLS |= {name: ((V + 1,) if name.strip("_") in BINARY else (), {}) for name in SELF}


def to_numpy(value):
    return value.held if isinstance(value, DeviceArray) else value


def on(make, value):
    """A value with its arrays made by `make`."""
    if isinstance(value, np.ndarray):
        return make(value)
    return tuple(on(make, one) for one in value) if isinstance(value, tuple) else value


def call(make, function, arguments, keywords, expected):
    """Call with arrays of one backend; `out` is an array for the expected result."""
    given = {
        key: make(np.empty(expected.shape, expected.dtype)) if value is OUT else on(make, value)
        for key, value in keywords.items()
    }
    result = function(*on(make, arguments), **given)
    if "out" in given:
        assert result is given["out"]
    return result


def meta(value):
    """A meta array; indices and masks stay real, as in a dry run."""
    return MetaArray(value.shape, value.dtype) if value.dtype.kind == "f" else value


def device(value):
    return Device().asarray(value)


def same_kind(result, expected, values):
    """Assert that a result has the shape and the dtype of NumPy's, and its values where there are any."""
    if isinstance(expected, tuple):
        for one, other in zip(result, expected, strict=True):
            same_kind(one, other, values)
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert not expected.ndim or result.flags.c_contiguous == expected.flags.c_contiguous
        if values and type(result).__module__ == "cupy":
            np.testing.assert_allclose(values(result), expected, rtol=1e-15)  # its cos differs in the last bit
        elif values:
            np.testing.assert_array_equal(values(result), expected)
    elif values:
        assert to_numpy(result) == expected


@pytest.fixture(params=["numpy", "stand-in", "meta", pytest.param("cupy", marks=pytest.mark.cuda)])
def backend(request):
    """How a backend makes an array of NumPy's, and how its values are read."""
    if request.param == "cupy":
        try:
            cupy = device_of("cuda")
        except UsageError as error:
            pytest.skip(str(error))
        return cupy.asarray, lambda result: result.get()
    return {"numpy": (np.array, np.asarray), "stand-in": (device, to_numpy), "meta": (meta, None)}[request.param]


def without_values(name, values):
    return None if name.startswith("empty") else values


def signature_of(parameters):
    """The signature of a function with these parameters."""
    return inspect.signature(eval(f"lambda {parameters}: None"))


@each("name", sorted(FUNCTIONS))
def test_every_function_takes_every_listed_parameter(name, backend):
    make, values = backend
    arguments, keywords = FUNCTION_CALLS[name]
    signature = signature_of(FUNCTIONS[name])
    assert set(signature.bind(*arguments, **keywords).arguments) == set(signature.parameters)
    function = getattr(xp, name)
    expected = function(*arguments, **{key: value for key, value in keywords.items() if value is not OUT})
    same_kind(call(make, function, arguments, keywords, expected), expected, without_values(name, values))


@each("name", sorted(METHODS | OPERATORS))
def test_every_method_takes_every_listed_parameter(name, backend):
    make, values = backend
    arguments, keywords = METHOD_CALLS[name]
    signature = signature_of((METHODS | OPERATORS)[name])
    assert set(signature.bind(*arguments, **keywords).arguments) == set(signature.parameters) - {
        parameter.name for parameter in signature.parameters.values() if not arguments and parameter.kind == 2
    }
    own = SELF.get(name, A)
    plain = {key: value for key, value in keywords.items() if value is not OUT}
    expected = getattr(own.copy(), name)(*arguments, **plain)
    if values is None and name == "nonzero":
        with pytest.raises(UsageError, match="meta array"):
            make(own).nonzero()
        return
    result = call(make, getattr(make(own.copy()), name), arguments, keywords, expected)
    same_kind(result, expected, values)


@pytest.mark.parametrize("order", ["C", "K"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_conversion_copies_where_numpy_copies(order, dtype, backend):
    make, _ = backend
    array, turned = make(A.copy()).T, A.copy().T
    result, expected = (one.astype(dtype, order=order, copy=False) for one in (array, turned))
    assert (result is array) == (expected is turned)
    assert (result.strides, result.dtype) == (expected.strides, expected.dtype)


def test_every_attribute_is_there(backend):
    make, _ = backend
    array = make(A.copy())
    for name in ATTRIBUTES - {"flags", "T", "base"}:
        assert getattr(array, name) == getattr(A, name), name
    assert array.T.shape == (3, 2)
    assert array.T.base is array
    assert array.flags.c_contiguous
    assert not array.T.flags.c_contiguous


def test_the_module_offers_the_listed_functions_and_no_others():
    trees = [ast.parse((PACKAGE / name / "base/arrays.py").read_text(encoding="utf-8")) for name in ("", "core")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "numpy"]
    taken = {alias.name for node in imports for alias in node.names}
    assigned = [node.value for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)]
    taken |= {value.attr for values in assigned for value in values.elts if ast.unparse(value).startswith("np.")}
    # `arange` makes indices on the host; `arrays.device_arange` makes them on the device.
    assert {name for name in taken if not host_only(name)} == {*FUNCTIONS, "arange"}
    assert set(FUNCTION_CALLS) == set(FUNCTIONS)
    assert set(METHOD_CALLS) == {*METHODS, *OPERATORS}


# --- the source above base/ ----------------------------------------------------------------------------------------

# Whose arrays may be on a GPU or have no data. What equality/, checkpoint/ and report/ look at has been brought to the
# host, and data/ makes the inputs there.
FOLDERS = (
    *(f"core/{name}" for name in ("autograd", "nn", "optim", "parallel", "comm", "collectives", "pipeline/runtime")),
    *("core/train", "nn", "optim", "parallel", "comm", "collectives", "pipeline/runtime", "techniques", "job/train"),
)
# Checks of collectives and of orders of sums, whose arrays have been brought to the host, too.
ON_THE_HOST = {f"collectives/{name}.py" for name in ("collective_check", "reduction_order", "summation_order")}
MAKERS = {"array", "asarray", "zeros", "empty", "ones", "full", "arange", "frombuffer"}  # of numbers, on the host
# Tables of measured times, and numbers of samples, which are on the host.
TABLES = {
    "collectives/tuning.py": (
        *("__version__", "argmin", "exp", "flatnonzero", "full_like", "interp", "isfinite", "isnan", "log"),
        *("maximum", "median", "nanmedian", "sqrt", "where"),
    ),
    "pipeline/runtime/layer_profile.py": ("concatenate", "median", "zeros_like"),
    "techniques/repartition/cut.py": ("concatenate", "max"),
    "techniques/data_ledger/ledger.py": ("bincount", "repeat", "concatenate", "unique", "flatnonzero", "any"),
}
EXCEPTIONS = {  # (file, name): tables of ranks and tokens, which are on the host, and what only one backend has
    *((file, name) for file, names in TABLES.items() for name in names),
    ("parallel/redistribute.py", "count_nonzero"),
    ("collectives/binomial_tree.py", "roll"),
    *(("collectives/ring_event.py", name) for name in ("roll", "maximum", "stack")),  # times of ranks
    ("collectives/two_level.py", "flatnonzero"),
    ("comm/buffers.py", "add"),  # the checksum of bytes that were fetched
    ("comm/communicator.py", "roll"),
    ("comm/communicator.py", "flatnonzero"),
    ("core/comm/mesh.py", "unravel_index"),
    ("comm/sim/process_state.py", "random"),  # the generators of the process
    ("comm/sim/process_state.py", "ctypes"),
    ("comm/mpi/staging.py", "cupy"),  # pinned memory of messages
    ("parallel/replica_check.py", "argwhere"),
    ("parallel/replica_check.py", "repeat"),
    ("techniques/pruning/selection.py", "append"),
    ("techniques/parameter_server/ranks.py", "unique"),
    ("techniques/asynchronous/replay.py", "zeros_like"),  # of one device, on the host
    ("comm/message_checks.py", "may_share_memory"),  # of two arrays of NumPy's
    ("parallel/host_pool.py", "cupy"),  # copies between a GPU and the host in separate streams
}
# Attributes of NumPy's arrays that other objects have too: files, queues, strings, tensors, JSON, settings.
OTHERS = {"clip", "data", "device", "dumps", "flat", "partition", "prod", "put", "sort", "take", "to_device", "trace"}


ARRAY_NAMES = {name for name in dir(np.ndarray) if not name.startswith("__")}


def host_only(name):
    """Whether numpy.NAME is a type, a constant or a function of types: no array goes in."""
    value = getattr(np, name)
    return isinstance(value, (type, float)) or name in ("finfo", "iinfo")


@cache
def nodes():
    """(name of the file, node) of every node of the syntax trees of the folders."""
    paths = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).rglob("*.py"))]
    named = {path.relative_to(PACKAGE).as_posix(): path for path in paths}
    trees = [(name, ast.parse(p.read_text(encoding="utf-8"))) for name, p in named.items() if name not in ON_THE_HOST]
    return [(name, node) for name, tree in trees for node in ast.walk(tree)]


def around(nodes):
    """Where the source reaches around the interface: sentences."""
    for name, node in nodes:
        sentence, subject = None, None
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in ("numpy", "cupy"):
                sentence, subject = f"imports from {module}; use minidist.base.arrays", module
            case ast.Import(names=[ast.alias(name="cupy")]):
                sentence, subject = "imports cupy; use minidist.base.arrays", "cupy"
            case ast.Import(names=[ast.alias(name="numpy")]) if name.startswith(("autograd/", "nn/")):
                sentence, subject = "imports numpy; use minidist.base.arrays", "numpy"
            case ast.Attribute(value=ast.Name(id="np"), attr=attr) if not host_only(attr) and attr not in MAKERS:
                sentence, subject = f"uses np.{attr}, which an array of a GPU may reach; list it in FUNCTIONS", attr
            case ast.Attribute(value=ast.Name(id="np" | "xp")):
                pass
            case ast.Attribute(attr=attr) if attr in ARRAY_NAMES - ATTRIBUTES - METHODS.keys() - OTHERS:
                sentence, subject = f"uses .{attr} of an array; list it in METHODS, for all backends", attr
        if sentence is not None and (name, subject) not in EXCEPTIONS:
            yield f"{name}:{node.lineno} {sentence}"


def test_no_source_above_base_reaches_around_the_interface():
    assert list(around(nodes())) == []


@each(
    ("line", "sentence"),
    [
        ("total = np.concatenate(arrays)", "uses np.concatenate"),
        ("order = x.argpartition(3)", "uses .argpartition of an array"),
        ("y = x.diagonal()", "uses .diagonal of an array"),
        ("norm = np.linalg.norm(x)", "uses np.linalg"),
        ("import cupy", "imports cupy"),
        ("from numpy import exp", "imports from numpy"),
        ("import numpy as np", "imports numpy"),
        ("a = np.zeros(3, np.float32)", None),
    ],
)
def test_the_lint_finds_what_reaches_around(line, sentence):
    found = list(around([("nn/example.py", node) for node in ast.walk(ast.parse(line))]))
    assert [sentence in one for one in found] == ([] if sentence is None else [True])


def test_every_listed_name_is_used():
    read = [(name, node) for name, node in nodes() if isinstance(node, ast.Attribute)]
    functions = {node.attr for _, node in read if getattr(node.value, "id", None) == "xp"}
    attributes = {node.attr for _, node in read}
    assert FUNCTIONS.keys() - functions == set()
    assert {name for name in (*ATTRIBUTES, *METHODS) if not name.startswith("__")} - attributes == set()

    # The exceptions are needed, too.
    used = {(name, node.attr) for name, node in read}
    used |= {(name, node.names[0].name) for name, node in nodes() if isinstance(node, ast.Import)}
    assert used >= EXCEPTIONS


def test_every_listed_operator_is_used():
    kinds = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "truediv": ast.Div}
    kinds |= {"floordiv": ast.FloorDiv, "mod": ast.Mod}
    kinds |= {"pow": ast.Pow, "matmul": ast.MatMult, "and": ast.BitAnd, "or": ast.BitOr, "rshift": ast.RShift}
    kinds |= {"lt": ast.Lt, "le": ast.LtE, "gt": ast.Gt, "ge": ast.GtE, "neg": ast.USub, "invert": ast.Invert}
    found = {type(node) for _, node in nodes()}
    augmented = {type(node.op) for _, node in nodes() if isinstance(node, ast.AugAssign)}
    for name, kind in kinds.items():
        assert kind in found, name
    for name in ("add", "sub", "mul", "truediv"):
        assert kinds[name] in augmented, name


def test_new_arrays_are_made_by_the_device_alone():
    with creating_on(Device()):
        assert isinstance(xp.zeros((2, 2), np.float32), DeviceArray)
