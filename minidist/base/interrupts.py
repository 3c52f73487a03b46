"""Ctrl-C ends a run, and says where it was.

Python raises KeyboardInterrupt between two instructions of the main thread, wherever that is. In the callback of a weak
reference (the memory account has one for every array) or in a destructor nothing can be raised: Python prints the
exception and goes on, and the job would go on, too. `interruptible` raises it again.

The program imports this module before all others, so it imports little itself: before `ends_at_interrupt`, Ctrl-C is a
traceback.

Proved by: tests/base/test_interrupts.py
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130  # of a process that SIGINT has ended: 128 + 2


@contextmanager
def interruptible() -> Iterator[None]:
    """In the block a KeyboardInterrupt that Python cannot raise where it came is raised again, a moment later."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.unraisablehook

    # Not at once: it would be raised in this function, and be lost again.
    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(0.01, _thread.interrupt_main).start()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        if sys.unraisablehook is hook:
            sys.unraisablehook = before


@contextmanager
def ends_at_interrupt() -> Iterator[None]:
    """In the block Ctrl-C ends the process at once, in one line: where modules are imported, nothing is to be undone.

    A KeyboardInterrupt would be raised inside some library, which may not survive it.
    """
    # A program with another handler, and another thread, are left alone.
    ours = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if ours:
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_more() -> None:
    """Ignore Ctrl-C from now on: the process ends already. mpiexec passes on what a terminal has sent to all ranks."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> None:
    # Of the processes of one mpiexec, the first says it.
    if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == "0":
        os.write(2, b"minidist: interrupted at the start\n")
    os._exit(EXIT_CODE)


def interruption(place: str) -> str:
    """Return what is said of an interrupted run. place: what the run says of itself: see `World.place`."""
    return f"interrupted in {place}" if place else "interrupted"


def interrupted(error: KeyboardInterrupt) -> str:
    """Return the line that is printed when Ctrl-C has ended a run; notes of the error say where it was."""
    return " ".join(["minidist: interrupted", *getattr(error, "__notes__", ())])
