"""The end of MPI: MPI_Finalize waits for every process, and none waits for ever for one that is stopped.

A rank has no watchdog any more when its program is over: rank 0 may still print and draw for minutes, while the others
wait in MPI_Finalize, and only a process that does nothing at all is in trouble. So a thread beside each rank says once
a second that its process lives, up to the end of MPI_Finalize. A rank that waits there longer than the timeout, for one
that has said nothing for as long, names that one and ends the job:

    rank 0   its program is over ── MPI_Finalize ............ timeout ──▶ "rank 1 has given no sign of life ..."
    rank 1   its program is over ── SIGSTOP: rank1.json is not written any more

Ranks of other hosts cannot be seen; each host's ranks look at their own.

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

from minidist.comm.call_log import ranks_text
from minidist.comm.mpi.job_folder import JobFolder

INTERVAL = 1.0  # seconds between two signs of life
LOOKS = 3  # at a rank that is silent, before it is reported


class Ending:
    """Says that this rank's process lives, from the end of its program to the end of MPI_Finalize, and watches that."""

    def __init__(self, folder: JobFolder, rank: int, size: int, timeout: float) -> None:
        self.folder, self.rank, self.size, self.timeout = folder, rank, size, timeout
        self.interval = min(INTERVAL, timeout / 4)
        self.since: float | None = None  # when this rank began to wait for the others
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True, name="minidist-ending")
        self.thread.start()

    def wait_for_all(self) -> None:
        """From here on this rank waits for the others."""
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

            # Three times in a row: after Ctrl-Z of the whole job the others need a moment, too.
            silent = self._silent() if late else []
            looks = looks + 1 if silent else 0
            if looks == LOOKS:
                self._report(silent)
            if self.over.wait(self.interval):
                return

    def _silent(self) -> list[int]:
        """Return the ranks of this host that have neither left nor given a sign of life within the timeout."""
        moments = {rank: self.folder.written_at(rank) for rank in range(self.size) if rank != self.rank}
        limit = time.time() - self.timeout
        return [rank for rank, written in moments.items() if written is not None and written < limit]

    def _report(self, silent: list[int]) -> None:
        """Say for which ranks the job waits, once per host, and end it."""
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
                time.sleep(0.2)  # mpiexec may stop reading as soon as it hears of the end
            else:
                time.sleep(1.0)  # another rank says it, and ends the job
            self.folder.discard()
        finally:
            os._exit(1)  # inside MPI_Finalize there is no MPI_Abort any more; the launcher ends the others


_last: list[Ending] = []  # that of the process's last world; a process may have had several, one after the other


def end_later(folder: JobFolder, rank: int, size: int, timeout: float) -> None:
    """Let a rank whose world is closed give signs of life until MPI has ended. timeout: seconds; 0: no limit."""
    leave()
    if timeout and size > 1:
        _last.append(Ending(folder, rank, size, timeout))
    else:
        folder.leave(rank)


def leave() -> None:
    """Give no more signs of life, and remove this rank's files: MPI has ended, or this process will be killed."""
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
    # Inside MPI no KeyboardInterrupt can be raised: Ctrl-C ends the process.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not MPI.Is_finalized():
        # mpi4py's own holds Python's lock meanwhile, so that no thread could see the time pass.
        with suppress(OSError, AttributeError):  # a platform on which the library is not found: mpi4py does it later
            ctypes.CDLL(MPI.__file__).MPI_Finalize()
    leave()
