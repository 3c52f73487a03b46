"""The end of MPI: MPI_Finalize waits for every process, but not for ever for a process that is stopped.

When a rank's program is over, its watchdog ends. Rank 0 may still print and draw for minutes while the others wait in
MPI_Finalize; that is no failure, and only a process that does nothing at all is one. So a thread of each rank writes a
file once per second, up to the end of MPI_Finalize. When a rank has waited there for longer than the timeout, and the
file of another rank is older than the timeout, it reports that rank and ends the job:

    rank 0   its program is over ── MPI_Finalize ............ timeout ──▶ "rank 1 has given no sign of life ..."
    rank 1   its program is over ── SIGSTOP: rank1.json is not written any more

The files of other hosts cannot be read, so each rank checks only the ranks on its host.

Proved by: tests/comm/mpi/test_watchdog.py, tests/comm/mpi/test_failures.py
"""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from minidist.comm.mpi.job_folder import JobFolder
from minidist.comm.unlike_calls import ranks_text

INTERVAL = 1.0  # seconds between two writes of a rank's file
LOOKS = 3  # checks in a row that find a rank silent, after which it is reported


class Ending:
    """A thread that reports this process as alive, and checks the others, from the program's end to that of MPI."""

    def __init__(self, folder: JobFolder, rank: int, size: int, timeout: float) -> None:
        self.folder, self.rank, self.size, self.timeout = folder, rank, size, timeout
        self.interval = min(INTERVAL, timeout / 4)
        self.since: float | None = None  # when this rank began to wait for the others
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="minidist-ending")
        self.thread.start()

    def wait_for_all(self) -> None:
        """Record that from now on this rank waits for the others."""
        self.since = time.monotonic()

    def leave(self) -> None:
        """End the watch and remove this rank's files."""
        self.over.set()
        self.thread.join()
        self.folder.leave(self.rank)

    def _watch(self) -> None:
        looks = 0
        while True:
            self.folder.write_state(self.rank, {"rank": self.rank, "state": "ended", "peers": []})
            late = self.since is not None and time.monotonic() - self.since > self.timeout

            # Check three times in a row: when a whole job continues after Ctrl-Z, the other ranks need a moment, too.
            silent = self._silent() if late else []
            looks = looks + 1 if silent else 0
            if looks == LOOKS:
                self._report(silent)
            if self.over.wait(self.interval):
                return

    def _silent(self) -> list[int]:
        """Return the ranks of this host that have not left, and have not written their file within the timeout."""
        moments = {rank: self.folder.written_at(rank) for rank in range(self.size) if rank != self.rank}
        limit = time.time() - self.timeout
        return [rank for rank, written in moments.items() if written is not None and written < limit]

    def _report(self, silent: list[int]) -> None:
        """Print for which ranks the job waits, once per host, and end the job."""
        try:
            if self.folder.first("reported"):
                have = "has" if len(silent) == 1 else "have"
                print(
                    f"minidist: {ranks_text(silent)} of {self.size} {have} given no sign of life for {self.timeout:g} s"
                    f" (--timeout) at the end of the job, and rank {self.rank} waits in MPI_Finalize; let a process"
                    " that is stopped (SIGSTOP, Ctrl-Z, a debugger) go on; what the job has printed and saved is whole",
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(0.2)  # mpiexec may stop reading the output as soon as a process has ended
            else:
                time.sleep(1.0)  # another rank prints the sentence and ends the job
            self.folder.discard()
        finally:
            os._exit(1)  # MPI_Abort is not allowed during MPI_Finalize; the launcher ends the other processes


_last: list[Ending] = []  # at most one: that of the last world, as a process may have several, one after the other


def end_later(folder: JobFolder, rank: int, size: int, timeout: float) -> None:
    """Report a rank whose world is closed as alive until MPI has ended. timeout: seconds; 0 means no limit."""
    leave()
    if timeout and size > 1:
        _last.append(Ending(folder, rank, size, timeout))
    else:
        folder.leave(rank)


def leave() -> None:
    """Stop reporting this rank as alive and remove its files: MPI has ended, or this process will be killed."""
    while _last:
        _last.pop().leave()


def finalize_at_exit(MPI: Any) -> None:
    """Call MPI_Finalize when the interpreter ends, before mpi4py does, and where a thread can watch it.

    Functions that a program has registered with `atexit` after the start of MPI run before that.
    """
    atexit.register(_finalize, MPI)


def _finalize(MPI: Any) -> None:
    for ending in _last:
        ending.wait_for_all()
    # Python cannot raise KeyboardInterrupt inside MPI_Finalize, so Ctrl-C ends the process.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not MPI.Is_finalized():
        # mpi4py's own call holds Python's lock, and the thread that checks the others could not run. Where ctypes does
        # not find the function, mpi4py calls it later.
        with suppress(OSError, AttributeError):
            ctypes.CDLL(MPI.__file__).MPI_Finalize()
    leave()
