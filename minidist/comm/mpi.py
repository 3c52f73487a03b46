"""The MPI world: this process is one rank, and messages are real. Same interface, same record, same words when it fails.

Bytes travel as `[buffer, MPI.BYTE]` (automatic datatype discovery rejects bfloat16, and nothing is gained by it). What MPI
does not check is checked here: a 64-byte header goes ahead of each payload, on the same communicator and tag, and is
compared before the payload is received:

    sender     Isend header ── Isend payload
    receiver   Irecv header ── wait ── compare ── Irecv payload ── wait

Receives from one source and tag therefore wait in a queue: the next header is asked for only after the payload before it.
A lane is a greenlet that tests its request and hands control back; `progress()` and every blocking wait resume all lanes.
"""

import contextvars
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet

from minidist.base.errors import LauncherError, UnmatchedMessageError, UnwaitedRequestError
from minidist.base.trace import MessageEvent, SpanEvent, Trace, current_purpose
from minidist.comm.communicator import ANY, Comm, Request, Work
from minidist.comm.header import HEADER_BYTES, compare, header_of, pack, unpack
from minidist.comm.site import Site
from minidist.comm.staging import fetch, is_device_array, pinned_like, put
from minidist.comm.watchdog import Watchdog


class Transfer:
    """What the MPI world remembers of a request until it has been waited for."""

    __slots__ = ("buffer", "header", "header_request", "lane", "payload", "queue")

    def __init__(self, buffer: np.ndarray, lane: str) -> None:
        self.buffer, self.lane = buffer, lane
        self.header: bytearray | bytes | None = None
        self.header_request: Any = None
        self.payload: Any = None
        self.queue: deque[Request] | None = None


class Lane:
    """A communicator's lane on this rank."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.greenlet: greenlet | None = None
        self.queue: deque[Work] = deque()
        self.waiting: Request | None = None


class MPIWorld:
    """All processes that `mpiexec` started.

    checks: send and compare headers. timeout: seconds that an operation may be pending before the watchdog reports every
    rank's pending operation and ends the job (0: no watchdog). synchronous: every send waits for its receive (MPI_Issend),
    which makes programs that rely on buffering deadlock at once. record: keep a trace.

    Raises LauncherError when launcher and library do not belong together (every process would be rank 0 of 1).
    """

    kind = "mpi"

    def __init__(
        self, *, checks: bool = True, timeout: float = 60.0, synchronous: bool = False, record: bool = True
    ) -> None:
        MPI = import_mpi()
        self.MPI, self.checks, self.synchronous, self.record = MPI, checks, synchronous, record
        self.rank, self.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        check_launcher(self.size, MPI.Get_library_version().splitlines()[0])
        self.base = MPI.COMM_WORLD.Dup()  # for making groups and for this class's own business
        self.handles: dict[str, Any] = {}
        self.trace = Trace(self.rank, self.size)
        self.lanes: dict[str, Lane] = {}
        self.active: list[Lane] = []
        self.running: Lane | None = None  # None: the main program
        self.main = getcurrent()
        self.waiting: Request | Work | None = None  # of the main program; the watchdog looks at it
        self.state = "computing"
        self.unwaited: dict[int, Request | Work] = {}
        self.incoming: dict[tuple[str, int], deque[Request]] = {}
        self.sent, self.received = np.zeros(self.size, np.int64), np.zeros(self.size, np.int64)
        self.started = time.perf_counter()
        self.comm = Comm(self, "world", range(self.size), self.rank)
        self.watchdog = Watchdog(self, timeout) if timeout else None

    def run(self, main: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """`[main(comm, ...)]`: this rank's result. Then checks that no message was left over."""
        result = main(self.comm, *arguments, **keywords)
        self.state = "returned"
        self.finish()
        return [result]

    def finish(self) -> None:
        """Raise when a request was never waited for or a message never received; then stop the watchdog."""
        for item in self.unwaited.values():
            raise UnwaitedRequestError(
                f"rank {self.rank}: nobody waited for its {item.describe()}; call wait() on every request"
            )
        to_me = np.zeros_like(self.sent)
        self.base.Alltoall(self.sent, to_me)
        lost = to_me - self.received
        for source in np.flatnonzero(lost):
            raise UnmatchedMessageError(
                f"rank {self.rank}: received {self.received[source]} of the {to_me[source]} messages that rank {source} sent to it; "
                "every send needs a receive"
            )
        self.base.Barrier()  # nobody leaves while another still has something to report
        if self.watchdog:
            self.watchdog.stop()

    # posting -----------------------------------------------------------------------------------------------------------

    def register(self, comm: Comm) -> None:
        """One MPI communicator for messages and one for collectives, for each context."""
        if comm.name in self.handles:
            return
        if comm.size == self.size and list(comm.members) == list(range(self.size)):
            handle = self.base.Dup()
        else:
            group = self.MPI.COMM_WORLD.Get_group().Incl(list(comm.members))
            handle = self.base.Create_group(group)
        self.handles[comm.name] = handle
        self.handles[comm.name + "/collectives"] = handle.Dup()

    def post(self, comm: Comm, kind: str, array: np.ndarray, peer: int, tag: int, site: Site, guarded: bool) -> Request:
        world_peer = comm.members[peer] if peer != ANY else ANY
        lane = self.running
        event = MessageEvent(
            self.rank, lane.name if lane else "main", kind, world_peer, tag, array.nbytes, current_purpose(), comm.operation,
            comm.name, self.time(), header_bytes=HEADER_BYTES if self.checks else 0, dtype=array.dtype.str,
            wildcard=peer == ANY,
        )  # fmt: skip
        if self.record:
            self.trace.messages.append(event)
        request = Request(comm, kind, array, peer, tag, comm.operation, site, event)
        buffer = array
        if is_device_array(array):
            event.staged = True
            buffer = fetch(array) if kind == "send" else pinned_like(array)
        transfer = request.state = Transfer(buffer, event.lane)
        if guarded:
            self.unwaited[id(request)] = request
        if kind == "send":
            self.sent[world_peer] += 1
            handle = self.handles[comm.context]
            if self.checks:
                transfer.header = pack(header_of(comm.operation, array))
                transfer.header_request = handle.Isend([transfer.header, self.MPI.BYTE], peer, tag)
            start = handle.Issend if self.synchronous else handle.Isend
            transfer.payload = start([buffer, self.MPI.BYTE], peer, tag)
        elif self.checks:
            queue = self.incoming.get((comm.context, tag))
            if queue is None:
                queue = self.incoming[(comm.context, tag)] = deque()
            transfer.queue = queue
            queue.append(request)
            self._ask_for_headers(queue)
        else:
            self._receive_payload(request, peer)
        return request

    def _ask_for_headers(self, queue: deque[Request]) -> None:
        """Post the header receive of every request that no earlier one of the same source stands before."""
        earlier: set[int] = set()
        for request in queue:
            if ANY in earlier or request.peer in earlier or (request.peer == ANY and earlier):
                earlier.add(request.peer)
                continue
            earlier.add(request.peer)
            transfer = request.state
            if transfer.header_request is None:
                transfer.header = bytearray(HEADER_BYTES)
                transfer.header_request = self._handle(request).Irecv(
                    [transfer.header, self.MPI.BYTE], self._source(request.peer), request.tag
                )

    def _handle(self, request: Request) -> Any:
        return self.handles[request.comm.context]

    def _source(self, peer: int) -> int:
        return int(self.MPI.ANY_SOURCE) if peer == ANY else peer

    def _receive_payload(self, request: Request, source: int) -> None:
        transfer = request.state
        transfer.payload = self._handle(request).Irecv([transfer.buffer, self.MPI.BYTE], self._source(source), request.tag)

    def _header_came(self, request: Request, source: int) -> None:
        """The sender has said what it sends: compare, then receive it."""
        transfer = request.state
        assert transfer.header is not None and transfer.queue is not None
        if request.peer == ANY:
            request.peer = source
            request.event.peer = request.comm.members[source]
        compare(
            unpack(bytes(transfer.header)), header_of(request.operation, request.array), request.event.peer, self.rank,
            f"{request.site} (receiver)",
        )  # fmt: skip
        self._receive_payload(request, source)
        queue = transfer.queue
        queue.remove(request)
        if queue:
            self._ask_for_headers(queue)
        else:
            self.incoming.pop((request.comm.context, request.tag), None)
            # A later receive starts a queue of its own: this one's payload is already asked for.

    # waiting -------------------------------------------------------------------------------------------------------------

    def wait(self, request: Request) -> None:
        event = request.event
        if request.kind == "receive":
            event.start = self.time()
        if self.running is None and not self.active:
            self.waiting = request
            self._block(request)
            self.waiting = None
        else:
            self._poll(request)
        transfer = request.state
        if request.kind == "receive":
            self.received[event.peer] += 1
            if event.staged:
                put(transfer.buffer, request.array)
        else:
            event.start = event.posted
        self.unwaited.pop(id(request), None)
        event.end = self.time()

    def _block(self, request: Request) -> None:
        """Wait inside MPI, which is fastest; the watchdog's thread runs meanwhile."""
        transfer = request.state
        while transfer.payload is None:
            # An earlier receive of the same source may stand before this one; its header must be taken first.
            first = next(r for r in transfer.queue if r.state.header_request is not None and self._stands_before(r, request))
            status = self.MPI.Status()
            first.state.header_request.Wait(status)
            self._header_came(first, status.Get_source())
        if request.kind == "send":
            if transfer.header_request is not None:
                transfer.header_request.Wait()
            transfer.payload.Wait()
        elif request.peer == ANY:
            status = self.MPI.Status()
            transfer.payload.Wait(status)
            self._matched_without_header(request, status.Get_source())
        else:
            transfer.payload.Wait()

    @staticmethod
    def _stands_before(first: Request, request: Request) -> bool:
        return first is request or first.peer == request.peer or ANY in (first.peer, request.peer)

    def _matched_without_header(self, request: Request, source: int) -> None:
        request.peer = source
        request.event.peer = request.comm.members[source]

    def _test(self, request: Request) -> bool:
        transfer = request.state
        if transfer.payload is None:
            for other in list(transfer.queue):
                status = self.MPI.Status()
                if other.state.header_request is not None and other.state.header_request.Test(status):
                    self._header_came(other, status.Get_source())
            if transfer.payload is None:
                return False
        if request.kind == "send" and transfer.header_request is not None and not transfer.header_request.Test():
            return False
        if request.peer == ANY:
            status = self.MPI.Status()
            if not transfer.payload.Test(status):
                return False
            self._matched_without_header(request, status.Get_source())
            return True
        return bool(transfer.payload.Test())

    def _poll(self, request: Request) -> None:
        lane = self.running
        if lane is not None:
            lane.waiting = request
            while not self._test(request):
                self.main.switch()
            lane.waiting = None
            return
        self.waiting = request
        while not self._test(request):
            self.progress()
            os.sched_yield()
        self.waiting = None

    # lanes -----------------------------------------------------------------------------------------------------------------

    def post_work(self, work: Work) -> Work:
        lane = self.lanes.get(work.comm.name)
        if lane is None:
            lane = self.lanes[work.comm.name] = Lane(f"lane:{work.comm.name}")
        lane.queue.append(work)
        self.unwaited[id(work)] = work
        if lane.greenlet is None or lane.greenlet.dead:
            lane.greenlet = greenlet(self._run_lane, parent=self.main)
            lane.greenlet.gr_context = contextvars.copy_context()
            self.active.append(lane)
            if self.running is None:
                self._resume(lane)  # its first sends leave now
        return work

    def _run_lane(self, lane: Lane) -> None:
        while lane.queue:
            work = lane.queue.popleft()
            work.result = work.function()
            work.end, work.finished = self.time(), True

    def _resume(self, lane: Lane) -> None:
        assert lane.greenlet is not None
        self.running = lane
        try:
            lane.greenlet.switch(lane)
        finally:
            self.running = None
            if lane.greenlet.dead:
                self.active.remove(lane)

    def progress(self) -> None:
        if self.active and self.running is None:
            for lane in tuple(self.active):
                self._resume(lane)

    def wait_work(self, work: Work) -> Any:
        self.unwaited.pop(id(work), None)
        if self.running is None:
            self.waiting = work
            while not work.finished:
                self.progress()
                os.sched_yield()
            self.waiting = None
        else:
            while not work.finished:
                self.main.switch()
        return work.result

    # clock -----------------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return time.perf_counter() - self.started

    def compute(self, operations: Sequence[tuple[float, float]], seconds: float, name: str) -> None:
        pass  # real time passes by itself

    def span(self, name: str, start: float, end: float, category: str = "compute") -> None:
        self.trace.spans.append(SpanEvent(self.rank, self.running.name if self.running else "main", name, start, end, category))

    def trace_of(self, comm: Comm) -> Trace:
        return self.trace


def import_mpi() -> Any:
    """mpi4py's MPI module, imported at the first use (0.1 to 1 s), or one sentence that says how to get it."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise LauncherError(f"MPI is not available ({error}); install it with: pip install 'minidist[mpi]'") from None
    return MPI


def launched_size(environment: "os._Environ[str] | dict[str, str]" = os.environ) -> int | None:
    """How many processes the launcher says it started; None when there is no launcher."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MINIDIST_SIZE"):
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return None


def check_launcher(size: int, library: str) -> None:
    """Launcher and library of two different MPIs make every process rank 0 of 1, and everything passes vacuously."""
    expected = launched_size()
    if expected is not None and expected != size:
        raise LauncherError(
            f"the launcher started {expected} processes but {library} sees {size}: they belong to different MPI installations; "
            "use the mpiexec that came with this library (minidist doctor shows both)"
        )
