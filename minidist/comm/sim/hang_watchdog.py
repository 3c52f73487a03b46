"""A thread that stops a rank of the simulated world which computes without end, or blocks outside of it.

Greenlets switch only where a rank communicates, so no other rank can run meanwhile. When no stream has switched for
`timeout` seconds, the thread raises an exception in the rank, again and again. Python raises it between two
instructions; a rank that sits inside one (time.sleep, a lock, input()) is sent SIGINT, too, which ends such a wait, and
where that does not help either the thread prints which rank blocks where.

    no switch for --timeout ──▶ Stopped in the rank ──▶ still at the same instruction ──▶ SIGINT ──▶ still there: print

Proved by: tests/comm/sim/test_world.py, tests/comm/sim/test_blocked_ranks.py
"""

import ctypes
import signal
import sys
import threading
from contextlib import suppress
from typing import Any

from minidist.comm.call_site import call_site_of_thread, imports_a_library, without_garbage_collection
from minidist.comm.errors import RankTimeoutError

IMPORT_S = 600.0  # that a rank may import libraries for
MOMENT_S = 0.5  # in which an exception is raised in a rank that computes


class Stopped(BaseException):
    """Raised in a rank that computes without end. Not an Exception, so that no `except Exception` catches it."""


class HangWatchdog:
    """Raises Stopped in a rank after `timeout` seconds without a switch, until the run is over.

    error: what the run must end with once that has happened, whatever the rank did with the exception. interrupts:
    whether SIGINT has been sent, so that a KeyboardInterrupt is this watchdog's.
    """

    def __init__(self, world: Any, timeout: float) -> None:
        self.world, self.timeout, self.thread_id = world, timeout, threading.get_ident()
        # Only Python's own handler of SIGINT raises in the main thread; a program's may do anything.
        self.may_interrupt = (
            threading.current_thread() is threading.main_thread()
            and hasattr(signal, "pthread_kill")
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        self.interrupts = False
        self.stopped = threading.Event()
        self.error: RankTimeoutError | None = None
        self.thread = threading.Thread(target=self._watch, daemon=True, name="minidist-watch")
        self.thread.start()

    def _watch(self) -> None:
        # Four looks in a row at the same number of switches: one rank has computed for a whole timeout.
        seen, looks, said = -1, 0, False  # looks: how many have found the same number of switches
        importing = 0.0  # seconds that this rank has imported libraries, which do not count
        while not self.stopped.wait(self.timeout / 4):
            if self.world.switches == seen and importing < IMPORT_S and imports_a_library(self._thread()):
                importing += self.timeout / 4
                continue
            looks = looks + 1 if self.world.switches == seen else 0
            importing = importing if looks else 0.0
            seen = self.world.switches
            if looks < 4:
                continue
            looks = 0
            place = self._raise_in_rank()

            # A rank that computes is stopped by now. One that is where it was blocks outside of Python.
            if not self._stays_at(place):
                continue
            if self.may_interrupt:
                self.error = RankTimeoutError(self._blocked())
                self.interrupts = True
                signal.pthread_kill(self.thread_id, signal.SIGINT)
            if not said and self._stays_at(place):
                said = True
                print(f"minidist: {self._blocked()}", file=sys.stderr, flush=True)

    def _thread(self) -> int:
        """Return the thread in which the program of the rank runs."""
        thread: int = self.world.programs.get(self._rank(), self.thread_id)
        return thread

    def _rank(self) -> int:
        """Return the rank that runs."""
        rank: int = self.world.state.running.rank
        return rank

    def _raise_in_rank(self) -> tuple[int, int]:
        """Raise Stopped in the rank, as soon as it runs; return where it is now."""
        # Raised again and again, because the rank's code may catch it; the first error is what the run reports.
        place = self._place()
        if self.error is None:
            self.error = RankTimeoutError(
                f"rank {self._rank()} computed for more than {self.timeout:g} s without communicating, at"
                f" {call_site_of_thread(self._thread())}; it may compute without end: look at this line, or raise"
                " --timeout (in a notebook: SimWorld(..., timeout=))"
            )
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread()), ctypes.py_object(Stopped))
        return place

    def _place(self) -> tuple[int, int]:
        """Return the frame and the instruction that the rank is at."""
        with without_garbage_collection():
            frame = sys._current_frames().get(self._thread())
            return (id(frame), frame.f_lasti) if frame is not None else (0, 0)

    def _stays_at(self, place: tuple[int, int]) -> bool:
        """Return whether the rank is at the same instruction a moment later; False when the run is over."""
        return not self.stopped.wait(MOMENT_S) and self._place() == place

    def _blocked(self) -> str:
        """Return the sentence about a rank that blocks."""
        site = call_site_of_thread(self._thread())
        return (
            f"rank {self._rank()} has been blocked for more than {self.timeout:g} s at {site}, outside of"
            " its communicator, and no other rank can run meanwhile: simulated ranks share one thread; let"
            " comm.compute(seconds=...) take the place of a sleep, and messages that of locks, or raise"
            " --timeout (in a notebook: SimWorld(..., timeout=))"
        )

    def stop(self) -> None:
        """End the watch. An exception that comes too late for this run must not hit what runs next."""
        # The exception may hit this thread here too: try again until the watch is over.
        late = (Stopped, KeyboardInterrupt) if self.interrupts else (Stopped,)
        while not self.stopped.is_set() or self.thread.is_alive():
            with suppress(*late):
                self.stopped.set()
                self.thread.join()
        late = (Stopped, KeyboardInterrupt) if self.interrupts else (Stopped,)
        if self.error:
            # It is caught, not withdrawn: Python 3.11 never leaves the state in which withdrawing one puts it.
            with suppress(*late):
                for _ in range(1000):
                    pass
