"""A program must not write into the memory of a message or work in flight, or use it twice: this module reports it.

    irecv ── the program goes on ──▶ the message comes: it is put aside ──▶ wait: the array is as it was? then write it
    isend ── the program goes on ──▶ wait: the array is as it was?

So what a program reads from an array before its wait does not depend on the order in which the ranks run.

Proved by: tests/comm/sim/test_world.py, tests/comm/sim/test_misuse.py
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from minidist.comm.buffers import OpenMessages, WorkArrays, changed, contents
from minidist.comm.call_site import NOWHERE, CallSite, call_site
from minidist.comm.sim.state import RunState
from minidist.comm.tags import LocatedRequest


@dataclass(slots=True, eq=False)
class Watched:
    """A message whose rank runs other code between its post and its wait.

    array: as it was posted. contents: what must be unchanged when the wait ends, or its checksum. open: it is not
    waited for yet. arrived: what its wait is to write.
    """

    array: np.ndarray
    contents: int | bytes
    open: bool
    arrived: np.ndarray | None = None


class BufferWatch:
    """The memory in flight of a run. ranks: that are watched."""

    def __init__(self, state: RunState, ranks: Sequence[int]) -> None:
        self.state = state
        self.watched: dict[LocatedRequest, Watched] = {}
        self.open = {rank: OpenMessages() for rank in ranks}
        self.works = {rank: WorkArrays(rank) for rank in ranks}

    # messages ---------------------------------------------------------------------------------------------------------

    def posted(self, request: LocatedRequest) -> None:
        """Raise when the memory is that of another message or work; watch it while other code runs."""
        stream, rank, nonblocking = request.stream, request.stream.rank, request.nonblocking
        if nonblocking or self.open[rank].start_of:
            # A buffered send has left its buffer at once, which may be freed before the wait.
            leaves = request.kind == "send" and request.nbytes <= self.state.eager_limit
            self.open[rank].add(rank, request, nonblocking and not leaves)
        if request.kind == "receive" and stream.is_main and self.works[rank].guards:
            self.works[rank].refuse(request)
        # Other code always runs in addition to a stream: the rank's main program.
        if nonblocking or not stream.is_main:
            self.watched[request] = Watched(request.array, contents(request.array), nonblocking)

    def meet(self, send: LocatedRequest, receive: LocatedRequest) -> bool:
        """Raise when a buffer has changed since its post; put aside what a program must not see before its wait."""
        if not self.watched:
            return False
        self.verify(send)
        watched = self.watched.get(receive)
        if watched is None:
            return False
        if watched.open:
            watched.arrived = send.array.copy()
        else:
            self.verify(receive)
            receive.array[...] = send.array
            watched.contents = contents(receive.array)
        return True

    def verify(self, request: LocatedRequest) -> None:
        """Raise BufferReuseError when the buffer of a message is not as it was."""
        watched = self.watched.get(request)
        # A buffered send holds a copy: its array may be written.
        if watched is not None and watched.array is request.array and contents(request.array) != watched.contents:
            self._raise_changed(request)

    def waiting(self, request: LocatedRequest) -> None:
        """Note that the program waits for a message, and runs no other code."""
        watched = self.watched.get(request) if self.watched else None
        if watched is not None and watched.open:
            watched.open = False
            self.open[request.stream.rank].close(request)

    def ended(self, request: LocatedRequest) -> None:
        """Raise when the buffer of a message has changed; give the program what has arrived."""
        if not self.watched:
            return
        if request.error is None:
            self.verify(request)
        watched = self.watched.pop(request, None)
        if watched is not None and watched.arrived is not None and request.error is None:
            request.array[...] = watched.arrived

    def _raise_changed(self, request: LocatedRequest) -> NoReturn:
        """Raise the error for a message whose buffer is not as it was, with the line that its rank has come to."""
        rank = request.stream.rank
        raise changed(rank, request.describe(), self.line_of(rank))

    def line_of(self, rank: int) -> CallSite:
        """Return the line at which the main program of a rank is; NOWHERE when it has ended or cannot be seen."""
        main = self.state.mains[rank]
        frame = sys._getframe(1) if main is self.state.running else getattr(main.fiber, "gr_frame", None)
        return call_site(frame, NOWHERE)

    def forget(self, rank: int) -> None:
        """Forget the works of a rank that has been killed."""
        self.works[rank] = WorkArrays(rank)
