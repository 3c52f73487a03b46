"""Which memory a message uses, and whether the program wrote into it meanwhile.

A buffer belongs to its message until the wait. Three mistakes are silent otherwise: changing what is being sent,
receiving two messages into the same place, and receiving into what is being sent. Both worlds call this module. Arrays
on a GPU are not checked.

Proved by: tests/comm/sim/test_world.py, tests/comm/mpi/test_failures.py
"""

import zlib
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.base.arrays import to_host
from minidist.comm.call_site import NOWHERE, CallSite
from minidist.comm.errors import BufferReuseError

_SMALL = 1 << 14  # bytes
_ROW = 8 * 509  # bytes; a prime number of words


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


# Memory in use: where it begins and ends, the id of what uses it, and that itself. Lists of these are sorted.
Use = tuple[int, int, int, Any]


def memory_of(array: Any) -> tuple[int, int] | None:
    """Return where an array's memory begins and ends; None for one on a GPU, or empty, which has none in this process.

    The array interface takes half the time of `array.ctypes.data`.
    """
    if not isinstance(array, np.ndarray) or array.nbytes == 0:
        return None
    start: int = array.__array_interface__["data"][0]
    return start, start + array.nbytes


def used_in(uses: list[Use], longest: int, start: int, end: int) -> list[Any]:
    """Return what uses memory of start to end. longest: at least the bytes of each use."""
    # Of those that begin before the end, any that is no further away than the longest is long.
    found = []
    for _, last, _, user in uses[bisect_left(uses, (start - longest + 1,)) : bisect_left(uses, (end,))]:
        if last > start:
            found.append(user)
    return found


class OpenMessages:
    """The memory of a rank's messages that are posted and not waited for, sorted by address.

    A receive shares no byte with any other message, because it may be written at any moment; sends may share theirs.
    """

    __slots__ = ("longest", "receives", "sends", "use_of")

    def __init__(self) -> None:
        self.receives: list[Use] = []
        self.sends: list[Use] = []
        self.longest = 0  # bytes of a send
        self.use_of: dict[int, Use] = {}  # by the id of a message; empty when no message is open

    def add(self, rank: int, message: Any, keep: bool) -> None:
        """Raise BufferReuseError when the memory is that of an open message; keep: this one is open from now on."""
        memory, receiving = memory_of(message.array), message.kind == "receive"
        if memory is None:
            return
        # Receives do not overlap each other, so only the last one that begins before the end can overlap this message.
        start, end = memory
        before = bisect_left(self.receives, (end,))
        others = [self.receives[before - 1][3]] if before and self.receives[before - 1][1] > start else []
        if receiving and self.sends and not others:
            others = used_in(self.sends, self.longest, start, end)
        if others:
            raise BufferReuseError(
                f"rank {rank}: its {message.describe()} is {'into' if receiving else 'from'} memory of its "
                f"{others[0].describe()}, which is not waited for yet; wait() first, or give each message a separate "
                "buffer"
            )

        if keep:
            if not receiving:
                self.longest = max(self.longest, end - start) if self.sends else end - start
            use = self.use_of[id(message)] = start, end, id(message), message
            insort(self.receives if receiving else self.sends, use)

    def close(self, message: Any) -> None:
        """Forget a message: it has been waited for."""
        use = self.use_of.pop(id(message), None)
        if use is not None:
            uses = self.receives if message.kind == "receive" else self.sends
            del uses[bisect_left(uses, use)]


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
    work: Any
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
        self.uses: list[Use] = []
        self.longest = 0  # bytes of a guard
        self.running: list[Guard] = []

    def add(self, work: Any, arrays: Sequence[Any]) -> list[Guard]:
        """Guard the arrays of a work that has been asked for; return what `begin` and `finish` are to be given."""
        guards = []
        for array in arrays:
            memory = memory_of(array)
            if memory is None:
                continue
            guard = self.guards.get(memory)
            if guard is None:
                self.longest = max(self.longest, array.nbytes) if self.guards else array.nbytes
                guard = self.guards[memory] = Guard(array, *memory, contents(array), work)
                insort(self.uses, (*memory, id(guard), guard))
            guard.works += 1
            guards.append(guard)
        return guards

    def begin(self, work: Any, guards: Sequence[Guard], line_of: Callable[[int], CallSite]) -> None:
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
                del self.uses[bisect_left(self.uses, (guard.start, guard.end))]

            # The guards that share memory with this one, itself among them.
            for other in used_in(self.uses, self.longest, guard.start, guard.end):
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

    def refuse(self, receive: Any) -> None:
        """Raise BufferReuseError when the main program receives into an array of a work that is not finished."""
        memory = memory_of(receive.array)
        guards = used_in(self.uses, self.longest, *memory) if memory else []
        if guards:
            raise BufferReuseError(
                f"rank {self.rank}: its {receive.describe()} is into memory of its {guards[0].work.describe()}, which "
                "is not finished yet; wait() first, or receive into a separate array"
            )
