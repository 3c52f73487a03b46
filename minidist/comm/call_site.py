"""Where the *user's* program started an operation: a report that names a line of this library would not help.

The search goes from the caller outwards to the first frame that is not minidist's own; inside minidist's own programs,
to the first frame outside comm/ and collectives/, of the core and of the package. It costs about a quarter of a
microsecond, so a collective call looks once and its messages share the result.

Proved by: tests/comm/sim/test_world.py, tests/comm/test_error_lines.py, tests/comm/test_call_site_of_thread.py
"""

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_PLUMBING = tuple(
    _PACKAGE + os.path.join(*path, "")
    for path in (("core", "comm"), ("core", "collectives"), ("comm",), ("collectives",))
)
_OTHERS: tuple[str, ...] = (str(Path(os.__file__).parent), "<frozen")  # Python's library
if sys.platform != "emscripten":  # in a browser the interpreter's folder is the user's
    _OTHERS += (str(Path(sys.executable).parent),)
_USER, _OURS, _PLUMBER, _OTHER = range(4)
_kind_of_file: dict[str, int] = {}  # by file name, which is faster to hash than a code object


class CallSite(NamedTuple):
    """A line of a program."""

    filename: str
    line: int

    def __str__(self) -> str:
        # Relative to where the program was started, as compilers print it.
        path = Path(self.filename)
        if path.parent.name.startswith("ipykernel_"):
            return f"{cell_name(self.filename)}, line {self.line}"
        try:
            return f"{path.relative_to(Path.cwd())}:{self.line}"
        except (ValueError, OSError):  # elsewhere, or the working directory was removed
            return f"{path}:{self.line}"


NOWHERE = CallSite("unknown", 0)


def call_site(frame: FrameType | None, otherwise: CallSite | None = None) -> CallSite:
    """Return the innermost line of the user's program in the stack that ends in `frame`; else `otherwise`."""
    # From the innermost frame outwards; the kind of each file is looked up once.
    fallback: FrameType | None = None
    while frame is not None:
        filename = frame.f_code.co_filename
        kind = _kind_of_file.get(filename)
        if kind is None:
            kind = _kind_of_file[filename] = _classify(filename)
        if kind == _USER:
            return CallSite(filename, frame.f_lineno)
        if kind == _OURS and fallback is None:
            fallback = frame  # a program of ours: `minidist train` has no user code above it
        frame = frame.f_back
    if otherwise is not None:
        return otherwise
    if fallback is not None:
        return CallSite(fallback.f_code.co_filename, fallback.f_lineno)
    return NOWHERE


def is_of_user(filename: str) -> bool:
    """Return whether a file is neither Python's, nor of an installed package, nor of this package."""
    kind = _kind_of_file.get(filename)
    if kind is None:
        kind = _kind_of_file[filename] = _classify(filename)
    return kind == _USER


def _classify(filename: str) -> int:
    if filename.startswith(_PLUMBING):
        return _PLUMBER
    if filename.startswith(_PACKAGE):
        return _OURS
    # A package may be installed in another folder than this interpreter's own, such as the user's.
    installed = any(f"{os.sep}{folder}{os.sep}" in filename for folder in ("site-packages", "dist-packages"))
    return _OTHER if installed or filename.startswith(_OTHERS) else _USER


cells: dict[str, str] = {}  # by the name of its temporary file, the name of a cell whose notebook is another process


def cell_name(filename: str) -> str:
    """Return the name by which a reader knows a notebook's cell, In[3], instead of its temporary file's."""
    if filename in cells:
        return cells[filename]
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    found: tuple[str, str] | None = shell.compile.format_code_name(filename) if shell else None
    return " ".join(found or ("a notebook's", "cell"))


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


class FindsLines:
    """What a world that reports lines of the program adds to one that only moves messages."""

    checks = unchecked = False
    finds_lines = True  # the line of a rank that waits can be found when it is asked for

    def note_request(self, request: Any) -> None:
        """Note a message for which the program will wait."""

    def note_wait(self, request: Any) -> None:
        """Note that the program waits for it."""

    def find_line(self, work: Any) -> None:
        """Note the line that a report of a work names: the user's call, found once for all its messages."""
        if work.site in (None, NOWHERE):
            work.site = call_site(sys._getframe(1))
