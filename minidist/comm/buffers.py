"""Which memory a message uses, and whether the program wrote into it meanwhile.

A buffer belongs to its message until the wait. Three mistakes are silent otherwise: changing what is being sent,
receiving two messages into the same place, and receiving into what is being sent. Both worlds call this module. Arrays
on a GPU are not checked.

Proved by: tests/comm/sim/test_world.py, tests/comm/mpi/test_failures.py
"""

import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from minidist.base.arrays import to_host
from minidist.comm.call_site import NOWHERE, CallSite
from minidist.comm.errors import BufferReuseError

_SMALL = 1 << 14  # bytes
_ROW = 8 * 509  # bytes; a prime number of words


class InFlight(Protocol):
    """A message or a work that has been started and not waited for."""

    def describe(self) -> str:
        """Return what it is, for reports."""
        ...


class OpenMessage(InFlight, Protocol):
    """A send or a receive that has been posted and not waited for."""

    kind: str
    array: np.ndarray


def contents(array: np.ndarray) -> int | bytes:
    """Return what is compared to detect writes: the bytes of a small array, a fifth of a checksum's time; or that."""
    return array.tobytes() if array.nbytes <= _SMALL and type(array) is np.ndarray else checksum(array)


def checksum(array: np.ndarray) -> int:
    """Checksum of the array's bytes, to detect writes while a message is in flight.

    Above 16 KiB it is that of the column sums of a table of 8-byte words, which is several times as fast and misses
    only a change that keeps all sums. (One sum would not do: that of 2**16 times 1.0 and that of 2**16 times 7.0 are
    equal modulo 2**64.)
    """
    # A small array goes to crc32 as it is.
    held: Any = array if type(array) is np.ndarray else to_host(array)
    if held.nbytes <= _SMALL:
        return zlib.crc32(held)
    raw = held.reshape(-1).view(np.uint8)

    # Fold the table's rows onto one row, then crc32 that row and the bytes that fill no row.
    whole = raw.size // _ROW * _ROW
    sums = np.add.reduce(raw[:whole].view(np.uint64).reshape(-1, _ROW // 8), axis=0)
    return zlib.crc32(raw[whole:], zlib.crc32(sums.view(np.uint8)))


def changed(rank: int, what: str, site: CallSite) -> BufferReuseError:
    """Return the error for a buffer that was written into. site: the line at which the rank has come since."""
    before = "" if site is NOWHERE else f", before {site}"
    return BufferReuseError(
        f"rank {rank}: the buffer of its {what} was changed while the operation was in flight{before}; wait() first, or"
        " give each message a separate buffer"
    )


class OpenMessages:
    """The memory of a rank's messages that are posted and not waited for, sorted by address.

    A receive shares no byte with any other message, because it may be written at any moment; sends may share theirs.
    """

    __slots__ = ("longest", "receives", "sends", "start_of", "starts")

    def __init__(self) -> None:
        # By kind: where each message's memory begins, and the messages in the same order. longest: bytes of a send.
        self.starts: dict[str, list[int]] = {"receive": [], "send": []}
        self.receives: list[tuple[int, OpenMessage]] = []  # with the end of the memory
        self.sends: list[tuple[int, OpenMessage]] = []
        self.longest = 0
        self.start_of: dict[int, int] = {}  # by the id of a message; empty when no message is open

    def _receive_in(self, start: int, end: int) -> OpenMessage | None:
        """Return an open receive into memory of start to end."""
        # Receives do not overlap each other, so only the two neighbours can overlap this message.
        starts = self.starts["receive"]
        i = bisect_right(starts, start)
        for j in (i, i - 1):
            if 0 <= j < len(starts) and starts[j] < end and start < self.receives[j][0]:
                return self.receives[j][1]
        return None

    def _send_in(self, start: int, end: int) -> OpenMessage | None:
        """Return an open send from memory of start to end."""
        # Sends may overlap: of those that begin before the end, any that is no further away than the longest is long.
        starts = self.starts["send"]
        for j in range(bisect_right(starts, start - self.longest), bisect_left(starts, end)):
            if self.sends[j][0] > start:
                return self.sends[j][1]
        return None

    def add(self, rank: int, message: OpenMessage, keep: bool) -> None:
        """Raise BufferReuseError when the memory is that of an open message; keep: this one is open from now on."""
        # An array on a GPU or an empty one has no memory of this process.
        array, receiving = message.array, message.kind == "receive"
        if not isinstance(array, np.ndarray) or array.nbytes == 0:
            return
        start: int = array.__array_interface__["data"][0]  # half the time of `array.ctypes.data`
        end = start + array.nbytes

        other = self._receive_in(start, end) or (self._send_in(start, end) if receiving else None)
        if other is not None:
            raise BufferReuseError(
                f"rank {rank}: its {message.describe()} is {'into' if receiving else 'from'} memory of its "
                f"{other.describe()}, which is not waited for yet; wait() first, or give each message a separate "
                "buffer"
            )

        if keep:
            starts, open_ = (self.starts["receive"], self.receives) if receiving else (self.starts["send"], self.sends)
            i = bisect_right(starts, start)
            starts.insert(i, start)
            open_.insert(i, (end, message))
            self.start_of[id(message)] = start
            if not receiving:
                self.longest = max(self.longest, array.nbytes) if len(starts) > 1 else array.nbytes

    def close(self, message: OpenMessage) -> None:
        """Forget a message: it has been waited for."""
        start = self.start_of.pop(id(message), None)
        if start is None:
            return
        starts, open_ = self.starts[message.kind], self.receives if message.kind == "receive" else self.sends
        i = bisect_left(starts, start)
        while open_[i][1] is not message:
            i += 1
        del starts[i], open_[i]


@dataclass(slots=True, eq=False)
class Guard:
    """The contents of an array that one or several works of a rank use; [start, end) is its memory.

    work: the last one that began, or else the first; for reports. works: how many are not finished; running: how many
    of those have begun.
    """

    array: np.ndarray
    start: int
    end: int
    contents: int | bytes
    work: InFlight
    works: int = 0
    running: int = 0


class WorkArrays:
    """The arrays of a rank's works that are not finished: its program must leave them alone, its streams need not.

    An array that no running work uses must stay as it is until a work begins; one in use must stay as it is while the
    main program runs. So an array is looked at when a work of it begins, and whenever the main program hands over.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.guards: dict[tuple[int, int], Guard] = {}  # by memory
        self.starts: list[int] = []  # of all guards, in order
        self.in_order: list[Guard] = []
        self.longest = 0  # bytes of a guard
        self.running: list[Guard] = []

    def add(self, work: InFlight, arrays: Sequence[Any]) -> list[Guard]:
        """Guard the arrays of a work that has been asked for; return what `begin` and `finish` are to be given."""
        guards = []
        for array in arrays:
            # An array on a GPU or an empty one has no memory of this process.
            if not isinstance(array, np.ndarray) or array.nbytes == 0:
                continue
            start: int = array.__array_interface__["data"][0]
            end = start + array.nbytes
            guard = self.guards.get((start, end))
            if guard is None:
                guard = self.guards[start, end] = Guard(array, start, end, contents(array), work)
                i = bisect_right(self.starts, start)
                self.starts.insert(i, start)
                self.in_order.insert(i, guard)
                self.longest = max(self.longest, array.nbytes) if len(self.starts) > 1 else array.nbytes
            guard.works += 1
            guards.append(guard)
        return guards

    def begin(self, work: InFlight, guards: Sequence[Guard], line_of: Callable[[int], CallSite]) -> None:
        """Note that a work begins; raise when its arrays have changed since it was asked for.

        line_of: returns the line at which a rank's main program is.
        """
        for guard in guards:
            # What overlaps an array in use changes lawfully; the main program is watched there already.
            for other in self.running:
                if other.start < guard.end and guard.start < other.end:
                    break
            else:
                if contents(guard.array) != guard.contents:
                    raise changed(self.rank, work.describe(), line_of(self.rank))
        for guard in guards:
            guard.work = work
            guard.running += 1
            if guard.running == 1:
                self.running.append(guard)

    def finish(self, guards: Sequence[Guard]) -> None:
        """Note that a work is done: what it wrote is what the works after it begin with."""
        for guard in guards:
            guard.works -= 1
            guard.running -= 1
            if guard.running == 0:
                self.running.remove(guard)
            if guard.works == 0:
                del self.guards[guard.start, guard.end]
                i = bisect_left(self.starts, guard.start)
                while self.in_order[i] is not guard:
                    i += 1
                del self.starts[i], self.in_order[i]

            # The guards that share memory with this one, itself among them.
            first = bisect_right(self.starts, guard.start - self.longest)
            for other in self.in_order[first : bisect_left(self.starts, guard.end)]:
                if other.end > guard.start:
                    other.contents = contents(other.array)

    def check(self, line_of: Callable[[int], CallSite]) -> None:
        """Raise when the main program, which hands over now, has changed an array in use."""
        for guard in self.running:
            if contents(guard.array) != guard.contents:
                raise changed(self.rank, guard.work.describe(), line_of(self.rank))

    def refresh(self) -> None:
        """Take the arrays in use as the streams have left them: the main program goes on."""
        for guard in self.running:
            guard.contents = contents(guard.array)

    def refuse(self, receive: OpenMessage) -> None:
        """Raise BufferReuseError when the main program receives into an array of a work that is not finished."""
        if not isinstance(receive.array, np.ndarray) or receive.array.nbytes == 0:
            return
        start: int = receive.array.__array_interface__["data"][0]
        end = start + receive.array.nbytes
        first = bisect_right(self.starts, start - self.longest)
        for guard in self.in_order[first : bisect_left(self.starts, end)]:
            if guard.end > start:
                raise BufferReuseError(
                    f"rank {self.rank}: its {receive.describe()} is into memory of its {guard.work.describe()}, which "
                    "is not finished yet; wait() first, or receive into a separate array"
                )
