"""The MPI world: this process is one rank, and messages are real. Same interface, same record, same errors.

Bytes travel as `[buffer, MPI.BYTE]` (automatic datatype discovery rejects bfloat16, and nothing is gained by it). What
MPI does not check is checked here: a 64-byte header goes ahead of each payload, on the same communicator, its tag in
the upper half of the tags, and is compared before the payload is received:

    sender     Isend header (tag + 2**14) ── Isend payload (tag)
    receiver   Irecv header, at once ── ... it comes: compare ── Irecv payload ── wait

Header receives are posted when the user posts, so MPI itself decides which message each gets, wildcards too. A payload
that nobody has asked for can block its sender, so whoever waits, for anything, also takes the headers that have come. A
lane is a greenlet that tests its request and hands control back; `progress()` and every blocking wait resume all lanes.
"""

import contextvars
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from greenlet import getcurrent, greenlet

from minidist.base.errors import RankDeadError, UnmatchedMessageError, UnwaitedRequestError, UsageError
from minidist.base.trace import MessageEvent, SpanEvent, Trace, current_purpose
from minidist.comm.buffers import OpenReceives, changed, checksum
from minidist.comm.call_site import Site
from minidist.comm.communicator import ANY, CALLS, Comm, Request, Work
from minidist.comm.header import HEADER_BYTES, compare, dtype_name, header_of, pack, unpack
from minidist.comm.launched import check_launcher, import_mpi
from minidist.comm.mpi.request import Lane, MPIRequest
from minidist.comm.mpi.staging import fetch, is_device_array, pinned_like, put
from minidist.comm.mpi.watchdog import Entering, Returned, Watchdog

HEADER_TAG = CALLS  # added to a message's tag, which is below it


class MPIWorld:
    """All processes that `mpiexec` started.

    checks: send and compare headers. timeout: seconds that an operation may be pending before the watchdog reports
    every rank's pending operation and ends the job (0: no watchdog). synchronous: every send waits for its receive
    (MPI_Issend), which makes programs that rely on buffering deadlock at once. record: keep a trace. on_failure: for
    programs that run in both worlds; whatever it says, a rank that dies ends the job, which is MPI's rule.

    Raises LauncherError when launcher and library do not belong together (every process would be rank 0 of 1).
    """

    kind = "mpi"

    def __init__(
        self,
        *,
        checks: bool = True,
        timeout: float = 60.0,
        synchronous: bool = False,
        record: bool = True,
        on_failure: str = "end",
    ) -> None:
        MPI = import_mpi()
        self.lean = not (checks or record or synchronous)
        self.MPI, self.checks, self.synchronous, self.record = MPI, checks, synchronous, record
        self.rank, self.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        check_launcher(self.size, MPI.Get_library_version().splitlines()[0])
        self.base = MPI.COMM_WORLD.Dup()  # for making groups and for this class's own business
        self.hosts: list[str] = self.base.allgather(MPI.Get_processor_name())
        self.handles: dict[str, Any] = {}
        self.trace = Trace(self.rank, self.size)
        self.dead: dict[int, float] = {}  # always empty: a death ends the job
        self.lanes: dict[str, Lane] = {}
        self.active: list[Lane] = []
        self.running: Lane | None = None  # None: the main program
        self.main = getcurrent()
        self.waiting: MPIRequest | Work | Entering | tuple[Any, ...] | Returned | None = (
            None  # of the main program; the watchdog looks at it
        )
        self.handling: BaseException | None = None  # it waits inside an `except` or `finally`: what brought it there
        self.state = "computing"
        self.open = OpenReceives()
        self.unwaited: dict[int, Request | Work] = {}
        self.expected: list[MPIRequest] = []  # receives whose header has not come, in the order of their posts
        self.sent, self.received = [0] * self.size, [0] * self.size  # messages to, and from, each rank
        self.completed = 0  # messages; the watchdog looks at it
        self.crowded = self.size > len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else False
        self.mark = 0.0  # since when the main program has been computing
        self.started = time.perf_counter()
        self.comm = Comm(self, "world", range(self.size), self.rank)
        self.watchdog = Watchdog(self, timeout) if timeout else None

    def run(self, main: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """`[main(comm, ...)]`: this rank's result. Then checks that no message was left over."""
        result = main(self.comm, *arguments, **keywords)
        self.finish()
        return [result]

    def finish(self) -> None:
        """Raise when a request was never waited for or a message never received. Collective."""
        self.state = "returned"
        for item in self.unwaited.values():
            raise UnwaitedRequestError(
                f"rank {self.rank}: nobody waited for its {item.describe()}; call wait() on every request"
            )
        self.waiting = Returned()
        to_me = np.empty(self.size, np.int64)
        self.base.Alltoall(np.array(self.sent, np.int64), to_me)
        for source, (sent, received) in enumerate(zip(to_me, self.received, strict=True)):
            if sent != received:
                raise UnmatchedMessageError(
                    f"rank {self.rank}: received {received} of the {sent} messages that rank {source} sent to it; "
                    "every send needs a receive"
                )
        self.base.Barrier()  # nobody leaves while another still has something to report
        self.waiting = None
        while self.handles:  # newest first
            self.handles.popitem()[1].Free()

    def kill(self, rank: int) -> NoReturn:
        """The caller's own rank dies, and the job with it: MPI's rule. (`SimWorld(on_failure="isolate")` has another.)"""
        if rank != self.rank:
            raise UsageError(f"rank {self.rank}: kill of rank {rank}; under MPI a rank can kill only itself")
        raise RankDeadError(f"rank {rank}: killed, and under MPI the job ends with it", rank)

    def close(self) -> None:
        """Stop the watchdog and give back the last of MPI's resources. Collective; nothing works afterwards."""
        if self.watchdog:
            self.watchdog.stop()
        self.base.Free()

    # posting ----------------------------------------------------------------------------------------------------------

    def register(self, comm: Comm) -> None:
        """One MPI communicator for messages and one for collectives. Blocks until all members are here."""
        if comm.name in self.handles:
            return
        while self.active and self.running is None:  # another member may want its lanes done before it comes here
            self.progress()
        before, self.waiting = self.waiting, Entering(comm)
        if comm.size == self.size and list(comm.members) == list(range(self.size)):
            handle = self.base.Dup()
        else:
            group = self.MPI.COMM_WORLD.Get_group().Incl(list(comm.members))
            handle = self.base.Create_group(group)
            group.Free()
        self.handles[comm.name] = handle
        self.handles[comm.name + "/collectives"] = handle.Dup()
        self.waiting = before

    def post(
        self, comm: Comm, kind: str, array: np.ndarray, peer: int, tag: int, site: Site, guarded: bool
    ) -> MPIRequest:
        world_peer = comm.members[peer] if peer != ANY else ANY
        event = MessageEvent(
            self.rank,
            self.running.name if self.running else "main",
            kind,
            world_peer,
            tag,
            array.nbytes,
            current_purpose(),
            comm.operation,
            comm.name,
            self.time(),
            -1.0,
            -1.0,
            HEADER_BYTES if self.checks else 0,
            dtype_name(array.dtype),
            peer == ANY,
        )
        if self.record:
            self.trace.messages.append(event)
        request = MPIRequest(comm, kind, array, peer, tag, site, event)
        if is_device_array(array):
            event.staged = True
            request.buffer = fetch(array) if kind == "send" else pinned_like(array)
        if guarded:
            self.unwaited[id(request)] = request
        handle = self.handles[comm.context]
        if kind == "send":
            # Does the user's program run between here and the wait? Beside a lane always.
            if self.checks and (guarded or self.running is not None) and request.buffer is array:
                request.checksum = checksum(array)
            self.sent[world_peer] += 1
            if self.checks:
                request.header = pack(header_of(comm.signature, array))
                request.header_request = handle.Isend([request.header, self.MPI.BYTE], peer, tag + HEADER_TAG)
            start = handle.Issend if self.synchronous else handle.Isend
            request.payload = start([request.buffer, self.MPI.BYTE], peer, tag)
        else:
            if self.checks and (guarded or self.open.starts):
                self.open.check(self.rank, request, guarded)
            source = self.MPI.ANY_SOURCE if peer == ANY else peer
            if self.checks:
                request.header = bytearray(HEADER_BYTES)
                request.header_request = handle.Irecv([request.header, self.MPI.BYTE], source, tag + HEADER_TAG)
                self.expected.append(request)
            else:
                request.payload = handle.Irecv([request.buffer, self.MPI.BYTE], source, tag)
        return request

    def _header_came(self, request: MPIRequest, source: int) -> None:
        """The sender has said what it sends: compare, then ask for it.

        Payloads must be asked for in the order of their headers. A receive that was posted earlier and could have had
        this header has had an earlier one, even if MPI has not told us yet; it goes first.
        """
        for other in self.expected[: self.expected.index(request)]:
            if other.peer in (source, ANY) and other.tag == request.tag and other.comm.context == request.comm.context:
                status = self.MPI.Status()
                other.header_request.Wait(status)
                self._ask_for_payload(other, status.Get_source())
        self._ask_for_payload(request, source)

    def _ask_for_payload(self, request: MPIRequest, source: int) -> None:
        self.expected.remove(request)
        self._came_from(request, source)
        assert request.header is not None
        expected = pack(header_of(request.operation, request.array))
        if request.header != expected:  # unpack both: a long name is cut alike
            compare(
                unpack(bytes(request.header)),
                unpack(expected),
                request.event.peer,
                self.rank,
                f"{request.site} (receiver)",
                request.operation,
            )
        handle = self.handles[request.comm.context]
        request.payload = handle.Irecv([request.buffer, self.MPI.BYTE], source, request.tag)

    def _came_from(self, request: MPIRequest, source: int) -> None:
        """A wildcard receive has got its message."""
        if request.peer == ANY:
            request.peer = source
            request.event.peer = request.comm.members[source]

    # waiting ----------------------------------------------------------------------------------------------------------

    def nodes(self, members: Sequence[int]) -> list[list[int]]:
        hosts = [self.hosts[member] for member in members]
        return [[i for i, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)]

    def exchange(
        self, comm: Comm, outgoing: np.ndarray, dest: int, incoming: np.ndarray, source: int, tag: int
    ) -> bool:
        """A whole sendrecv straight to MPI, when there is nothing to check, to record or to do beside it; else False.

        A message costs a microsecond in MPI and four in what is kept about it: on short ones that is all there is.
        """
        if self.active or self.running is not None or outgoing.__class__ is not np.ndarray:
            return False
        handle, tag = self.handles[comm.context], tag if comm.call is None else comm.call
        self.waiting = (comm, dest, source, tag, outgoing.nbytes)  # what Exchanging is made of, when somebody looks
        BYTE = self.MPI.BYTE
        if self.crowded:
            requests = [handle.Irecv([incoming, BYTE], source, tag), handle.Isend([outgoing, BYTE], dest, tag)]
            while not self.MPI.Request.Testall(requests):
                os.sched_yield()
        else:
            handle.Sendrecv([outgoing, BYTE], dest, tag, [incoming, BYTE], source, tag)
        self.waiting = None
        self.sent[comm.members[dest]] += 1
        self.received[comm.members[source]] += 1
        self.completed += 2
        return True

    def wait(self, request: Any) -> None:
        event = request.event
        receiving = request.kind == "receive"
        event.start = self.time() if receiving else event.posted
        if self.running is not None:
            self._wait_in_lane(request, self.running)
        else:
            self.waiting = request
            self.handling = sys.exc_info()[1]
            if self.active:
                self._poll(request)
            else:
                self._block(request)
            self.waiting = self.handling = None
        if not receiving and request.header_request is not None:
            request.header_request.Wait()  # it was received before the payload was
        if request.checksum is not None and checksum(request.array) != request.checksum:
            raise changed(self.rank, request.describe())
        if receiving:
            self.open.close(request)
            self.received[event.peer] += 1
            if event.staged:
                put(request.buffer, request.array)
        if self.running is None:
            self.mark = self.time()
        self.completed += 1
        self.unwaited.pop(id(request), None)
        event.end = self.time()

    def _block(self, request: MPIRequest) -> None:
        """Wait for the request or any header; the watchdog's thread runs meanwhile."""
        status = self.MPI.Status()
        while True:
            handles = [expected.header_request for expected in self.expected]
            if request.payload is not None:
                handles.append(request.payload)
            index = self._first_of(handles, status)
            if index == len(self.expected):
                if request.peer == ANY:
                    self._came_from(request, status.Get_source())
                return
            self._header_came(self.expected[index], status.Get_source())

    def _first_of(self, handles: list[Any], status: Any) -> int:
        """Wait for one of several MPI requests; its index. Inside MPI that is fastest, but there a rank spins."""
        if not self.crowded:
            if len(handles) == 1:
                handles[0].Wait(status)
                return 0
            return int(self.MPI.Request.Waitany(handles, status))
        while True:  # more ranks than cores: who waits must let the others run
            index, done = self.MPI.Request.Testany(handles, status)
            if done:
                return int(index)
            os.sched_yield()

    def _poll(self, request: MPIRequest) -> None:
        """Wait while lanes are active: they advance in between."""
        while not self._test(request):
            self.progress()
            os.sched_yield()

    def _wait_in_lane(self, request: MPIRequest, lane: Lane) -> None:
        lane.waiting = request
        while not self._test(request):
            self.main.switch()
        lane.waiting = None

    def _test(self, request: MPIRequest) -> bool:
        if self.expected:
            self._take_headers()
        if request.payload is None:
            return False
        if request.peer != ANY:
            return bool(request.payload.Test())
        status = self.MPI.Status()
        if not request.payload.Test(status):
            return False
        self._came_from(request, status.Get_source())
        return True

    def _take_headers(self) -> None:
        status = self.MPI.Status()
        for request in tuple(self.expected):
            if request in self.expected and request.header_request.Test(status):  # not taken care of by a later one
                self._header_came(request, status.Get_source())

    # lanes ------------------------------------------------------------------------------------------------------------

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
            getcurrent().gr_context = work.context
            work.result = work.function()
            work.end, work.finished = self.time(), True

    def _resume(self, lane: Lane) -> None:
        assert lane.greenlet is not None
        self.running = lane
        try:
            lane.greenlet.switch(lane)
        except Exception as error:
            error.add_note(f"raised in {lane.name} of rank {self.rank}")
            raise
        finally:
            self.running = None
            if lane.greenlet.dead:
                self.active.remove(lane)

    def progress(self) -> None:
        if self.running is None:
            if self.expected:
                self._take_headers()
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

    # clock ------------------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return time.perf_counter() - self.started

    def compute(self, operations: Sequence[tuple[float, float]], seconds: float, name: str) -> None:
        """Real time passes by itself; what passed since the last wait, or the last call, is recorded."""
        if self.record and self.running is None:
            now = self.time()
            self.trace.spans.append(SpanEvent(self.rank, "main", name, self.mark, now))
            self.mark = now

    def span(self, name: str, start: float, end: float, category: str = "compute") -> None:
        lane = self.running.name if self.running else "main"
        self.trace.spans.append(SpanEvent(self.rank, lane, name, start, end, category))

    def trace_of(self, comm: Comm) -> Trace:
        return self.trace
