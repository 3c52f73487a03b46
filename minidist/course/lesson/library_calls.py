"""Refuses, in the process that runs an answer, the library functions that the exercise asks the reader to write.

Proved by: tests/lesson/test_judge.py
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from minidist.core.base.errors import UsageError
from minidist.course.lesson import solutions  # noqa: F401 - what is refused must be there to be replaced

SOLUTIONS = ("minidist.course.lesson.solutions.solution", "minidist.course.lesson.solutions.loaded")


class LibraryCallError(UsageError):
    """The answer called what it is asked to write."""


def refuse_library_calls(written_by_hand: Sequence[str]) -> Callable[[Any], Any]:
    """Replace the functions and classes by functions that raise LibraryCallError, under every name that a module of
    minidist has for them.

    Which functions: those of an exercise's `written_by_hand`, and those that find solutions. The process must be one
    that runs answers and nothing else. Returns a function that undoes it for a single value: a function of the library
    itself may be checked, and only an answer that calls it is refused.
    """
    originals: dict[int, tuple[Any, Any]] = {}  # by the id of what replaces it
    refused: dict[int, Any] = {}  # by the id of the original
    for entry in written_by_hand:
        _load(entry)
    for module in _modules("minidist"):
        for name, value in list(vars(module).items()):
            if id(value) not in refused and _is_callable(value) and _is_refused(written_by_hand, value):
                refused[id(value)] = stub = _refusal(value)
                originals[id(stub)] = (stub, value)
            if id(value) in refused:
                setattr(module, name, refused[id(value)])
    return lambda value: originals.get(id(value), (None, value))[1]


def _load(entry: str) -> None:
    """Import the module that has a name such as "minidist.parallel" or "minidist.core.collectives.calls.all_reduce"."""
    name = ""
    for part in entry.split("."):
        try:
            module = importlib.import_module(f"{name}.{part}".lstrip("."))
        except ModuleNotFoundError:
            return
        name = module.__name__
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
        importlib.import_module(info.name)


def _is_callable(value: Any) -> bool:
    """Return whether a value is a function of Python, one that `functools.cache` wraps, or a class."""
    if isinstance(value, type):
        return not issubclass(value, BaseException)
    return isinstance(getattr(value, "__wrapped__", value), FunctionType)


def _modules(package: str) -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package]


def _is_refused(written_by_hand: Sequence[str], function: Any) -> bool:
    name = f"{function.__module__}.{function.__qualname__}"
    if name in SOLUTIONS:
        return True
    return any(name == entry or name.startswith(entry + ".") for entry in written_by_hand)


def _refusal(function: Any) -> Callable[..., Any]:
    name = f"{function.__module__}.{function.__qualname__}"

    def refusal(*arguments: Any, **keywords: Any) -> Any:
        raise LibraryCallError(f"the answer calls {name}, which does what this exercise asks you to write")

    return refusal
