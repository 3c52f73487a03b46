"""Reads the interface of CuPy from its wheel, where no GPU is at hand: the names and parameters that arrays may use.

    python -m tests.cupy.read_interface > tests/cupy/interface.json        (with CuPy and cuda-pathfinder importable)

The result has the functions of the module with their parameters, its ufuncs, and the methods of an array with theirs,
which Cython writes into the first line of a docstring. The tests of tests/cupy run on arrays that have no more.
"""

import inspect
import json
import re

import numpy as np


def parameters_of(function):
    """Return the names of a function's parameters, from its signature or from the first line of its docstring."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        pass
    found = re.match(r"[\w.]+\((.*?)\)", (function.__doc__ or "").replace("\n", " "))
    if found is None:
        return None
    return [
        part.split("=")[0].split(":")[0].split()[-1] for part in found[1].split(",") if part.strip() not in ("", "self")
    ]


def main():
    """Print the interface as JSON."""
    import cupy

    ufuncs, functions, methods = [], {}, {}
    for name in sorted(dir(cupy)):
        value = getattr(cupy, name)
        if name.startswith("_") or not hasattr(np, name):
            continue
        if isinstance(value, cupy.ufunc):
            ufuncs.append(name)
        elif callable(value) and not isinstance(value, type):
            functions[name] = parameters_of(value)
    for name in sorted(dir(cupy.ndarray)):
        value = getattr(cupy.ndarray, name)
        if callable(value) and (not name.startswith("_") or hasattr(np.ndarray, name)):
            methods[name] = parameters_of(value)
    print(
        json.dumps(
            {"version": cupy.__version__, "ufuncs": ufuncs, "functions": functions, "methods": methods}, indent=1
        )
    )


if __name__ == "__main__":
    main()
