"""Smaller objects of MPI: error handlers, how objects are pickled, and what is refused by name.

Proved by: tests/mpi_ranks/test_program.py
"""

import pickle as python_pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from minidist.debug.mpi_ranks.constants import failed, unsupported
from minidist.debug.mpi_ranks.handle import Handle

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


class Errhandler(Handle):
    """An error handler. Errors are raised as MPI.Exception, whichever is set. held: its name."""

    is_handle = True
    held: Any

    def Free(self) -> None:
        if self.held is None:
            raise failed("ERR_ARG", "the error handler is ERRHANDLER_NULL")
        self.held = None


class Refused(type):
    """The class of classes that simulated ranks do not have: whatever is called on them says so."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> Any:
            raise unsupported(f"MPI.{cls.__name__}.{name}", cls.__doc__ or "")

        return refuse


class _NullOnly(Handle, metaclass=Refused):
    is_handle = True


class Info(_NullOnly):
    """leave the hints out, which would change nothing"""


class Grequest(_NullOnly):
    """let the program keep what it waits for"""


class Win(_NullOnly):
    """send messages instead of one-sided access, or run it under mpiexec"""


class File(_NullOnly):
    """let every rank write its own file, or run it under mpiexec"""


class Session(_NullOnly):
    """use MPI.COMM_WORLD"""
