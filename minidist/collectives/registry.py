"""Which file implements which collective under which name. A new algorithm is one new file in this folder:

@algorithm("all_reduce", "my_name")
def all_reduce(comm, array, op): ...
"""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from minidist.base.errors import UsageError, nearest

Algorithm = TypeVar("Algorithm", bound=Callable[..., Any])


def algorithm(operation: str, name: str) -> Callable[[Algorithm], Algorithm]:
    """Mark a function as `operation`'s algorithm `name`."""

    def mark(function: Algorithm) -> Algorithm:
        function.implements = (operation, name)  # type: ignore[attr-defined]
        return function

    return mark


@cache
def algorithms() -> dict[str, dict[str, Callable[..., Any]]]:
    """operation -> name -> function, from all files of this folder."""
    table: dict[str, dict[str, Callable[..., Any]]] = {}
    for info in sorted(pkgutil.iter_modules([str(Path(__file__).parent)]), key=lambda info: info.name):
        module = importlib.import_module(f"minidist.collectives.{info.name}")
        for function in vars(module).values():
            if hasattr(function, "implements") and function.__module__ == module.__name__:
                operation, name = function.implements
                table.setdefault(operation, {})[name] = function
    return table


def find(operation: str, name: str) -> Callable[..., Any]:
    """The function, or one sentence that says which names exist."""
    names = algorithms()[operation]
    if name not in names:
        raise UsageError(
            f"{operation} has no algorithm {name!r}{nearest(name, names)}; it has {', '.join(sorted(names))}"
        )
    return names[name]
