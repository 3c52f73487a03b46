"""Where the *user's* program started an operation: a report that names a line of this library is of no use.

The search goes from the caller outwards to the first frame that is not minidist's own; inside minidist's own programs,
to the first frame outside comm/ and collectives/, of the core and of the package. It costs about a quarter of a
microsecond, so a collective call looks once and its messages share the result.

Proved by: tests/comm/sim/test_world.py, tests/comm/test_error_lines.py
"""

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from minidist.core.base import hooks

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_PLUMBING = tuple(
    _PACKAGE + os.path.join(*path, "")
    for path in (("core", "comm"), ("core", "collectives"), ("comm",), ("collectives",))
)
_OTHERS: tuple[str, ...] = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<frozen")
if sys.platform != "emscripten":  # in a browser the interpreter's folder is the user's
    _OTHERS += (str(Path(sys.executable).parent),)
USER, OURS, PLUMBER, OTHER = range(4)


class _Kinds(dict[str, int]):
    """Whose a file is, by its name, which is faster to hash than a code object. Each is looked at once."""

    def __missing__(self, filename: str) -> int:
        # A package may be installed in another folder than this interpreter's own, such as the user's.
        installed = any(f"{os.sep}{folder}{os.sep}" in filename for folder in ("site-packages", "dist-packages"))
        kind = OTHER if installed or filename.startswith(_OTHERS) else USER
        if filename.startswith(_PACKAGE):
            kind = PLUMBER if filename.startswith(_PLUMBING) else OURS
        self[filename] = kind
        return kind


KINDS = _Kinds()


class CallSite(NamedTuple):
    """A line of a program."""

    filename: str
    line: int

    def __str__(self) -> str:
        # Relative to where the program was started, as compilers print it.
        path = Path(self.filename)
        if cell := hooks.cell_name(self.filename):
            return f"{cell}, line {self.line}"
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
        kind = KINDS[filename]
        if kind == USER:
            return CallSite(filename, frame.f_lineno)
        if kind == OURS and fallback is None:
            fallback = frame  # a program of ours: `minidist train` has no user code above it
        frame = frame.f_back
    if otherwise is not None:
        return otherwise
    if fallback is not None:
        return CallSite(fallback.f_code.co_filename, fallback.f_lineno)
    return NOWHERE
