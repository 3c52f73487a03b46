"""Attributes: values that a program keeps with a communicator or a datatype, by the number of a key.

Proved by: tests/mpi_ranks/test_program.py
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar

from minidist.debug.mpi_ranks.constants import KEYVALS, failed

KEYS = frozenset(KEYVALS.values())

_numbers = count(100)
_functions: dict[int, tuple[Any, Callable[..., Any] | None]] = {}


class Attributed:
    """What has attributes: `held.attributes` are their values by key."""

    __slots__ = ()
    held: Any
    predefined_attributes: ClassVar[dict[int, Any]] = defaultdict(lambda: None)
    null_error: ClassVar[str] = "ERR_TYPE"

    @classmethod
    def Create_keyval(cls, copy_fn: Any = None, delete_fn: Any = None, nopython: bool = False) -> int:
        """Return a new key. copy_fn(object, key, value): the value of a duplicate. delete_fn: called at the end."""
        key = next(_numbers)
        _functions[key] = copy_fn, delete_fn
        return key

    @classmethod
    def Free_keyval(cls, keyval: int) -> int:
        """Forget a key; return KEYVAL_INVALID."""
        _functions.pop(_known(keyval))
        return -1

    def Get_attr(self, keyval: int) -> Any:
        """Return the value of a key; None when there is none."""
        attributes = self._attributes()
        return self.predefined_attributes[keyval] if keyval in KEYS else attributes.get(_known(keyval))

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        """Set the value of a key."""
        if _known(keyval) in self._attributes():
            self.Delete_attr(keyval)
        self._attributes()[keyval] = attrval

    def Delete_attr(self, keyval: int) -> None:
        """Delete the value of a key."""
        attributes = self._attributes()
        if _known(keyval) in attributes:
            delete = _functions[keyval][1]
            if delete is not None:
                delete(self, keyval, attributes[keyval])
            del attributes[keyval]

    def copy_attributes(self, other: Any) -> None:
        """Give a duplicate what the copy functions of the keys return."""
        for key, value in self._attributes().items():
            copy = _functions.get(key, (None, None))[0]
            if copy is True:
                other.held.attributes[key] = value
            elif copy:
                copied = copy(self, key, value)
                if copied is not NotImplemented:
                    other.held.attributes[key] = copied

    def delete_attributes(self) -> None:
        """Delete all values."""
        for key in [key for key in self._attributes() if key in _functions]:
            self.Delete_attr(key)

    def _attributes(self) -> dict[int, Any]:
        if self.held is None:
            raise failed(self.null_error, f"an attribute of a null {type(self).__name__}")
        found: dict[int, Any] = self.held.attributes
        return found


def _known(keyval: int) -> int:
    if keyval not in _functions:
        raise failed("ERR_KEYVAL", f"key {keyval} is unknown; pass one that Create_keyval returned")
    return keyval
