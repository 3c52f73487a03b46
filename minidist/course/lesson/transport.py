"""A function from a notebook cell, as bytes that another Python process can run.

pickle sends functions and classes by name. Those of a cell, or of a file next to the notebook, are in no module that
the other process could import, or in an older state of it. cloudpickle sends them by value: the code, with the globals
that it names. Installed libraries are sent by name. Data is copied on purpose: what ranks share in one process they do
not share here.

Proved by: tests/lesson/test_transport.py
"""

import importlib
import io
import pickle
import sys
import sysconfig
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_BY_NAME = {"minidist", *sys.stdlib_module_names}
_EXERCISES = (
    "minidist.course.lesson.exercises",
    "minidist.course.lesson.assignments",
    "minidist.course.lesson.puzzles",
)  # not to be had where an answer runs


def dumps_of_exercise(value: Any) -> bytes:
    """Return a value with what it has of exercises' modules, which the process of an answer does not import."""
    for name in _EXERCISES:
        cloudpickle.register_pickle_by_value(importlib.import_module(name))
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def dumps(function: Callable[..., Any]) -> bytes:
    """Return the function with everything that it needs. Raises what pickle raises when something cannot be sent."""
    with _own_modules_by_value():
        return dumps_of_exercise(function)


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, with the name of its file, so that reports name the reader's line."""
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in arguments)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, with the names of files: its version 3.1.3 writes "<dynamic-code>" in their place."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


@dataclass(frozen=True)
class Packed:
    """A function as bytes, which another process loads."""

    data: bytes

    def load(self) -> Callable[..., Any]:
        """Return the function."""
        return loads(self.data)


def loads(data: bytes) -> Callable[..., Any]:
    """Return the function that `dumps` packed."""
    result: Callable[..., Any] = pickle.loads(data)
    return result


@contextmanager
def _own_modules_by_value() -> Iterator[None]:
    """In the block cloudpickle sends what is defined in the user's own modules by value."""
    own = [module for name, module in list(sys.modules.items()) if _is_own(name, module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _is_own(name: str, module: ModuleType) -> bool:
    """Return whether a module is neither installed nor a part of Python or minidist."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or name.partition(".")[0] in _BY_NAME or module.__name__ != name:
        return False
    return not file.startswith(_INSTALLED)
