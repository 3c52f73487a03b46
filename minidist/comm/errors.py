"""What goes wrong between ranks, in addition to the errors that the core has: one class per way.

Proved by: tests/comm/sim/test_world.py, tests/comm/mpi/test_start.py
"""

from minidist.core.base.errors import CommunicationError


class UnmatchedMessageError(CommunicationError):
    """A message was sent and never received."""


class UnwaitedRequestError(CommunicationError):
    """A nonblocking operation was started and never waited for."""


class BufferReuseError(CommunicationError):
    """A buffer changed while a nonblocking operation still used it."""


class RankTimeoutError(CommunicationError):
    """A rank computed, or waited, longer than --timeout."""


class LauncherError(CommunicationError):
    """There is no launcher, it does not belong to the MPI library, or it could not start the ranks."""

    exit_code = 2
