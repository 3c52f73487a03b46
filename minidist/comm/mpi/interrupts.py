"""What ends a rank that waits inside the MPI library: Ctrl-C, and the end of the launcher that started it.

Python raises KeyboardInterrupt between two instructions of the main program, and a main program that waits in MPI comes
to none. But Python's own signal handler, in C, writes the signal's number into a file descriptor at once. A thread
reads it, and ends the job when the main program has waited in MPI for half a second and was not interrupted.

    launcher ── starts ──▶ rank        SIGINT ── in C ──▶ descriptor ──▶ thread ── half a second ──▶ end of the job
    launcher dies: the rank's parent becomes another process ──▶ thread, once a second ──▶ end of the rank

A program may catch KeyboardInterrupt and save, and nothing ends it meanwhile. On a loaded machine Python may raise the
exception late, so the thread also waits until the main program has run for a millisecond, or is asleep: a program that
is ready to run, or stopped, may still be interrupted. And a rank that waits in MPI ends the job only when no other rank
of its host computes after the same Ctrl-C.

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
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from minidist.comm.launched import has_launcher

GRACE = 0.5  # seconds
RAN = 0.001  # seconds of processor time of the main program; outside MPI it is interrupted within microseconds
LOOK = 0.05  # seconds between two looks at the main program after Ctrl-C
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


class Chance:
    """Says whether the main program could have been interrupted since this was made."""

    def __init__(self) -> None:
        self.thread = threading.main_thread()
        self.began = time.monotonic()
        self.ran_before = self.ran = self._seconds()
        self.asleep = False

    def is_over(self) -> bool:
        """Return whether it has had half a second, and has run since or was asleep between two calls of this method."""
        last, self.ran = self.ran, self._seconds()
        self.asleep = self.ran == last and self._is_asleep()
        return time.monotonic() - self.began >= GRACE and (self.asleep or self.ran - self.ran_before >= RAN)

    def _seconds(self) -> float:
        if not hasattr(time, "pthread_getcpuclockid"):  # macOS: take all time for time in which it ran
            return time.monotonic()
        assert self.thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))

    def _is_asleep(self) -> bool:
        try:
            stat = Path(f"/proc/self/task/{self.thread.native_id}/stat").read_text()
        except OSError:  # not Linux
            return True
        return stat.rpartition(")")[2].split()[0] == "S"


class InterruptWatch:
    """Ends the job of an `MPIWorld` from a thread when SIGINT has come and the main program waits in MPI.

    A program with another handler for a signal, or in another thread than the main one, is left alone.
    """

    def __init__(self, world: Any) -> None:
        self.world = world
        self.parent, self.launched = os.getppid(), has_launcher()
        self.terminates = False
        self.chance: Chance | None = None  # after SIGINT
        self.interrupted = False  # was KeyboardInterrupt raised in the main program?
        self.repeated = False  # has the thread sent SIGINT to the main program again?
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.active = self._listen()
        if self.active or self.launched:
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
        if self.interrupted and self.repeated:  # it has been raised for this Ctrl-C
            self.repeated = False
            return
        self.interrupted = True
        signal.default_int_handler(number, frame)

    def _watch(self) -> None:
        over = False
        while not over:
            self.receiver.settimeout(LOOK if self.chance else INTERVAL if self.launched else None)
            try:
                signals = self.receiver.recv(64)
            except TimeoutError:
                over = self._look()
                continue
            over = not signals  # after `stop`
            if signal.SIGTERM in signals and self.terminates:
                self.world.end_terminated()
                over = True
            elif signal.SIGINT in signals and self.chance is None:
                self.world.folder.note_interrupt(self.world.rank, True)
                self.chance = Chance()

    def _look(self) -> bool:
        """Look at the parent and, after Ctrl-C, at the main program; return whether one of them has ended the job."""
        waits = self.world.waits_in_mpi()
        if self.launched and os.getppid() != self.parent and (waits or not self.interrupted):
            self.world.end_orphaned()
            return True
        return self.chance is not None and self._look_after_interrupt(waits)

    def _look_after_interrupt(self, waits: bool) -> bool:
        """Look at the main program; return whether it has waited in MPI for long enough, and the job has ended."""
        if self.chance is None or (self.interrupted and not waits):
            self.chance = Chance()  # it may save
        if not self.chance.is_over():
            return False

        if waits:
            others = self.world.folder.note_interrupt(self.world.rank, False)
            if self.interrupted:  # the program has caught the exception, and goes on
                self.chance = None
            elif not others:
                self.world.end_interrupted()
                return True

        # Where the system has given the signal to another thread, the main program is still asleep: wake it.
        elif self.chance.asleep and not self.interrupted and not self.repeated:
            self.repeated = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return False

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
