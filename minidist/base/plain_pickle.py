"""Reads pickles whose author is not trusted: a dump of another machine, what a student's answer sends to its judge.

A pickle may hold numbers, texts, bytes, lists, tuples and dicts. No name is imported, no code is run, and no more
memory is taken than the pickle's size allows.

Proved by: tests/flight_recorder/test_dump.py, tests/lesson/test_wire.py
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, NoReturn

from minidist.base.errors import UsageError, quoted, reason

# What builds plain values. All other operations of a pickle can run code.
_OPERATIONS = """
PROTO FRAME STOP MARK POP POP_MARK DUP
NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 INT LONG BINFLOAT FLOAT
SHORT_BINUNICODE BINUNICODE BINUNICODE8 UNICODE SHORT_BINSTRING BINSTRING SHORT_BINBYTES BINBYTES BINBYTES8
EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS
BINPUT LONG_BINPUT PUT MEMOIZE BINGET LONG_BINGET GET
"""
PLAIN = frozenset(_OPERATIONS.split())


class BadPickleError(UsageError):
    """A pickle that is damaged or holds more than plain values; the text is the reason."""


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain values; whatever would import a name is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse a class or a function."""
        raise BadPickleError(f"its pickle names {quoted(f'{module}.{name}')}, and it may have plain values only")


def read_plain_pickle(content: bytes, stand_in: Callable[[Any], Any] | None = None) -> Any:
    """Return the plain values of a pickle.

    stand_in: makes a value of what the pickler's `persistent_id` returned for it, itself plain values; None refuses it.
    """
    # The operations are looked at first. A place in the memo is an index into an array that is made for it, so a large
    # one would take all memory.
    allowed = PLAIN | {"BINPERSID"} if stand_in is not None else PLAIN
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if operation.name not in allowed:
                raise BadPickleError(
                    f"its pickle has the operation {operation.name}, and it may have plain values only"
                )
            if "PUT" in operation.name and int(argument or 0) > count:
                raise BadPickleError(f"its pickle has place {argument} of a memo after {count} operations")
        reader = _PlainUnpickler(io.BytesIO(content))
        if stand_in is not None:
            reader.persistent_load = stand_in  # type: ignore[method-assign]
        return reader.load()
    except BadPickleError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise BadPickleError(f"its pickle is damaged ({reason(error)})") from None
