"""Which memory a message uses, and whether the program wrote into it meanwhile.

A buffer belongs to its message until the wait. Two mistakes are silent otherwise: changing what is being sent, and
receiving two messages into the same place. Both worlds ask here. Arrays on a GPU are not looked at.

Proved by: tests/comm/sim/test_world.py, tests/comm/mpi/test_failures.py
"""

import zlib
from bisect import bisect_left, bisect_right
from typing import Any, Protocol

import numpy as np

from minidist.base.errors import BufferReuseError

_ROW = 8 * 509  # bytes; a prime number of words


class InFlight(Protocol):
    """A message or a work that has been started and not waited for."""

    array: np.ndarray

    def describe(self) -> str:
        """Return what it is, for reports."""
        ...


def checksum(array: np.ndarray) -> int:
    """Checksum of the array's bytes, to detect writes while a message is in flight.

    Above 64 KiB it is that of the column sums of a table of 8-byte words, which is several times as fast and misses
    only a change that keeps all sums. (One sum would not do: that of 2**16 times 1.0 and that of 2**16 times 7.0 are
    equal modulo 2**64.)
    """
    # The array's bytes; a small one goes to crc32 as it is.
    raw: Any = array.reshape(-1).view(np.uint8)
    if raw.size <= 1 << 16:
        return zlib.crc32(raw)

    # Fold the table's rows onto one row, then crc32 that row and the bytes that fill no row.
    whole = raw.size // _ROW * _ROW
    sums = np.add.reduce(raw[:whole].view(np.uint64).reshape(-1, _ROW // 8), axis=0)
    return zlib.crc32(raw[whole:], zlib.crc32(sums.view(np.uint8)))


def may_overlap(a: Any, b: Any) -> bool:
    """Return whether two arrays may share memory."""
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.size > 0 and np.may_share_memory(a, b)


def changed(rank: int, what: str) -> BufferReuseError:
    """Return the error for a buffer that was written into."""
    return BufferReuseError(
        f"rank {rank}: the buffer of its {what} was changed while the operation was "
        "in flight; wait() first, or give each message a buffer of its own"
    )


class OpenReceives:
    """The memory of a rank's receives that are posted and not waited for, sorted by address: no two share a byte."""

    __slots__ = ("ends", "receives", "start_of", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.receives: list[InFlight] = []
        self.start_of: dict[int, int] = {}  # by the id of a receive

    def add(self, rank: int, receive: InFlight, keep: bool) -> None:
        """Raise BufferReuseError when the memory is an open receive's; keep: it is open from now on."""
        # An array on a GPU or an empty one has no memory of this process.
        array = receive.array
        if not isinstance(array, np.ndarray) or array.nbytes == 0:
            return
        start = array.ctypes.data
        end = start + array.nbytes
        i = bisect_right(self.starts, start)

        # The open ones do not overlap each other, so only the two neighbours can overlap this one.
        for j in (i - 1, i):
            if 0 <= j < len(self.starts) and self.starts[j] < end and start < self.ends[j]:
                raise BufferReuseError(
                    f"rank {rank}: its {receive.describe()} is into memory of its {self.receives[j].describe()}, which "
                    "is not waited for yet; wait() first, or give each message a buffer of its own"
                )
        if keep:
            self.starts.insert(i, start)
            self.ends.insert(i, end)
            self.receives.insert(i, receive)
            self.start_of[id(receive)] = start

    def close(self, receive: InFlight) -> None:
        """Forget a receive: it has been waited for."""
        start = self.start_of.pop(id(receive), None)
        if start is not None:
            i = bisect_left(self.starts, start)
            del self.starts[i], self.ends[i], self.receives[i]
