"""Which memory a message uses, and whether somebody else wrote into it meanwhile.

A buffer belongs to its message until the wait. Two mistakes are silent otherwise: changing what is being sent, and
receiving two messages into the same place. Both worlds ask here. Arrays on a GPU are not looked at.
"""

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.base.errors import BufferReuseError

if TYPE_CHECKING:
    from minidist.comm.communicator import Request, Work


_ROW = 8 * 509  # bytes; a prime number of words


def checksum(array: np.ndarray) -> int:
    """Of the array's bytes: enough to notice that somebody wrote into it.

    Above 64 KiB of the sums of the columns of a table of 8-byte words, several times as fast; it misses only a change
    that keeps all sums. (One sum would not do: 2**16 times 1.0 has the same as 2**16 times 7.0, modulo 2**64.)
    """
    raw: Any = array.reshape(-1).view(np.uint8)
    if raw.size <= 1 << 16:
        return zlib.crc32(raw)
    whole = raw.size // _ROW * _ROW
    sums = np.add.reduce(raw[:whole].view(np.uint64).reshape(-1, _ROW // 8), axis=0)
    return zlib.crc32(raw[whole:], zlib.crc32(sums.view(np.uint8)))


def may_overlap(a: Any, b: Any) -> bool:
    """May two arrays share memory?"""
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.size > 0 and np.may_share_memory(a, b)


def changed(rank: int, what: str) -> BufferReuseError:
    """The error for a buffer that somebody wrote into."""
    return BufferReuseError(
        f"rank {rank}: the buffer of its {what} was changed while the operation was "
        "in flight; wait() first, or give each message a buffer of its own"
    )


def remember(works: "Sequence[Work]") -> None:
    """The main program runs from here on: what is in the arrays of its works in lanes?"""
    for work in works:
        work.checksums = [checksum(array) for array in work.arrays]


def check_unchanged(rank: int, works: "Sequence[Work]") -> None:
    """The main program ran until here: has it written into the arrays of its works in lanes?"""
    for work in works:
        if work.checksums != [checksum(array) for array in work.arrays]:
            raise changed(rank, work.describe())


class OpenReceives:
    """The memory of a rank's receives that are posted and not waited for, sorted by address: no two share a byte."""

    __slots__ = ("ends", "place", "requests", "starts")

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.requests: list[Request] = []
        self.place: dict[int, int] = {}  # id of a request -> its start

    def check(self, rank: int, request: "Request", keep: bool) -> None:
        """Raise BufferReuseError when an open receive's memory is among the request's; keep: it is open from now on."""
        array = request.array
        if not isinstance(array, np.ndarray) or array.nbytes == 0:
            return
        start = array.ctypes.data
        end = start + array.nbytes
        i = bisect_right(self.starts, start)
        for j in (i - 1, i):
            if 0 <= j < len(self.starts) and self.starts[j] < end and start < self.ends[j]:
                raise BufferReuseError(
                    f"rank {rank}: its {request.describe()} is into memory of its {self.requests[j].describe()}, which "
                    "nobody has waited for; wait() first, or give each message a buffer of its own"
                )
        if keep:
            self.starts.insert(i, start)
            self.ends.insert(i, end)
            self.requests.insert(i, request)
            self.place[id(request)] = start

    def close(self, request: "Request") -> None:
        """The request has been waited for."""
        start = self.place.pop(id(request), None)
        if start is not None:
            i = bisect_left(self.starts, start)
            del self.starts[i], self.ends[i], self.requests[i]
