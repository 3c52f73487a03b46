"""What all objects of MPI have in common: they are handles, and two handles may name the same thing.

Proved by: tests/mpi_ranks/test_program.py
"""

import sys
from typing import Any, Generic, Self, TypeVar

from minidist.debug.mpi_ranks.constants import failed, unknown, unsupported

_numbers: dict[int, "Handle"] = {}
T = TypeVar("T")


class Named(Generic[T]):
    """An attribute of handles: what the handle names. Of a null handle it raises MPI.Exception of a class and text."""

    def __init__(self, error: str, text: str) -> None:
        self.error, self.text = error, text

    def __get__(self, handle: Any, _: Any = None) -> T:
        if handle.held is None:
            raise failed(self.error, self.text)
        held: T = handle.held
        return held


class Handle:
    """A handle. held: what it names, None for a null handle. predefined: the name of one of MPI's constants.

    named: what it names, or an error.
    """

    __slots__ = ("__weakref__", "held", "predefined")
    named: Any
    held: Any
    predefined: str

    def __new__(cls, other: Any = None, *_: Any) -> Self:
        self: Any = super().__new__(cls)
        self.predefined = ""
        self.held = None
        if other is not None:
            named: Any = other
            base = _family(cls)
            if not isinstance(other, base):
                raise TypeError(f"{cls.__name__}() takes a {base.__name__}, not a {type(other).__name__}")
            self.held, self.predefined = named.held, named.predefined
        made: Self = self
        return made

    @classmethod
    def of(cls, held: Any, name: str = "") -> Self:
        """Return a handle of `held`."""
        self = cls.__new__(cls)
        self.held, self.predefined = held, name
        return self

    def release(self) -> None:
        """Make this a null handle, which it must not be yet."""
        self.named  # noqa: B018
        self.held = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Handle):
            return NotImplemented
        return self.held is other.held and isinstance(other, _family(type(self)))

    def __getattr__(self, name: str) -> Any:
        raise unknown(name, f"MPI.{type(self).__name__}")

    def __hash__(self) -> int:
        return id(self.held)

    def __bool__(self) -> bool:
        return self.held is not None

    def __reduce__(self) -> Any:
        if self.predefined:
            original = _predefined(self.predefined) is self
            return (_predefined if original else _copy_of), (self.predefined,)
        raise ValueError(
            f"cannot pickle a {type(self).__name__}; send what it is made of, and make it on the other rank"
        )

    def __copy__(self) -> Self:
        return self

    @property
    def handle(self) -> int:
        """A number for this handle."""
        return self.toint()

    def toint(self) -> int:
        """Return a number for this handle, from which `fromint` makes it again."""
        number = id(self.held) if self.held is not None else 0
        _numbers[number] = self
        return number

    @classmethod
    def fromint(cls, arg: int) -> Any:
        """Return the handle of a number."""
        if arg not in _numbers:
            raise unsupported(f"{cls.__name__}.fromint({arg})", "pass what toint() returned")
        return _numbers[arg] if arg or _family(type(_numbers[arg])) is _family(cls) else cls()

    tohandle = py2f = toint
    fromhandle = f2py = fromint


def _family(kind: type[Handle]) -> type[Handle]:
    """Return the class whose subclasses' handles may be equal to each other: Comm, for a Cartcomm."""
    kinds = kind.__mro__
    return kinds[kinds.index(Handle) - 1]


def _predefined(name: str) -> Any:
    """Return the handle of a name on the rank that unpickles it."""
    return getattr(sys.modules["mpi4py.MPI"], name)


def _copy_of(name: str) -> Any:
    """Return a handle that is equal to that of a name."""
    found = _predefined(name)
    return type(found)(found)
