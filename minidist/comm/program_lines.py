"""The line of a person's program in other places than a call: in another thread, and in an error's traceback.

`lines_of` is what a person reads of an error of ours: the sentence, and the line of their program that led to it (see
tracebacks.py for other exceptions). All of the traceback comes with `--traceback`, or where MINIDIST_TRACEBACK=1 is
set.

Proved by: tests/comm/test_error_lines.py, tests/comm/test_call_site_of_thread.py
"""

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from minidist.comm.call_site import CallSite, call_site, is_of_user
from minidist.comm.errors import BufferReuseError


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Keep the collector off; the frames of another thread may be looked at inside this context only.

    Python 3.11 makes a frame's object when somebody asks for it, and making it may collect garbage. A finalizer may
    then let the other thread run on until that frame has ended: the object describes memory that now belongs to
    something else, and the next look at it ends the process with a segmentation fault. Later versions of Python collect
    garbage only between two instructions.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def call_site_of_thread(thread: int, suspended: FrameType | None = None) -> CallSite:
    """Return the line of the user's program that another thread is at. suspended: the frame of a greenlet, instead."""
    with without_garbage_collection():
        return call_site(suspended or sys._current_frames().get(thread))


def imports_a_library(thread: int) -> bool:
    """Return whether another thread is importing something other than the user's program."""
    with without_garbage_collection():
        frame = sys._current_frames().get(thread)
        while frame is not None:
            filename = frame.f_code.co_filename
            if filename.startswith("<frozen importlib"):
                return True
            if is_of_user(filename):
                return False
            frame = frame.f_back
    return False


def line_of_error(error: BaseException) -> CallSite | None:
    """Return the innermost line of the user's program that an error passed; None when it passed none."""
    # An error that was made of another one: the line at which the first one arose says more.
    if error.__cause__ is not None and (first := line_of_error(error.__cause__)) is not None:
        return first
    found, step = None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        filename = code.co_filename
        # The methods that a dataclass generates have the file name of `python -c`.
        generated = filename == "<string>" and code.co_name.startswith("__")
        if not generated and is_of_user(filename):
            found = CallSite(filename, step.tb_lineno)
        step = step.tb_next
    return found


def lines_of(error: BaseException) -> list[str]:
    """Return what a person reads of an error: its sentence, its notes, and their line; or all of the traceback."""
    lines = [str(error), *getattr(error, "__notes__", ())]
    if shows_all():
        return [*lines, *"".join(traceback.format_exception(error)).splitlines()]
    # A buffer that a rank has changed is noticed by another one, whose line says nothing of it.
    line = None if isinstance(error, BufferReuseError) else line_of_error(error)
    if line is not None and not any(str(line) in text for text in lines):
        lines.append(f"at {line} (--traceback or MINIDIST_TRACEBACK=1 shows the whole way)")
    return lines


def shows_all() -> bool:
    """Return whether the user asks for whole tracebacks."""
    return os.environ.get("MINIDIST_TRACEBACK", "0") not in ("", "0")
