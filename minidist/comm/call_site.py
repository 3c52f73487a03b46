"""Where in the *user's* program an operation was started: what a report must name to be of any use.

Walks from the caller outwards to the first frame that is not minidist's own; inside minidist's own programs, to the
first frame outside comm/ and collectives/. Costs about a quarter of a microsecond, so it is done once a collective
call.
"""

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import NamedTuple

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_PLUMBING = (_PACKAGE + "comm" + os.sep, _PACKAGE + "collectives" + os.sep)
_OTHERS = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(sys.executable).parent), "<frozen")
_USER, _OURS, _PLUMBER, _OTHER = range(4)
_place: dict[str, int] = {}  # a cache of a pure function, by file name (hashing a code object is slow)


class Site(NamedTuple):
    filename: str
    line: int

    def __str__(self) -> str:
        path = Path(self.filename)
        if path.parent.name.startswith("ipykernel_"):
            return f"{_cell(self.filename)}, line {self.line}"
        try:
            return f"{path.relative_to(Path.cwd())}:{self.line}"
        except ValueError:
            return f"{path}:{self.line}"


NOWHERE = Site("unknown", 0)


def _cell(filename: str) -> str:
    """A notebook's cell is compiled under a name in a temporary directory; readers know it as In[3]."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    found: tuple[str, str] | None = shell.compile.format_code_name(filename) if shell else None
    return " ".join(found or ("a notebook's", "cell"))


def _classify(filename: str) -> int:
    if filename.startswith(_PLUMBING):
        place = _PLUMBER
    elif filename.startswith(_PACKAGE):
        place = _OURS
    else:
        place = _OTHER if filename.startswith(_OTHERS) else _USER
    _place[filename] = place
    return place


def site_of(frame: FrameType | None) -> Site:
    """The user's place in the stack that ends in `frame`."""
    fallback: FrameType | None = None
    while frame is not None:
        filename = frame.f_code.co_filename
        place = _place.get(filename)
        if place is None:
            place = _classify(filename)
        if place == _USER:
            return Site(filename, frame.f_lineno)
        if place == _OURS and fallback is None:
            fallback = frame
        frame = frame.f_back
    if fallback is not None:
        return Site(fallback.f_code.co_filename, fallback.f_lineno)
    return NOWHERE


def user_site(depth: int = 1) -> Site:
    """The user's place, seen from `depth` frames above the caller's callee."""
    frame = sys._getframe(depth)
    filename = frame.f_code.co_filename
    if _place.get(filename) == _USER:  # the user called us directly: the hot path of every message
        return Site(filename, frame.f_lineno)
    return site_of(frame)
