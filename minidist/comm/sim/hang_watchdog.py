"""A thread that stops a rank of the simulated world which computes without end.

Greenlets switch only where a rank communicates, so no other rank can run meanwhile. When no stream has switched for
`timeout` seconds, the thread raises an exception in the rank, again and again.

Proved by: tests/comm/sim/test_world.py
"""

import ctypes
import threading
from contextlib import suppress

from minidist.base.errors import RankTimeoutError
from minidist.comm.sim.state import SimState


class Stopped(BaseException):
    """Raised in a rank that computes without end. Not an Exception, so that no `except Exception` catches it."""


class HangWatchdog:
    """Raises Stopped in a rank after `timeout` seconds without a switch, until the run is over.

    error: what the run must end with once that has happened, whatever the rank did with the exception.
    """

    def __init__(self, state: SimState, timeout: float) -> None:
        self.state, self.timeout, self.thread_id = state, timeout, threading.get_ident()
        self.stopped = threading.Event()
        self.error: RankTimeoutError | None = None
        self.thread = threading.Thread(target=self._watch, daemon=True, name="minidist-watch")
        self.thread.start()

    def _watch(self) -> None:
        # Four looks in a row at the same number of switches: one rank has computed for a whole timeout.
        seen, looks = -1, 0  # looks: how many have found the same number of switches
        while not self.stopped.wait(self.timeout / 4):
            looks = looks + 1 if self.state.switches == seen else 0
            seen = self.state.switches
            if looks >= 4:
                looks = 0
                self._raise_in_rank()

    def _raise_in_rank(self) -> None:
        # Raised again and again, because the rank's code may catch it; the first error is what the run reports.
        if self.error is None:
            self.error = RankTimeoutError(
                f"rank {self.state.running.rank} computed for more than {self.timeout:g} s without communicating;"
                " it may compute without end: look at the last line of the traceback, or raise --timeout"
            )
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread_id), ctypes.py_object(Stopped))

    def stop(self) -> None:
        """End the watch. An exception that comes too late for this run must not hit what runs next."""
        # The exception may hit this thread here too: try again until the watch is over.
        while not self.stopped.is_set() or self.thread.is_alive():
            with suppress(Stopped):
                self.stopped.set()
                self.thread.join()
        if self.error:
            # It is caught, not withdrawn: Python 3.11 never leaves the state in which withdrawing one puts it.
            with suppress(Stopped):
                for _ in range(1000):
                    pass
