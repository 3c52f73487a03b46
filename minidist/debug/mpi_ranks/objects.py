"""Smaller objects of MPI: hints, error handlers, how objects are pickled, and what is refused by name.

Proved by: tests/mpi_ranks/test_program.py
"""

import pickle as python_pickle
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np

from minidist.debug.mpi_ranks.constants import failed, refusing
from minidist.debug.mpi_ranks.handle import Handle, Named

OBJECT = np.dtype("V1")  # of the bytes of an object, which is not received into a buffer of numbers


class Pickle:
    """How objects become bytes: `dumps` and `loads`, and the protocol."""

    def __init__(self, dumps: Any = None, loads: Any = None, protocol: int | None = None, threshold: int = 1 << 18):
        self._dumps: Callable[..., Any] = dumps or python_pickle.dumps
        self._loads: Callable[..., Any] = loads or python_pickle.loads
        self.PROTOCOL = python_pickle.HIGHEST_PROTOCOL if protocol is None and dumps is None else protocol
        self.THRESHOLD = threshold

    def dumps(self, obj: Any) -> bytes:
        data: bytes = self._dumps(obj) if self.PROTOCOL is None else self._dumps(obj, self.PROTOCOL)
        return data

    def loads(self, data: Any) -> Any:
        """Return the object of some bytes; None of none."""
        return self._loads(bytes(data)) if len(data) else None


pickle = Pickle()


class Info(Handle, MutableMapping[str, str]):
    """Hints by name, which change nothing."""

    held: dict[str, str] | None
    named = hints = Named[dict[str, str]]("ERR_INFO", "the info object is INFO_NULL")

    @classmethod
    def Create(cls, items: Any = None) -> "Info":
        """Return hints."""
        made = cls.of(dict[str, str]())
        made.update(items or ())
        return made

    Create_env = Create

    def Get(self, key: str) -> str | None:
        return self.hints.get(key)

    def Set(self, key: str, value: str) -> None:
        self.hints[key] = value

    def Delete(self, key: str) -> None:
        if self.hints.pop(key, None) is None:
            raise failed("ERR_INFO_NOKEY", f"no hint {key!r}")

    def Get_nkeys(self) -> int:
        return len(self.hints)

    def Get_nthkey(self, n: int) -> str:
        """Return a name by its number."""
        if not 0 <= n < len(self.hints):
            raise failed("ERR_ARG", f"hint {n} of {len(self.hints)}")
        return list(self.hints)[n]

    def Dup(self) -> "Info":
        return self.Create(self.hints)

    Free = Handle.release

    def __getitem__(self, key: str) -> str:
        return (self.held or {})[key]

    def __setitem__(self, key: str, value: str) -> None:
        if self.held is None:
            raise KeyError(key)
        self.Set(key, value)

    def __delitem__(self, key: str) -> None:
        del (self.held or {})[key]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.held or ()))

    def __len__(self) -> int:
        return len(self.held or ())

    def __reduce__(self) -> Any:
        if self.predefined or self.held is None:
            return super().__reduce__() if self.predefined else (Info, ())
        return Info.Create, (dict(self.hints),)


class Errhandler(Handle):
    """An error handler. Errors are raised as MPI.Exception, whichever is set. held: its name, or a function."""

    named = Named[Any]("ERR_ARG", "the error handler is ERRHANDLER_NULL")
    Free = Handle.release


class Refused(type):
    """The class of classes that simulated ranks do not have: whatever is called on them says so."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return refusing(f"MPI.{cls.__name__}.{name}", cls.__doc__ or "")


class _NullOnly(Handle, metaclass=Refused):
    pass


class Win(_NullOnly):
    """send messages instead of one-sided access, or run it under mpiexec"""


class File(_NullOnly):
    """let every rank write its own file, or run it under mpiexec"""


class Session(_NullOnly):
    """use MPI.COMM_WORLD"""
