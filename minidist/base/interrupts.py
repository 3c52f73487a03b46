"""Ctrl-C ends a run, and says where it was.

Python raises KeyboardInterrupt between two instructions of the main thread, wherever that is. In the callback of a weak
reference (the memory account has one for every array) or in a destructor nothing can be raised: Python prints the
exception and goes on, and the job would go on, too. `interruptible` raises it again.

Proved by: tests/base/test_interrupts.py
"""

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EXIT_CODE = 130  # of a process that SIGINT has ended: 128 + 2


@contextmanager
def interruptible() -> Iterator[None]:
    """In the block a KeyboardInterrupt that Python cannot raise where it came is raised again, a moment later."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.unraisablehook

    # Not at once: it would be raised in this function, and be lost again.
    def hook(unraisable: Any) -> None:
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


def interruption(place: str) -> str:
    """Return what is said of an interrupted run. place: what the run says of itself: see `World.place`."""
    return f"interrupted in {place}" if place else "interrupted"
