"""The MPI world: this process is one rank, and messages are real. Same interface, same record, same errors.

Bytes travel as `[buffer, MPI.BYTE]` (automatic datatype discovery rejects bfloat16, and nothing is gained by it). What
MPI does not check is checked here: a 64-byte header goes ahead of each payload, on the same communicator, its tag in
the upper half of the tags, and is compared before the payload is received:

    sender     Isend header (tag + 2**14) ── Isend payload (tag)
    receiver   Irecv header, at once ── ... it comes: compare ── Irecv payload ── wait

Header receives are posted when the user posts, so MPI itself decides which message each gets, wildcards too. A payload
that has not been asked for can block its sender, so a rank that waits, for anything, also takes the headers that have
come. A stream is a fiber that tests its request and hands control back; `progress()` and every blocking wait resume
all streams.

Proved by: tests/comm/test_conformance.py, tests/comm/mpi/test_failures.py
"""

import contextvars
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from minidist.base.arrays import dtype_name
from minidist.base.interrupts import EXIT_CODE, interruptible, interruption
from minidist.base.process import usable_cores
from minidist.base.traces import MessageEvent, SpanEvent, Trace
from minidist.comm.buffers import OpenMessages, changed, checksum
from minidist.comm.call_log import Call, CallLog
from minidist.comm.call_site import NOWHERE, CallSite, FindsLines, call_site
from minidist.comm.communicator import CheckedComm, Claim, check_watching, second_thread, unwaited
from minidist.comm.errors import BufferReuseError, UnmatchedMessageError
from minidist.comm.has_run import LAZY, check_takes_comm, has_run, with_remedies
from minidist.comm.header import (
    EQUAL_BYTES,
    HEADER_BYTES,
    KEY_BYTES,
    NO_CHECKSUM,
    checksum_bytes,
    compare,
    has_checksum,
    is_of_replicas,
    is_payload,
    packed,
    unpack,
)
from minidist.comm.launched import check_launcher, launched_rank, launched_size
from minidist.comm.message_checks import OWN_TAG, CheckedMessages
from minidist.comm.mpi.direct import DirectComm
from minidist.comm.mpi.ending import end_later, finalize_at_exit
from minidist.comm.mpi.interrupts import InterruptWatch, say_past_the_launcher
from minidist.comm.mpi.job_folder import JobFolder, make_job_folder, remove_old_folders
from minidist.comm.mpi.membership import Membership
from minidist.comm.mpi.staging import fetch, is_device_array, pinned_like, put
from minidist.comm.mpi.start import Starting, abort, meet, start_limit
from minidist.comm.mpi.waits import Entering, MPIRequest, Returned, Stream, Wait, doing, state_of
from minidist.comm.mpi.watchdog import Watchdog
from minidist.comm.unlike_calls import unlike_calls
from minidist.core.base import arrays as xp
from minidist.core.base.errors import MismatchError, RankDeadError, UsageError
from minidist.core.base.fibers import current, spawn
from minidist.core.base.trace import current_purpose
from minidist.core.comm.communicator import ANY, MAX_TAG, PointToPoint, Request, Work

HEADER_TAG = MAX_TAG + 1  # added to a message's tag, which is below it


class MPIWorld(FindsLines):
    """All processes that `mpiexec` started.

    checks: send and compare headers, and watch the buffers of nonblocking messages; "headers" leaves the watch out.
    timeout: seconds that an operation may be pending before the watchdog reports every rank's pending operation and
    ends the job (0: no watchdog). synchronous: every send waits for its receive (MPI_Issend), which makes programs that
    rely on buffering deadlock at once. record: keep a trace; "totals" keeps the bytes by purpose alone. on_failure: for
    programs that run in both worlds; here a rank that dies always ends the job, which is MPI's rule.

    Raises LauncherError when launcher and library do not belong together (every process would be rank 0 of 1).
    """

    kind = "mpi"
    folds = False
    finds_lines = False  # another thread reports, and cannot look at the program at every moment
    direct = DirectComm  # the communicators of a world that checks and records nothing
    kept_calls = 256  # a rank whose sends are buffered may be far ahead

    def __init__(
        self,
        *,
        checks: bool | str = True,
        timeout: float = 60.0,
        synchronous: bool = False,
        record: bool | str = True,
        on_failure: str = "end",
    ) -> None:
        check_watching(record, checks)
        # Nothing in here waits for ever: a limit on the start ends it, and later the watchdog does.
        self.rank, self.size, self.place = launched_rank(), launched_size() or 1, ""
        self.state = "starting"
        self.watchdog: Watchdog | None = None
        self.folder = JobFolder(None)
        with Starting(start_limit() if timeout else 0.0) as starting:
            self.interrupts = InterruptWatch(self)
            MPI = starting.start_mpi()
            if starting.initialized:
                finalize_at_exit(MPI)
            self.BYTE = MPI.BYTE
            self.MPI, self.checks, self.synchronous, self.record = MPI, bool(checks), synchronous, record
            self.check_buffers = checks is True
            self.unchecked = not (checks or record or synchronous)
            self.rank, self.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
            check_launcher(self.size, MPI.Get_library_version().splitlines()[0])
            self.highest_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) - HEADER_TAG

            # The first message: who is where, and which rank refuses to start. Rank 0 makes the job's folder.
            self.hosts, path = meet(MPI, make_job_folder() if self.rank == 0 else None)
            self.folder = JobFolder(path)
            if self.hosts.index(self.hosts[self.rank]) == self.rank:
                remove_old_folders()
            self.base = MPI.COMM_WORLD.Dup()  # for making groups, and for what this class itself exchanges
            self._prepare()
            kind = self.direct if self.unchecked else CheckedComm
            self.comm = kind(self, "world", range(self.size), self.rank)
            if timeout:
                self.watchdog = Watchdog(self, timeout, self.folder)

    def _prepare(self) -> None:
        """Make what a run fills in."""
        self.handles: dict[str, Any] = {}  # MPI's communicators, by context
        self.oversubscribed = self.size > len(usable_cores())
        self.dead: dict[int, float] = {}  # always empty: a death ends the job

        # Streams.
        self.streams: dict[str, Stream] = {}
        self.active: list[Stream] = []  # those with work to do
        self.running: Stream | None = None  # None: the main program
        self.main, self.thread = current(), threading.get_ident()

        # Messages.
        self.trace = Trace(self.rank, self.size, keeps_events=self.record is True)
        self.open = OpenMessages()
        self.unwaited: dict[int, Request | Work] = {}
        self.logs: dict[str, CallLog] = {}  # of the collective calls, by communicator
        self.membership = Membership(self.base, self.MPI.ANY_SOURCE)
        self.made = self.membership.made
        self.expected: list[MPIRequest] = []  # receives whose header has not come, in the order of their posts
        self.sent, self.received = [0] * self.size, [0] * self.size  # messages to, and from, each rank

        # What the watchdog reads, and the clock.
        self.waiting: Wait = None  # of the main program
        self.state = "computing"
        self.handling: BaseException | None = None  # the exception that led into a wait in `except` or `finally`
        self.mark = 0.0  # since when the main program has been computing
        self.started = time.perf_counter()

    def run(self, main: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Return `[main(comm, ...)]`, this rank's result, after a check that no message was left over."""
        check_takes_comm(main)
        with interruptible(), with_remedies():
            result = has_run(main(self.comm, *arguments, **keywords), main, self.rank)
        self.finish()
        return [result]

    def finish(self) -> None:
        """Raise when a request was never waited for or a message never received. Collective."""
        # What this rank alone can see: a request that was never waited for.
        self.state = "returned"
        for item in self.unwaited.values():
            raise unwaited(self.rank, item)

        # A communicator that another rank makes of other members than this rank did.
        self.membership.take()

        # What travels: how many messages each rank has sent to each other; a receiver that counts fewer has left one.
        self.waiting = Returned()
        to_me = np.empty(self.size, np.int64)
        self.base.Alltoall(np.array(self.sent, np.int64), to_me)
        if any(self.base.allgather(to_me.tolist() != self.received)):
            self._compare_calls()
        for source, (sent, received) in enumerate(zip(to_me, self.received, strict=True)):
            if sent != received:
                raise UnmatchedMessageError(
                    f"rank {self.rank}: received {received} of the {sent} messages that rank {source} sent to it; "
                    "every send needs a receive"
                )
        self.base.Barrier()  # no rank leaves while another still has something to report
        self.waiting = None
        while self.handles:  # newest first
            self.handles.popitem()[1].Free()

    def _compare_calls(self) -> None:
        """Raise MismatchError, the same on every rank, where ranks have made mismatched calls. Collective."""
        logs = self.base.allgather({name: list(log.recent) for name, log in self.logs.items()})
        for name in dict.fromkeys(name for of_rank in logs for name in of_rank):
            calls = {rank: of_rank[name] for rank, of_rank in enumerate(logs) if name in of_rank}
            if found := unlike_calls(name, calls, range(self.size)):
                raise MismatchError(found)

    def kill(self, rank: int) -> NoReturn:
        """Let the caller's own rank die, and the job with it, which is MPI's rule."""
        if rank != self.rank:
            raise UsageError(f"rank {self.rank}: kill of rank {rank}; under MPI a rank can kill only itself")
        raise RankDeadError(f"rank {rank}: killed, and under MPI the job ends with it", rank)

    def close(self) -> None:
        """Stop the watchdog and free the last of MPI's resources. Collective; nothing works afterwards."""
        # From here on the process only says that it lives, until MPI has ended.
        if self.watchdog:
            self.watchdog.stop()
        end_later(self.folder, self.rank, self.size, self.watchdog.timeout if self.watchdog else 0.0)
        self.interrupts.stop()
        self.base.Free()

    def end(self, text: str, code: int, key: str = "") -> NoReturn:
        """Print why the job ends, once for all ranks of a host that say the same, and end all processes.

        key: the text without what differs from rank to rank. Called from the main program or from a thread.
        """
        try:
            # A rank that has said it removes the folder, and then ends this process, too: leave it the time for that.
            if self.folder.is_gone():
                time.sleep(0.5)
            said = "said-" + hashlib.blake2b((key or text).encode(errors="replace"), digest_size=8).hexdigest()
            if self.folder.first(said):
                print(f"{text}\n", end="", file=sys.stderr, flush=True)  # in one write
            time.sleep(0.2)  # mpiexec may stop reading as soon as it hears of the abort
            (self.watchdog or self.folder).discard()
        finally:
            abort(code)

    def waits_in_mpi(self) -> bool:
        """Return whether the main program waits for other ranks. Called in any thread."""
        if self.state == "starting":
            return True
        return self.waiting is not None and (self.running is None or isinstance(self.waiting, Entering))

    def end_interrupted(self) -> NoReturn:
        """End the job after Ctrl-C: the main program waits inside MPI, and cannot be interrupted."""
        what = interruption(self.place)
        self.end(f"minidist: rank {self.rank} of {self.size}: {what}", EXIT_CODE, "interrupted")

    def end_terminated(self) -> NoReturn:
        """End this process when Open MPI's mpiexec ends the job, as after Ctrl-C; a host's first rank says so."""
        try:
            if self.hosts.index(self.hosts[self.rank]) == self.rank:
                say_past_the_launcher(f"minidist: rank {self.rank} of {self.size}: {interruption(self.place)}\n")
            (self.watchdog or self.folder).discard()
        finally:
            os._exit(EXIT_CODE)

    def end_orphaned(self) -> NoReturn:
        """End this process when its launcher has ended: nobody else would, and what it waits for may never come."""
        try:
            text = f"minidist: rank {self.rank} of {self.size}: the launcher that started it has ended, and so it ends;"
            text += f" it {doing(state_of(self)).replace('computing', 'is computing')}; start the job again\n"
            print(text, end="", file=sys.stderr, flush=True)
        except OSError:
            say_past_the_launcher(text, ())  # standard error was a pipe to the launcher
        finally:
            with suppress(Exception):
                (self.watchdog or self.folder).discard()
            os._exit(1)

    def abort(self, code: int) -> NoReturn:
        """End this process at once, and with it the job. Called from any thread."""
        abort(code)

    # messages ---------------------------------------------------------------------------------------------------------

    def register(self, comm: PointToPoint, origin: str, label: str) -> None:
        """Make one MPI communicator for messages and one for collectives. Blocks until all members are here."""
        if comm.name in self.handles:
            return
        self.logs[comm.name] = CallLog(self.kept_calls)
        if self.state == "returned":
            raise self.cannot_be_used(comm, call_site(sys._getframe(1)))
        while self.active and self.running is None:  # another member may need our streams before it comes here
            self.progress()

        # A collective call of MPI's, which blocks: the watchdog must know of it.
        before, self.waiting = self.waiting, Entering(comm, origin)
        claim = Claim(origin, comm.members[comm.rank], comm.members, label, call_site(sys._getframe(1)))
        try:
            if comm.name != "world":
                self.membership.compare(claim)
            if comm.size == self.size and list(comm.members) == list(range(self.size)):
                handle = self.base.Dup()
            else:
                group = self.MPI.COMM_WORLD.Get_group().Incl(list(comm.members))
                handle = self.base.Create_group(group)
                group.Free()
            self.handles[comm.name] = handle
            self.handles[comm.name + "/collectives"] = handle.Dup()
        finally:
            self.waiting = before

    def called(self, comm: CheckedMessages, call: CheckedMessages, array: np.ndarray | None, root: int | None) -> None:
        """Note a call that begins; its messages say which calls this rank has made before."""
        if not self.unchecked:
            log = self.logs[call.name]
            call.calls_before = log.continue_with(call.match_key)
            log.note(comm, call, array)

    def post(
        self, comm: CheckedMessages, kind: str, array: np.ndarray, peer: int, tag: int, nonblocking: bool
    ) -> MPIRequest:
        event = self._recorded(comm, kind, array, peer, tag)
        site = comm.site or call_site(sys._getframe(1), comm.opened)
        request = MPIRequest(comm, kind, array, peer, tag, nonblocking, site, event, array)

        # MPI is given the array itself, or a host copy of one that lies on a GPU.
        if array.__class__ is not np.ndarray and is_device_array(array):
            event.staged = True
            request.buffer = fetch(array) if kind == "send" else pinned_like(array)
        if nonblocking:
            self.unwaited[id(request)] = request
        if self.check_buffers and (nonblocking or self.open.use_of):
            self.open.add(self.rank, request, nonblocking)

        if tag > self.highest_tag:
            raise UsageError(
                f"rank {self.rank}: own tag {tag // OWN_TAG} inside a collective call, at {request.site}; this MPI"
                f" library has tags up to {self.highest_tag + HEADER_TAG}: use smaller ones"
            )
        handle = self.handles.get(comm.context)
        if handle is None or threading.get_ident() != self.thread:
            raise self.cannot_be_used(comm, request.site)

        # The rank in MPI's communicator; a part of a collective call has other numbers.
        place = comm.ranks[peer] if peer != ANY else self.MPI.ANY_SOURCE
        if kind == "send":
            self._start_send(request, handle, place, nonblocking)
        else:
            self._start_receive(request, handle, place, nonblocking)
        return request

    def _recorded(self, comm: PointToPoint, kind: str, array: np.ndarray, peer: int, tag: int) -> MessageEvent:
        """Return the event of a message that is posted now; a trace has one for each side of a message."""
        event = MessageEvent(
            self.rank,
            self.running.name if self.running else "main",
            kind,
            comm.members[peer] if peer != ANY else ANY,
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
        if self.record is True:
            self.trace.messages.append(event)
        elif self.record and kind == "send":
            self.trace.add_to_totals(event.purpose, 1, event.nbytes)
        return event

    def _start_send(self, request: MPIRequest, handle: Any, place: int, nonblocking: bool) -> None:
        """Hand a send to MPI, its header first."""
        # Watch the buffer when the user's program runs before the wait: while a stream works it always does.
        array, tag = request.array, request.tag
        if self.check_buffers and (nonblocking or self.running is not None) and request.buffer is array:
            request.checksum = checksum(array)
        self.sent[request.event.peer] += 1
        if self.checks:
            watched = request.checksum is not None and nonblocking
            payload = checksum_bytes(request.checksum or 0) if watched else NO_CHECKSUM
            own = packed(request.comm.match_key, array.dtype, array.nbytes, array.shape)
            request.header = own + request.comm.calls_before + payload
            request.header_request = handle.Isend([request.header, self.MPI.BYTE], place, tag + HEADER_TAG)
        start = handle.Issend if self.synchronous else handle.Isend
        request.payload = start([request.buffer, self.MPI.BYTE], place, tag)

    def _start_receive(self, request: MPIRequest, handle: Any, place: int, nonblocking: bool) -> None:
        """Ask MPI for a header; for the payload when the header has come and fits, or at once where none are sent."""
        array, tag = request.array, request.tag
        if self.check_buffers and nonblocking and array.nbytes and request.buffer is array:
            request.checksum = checksum(array)  # the program must not write into it before the wait
            request.buffer = xp.empty_like(array)
        if self.checks:
            request.header = bytearray(HEADER_BYTES)
            request.header_request = handle.Irecv([request.header, self.MPI.BYTE], place, tag + HEADER_TAG)
            self.expected.append(request)
        else:
            request.payload = handle.Irecv([request.buffer, self.MPI.BYTE], place, tag)

    def cannot_be_used(self, comm: PointToPoint, site: CallSite) -> UsageError:
        """Return why a communicator has no messages: it is used after the run, or in another thread."""
        if threading.get_ident() != self.thread:
            return second_thread(comm, site)
        return UsageError(
            f"rank {self.rank}: {comm.name} is used after its run has ended, at {site}; communicate only inside the"
            " function that launch runs"
        )

    def _header_came(self, request: MPIRequest, source: int) -> None:
        """Compare what the sender is going to send, then ask for it. source: a rank of the communicator.

        Payloads must be asked for in the order of their headers. A receive that was posted earlier and could have had
        this header has had an earlier one, even if MPI has not reported it yet; it goes first.
        """
        context = request.comm.context
        for other in self.expected[: self.expected.index(request)]:
            if other.tag == request.tag and other.comm.context == context:
                if other.peer != ANY and other.comm.ranks[other.peer] != source:
                    continue
                status = self.MPI.Status()
                other.header_request.Wait(status)
                self._ask_for_payload(other, status.Get_source())
        self._ask_for_payload(request, source)

    def _ask_for_payload(self, request: MPIRequest, source: int) -> None:
        # The sizes are equal when the headers are, so the payload fits into the buffer.
        self.expected.remove(request)
        if request.peer == ANY:
            self._came_from(request, source)
        assert request.header is not None
        array = request.array
        expected = packed(request.comm.match_key, array.dtype, array.nbytes, array.shape)
        if request.header[:EQUAL_BYTES] != expected + request.comm.calls_before:
            self._refuse(request, expected)

        # From the rank whose header came: a wildcard receives both from the same sender.
        handle = self.handles[request.comm.context]
        request.payload = handle.Irecv([request.buffer, self.MPI.BYTE], source, request.tag)
        # MPI may write into the arrays of a stream that waits for it, at any moment from now on.
        stream = self.streams.get(request.comm.name)
        if stream is not None and stream.waiting is request:
            stream.resumed += 1

    def _refuse(self, request: MPIRequest, expected: bytes) -> NoReturn:
        """Raise MismatchError for a message whose header is not the one that its receiver expects."""
        comm, sender, header = request.comm, request.event.peer, request.header
        assert header is not None
        sent, key = unpack(header), comm.match_key
        unlike = header[KEY_BYTES:EQUAL_BYTES] != comm.calls_before

        # The sender may wait inside MPI; its watchdog answers through the job's folder, within a second.
        theirs: Sequence[Call] = ()
        in_call = comm.opened is not None
        if in_call and self.watchdog is not None:
            theirs = self.watchdog.ask(sender).calls.get(comm.name, ())

        # Where the calls before this one differ, that is the cause, whatever the message is; else what they were given.
        if in_call and (unlike or (theirs and not is_of_replicas(key))):
            mine = self.logs[comm.name].recent
            number = next(call[0] for call in reversed(mine) if call[0] % HEADER_TAG == comm.tag % OWN_TAG)
            met = number if sent.operation == unpack(expected).operation else None
            if found := unlike_calls(comm.name, {self.rank: mine, sender: theirs}, met=met):
                raise MismatchError(found)

        # Its own call, in full and with its line, if it is known.
        where = f"{request.site} (receiver)"
        for number, operation, site, _ in theirs:
            if number % HEADER_TAG == comm.tag:
                sent = sent._replace(operation=operation)
                where = where if site == request.site else f"{site} (sender) and {where}"
        compare(sent, unpack(expected), sender, self.rank, where, key)
        raise MismatchError(
            f"calls differ: rank {sender} and rank {self.rank} have made other collective calls on {comm.name} before"
            f" their {key} at {request.site}; every rank of a communicator must call the same collectives in the same"
            " order"
        )

    def _came_from(self, request: MPIRequest, source: int) -> None:
        """Note which rank of the communicator a wildcard receive has got its message from."""
        request.peer = request.comm.ranks.index(source)
        request.event.peer = request.comm.members[request.peer]

    # waiting ----------------------------------------------------------------------------------------------------------

    def wait(self, request: Any) -> None:
        # In a stream hand control back until it is complete; the main program blocks, or polls while streams have work.
        event = request.event
        receiving = request.kind == "receive"
        event.start = self.time() if receiving else event.posted
        if self.running is not None:
            self._wait_in_stream(request, self.running)
        else:
            self.waiting = request
            self.handling = sys.exc_info()[1]
            try:
                if self.active:
                    self._poll(request)
                else:
                    self._block(request)
            finally:  # a program may catch an error, and go on
                self.waiting = self.handling = None

        # The message is there: check the buffer, then record when it ended.
        if not receiving and request.header_request is not None:
            request.header_request.Wait()  # it was received before the payload was
        if request.checksum is not None and checksum(request.array) != request.checksum:
            raise changed(self.rank, request.describe(), call_site(sys._getframe(1), NOWHERE))
        if receiving and request.header is not None and has_checksum(request.header):
            self._compare_payload(request)
        if self.open.use_of:
            self.open.close(request)
        if receiving:
            self.received[event.peer] += 1
            if event.staged:
                put(request.buffer, request.array)
            elif request.buffer is not request.array:
                request.array[...] = request.buffer
        event.end = self.time()
        if self.running is None:
            self.mark = event.end
        self.unwaited.pop(id(request), None)

    def _compare_payload(self, request: MPIRequest) -> None:
        """Raise when what has come is not what the sender's buffer held when it posted the send."""
        assert request.header is not None
        if not is_payload(request.header, checksum(request.buffer)):
            sender = request.event.peer
            raise BufferReuseError(
                f"rank {self.rank}: its {request.describe()} got other bytes than rank {sender} posted: rank {sender}"
                " changed the buffer while the operation was in flight; wait() first, or give each message a buffer of"
                " its own"
            )

    def _block(self, request: MPIRequest) -> None:
        """Wait for the request or any header; the watchdog's thread runs meanwhile."""
        # handles: the headers that are expected, then the payload. A header that comes is answered with a receive,
        # because its sender may be blocked until then.
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
        """Wait for one of several MPI requests; return its index. Inside MPI that is fastest, but it spins."""
        if not self.oversubscribed:
            if len(handles) == 1:
                handles[0].Wait(status)
                return 0
            return int(self.MPI.Request.Waitany(handles, status))
        while True:  # more ranks than cores: a rank that waits must let the others run
            index, done = self.MPI.Request.Testany(handles, status)
            if done:
                return int(index)
            os.sched_yield()

    def _poll(self, request: MPIRequest) -> None:
        """Wait while streams are active: they advance in between."""
        while not self._test(request):
            self.progress()
            os.sched_yield()

    def _wait_in_stream(self, request: MPIRequest, stream: Stream) -> None:
        stream.waiting = request
        while not self._test(request):
            self.main.switch()
        stream.waiting = None

    def _test(self, request: MPIRequest) -> bool:
        # Headers first: the payload may not have been asked for yet.
        if self.expected:
            self._take_headers()
        if request.payload is None:
            return False

        # A wildcard without headers learns its source from the payload.
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

    # streams ----------------------------------------------------------------------------------------------------------

    def run_async(self, work: Work) -> Work:
        self.find_line(work)
        if threading.get_ident() != self.thread:
            raise self.cannot_be_used(work.comm, work.site)
        # One stream per communicator: works run one after the other, in the order of their starts.
        stream = self.streams.get(work.comm.name)
        if stream is None:
            stream = self.streams[work.comm.name] = Stream(f"lane:{work.comm.name}")
        stream.queue.append(work)
        self.unwaited[id(work)] = work

        # A stream whose queue was empty has ended; it starts again.
        if stream.fiber is None or stream.fiber.dead:
            stream.fiber = spawn(self._run_stream, stream, contextvars.copy_context(), self.main)
            self.active.append(stream)
            # The main program lets all streams run until the work is done.
            if self.running is None:
                self._resume(stream)  # its first sends leave now
        # As long as the stream does not run again, its arrays are as they are now, unless MPI writes into them.
        on = stream.waiting
        writes = on is not None and on.kind == "receive" and on.payload is not None
        if self.check_buffers and self.running is None and not work.finished and not writes:
            kept = [(array, checksum(array)) for array in work.arrays if isinstance(array, np.ndarray) and array.nbytes]
            work.watched = [stream.resumed, kept]
        return work

    def _run_stream(self, stream: Stream) -> None:
        while stream.queue:
            work = stream.queue.popleft()
            result = work.context.run(work.function)
            work.result = has_run(result, work.function, work.comm.rank) if isinstance(result, LAZY) else result
            work.end, work.finished = self.time(), True

    def _resume(self, stream: Stream) -> None:
        assert stream.fiber is not None
        self.running = stream
        stream.resumed += 1
        try:
            stream.fiber.switch()
        except Exception as error:
            error.add_note(f"raised in {stream.name} of rank {self.rank}")
            raise
        finally:
            self.running = None
            if stream.fiber.dead:
                self.active.remove(stream)

    def progress(self) -> None:
        """Let each active stream run until it has to wait for a message."""
        if self.running is None:
            if self.expected:
                self._take_headers()
            for stream in tuple(self.active):
                self._resume(stream)

    def wait_work(self, work: Work) -> Any:
        self.unwaited.pop(id(work), None)
        if work.watched and work.watched[0] == self.streams[work.comm.name].resumed:
            for array, before in work.watched[1]:
                if checksum(array) != before:
                    raise changed(self.rank, work.describe(), call_site(sys._getframe(1), NOWHERE))
        work.watched = []
        if self.running is None:
            self.waiting = work
            try:
                while not work.finished:
                    self.progress()
                    os.sched_yield()
            finally:
                self.waiting = None
                self.mark = self.time()
        else:
            while not work.finished:
                self.main.switch()
        return work.result

    @property
    def completed(self) -> int:
        """The number of messages that this rank has posted to send, or received: it grows while streams go on."""
        return sum(self.sent) + sum(self.received)

    # clock and record -------------------------------------------------------------------------------------------------

    def time(self) -> float:
        return time.perf_counter() - self.started

    def compute(self, operations: Sequence[tuple[float, float]], seconds: float, name: str) -> None:
        """Record the real time since the last wait, or the last call; it passes by itself."""
        if self.running is None:
            now = self.time()
            self.trace.computed += now - self.mark
            if self.record is True:
                self.trace.spans.append(SpanEvent(self.rank, "main", name, self.mark, now))
            self.mark = now

    def trace_of(self, comm: PointToPoint) -> Trace:
        return self.trace

    def compare_calls(self, call: PointToPoint, value: int) -> None:
        """Nothing to do: messages that meet are compared, and a report of a hang compares what the ranks wait in."""

    def nodes(self, members: Sequence[int]) -> list[list[int]]:
        """Return the places in `members` of the ranks on one host, host by host."""
        hosts = [self.hosts[member] for member in members]
        return [[i for i, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)]
