"""MPI's constants and its errors.

The numbers of error classes are this package's: a program compares them with the names, as the standard asks.

Proved by: tests/mpi_ranks/test_program.py
"""

from functools import total_ordering
from typing import Any

ANY_SOURCE, PROC_NULL, ROOT = -1, -2, -3
ANY_TAG, UNDEFINED, KEYVAL_INVALID = -1, -32766, -1
IDENT, CONGRUENT, SIMILAR, UNEQUAL = 0, 1, 2, 3
TAG_LIMIT = 2**31 - 1  # the largest tag, TAG_UB
KEYVALS = {"TAG_UB": 1, "HOST": 2, "IO": 3, "WTIME_IS_GLOBAL": 4, "UNIVERSE_SIZE": 5, "APPNUM": 6, "LASTUSEDCODE": 7}

_NAMES = (
    "SUCCESS BUFFER COUNT TYPE TAG COMM RANK REQUEST ROOT GROUP OP TOPOLOGY DIMS ARG UNKNOWN TRUNCATE OTHER INTERN"
    " PENDING IN_STATUS ACCESS AMODE ASSERT BAD_FILE BASE CONVERSION DISP DUP_DATAREP FILE_EXISTS FILE_IN_USE FILE"
    " INFO_KEY INFO_NOKEY INFO_VALUE INFO IO KEYVAL LOCKTYPE NAME NO_MEM NOT_SAME NO_SPACE NO_SUCH_FILE PORT QUOTA"
    " READ_ONLY RMA_CONFLICT RMA_SYNC SERVICE SIZE SPAWN UNSUPPORTED_DATAREP UNSUPPORTED_OPERATION WIN RMA_RANGE"
    " RMA_ATTACH RMA_SHARED RMA_FLAVOR PROC_ABORTED VALUE_TOO_LARGE SESSION ERRHANDLER REVOKED PROC_FAILED"
    " PROC_FAILED_PENDING ABI"
)
ERRORS = {("" if name == "SUCCESS" else "ERR_") + name: code for code, name in enumerate(_NAMES.split())}
ERR_LASTCODE = 2**30 - 1
_texts = {code: f"MPI_{name}" for name, code in ERRORS.items()}


@total_ordering
class Exception(RuntimeError):
    """An error of MPI. code: one of MPI's, such as MPI.ERR_RANK. text: what is wrong, in one sentence."""

    def __init__(self, code: int = 0, text: str = "") -> None:
        super().__init__(code)
        self.error_code: int = code if code in _texts else ERRORS["ERR_UNKNOWN"]
        self.text = text

    def Get_error_code(self) -> int:
        return self.error_code

    def Get_error_string(self) -> str:
        """Return the name of the class, and what is wrong."""
        return _texts[self.error_code] + (f": {self.text}" if self.text else "")

    Get_error_class = Get_error_code  # a code is its own class
    error_class, error_string = property(Get_error_class), property(Get_error_string)

    __str__ = Get_error_string

    def __repr__(self) -> str:
        return f"MPI.Exception({self.error_code})"

    __int__ = Get_error_code

    def __bool__(self) -> bool:
        return self.error_code != 0

    def __hash__(self) -> int:
        return hash(self.error_code)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | Exception) and self.error_code == int(other)

    def __lt__(self, other: Any) -> bool:
        return self.error_code < int(other)


def failed(name: str, text: str) -> Exception:
    """Return the error of a class, such as "ERR_RANK"."""
    return Exception(ERRORS[name], text)


class Unsupported(NotImplementedError):
    """The program uses a part of MPI that simulated ranks do not have."""


def unsupported(what: str, instead: str) -> Unsupported:
    """Return the error for a part of MPI that simulated ranks do not have, and what to do instead."""
    return Unsupported(f"{what} is not simulated by minidist mpi; {instead}")


MORE_RANKS = "start as many ranks as the program needs with --ranks"


def refusing(what: str, instead: str) -> Any:
    """Return a function or method of MPI that simulated ranks do not have: it raises that error."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise unsupported(what, instead)

    return refuse


class UnknownName(Unsupported, AttributeError):
    """The program names something of MPI that is not here. hasattr returns False for it."""


def unknown(name: str, owner: str) -> AttributeError:
    """Return the error for an attribute that is not here: one of MPI's, which have capital letters, or any other."""
    if not name[:1].isupper():
        return AttributeError(f"{owner} has no attribute {name!r}")
    return UnknownName(f"{owner}.{name} is not simulated by minidist mpi; check its spelling, or run it under mpiexec")


def Get_error_class(errorcode: int) -> int:
    """Return the class of an error code, which is the code itself."""
    return Exception(errorcode).error_code


def Get_error_string(errorcode: int) -> str:
    """Return an error code in words."""
    return Exception(errorcode).Get_error_string()
