"""Checks a message that is not plain: it can be sent, or is refused with the line of the program and a remedy.

This module is imported with the first such message, see `message_checks.py`. comm: the `CheckedMessages` that sends or
receives it.

Proved by: tests/comm/test_conformance.py, tests/misuse/test_misuse.py
"""

import operator
import sys
from typing import Any

from minidist.comm.call_site import call_site
from minidist.core.base.errors import UsageError
from minidist.core.comm.communicator import ANY, MAX_TAG

MASKED = "a masked array, whose mask is not sent; pass array.filled(0), or the data and the mask"


def check(comm: Any, kind: str, array: Any, peer: Any) -> int:
    """Return the peer of a message as a Python int; raise UsageError for what is no rank or cannot be sent."""
    number = _whole(comm, "rank", peer)
    if not 0 <= number < comm.size and (number != ANY or kind == "send"):
        raise _refusal(comm, f"{kind} names rank {number}, but {comm.name} has ranks 0..{comm.size - 1}")
    # An array of numbers, contiguous and, for a receive, writeable.
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


def tag_named(comm: Any, tag: Any) -> int:
    """Return the tag that a message names, as a Python int; raise UsageError for what is no tag."""
    number = _whole(comm, "tag", tag)
    if not 0 <= number <= comm.highest_tag:
        where = " inside a collective call" if comm.highest_tag != MAX_TAG else ""
        raise _refusal(comm, f"tag {number} is outside 0..{comm.highest_tag}{where}")
    return number


def _whole(comm: Any, what: str, value: Any) -> int:
    """Return a rank or a tag as a Python int, because an integer of NumPy's would go into traces and reports."""
    try:
        number: int = operator.index(value)
        return number
    except TypeError:
        raise _refusal(
            comm, f"the {what} of a message is {str(value)[:80]!r}, a {type(value).__name__}", "; pass an integer"
        ) from None


def no_request(comm: Any, call: str, value: Any) -> UsageError:
    """Return the error for a value that is passed in place of a request, or of several."""
    return UsageError(
        f"rank {comm.rank}: {call} for {_article(value)}, at {comm.site or call_site(sys._getframe(1))}; pass"
        " what isend or irecv returned (a Work has its method wait())"
    )


def _refusal(comm: Any, what: str, remedy: str = "") -> UsageError:
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
