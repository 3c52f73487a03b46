"""Ctrl-C under MPI: the job ends within a second, even where a rank waits inside the MPI library.

Python raises KeyboardInterrupt between two instructions of the main program, and a main program that waits in MPI comes
to none. But Python's own signal handler, in C, writes the signal's number into a file descriptor at once. A thread
reads it, gives the main program half a second to be interrupted, and ends the job when it was not.

Proved by: tests/comm/mpi/test_interrupts.py
"""

import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

GRACE = 0.5  # seconds


class InterruptWatch:
    """Calls `end` from a thread when SIGINT has come and the main program could not be interrupted.

    A program with a handler of its own for SIGINT, or in another thread than the main one, is left alone.
    """

    def __init__(self, end: Callable[[], None]) -> None:
        self.end = end
        self.interrupted = False  # was KeyboardInterrupt raised in the main program?
        self.active = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if not self.active:
            return

        # Only one descriptor can be told of signals; an event loop may have set its own.
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        before = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            self.active = False
            return
        signal.signal(signal.SIGINT, self._handler)
        threading.Thread(target=self._watch, daemon=True, name="minidist-interrupts").start()

    def _handler(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        signal.default_int_handler(number, frame)

    def _watch(self) -> None:
        while signals := self.receiver.recv(64):
            if signal.SIGINT in signals:
                time.sleep(GRACE)
                if not self.interrupted:
                    self.end()
                    return
                self.interrupted = False

    def stop(self) -> None:
        """Leave signals as they were before. Called by the main program."""
        if self.active:
            self.active = False
            signal.set_wakeup_fd(-1)
            if signal.getsignal(signal.SIGINT) == self._handler:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            self.sender.close()  # which ends the thread
