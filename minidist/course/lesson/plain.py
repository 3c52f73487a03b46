"""A function's answer as plain data, so that it can be sent to the judge and compared whatever it is.

Numbers, texts, arrays, and tuples, lists and dicts of them stay what they are; a tensor becomes an array and a named
tuple a tuple. Everything else (an object, a generator, a list that contains itself, an array of gigabytes) becomes an
`Unreadable`, which says what it was.

Proved by: tests/lesson/test_plain.py
"""

from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np

from minidist.base.errors import quoted
from minidist.core.autograd import Tensor

MAX_DEPTH = 20  # lists in lists
MAX_ENTRIES = 1_000_000  # of all lists of an answer together
MAX_ARRAY = 1 << 28  # bytes of an array
_NUMBERS = (bool, int, float, complex, np.generic)


@dataclass(frozen=True)
class Unreadable:
    """Stands for a value that no exercise asks for; `what` says what it was."""

    what: str

    def __repr__(self) -> str:
        return self.what


def plain(value: Any) -> Any:
    """Return the value as plain data; what is the same object in it twice is so in the result."""
    return _Copy().of(value, 0)


def form(value: Any, depth: int = 0) -> str:
    """Return what a plain value is in words, without its numbers: "a list of 2: each a list of 3"."""
    if isinstance(value, list | tuple):
        text = f"a {type(value).__name__} of {len(value)}"
        return text if not value or depth == 2 else f"{text}, the first of them {form(value[0], depth + 1)}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    if value is None:
        return "None"
    name = "number" if isinstance(value, _NUMBERS) else type(value).__name__
    return f"a{'n' * (name[0] in 'aeiou')} {name}"


class _Copy:
    """One conversion. seen: the converted objects by id, with the originals, so that ids stay theirs."""

    def __init__(self) -> None:
        self.entries = 0
        self.seen: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any, depth: int) -> Any:
        if id(value) in self.seen:
            return self.seen[id(value)][1]
        self.seen[id(value)] = (value, Unreadable(f"a {type(value).__name__} that contains itself"))
        try:
            result = self._convert(value, depth)
        except Exception as error:  # whatever the object's own methods raise
            result = Unreadable(f"a {type(value).__name__} that cannot be read ({type(error).__name__})")
        self.seen[id(value)] = (value, result)
        return result

    def _convert(self, value: Any, depth: int) -> Any:
        if type(value) in (NoneType, bool, int, float, complex):
            return value
        if isinstance(value, Tensor):
            value = value.data

        # Of a subclass it is the value that counts, and the judge need not know the class.
        if isinstance(value, str | bytes):
            if len(value) > MAX_ENTRIES:
                return Unreadable(f"{len(value):,} characters")
            return str.__str__(value) if isinstance(value, str) else bytes(value)
        if isinstance(value, np.generic):
            return value if value.dtype.kind in "biufc" else Unreadable(f"a number of dtype {value.dtype}")
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value)

        if isinstance(value, list | tuple):
            return self._sequence(value, depth)
        if isinstance(value, dict):
            keys, values = self._sequence(list(value), depth), self._sequence(list(value.values()), depth)
            return dict(zip(keys, values, strict=True)) if isinstance(keys, list) else keys
        if isinstance(value, np.ndarray) or hasattr(value, "__array__"):
            return self._array(np.asarray(value))
        return Unreadable(f"a {type(value).__name__} ({quoted(value)})")

    def _sequence(self, values: Any, depth: int) -> Any:
        kind = list if isinstance(values, list) else tuple
        self.entries += len(values)
        if depth >= MAX_DEPTH:
            return Unreadable(f"a {kind.__name__}, {MAX_DEPTH} deep in others")
        if self.entries > MAX_ENTRIES:
            return Unreadable(f"a {kind.__name__} of {len(values):,} entries")
        return kind(self.of(value, depth + 1) for value in values)

    def _array(self, array: np.ndarray) -> Any:
        if array.dtype.kind not in "biufcSU":
            return Unreadable(f"an array of dtype {array.dtype} and shape {array.shape}")
        if array.nbytes > MAX_ARRAY:
            return Unreadable(f"an array of shape {array.shape}, which is {array.nbytes:,} bytes")
        return array
