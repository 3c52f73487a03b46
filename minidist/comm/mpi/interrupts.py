"""What ends a rank that waits inside the MPI library: Ctrl-C, and the end of the launcher that started it.

Python raises KeyboardInterrupt between two instructions of the main program, and a main program that waits in MPI comes
to none. But Python's own signal handler, in C, writes the signal's number into a file descriptor at once. A thread
reads it, gives the main program half a second to be interrupted, and ends the job when it was not.

    launcher ── starts ──▶ rank        SIGINT ── in C ──▶ descriptor ──▶ thread ── half a second ──▶ end of the job
    launcher dies: the rank's parent becomes another process ──▶ thread, once a second ──▶ end of the rank

A launcher that ends has ended its ranks. Where it was killed, or has lost one of them, that rank would wait for ever:
MPI_Abort asks the launcher to end the processes, and returns when there is none. A rank that no launcher started
does not look at its parent, so that a shell may end before its programs.

Open MPI's mpiexec makes SIGTERM of it, passes on nothing that a rank prints from then on, and kills the ranks a quarter
of a second later. So a rank that it has started says at once where it was, past the launcher: into the launcher's own
standard error, or on the terminal.

Proved by: tests/comm/mpi/test_interrupts.py
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from minidist.comm.launched import has_launcher

GRACE = 0.5  # seconds
INTERVAL = 1.0  # seconds between two looks at the parent
_LAUNCHERS = ("prterun", "prte", "orterun", "mpirun", "mpiexec")


def started_by_open_mpi() -> bool:
    """Return whether Open MPI's mpiexec has started this process."""
    return "OMPI_COMM_WORLD_RANK" in os.environ


def say_past_the_launcher(text: str, launchers: tuple[str, ...] = _LAUNCHERS) -> None:
    """Write into the standard error of the launcher, if it is this process's parent, else on the terminal, if any."""
    places = ["/dev/tty"]
    parent = os.getppid()
    with suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() in launchers:
            places.insert(0, f"/proc/{parent}/fd/2")
    for place in places:
        try:
            file = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        except OSError:  # another system, another user's launcher, or no terminal
            continue
        os.write(file, text.encode())
        os.close(file)
        return


def _wait_for_the_thread(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread ends the process."""


class InterruptWatch:
    """Calls `end` from a thread when SIGINT has come and the main program could not be interrupted.

    terminate: called instead when Open MPI's mpiexec has sent SIGTERM. A program with another handler for a
    signal, or in another thread than the main one, is left alone. orphaned: called when the launcher has ended.
    """

    def __init__(self, end: Callable[[], None], terminate: Callable[[], None], orphaned: Callable[[], None]) -> None:
        self.end, self.terminate, self.orphaned = end, terminate, orphaned
        self.parent = os.getppid()
        self.terminates = False
        self.interrupted = False  # was KeyboardInterrupt raised in the main program?
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.active = self._listen()
        if self.active or has_launcher():
            self.receiver.settimeout(INTERVAL if has_launcher() else None)
            threading.Thread(target=self._watch, daemon=True, name="minidist-interrupts").start()

    def _listen(self) -> bool:
        """Ask for the numbers of signals; return whether they come: not where the program handles them itself."""
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return False

        # Only one descriptor can be told of signals; an event loop may have set its own.
        before = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            return False
        signal.signal(signal.SIGINT, self._handler)
        if started_by_open_mpi() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.terminates = True
            signal.signal(signal.SIGTERM, _wait_for_the_thread)
        return True

    def _handler(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        signal.default_int_handler(number, frame)

    def _watch(self) -> None:
        while signals := self._next():
            if signal.SIGTERM in signals and self.terminates:
                self.terminate()
                return
            if signal.SIGINT in signals:
                time.sleep(GRACE)
                if not self.interrupted:
                    self.end()
                    return
                self.interrupted = False

    def _next(self) -> bytes:
        """Return the numbers of the next signals, nothing after `stop`; meanwhile look at the parent."""
        while True:
            try:
                return self.receiver.recv(64)
            except TimeoutError:
                if os.getppid() != self.parent:
                    self.orphaned()
                    return b""

    def stop(self) -> None:
        """Leave signals as they were before. Called by the main program."""
        if self.active:
            self.active = False
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGINT) == self._handler:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.terminates and signal.getsignal(signal.SIGTERM) is _wait_for_the_thread:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.sender.close()  # which ends the thread
