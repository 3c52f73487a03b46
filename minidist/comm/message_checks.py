"""What can be wrong with a message on one rank alone, refused with the line of the program before anything is sent.

`PointToPoint` calls these functions where a message is not plain: an array that is contiguous, and an integer rank and
tag in their ranges.

Proved by: tests/comm/test_conformance.py, tests/misuse/test_misuse.py
"""

import operator
import sys
from typing import Any, NoReturn

from minidist.comm.call_site import call_site
from minidist.comm.tags import OWN_TAG
from minidist.core.base.errors import BufferReuseError, UsageError
from minidist.core.comm.point_to_point import ANY, MAX_TAG, PointToPoint

MASKED = "a masked array, whose mask is not sent; pass array.filled(0), or the data and the mask"


def check(comm: PointToPoint, kind: str, array: Any, peer: Any) -> int:
    """Return the peer of a message as an int of Python's; UsageError for what is no rank or cannot be sent."""
    number = _whole(comm, "rank", peer)
    if not 0 <= number < comm.size and (number != ANY or kind == "send"):
        raise _refusal(comm, f"{kind} names rank {number}, but {comm.name} has ranks 0..{comm.size - 1}")
    # An array of numbers, contiguous and, of a receive, writeable.
    flags = getattr(array, "flags", None)  # one on a GPU has no `writeable`
    if flags is None or not flags.c_contiguous or (kind == "receive" and not getattr(flags, "writeable", True)):
        raise _refusal(comm, f"{kind} of {_why_not(array)}")
    if hasattr(array, "mask"):
        raise _refusal(comm, f"{kind} of {MASKED}")
    if array.dtype.hasobject:
        raise _refusal(
            comm,
            f"{kind} of an array of Python objects, which are addresses in this process; convert it to numbers, or"
            " use send_object",
        )
    return number


def tag_of(comm: PointToPoint, tag: Any) -> int:
    """Return the tag of a message that names one; inside a collective call it lies above the call's number."""
    own, inside = _whole(comm, "tag", tag), comm.highest_tag != MAX_TAG
    if not 0 <= own <= comm.highest_tag:
        where = " inside a collective call" if inside else ""
        raise _refusal(comm, f"tag {own} is outside 0..{comm.highest_tag}{where}")
    return comm.tag + OWN_TAG * own if inside else own


def refuse_wait(comm: PointToPoint, request: Any) -> NoReturn:
    """Refuse a wait for what is no request."""
    raise UsageError(
        f"rank {comm.rank}: wait for {_article(request)}, at {comm.site or call_site(sys._getframe(1))}; pass"
        " what isend or irecv returned (a Work has a wait() of its own)"
    )


def refuse_overlap(comm: PointToPoint) -> NoReturn:
    """Refuse a sendrecv whose two arrays share memory."""
    raise BufferReuseError(
        f"rank {comm.rank}: sendrecv receives into the memory that it sends from, at"
        f" {comm.site or call_site(sys._getframe(1), comm.opened)}; give each message a buffer of its own"
    )


def _whole(comm: PointToPoint, what: str, value: Any) -> int:
    """Return a rank or a tag as an int of Python's; one of NumPy's would go into traces and reports."""
    try:
        number: int = operator.index(value)
        return number
    except TypeError:
        raise _refusal(
            comm, f"the {what} of a message is {str(value)[:80]!r}, a {type(value).__name__}", "; pass an integer"
        ) from None


def _refusal(comm: PointToPoint, what: str, remedy: str = "") -> UsageError:
    """Return the error for a message that no world could send, with the line of the program."""
    site = comm.site or call_site(sys._getframe(1), comm.opened)
    return UsageError(f"rank {comm.rank}: {what}, at {site}{remedy}")


def _article(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _why_not(array: Any) -> str:
    """Return why this cannot be a message, and what to pass instead."""
    if not hasattr(array, "flags"):
        return f"{_article(array)}; messages are arrays: pass numpy.array(...), or use send_object"
    if not array.flags.c_contiguous:
        return (
            f"an array with strides {array.strides}; messages need C-contiguous arrays: "
            "pass numpy.ascontiguousarray(array) or receive into a fresh one"
        )
    return "an array that is read-only; receive into one that may be written"
