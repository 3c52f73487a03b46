"""The simulated world that programs run in: a `Sim` and whoever watches it.

    Sim        moves messages (world.py, matching.py)
    watchers   compare what ranks call, watch the memory in flight, record, kill ranks (comm/sim/checks.py, failures.py)
    the run    ends a rank that hangs, gives each rank the process's random generators, refuses use after its end

Proved by: tests/comm/sim/test_world.py, tests/comm/sim/test_misuse.py, tests/comm/test_conformance.py,
tests/collectives/test_two_level.py
"""

import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from minidist.base.errors import DeadlockError, MismatchError, RankDeadError, UsageError, quoted
from minidist.base.interrupts import interruptible
from minidist.base.limits import check_number, check_whole
from minidist.base.traces import Trace
from minidist.comm.call_site import NOWHERE, CallSite, FindsLines, call_site
from minidist.comm.communicator import CheckedComm, check_watching, second_thread, unwaited
from minidist.comm.errors import RankTimeoutError, UnmatchedMessageError
from minidist.comm.has_run import LAZY, check_takes_comm, has_run, with_remedies
from minidist.comm.message_checks import CheckedCall
from minidist.comm.sim.checks import KEPT_CALLS, BufferWatch, CallWatch, Lines, Recorder, Totals
from minidist.comm.sim.hang_watchdog import HangWatchdog, Stopped
from minidist.comm.sim.links import LinkModel
from minidist.comm.sim.process_state import ProcessState
from minidist.comm.sim.watched import AnySource, Chooser, RunState, Watched, earliest
from minidist.comm.tags import LocatedRequest
from minidist.core.base.fibers import FiberExit
from minidist.core.comm.communicator import Comm, PointToPoint, Request, Work
from minidist.core.comm.sim.matching import Stream
from minidist.core.comm.sim.world import Sim

if TYPE_CHECKING:
    from minidist.comm.sim.failures import Failures


class SimWorld(FindsLines, Sim):
    """`ranks` virtual ranks that run one function.

    eager_bytes: sends of at most this many bytes are buffered and complete at once; 0 (default): every send is
    synchronous. links: the alpha-beta cost model. chooser: which message a wildcard receive gets. checks: compare
    headers and watch buffers in flight; "headers" leaves out the watch on buffers, which costs checksums of each
    nonblocking message. timeout: seconds of real time that one rank may compute without communicating.
    record: keep traces; "totals" keeps the bytes by purpose alone, so that a long run's memory does not grow.
    on_failure: what `kill` does: "end" (default) the run, as MPI would; "isolate" the rank alone.

    `run(main, *arguments)` calls `main(comm, *arguments)` on every rank and returns the list of results. An exception
    on any rank ends the run and is raised here, with a note naming the rank. A killed rank's result is None.
    Ranks share the global variables of the process: one that writes to a global array changes it for all others.
    """

    kind = "simulated"
    checks_links = True
    links: LinkModel
    comm_class, state_class = CheckedComm, RunState
    kept_calls = KEPT_CALLS
    uneven: Collection[str] = ()  # see `FoldedWorld`
    state: RunState
    matching: AnySource
    _failures: "Failures | None"
    calls: CallWatch
    buffers: BufferWatch

    def __init__(
        self,
        ranks: int,
        *,
        eager_bytes: int = 0,
        links: LinkModel | None = None,
        chooser: Chooser = earliest,
        checks: bool | str = True,
        timeout: float = 60.0,
        record: bool | str = True,
        on_failure: str = "end",
    ) -> None:
        check_watching(record, checks)
        if not isinstance(links, LinkModel | None):
            raise UsageError(f"SimWorld: links={quoted(links)}; it must be a LinkModel")
        super().__init__(check_whole("SimWorld: ranks", ranks, 1), links=links or LinkModel())
        given, self.slowdown = self.links, self.links.slowdown
        self.costs = given if given.link is not None or given.overhead or given.free_startup else None
        self.eager_bytes, self.chooser = check_whole("SimWorld: eager_bytes", eager_bytes), chooser
        if on_failure not in ("end", "isolate"):
            raise UsageError(f'on_failure={quoted(on_failure)}; it must be "end" or "isolate"')
        self.checks, self.check_buffers = bool(checks), checks is True
        self.finds_lines = sys.platform != "emscripten"  # the stack of a fiber made of promises cannot be looked at
        self.timeout, self.record, self.on_failure = check_number("SimWorld: timeout", timeout), record, on_failure
        self.in_run = self.looking_ahead = False
        self.pending_kills: dict[int, int] = {}  # rank -> messages that it posts before, in each run

    @property
    def dead(self) -> dict[int, float]:
        """The ranks that were killed in this run (the last one), and the virtual time of each death."""
        return self.state.dead

    # a run ------------------------------------------------------------------------------------------------------------

    def run(self, main: Callable[..., Any], *arguments: Any, **keywords: Any) -> list[Any]:
        """Call `main(comm, *arguments)` on every rank; return the list of results."""
        if self.in_run:
            raise UsageError(
                f"SimWorld.run inside its own run, at {call_site(sys._getframe(1))}; make another SimWorld for a run "
                "inside a run"
            )
        if not callable(main):
            raise UsageError(f"SimWorld.run({quoted(main)}); pass a function, which each rank calls with its comm")
        check_takes_comm(main)
        self.place, self.looking_ahead, self.in_run = "", False, True
        self.thread = get_ident()  # that runs the ranks
        self.programs: dict[int, int] = {}  # ranks whose program runs in another thread: its identifier
        self.switches = 0  # of streams; stands still while a rank computes
        self.comms: list[Any] = []  # that this run has made
        self.watchdog: HangWatchdog | None = None
        self.process = ProcessState()
        try:
            with interruptible():
                results = super().run(partial(self._result, main), *arguments, **keywords)
        except BaseException as error:
            # What an interrupted rank raises on its way out (a lock that is not held any more) has the same cause.
            watchdog = self.watchdog
            if watchdog and watchdog.error and (watchdog.interrupts or isinstance(error, Stopped | RankTimeoutError)):
                raise watchdog.error.with_traceback(error.__traceback__) from None
            from minidist.comm.tracebacks import note_call  # hardly any program needs it

            note_call(error)
            raise
        finally:
            self.process.end()
            self.in_run = False

            # What a program has kept of the run can be read, and nothing can be sent with it.
            ended = EndedWorld(self.state.traces, self.end_time)
            for comm in self.comms:
                comm.world = ended
            self.comms.clear()
            self.post = self.wait = ended.post_or_wait
        return [None if rank in self.state.dead else result for rank, result in enumerate(results)]

    def kill(self, rank: int, *, after_messages: int | None = None) -> None:
        """Let rank `rank` (a world rank) die.

        Without `after_messages` it dies now: call it on a rank of a run. With it, in a run or before one, it dies when
        it is about to post one message more than `after_messages` from here on (0: instead of its next message).

        In a world with on_failure="isolate" the others go on: see `failures`. Otherwise RankDeadError ends the run.
        """
        if rank not in range(self.size):
            raise UsageError(f"kill names rank {quoted(rank)}, but the world has ranks 0..{self.size - 1}")
        if after_messages is None:
            if not self.in_run:
                raise UsageError(
                    f"kill of rank {rank} outside a run: pass after_messages, or call it on a rank of the run"
                )
            self.failures.kill(rank)
        elif not isinstance(after_messages, int) or after_messages < 0:
            raise UsageError(f"kill of rank {rank} after {quoted(after_messages)} messages; it must be at least 0")
        elif self.in_run:
            if not self.failures.watches:
                self.failures.watches = True
                self.post = self._post_until_killed
            self.failures.pending[rank] = after_messages
        else:
            self.pending_kills[rank] = after_messages

    @property
    def failures(self) -> "Failures":
        """The killed ranks of this run. Most runs have none, and do not load what is needed for them."""
        if self._failures is None:
            from minidist.comm.sim.failures import Failures

            isolate = self.on_failure == "isolate"
            self._failures = Failures(self.state, isolate, self.pending_kills, self.buffers.forget)
        return self._failures

    def _post_until_killed(self, comm: PointToPoint, *message: Any) -> Request:
        self.failures.posting(self.state.running.rank)
        return self.matching.post(comm, *message)

    def _watchers(self) -> list[Any]:
        """Return what watches the messages of a run, which begins."""
        state = self.state
        state.chooser, state.eager_limit = self.chooser, self.eager_bytes or -1
        state.costs = self.costs
        for trace in state.traces:
            trace.keeps_events = self.record is True
        isolate, self._failures = self.on_failure == "isolate", None
        self.calls = CallWatch(state, self._block)
        self.buffers = BufferWatch(state, range(self.size) if self.check_buffers else ())
        # A browser has no threads.
        if self.timeout and sys.platform != "emscripten":
            self.watchdog = HangWatchdog(self, self.timeout)
        return [
            *([self] if self.checks else []),
            *([self.failures] if isolate or self.pending_kills else []),
            *([Lines()] if sys.platform == "emscripten" else []),
            *([Recorder(state)] if self.record is True else [Totals(state)] if self.record else []),
            *([self.calls] if self.checks else []),
            *([self.buffers] if self.check_buffers else []),
        ]

    def _new_matching(self) -> AnySource:
        watchers = self._watchers()
        if watchers or self.eager_bytes or self.links.free_startup:
            return Watched(self.state, self._block, watchers)
        return AnySource(self.state, self._block)

    def _result(self, main: Callable[..., Any], comm: Comm, /, *arguments: Any, **keywords: Any) -> Any:
        """Run the program of a rank and return its result."""
        self._switched(self.state.running)
        rank, result = comm.rank, None
        try:
            with with_remedies():
                result = has_run(main(comm, *arguments, **keywords), main, rank)
        except SystemExit as end:  # `sys.exit()` is one way to return
            if end.code:
                raise
        self.process.returned(rank, self.size)
        if rank in self.state.dead:
            raise FiberExit
        self.state.returned.add(rank)
        return result

    def _finish(self) -> None:
        """Raise when a message was never received, or a request never waited for."""
        # A sent message that no rank received.
        state = self.state
        for (context, source, *_), queue in state.sends.items():
            for request in queue:
                rank = request.stream.rank
                if state.dead and (source in state.dead or context.endswith("/collectives")):
                    continue  # on the wire when its sender died, or of a collective that was given up
                name = request.comm.name
                if context.endswith("/collectives") and (found := self.calls.explain(name, range(self.size))):
                    raise MismatchError(found)
                raise UnmatchedMessageError(
                    f"rank {rank}: its {request.describe()} was never received; every send needs a receive"
                )

        # A request or a work whose `wait` was not called.
        for rank, item in state.items_unwaited():
            raise unwaited(rank, item)
        if self.watchdog and self.watchdog.error:  # raised in a rank that caught it
            raise self.watchdog.error

    def _end_streams(self) -> None:
        if self.watchdog:
            self.watchdog.stop()
        # Where a message was posted is known as long as its rank waits.
        for stream in self.state.streams():
            if isinstance(stream.waiting, LocatedRequest):
                stream.waiting.posted_at = stream.waiting.site
        super()._end_streams()

    # the scheduler ----------------------------------------------------------------------------------------------------

    def _block(self, on: Request | Work) -> None:
        stream = self.state.running
        if stream.rank in self.state.dead:
            raise FiberExit  # a killed rank never communicates again: see `failures`
        if self.checks and get_ident() != self.thread:
            raise second_thread(on.comm, on.site)  # type: ignore[union-attr]  # both are a `SimWorld`'s
        # The main program, which has run until here, must not have written into the arrays of its works.
        works = self.buffers.works[stream.rank] if self.check_buffers and stream.is_main else None
        if works is not None and works.running:
            works.check(self.buffers.line_of)

        stream.handling = sys.exception()
        Sim._block(self, on)
        self._switched(stream)
        if self.state.dead and isinstance(on, LocatedRequest) and on.error is not None:
            raise on.error
        if works is not None and works.running:
            works.refresh()  # they are as the streams have left them

    def _switched(self, stream: Stream) -> None:
        """Give the process the state of the rank that runs."""
        process, rank = self.process, stream.rank
        if rank != process.owner:
            # Usually no rank has drawn a random number or waits inside an event loop.
            drawn, seed, numpy = process.words
            if (
                process.drawn.value != drawn
                or process.seed.value != seed
                or process.numpy.value != numpy
                or process.asyncio is not None
            ):
                process.give_to(rank)
            process.owner = rank
        self.switches += 1

    def _idle(self) -> bool:
        # Two calls that differ let no other stream run.
        if self.calls.unlike is not None:
            from minidist.comm.sim.look_ahead import look_ahead

            raise look_ahead(self, self.calls.unlike)
        return self.matching.match_one() or bool(self.state.dead and self.failures.notify(self.matching.withdraw))

    def _deadlock(self, blocked: list[Stream]) -> DeadlockError:
        from minidist.comm.sim.deadlock_report import deadlock

        return deadlock(self.state, blocked, lambda name: self.calls.explain(name, self.state.returned))

    # messages and works -----------------------------------------------------------------------------------------------

    def posted(self, request: LocatedRequest) -> None:
        """Raise when the communicator is not that of the rank that runs, or is used in another thread."""
        comm, stream = request.comm, request.stream
        if get_ident() != self.thread:
            raise second_thread(comm, comm.site or call_site(sys._getframe(1), comm.opened))
        if comm.members[comm.rank] != stream.rank:
            raise UsageError(
                f"rank {stream.rank} uses the communicator of rank {comm.members[comm.rank]}, at"
                f" {comm.site or call_site(sys._getframe(1), comm.opened)}; each rank communicates on the one that it"
                " is given"
            )

    def note_request(self, request: Any) -> None:
        comm = request.comm
        request.posted_at = comm.site or call_site(sys._getframe(1), comm.opened)
        self.state.unwaited[id(request)] = request

    def note_wait(self, request: Any) -> None:
        self.state.unwaited.pop(id(request), None)

    def run_async(self, work: Work) -> Work:
        comm: Any = work.comm
        work.site = comm.site
        if work.site in (None, NOWHERE):
            work.site = call_site(sys._getframe(1))
        if not self.in_run:
            raise used_after_run(work.site)
        if get_ident() != self.thread:
            raise second_thread(work.comm, work.site)
        rank = self.state.running.rank
        self.state.unwaited[id(work)] = work
        if self.check_buffers and work.arrays:  # which are watched from here to its wait
            work.watched = self.buffers.works[rank].add(work, work.arrays)
        work.function = partial(self._run_watched, work, work.function)
        return super().run_async(work)

    def _run_watched(self, work: Work, function: Callable[[], Any]) -> Any:
        """Run the function of a work, whose arrays the program leaves alone; return its result."""
        self._switched(self.state.running)
        rank, result = self.state.running.rank, None
        if work.watched:
            self.buffers.works[rank].begin(work, work.watched, self.buffers.line_of)
        try:
            result = function()
            if isinstance(result, LAZY):
                result = has_run(result, function, work.comm.rank)
        except RankDeadError as error:
            if self.on_failure == "end":
                raise
            work.error = error  # raised by its wait
        if work.watched:
            self.buffers.works[rank].finish(work.watched)
        # The work refers to both of these, and each of them to the work: the cycle would keep the arrays alive.
        work.function, work.watched = function, []
        return result

    def wait_work(self, work: Work) -> Any:
        self.state.unwaited.pop(id(work), None)
        if not work.finished and not self.in_run:
            raise used_after_run(work.site)
        return super().wait_work(work)

    def nodes(self, members: Sequence[int]) -> list[list[int]]:
        """Return the places in `members` (world ranks) node by node: ranks joined by the cheapest links form a node.

        With uniform links all ranks are one node.
        """
        # (alpha, beta) of each pair of places; with uniform links the table is empty, and all ranks end in one node.
        links, places = self.links, range(len(members))
        pairs = [(i, j) for i in places for j in places if i != j] if links.link else []
        costs = {(i, j): links.cost(members[i], members[j]) for i, j in pairs}
        fastest = min(costs.values(), key=lambda cost: cost[::-1], default=None)  # beta counts first, then alpha

        # A rank joins the first node whose first rank is joined to it by the fastest link.
        nodes: list[list[int]] = []
        for i in places:
            near = next((node for node in nodes if costs.get((node[0], i)) == fastest), None)
            if near is None:
                nodes.append([i])
            else:
                near.append(i)
        return nodes

    # communicators and calls ------------------------------------------------------------------------------------------

    def register(self, comm: PointToPoint, origin: str, label: str) -> None:
        self.comms.append(comm)
        self.calls.register(comm, origin, label)

    def called(self, comm: CheckedComm, call: CheckedCall, array: np.ndarray | None, root: int | None) -> None:
        self.calls.logs[comm.name][comm.members[comm.rank]].note(comm, call, array)
        # Ranks with unlike roots may all wait for each other, without any two of their messages meeting.
        if root is not None:
            self.compare_calls(call, root)

    def compare_calls(self, call: PointToPoint, value: int) -> None:
        """Raise MismatchError when another rank has begun this collective call with another value.

        value: the root, or a checksum of what every rank must have equal when the call sends nothing.
        """
        if self.calls.differs(call, value) and self.calls.unlike is None:
            self.calls.refuse(MismatchError(self.calls.explain(call.name)), call, False)
            self.hub.switch()


class EndedWorld:
    """Stands for the world of a run that is over: it has the record, and an error for all else.

    def main(comm): kept.append(comm)
    SimWorld(2).run(main)
    kept[0].trace                    the record can be read
    all_reduce(kept[0], array)       UsageError: no other rank runs; on one rank it would return without an error
    """

    kind = "simulated"

    def __init__(self, traces: Sequence[Trace], end_time: float) -> None:
        self.traces, self.end_time = traces, end_time

    def trace_of(self, comm: PointToPoint) -> Trace:
        """Return the record of the rank that `comm` belonged to."""
        return self.traces[comm.members[comm.rank]]

    def time(self) -> float:
        """Return the virtual time at which the run ended."""
        return self.end_time

    def post_or_wait(self, first: Any, *_: Any) -> Any:
        """Refuse a message, or the wait for one, of something else that a program has kept."""
        raise used_after_run(call_site(sys._getframe(1)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise used_after_run(call_site(sys._getframe(1)))


def used_after_run(site: CallSite) -> UsageError:
    """Return the error for a communicator, or a request of one, that is used after its run."""
    return UsageError(
        f"a communicator is used after its run has ended, at {site}; communicate only inside the function that the run "
        "calls, on the communicator that it is given"
    )
