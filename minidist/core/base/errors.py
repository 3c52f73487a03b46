"""Exceptions with one class per way in which a run can fail, so that programs and tests can tell them apart.

An error message is one sentence that names the rank, the value, the place and the remedy. The classes carry no logic.

Proved by: tests/base/test_errors.py, tests/autograd/test_refusals.py
"""

from collections.abc import Sequence
from typing import Any


class MinidistError(Exception):
    """Base of every error that minidist raises on purpose. exit_code: of the command line when this ends it."""

    exit_code = 1


class UsageError(MinidistError, ValueError):
    """Wrong input from the user: a flag, a file, a shape. The command line prints it and exits with code 2."""

    exit_code = 2


class AutogradError(MinidistError):
    """An operation or a backward pass cannot be done as asked."""


class ShapeError(AutogradError, ValueError):
    """The shapes of operands do not fit; the message names the operation and both shapes."""


class DtypeError(AutogradError, TypeError):
    """Operands have two dtypes; minidist never promotes silently, because a float64 would get into float32 buffers."""


class VersionError(AutogradError):
    """A parameter or an input was changed between the forward and the backward that needs the older values."""


class CommunicationError(MinidistError):
    """Base of everything that can go wrong between ranks."""


class DeadlockError(CommunicationError):
    """Every unfinished rank waits for something that no rank will send or receive.

    waiting: the blocked streams (`minidist.comm.waiting.Waiting`). cycle: ranks that each wait only for the
    next, or [].
    """

    def __init__(self, message: str, waiting: Sequence[Any] = (), cycle: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.waiting, self.cycle = list(waiting), list(cycle)


class MismatchError(CommunicationError):
    """Two sides of one message disagree: another operation, dtype, shape or size."""


class RankDeadError(CommunicationError):
    """A rank was killed. rank: the world rank that is dead."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
