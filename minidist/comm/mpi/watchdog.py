"""Nothing hangs: when an MPI operation is pending for too long, the pending operations of all ranks are reported.

A second thread of each rank reads once a second what the main program waits in (one attribute, so the rank is not
slowed) and writes it, with the trace so far, into the rank's file. The files survive a killed process. The first
rank that has waited longer than the timeout reads all of them, prints one report and ends the job.

    rank 0   waits ... timeout ──▶ read rank*.json, rank*.trace.jsonl ──▶ report ──▶ Abort
    rank 1   waits ... writes what it waits in ──▶ rank1.json, rank1.trace.jsonl

When no rank waits and all of them compute for longer than the timeout, rank 0 says so, and the job goes on: only the
user can tell whether it should.

Proved by: tests/comm/mpi/test_failures.py, tests/comm/mpi/test_watchdog.py
"""

import sys
import threading
import time
from contextlib import suppress
from typing import Any

from minidist.comm.call_site import CallSite
from minidist.comm.communicator import Claim
from minidist.comm.mpi.hints import History, hints
from minidist.comm.mpi.job_folder import JobFolder
from minidist.comm.mpi.waits import as_dict, doing, state_of
from minidist.comm.waiting import Waiting, circle_text, find_cycle

INTERVAL = 1.0  # seconds between two looks


class Watchdog:
    """Watches one rank of an MPIWorld until `stop()`. Its thread outlives every error but the end of the process."""

    def __init__(self, world: Any, timeout: float, folder: JobFolder) -> None:
        self.world, self.timeout, self.folder = world, timeout, folder
        self.interval = min(INTERVAL, timeout / 4)

        self.written = 0
        self.writing = threading.Lock()  # the main program writes, too, when it ends the job
        self.silence = 0.0  # seconds for which this rank has computed without a message
        self.patience = timeout  # the silence that is reported next
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="minidist-watchdog")
        self.thread.start()

    def stop(self) -> None:
        """End the watch: the rank is done."""
        self.stopping.set()
        self.thread.join()

    def discard(self) -> None:
        """End the watch and remove the job's folder: the job ends, and no report names the folder."""
        self.stopping.set()
        with self.writing:
            self.folder.discard()

    def _watch(self) -> None:
        # The clock starts again with each new wait, and with each message that a stream completes meanwhile.
        self.write()
        seen: object = None
        signs: object = None
        since = time.monotonic()
        while not self.stopping.wait(self.interval):
            now, moment = self.world.waiting, time.monotonic()
            if now is not seen or (self.world.completed, self.world.place) != signs:  # streams may be busy meanwhile
                seen, signs, since = now, (self.world.completed, self.world.place), moment
                self.patience = self.timeout
            self.silence = moment - since if now is None else 0.0
            self.write()
            if now is not None and moment - since > self.timeout:
                self.report()
                return
            if self.world.rank == 0 and self.silence > self.patience:
                self._say_that_all_compute()

    def write(self) -> None:
        """Write this rank's state, and what is new in its trace, into its files."""
        with self.writing:
            if self.stopping.is_set():
                return
            self.folder.write_state(self.world.rank, state_of(self.world, self.silence))
            if self.folder.is_asked():
                self.folder.write_state(self.world.rank, self._history()._asdict(), ".calls")
            new = self.world.trace.messages[self.written :]
            if new and self.folder.append_messages(self.world.rank, map(as_dict, new)):
                self.written += len(new)

    def _history(self) -> History:
        """Return this rank's last collective calls and its communicators."""
        calls = {name: list(log.recent) for name, log in tuple(self.world.logs.items())}
        made = {origin: claim._replace(members=list(claim.members)) for origin, claim in self.world.made.copy().items()}
        return History(calls, made)

    def ask(self, rank: int) -> History:
        """Ask another rank for what it has done, and wait for it for at most 3 s; it is empty when nothing comes."""
        asked = self.folder.ask()
        while (self.folder.written_at(rank, ".calls") or 0.0) < asked and time.time() < asked + 3:
            time.sleep(self.interval / 50)
        return self._written_history(rank)

    def _written_history(self, rank: int) -> History:
        """Return the collective calls and the communicators that a rank has written last."""
        found = self.folder.state(rank, ".calls") or {"calls": {}, "made": {}}
        calls, made = found["calls"].items(), found["made"].items()
        return History(
            {name: [(number, key, CallSite(*site), passed) for number, key, site, passed in of] for name, of in calls},
            {origin: Claim._make([*claim, CallSite(*site)]) for origin, (*claim, site) in made},
        )

    # reports ----------------------------------------------------------------------------------------------------------

    def report(self) -> None:
        """Print every rank's pending operation (once for the job) and end the job."""
        try:
            if not self.folder.first("reported"):
                for _ in range(40):  # another rank reports and ends the job; go on only if it could not
                    self.write()
                    time.sleep(self.interval)
                return
            self.folder.ask()
            self._await_the_others()
            print(f"{self.text()}\n", end="", file=sys.stderr, flush=True)  # in one write
            time.sleep(0.2)  # mpiexec may stop reading as soon as it hears of the abort
        except Exception as error:  # whatever happens, something is said, and the job ends
            with suppress(Exception):
                print(
                    f"minidist: {self._headline()} unknown, because the report failed ({type(error).__name__})",
                    file=sys.stderr,
                    flush=True,
                )
        finally:
            self.world.abort(1)

    def _headline(self) -> str:
        return (
            f"no progress on rank {self.world.rank} for {self.timeout:g} s (--timeout); every rank's pending operation:"
        )

    def _await_the_others(self) -> None:
        """Wait until each has written what it does now: two looks, or more on a busy machine, at most 5 s."""
        # Their watchdogs write once per interval; a file older than this moment may be out of date.
        began = time.time()
        time.sleep(1.5 * self.interval)
        self.write()
        others = [rank for rank in range(self.world.size) if rank != self.world.rank and self.folder.written_at(rank)]
        while time.time() < began + 5 and any((self.folder.written_at(rank) or began) < began for rank in others):
            time.sleep(self.interval / 4)

    def _states(self) -> dict[int, dict[str, Any]]:
        """Return what each rank does now, of those that have said it; this one's own needs no file."""
        found = {rank: state for rank in range(self.world.size) if (state := self.folder.state(rank)) is not None}
        return found | {self.world.rank: state_of(self.world, self.silence)}

    def text(self) -> str:
        """Return the report."""
        lines = [f"minidist: {self._headline()}"]

        # Each rank's own file says what it waits in.
        waiting, states = [], self._states()
        for rank in range(self.world.size):
            state = states.get(rank)
            if state is None:
                lines.append(f"  rank {rank}: unknown (it runs on another host, or died before it could write)")
                continue
            lines.append(f"  rank {rank}: {doing(state)}")
            if state["state"] == "waiting":
                waiting.append(Waiting(rank, "main", tuple(state["peers"]), state["what"]))

        # What only all of them together show.
        cycle = find_cycle(waiting)
        if cycle:
            lines.append(f"  circle: {circle_text(cycle)}")
        messages = {rank: self.folder.messages(rank) for rank in states}
        histories = {rank: self._written_history(rank) for rank in states} | {self.world.rank: self._history()}
        lines += [f"  hint: {hint}" for hint in hints(states, messages, histories)]
        if any(messages.values()):
            path = self.folder.path
            lines.append(f"  traces so far: {path}/rank*.trace.jsonl; minidist report {path} draws them")
        return "\n".join(lines)

    def _say_that_all_compute(self) -> None:
        """Say that no rank waits and none has sent or received anything for long; after twice the time, say it again.

        A rank that waits is reported separately, and one that writes nothing may be on another host.
        """
        states = self._states()
        if any(
            state["state"] != "computing" or state.get("silence", 0) < self.timeout / 2 for state in states.values()
        ):
            return
        lines = [
            f"minidist: all ranks have computed for {self.silence:.0f} s without a message (--timeout); the job goes"
            " on, Ctrl-C ends it:",
            *(f"  rank {rank}: {state['what']}" for rank, state in sorted(states.items())),
        ]
        self.patience = 2 * self.silence
        with suppress(OSError, ValueError):  # standard error is closed
            print("\n".join(lines), file=sys.stderr, flush=True)
