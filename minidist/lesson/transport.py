"""A function from a notebook cell, as bytes that another Python process can run.

pickle sends functions by name, and a cell's function is in no module that the other process could import. So the code
object is sent (marshal), with the globals that it names: modules by name, functions of libraries by name, other
functions by code again, data by value. Data is copied on purpose: what ranks share in one process they do not share
here.

Proved by: tests/lesson/test_checker.py
"""

import builtins
import importlib
import marshal
import pickle
import sys
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

_LIBRARIES = {"minidist", "numpy", *sys.stdlib_module_names} - {"__main__"}


def dumps(function: Callable[..., Any]) -> bytes:
    """Return the function with everything that it needs. Raises what pickle raises when something cannot be sent."""
    table: list[dict[str, Any]] = []
    return pickle.dumps((table, _pack(function, table, {})))


def loads(data: bytes) -> Callable[..., Any]:
    """Return the function that `dumps` packed."""
    table, packed = pickle.loads(data)
    result: Callable[..., Any] = _unpack(packed, table, {})
    return result


def _pack(value: Any, table: list[dict[str, Any]], seen: dict[int, int]) -> tuple[str, Any]:
    if isinstance(value, ModuleType):
        return "module", value.__name__
    if not isinstance(value, FunctionType) or _in_library(value):
        return "pickle", pickle.dumps(value)
    if id(value) not in seen:  # a function may name itself
        seen[id(value)] = len(table)
        entry: dict[str, Any] = {"name": value.__name__, "code": marshal.dumps(value.__code__)}
        table.append(entry)
        wanted = {name: value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__}
        entry["globals"] = {name: _pack(item, table, seen) for name, item in wanted.items()}
        entry["closure"] = [_pack(cell.cell_contents, table, seen) for cell in value.__closure__ or ()]
        entry["defaults"] = [_pack(item, table, seen) for item in value.__defaults__ or ()]
        entry["keywords"] = {name: _pack(item, table, seen) for name, item in (value.__kwdefaults__ or {}).items()}
    return "function", seen[id(value)]


def _in_library(function: FunctionType) -> bool:
    return function.__module__.split(".")[0] in _LIBRARIES and "<locals>" not in function.__qualname__


def _names(code: CodeType) -> set[str]:
    """Return the names that the code, or code inside it, may look up as globals."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _unpack(packed: tuple[str, Any], table: list[dict[str, Any]], made: dict[int, FunctionType]) -> Any:
    kind, value = packed
    if kind == "module":
        return importlib.import_module(value)
    if kind == "pickle":
        return pickle.loads(value)
    if value not in made:
        entry = table[value]
        cells = tuple(CellType() for _ in entry["closure"])
        scope = {"__builtins__": builtins, "__name__": "exercise"}
        made[value] = function = FunctionType(marshal.loads(entry["code"]), scope, entry["name"], None, cells)
        scope.update({name: _unpack(item, table, made) for name, item in entry["globals"].items()})
        for cell, item in zip(cells, entry["closure"], strict=True):
            cell.cell_contents = _unpack(item, table, made)
        function.__defaults__ = tuple(_unpack(item, table, made) for item in entry["defaults"]) or None
        function.__kwdefaults__ = {name: _unpack(item, table, made) for name, item in entry["keywords"].items()} or None
    return made[value]
