"""A rank of the simulated world that computes without end: nobody else can run meanwhile, so a thread looks on.

Greenlets switch only where a rank communicates. When nothing has switched for `timeout` seconds, this thread raises an
exception in the rank, again and again: no `except Exception` of the rank's may take it for its own.
"""

import ctypes
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from minidist.base.errors import RankTimeoutError

if TYPE_CHECKING:
    from minidist.comm.sim.world import SimWorld


class Stopped(BaseException):
    """Raised in a rank that computes without end; no `except Exception` of the rank's may take it for its own."""


class EndlessWatch:
    """Stops a rank that computes without end: raises in it after `timeout` s without a switch, again and again.

    error: what the run must end with once that has happened, whatever the rank made of it.
    """

    def __init__(self, world: "SimWorld") -> None:
        self.world, self.thread_id = world, threading.get_ident()
        self.stopped = threading.Event()
        self.error: RankTimeoutError | None = None
        self.thread = threading.Thread(target=self._watch, daemon=True, name="minidist-watch")
        self.thread.start()

    def _watch(self) -> None:
        seen, since = -1, 0
        while not self.stopped.wait(self.world.timeout / 4):
            since = since + 1 if self.world.switches == seen else 0
            seen = self.world.switches
            if since >= 4:
                since = 0
                self._raise_in_rank()

    def _raise_in_rank(self) -> None:
        if self.error is None:
            self.error = RankTimeoutError(
                f"rank {self.world.running.rank} computed for more than {self.world.timeout:g} s without communicating;"
                " it may compute without end: look at the last line of the traceback, or raise --timeout"
            )
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread_id), ctypes.py_object(Stopped))

    def stop(self) -> None:
        """The run is over; an exception that comes too late for it must not hit what runs next."""
        while not self.stopped.is_set() or self.thread.is_alive():
            with suppress(Stopped):
                self.stopped.set()
                self.thread.join()
        if self.error:
            # It is caught, not withdrawn: Python 3.11 never leaves the state in which withdrawing one puts it.
            with suppress(Stopped):
                for _ in range(1000):
                    pass
