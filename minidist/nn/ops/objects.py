"""Find the tensors in a module's output that is an object of a class of its user's.

Proved by: tests/parallel/test_fully_shard.py
"""

from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from minidist.core.autograd.backward import map_tensors
from minidist.core.autograd.tensor import Tensor


def _members(value: Any) -> tuple[list[tuple[Any, Any]], list[str]]:
    """Return what can hold tensors: (key, item) of a list or dict of a user's class, and the names of attributes."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    names = [field.name for field in fields(value)] if is_dataclass(value) else list(getattr(value, "__dict__", ()))
    return list(items), names


def map_object(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return a shallow copy of an object of another class with its tensors replaced, or itself without any."""
    if hasattr(value, "_fields"):  # a named tuple takes its items one by one
        return type(value)(*map_tensors(tuple(value), function))
    items, names = _members(value)
    if isinstance(value, type) or (not items and not names) or hasattr(value, "forward"):
        return value  # a module is not an output

    # Attributes that are objects themselves are looked into only where they are containers or dataclasses.
    def mapped(old: Any) -> Any:
        inside = isinstance(old, (Tensor, tuple, list, dict)) or is_dataclass(old)
        return map_tensors(old, function) if inside else old

    new_items = {key: new for key, old in items if (new := mapped(old)) is not old}
    new_names = {n: new for n in names if (new := mapped(old := getattr(value, n, None))) is not old}
    if not new_items and not new_names:
        return value

    result = copy(value)
    for key, new in new_items.items():
        result[key] = new
    for attribute, new in new_names.items():
        object.__setattr__(result, attribute, new)  # also of a frozen dataclass
    return result
