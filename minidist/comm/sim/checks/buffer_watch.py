"""The memory of messages and works in flight belongs to them: who writes into it, or shares it, is told.

    irecv ── the program goes on ──▶ the message comes: it is put aside ──▶ wait: the array is as it was? then write it
    isend ── the program goes on ──▶ wait: the array is as it was?

So what a program reads from an array before its wait does not depend on the order in which the ranks run.

Proved by: tests/comm/sim/test_world.py, tests/comm/sim/test_misuse.py
"""

import sys
from typing import NoReturn

import numpy as np

from minidist.comm.buffers import OpenMessages, WorkArrays, changed, contents
from minidist.comm.call_site import NOWHERE, CallSite, call_site
from minidist.comm.sim.state import RunState
from minidist.comm.tags import LocatedRequest
from minidist.core.comm.point_to_point import Request, Work
from minidist.core.comm.sim.state import Stream


class Watched:
    """A message whose rank runs other code between its post and its wait.

    array: as it was posted. contents: what must be unchanged when the wait ends, or its checksum. open: it is not
    waited for yet. arrived: what its wait is to write.
    """

    __slots__ = ("array", "arrived", "contents", "open")

    def __init__(self, array: np.ndarray, open: bool) -> None:
        self.array, self.contents, self.open = array, contents(array), open
        self.arrived: np.ndarray | None = None


class BufferWatch:
    """The memory in flight of all ranks of a run."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.watched: dict[LocatedRequest, Watched] = {}
        self.open = [OpenMessages() for _ in range(state.size)]
        self.works = [WorkArrays(rank) for rank in range(state.size)]

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
            self.watched[request] = Watched(request.array, nonblocking)

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
        raise changed(rank, request.describe(), self._line_of(rank))

    def _line_of(self, rank: int) -> CallSite:
        """Return the line at which the main program of a rank is; NOWHERE when it has ended or cannot be seen."""
        main = self.state.mains[rank]
        frame = sys._getframe(1) if main is self.state.running else getattr(main.fiber, "gr_frame", None)
        return call_site(frame, NOWHERE)

    # works ------------------------------------------------------------------------------------------------------------

    def asked(self, work: Work, rank: int) -> None:
        """Watch the arrays of a work from here to its wait."""
        if work.arrays:
            work.watched = self.works[rank].add(work, work.arrays)

    def begins(self, work: Work, rank: int) -> None:
        """Raise when its arrays have changed since a work was asked for."""
        if work.watched:
            self.works[rank].begin(work, work.watched, self._line_of)

    def is_done(self, work: Work, rank: int) -> None:
        """Free the arrays of a work."""
        if work.watched:
            self.works[rank].finish(work.watched)
            work.watched = []  # a guard knows its work: a circle would keep the arrays alive

    def pauses(self, stream: Stream, on: Request | Work) -> None:
        """Raise when the main program, which has run until here, wrote into the arrays of its works."""
        if stream.is_main and self.works[stream.rank].running:
            self.works[stream.rank].check(self._line_of)

    def goes_on(self, stream: Stream, on: Request | Work) -> None:
        """Take the arrays as the streams have left them."""
        if stream.is_main and self.works[stream.rank].running:
            self.works[stream.rank].refresh()

    def forget(self, rank: int) -> None:
        """Forget the works of a rank that has been killed."""
        self.works[rank] = WorkArrays(rank)
