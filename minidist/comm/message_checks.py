"""What can be wrong with a message on one rank alone, refused with the line of the program before anything is sent.

A message is plain when its array is contiguous, and its rank and tag are integers in their ranges. `check` and `tag_of`
look at all others.

Proved by: tests/comm/test_conformance.py, tests/misuse/test_misuse.py
"""

import operator
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minidist.comm.call_site import CallSite, call_site
from minidist.comm.errors import BufferReuseError
from minidist.core.base.arrays import ndarray
from minidist.core.base.errors import UsageError
from minidist.core.comm.communicator import ANY, MAX_TAG, CollectiveCall, PointToPoint, Request

# Inside a collective call the tag of a message is the call's number; a separate tag lies above the header's bit, so
# that messages are told apart as they would be outside, and still belong to their call. 2**23 - 1 is the highest tag of
# UCX, the lowest limit of today's MPI libraries.
OWN_TAG = 2**15
MAX_OWN_TAG = 255  # the highest tag that a message of a collective call may name
MASKED = "a masked array, whose mask is not sent; pass array.filled(0), or the data and the mask"


def may_overlap(a: Any, b: Any) -> bool:
    """Return whether two arrays may share memory."""
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.size > 0 and np.may_share_memory(a, b)


class CheckedMessages(PointToPoint):
    """Messages in a world that programs run in.

    highest_tag: that a message may name. site: the line of all messages (None: look for the caller's line at each
    message, and take `opened` where there is none). calls_before: what the messages say of the collective calls before
    this one (see `call_log`). choices: of a `Comm`, which algorithm "auto" has taken, by operation and bytes. incoming:
    of a call, the array that it has received in.
    """

    highest_tag = MAX_TAG
    site: CallSite | None = None
    opened: CallSite | None = None
    calls_before = bytes(2)
    choices: dict[tuple[str, int], str] | None = None
    incoming: Any = None

    def wait(self, request: Request) -> np.ndarray:
        if not isinstance(request, Request):
            raise self._no_request("wait", request)
        if not request.finished:
            self.world.note_wait(request)
        return super().wait(request)

    def waitall(self, requests: Sequence[Request]) -> None:
        if not isinstance(requests, Iterable):
            raise self._no_request("waitall", requests)
        for request in requests:
            self.wait(request)

    def _no_request(self, call: str, value: Any) -> UsageError:
        """Return the error for something else in the place of a request, or of several."""
        return UsageError(
            f"rank {self.rank}: {call} for {_article(value)}, at {self.site or call_site(sys._getframe(1))}; pass"
            " what isend or irecv returned (a Work has its method wait())"
        )

    def sendrecv(
        self, outgoing: np.ndarray, dest: int, incoming: np.ndarray, source: int, tag: int | None = None
    ) -> None:
        # `may_overlap`, without a call: this is entered for every step of a ring.
        arrays = self.world.checks and isinstance(outgoing, np.ndarray) and isinstance(incoming, np.ndarray)
        if arrays and np.may_share_memory(outgoing, incoming):
            raise BufferReuseError(
                f"rank {self.rank}: sendrecv receives into the memory that it sends from, at"
                f" {self.site or call_site(sys._getframe(1), self.opened)}; give each message a separate buffer"
            )
        PointToPoint.sendrecv(self, outgoing, dest, incoming, source, tag)

    def _post(self, kind: str, array: np.ndarray, peer: int, tag: int | None, nonblocking: bool) -> Request:
        if tag is None:
            tag = self.tag
        elif type(tag) is not int or self.highest_tag != MAX_TAG or not 0 <= tag <= MAX_TAG:
            tag = tag_of(self, tag)
        # Most are a plain array, C-contiguous and writeable, and a rank in its range.
        plain = array.__class__ is ndarray and array.flags.carray and not array.dtype.hasobject
        if not (plain and peer.__class__ is int and 0 <= peer < self.size):
            peer = check(self, kind, array, peer)
        post = self.world.post
        request: Request = post(self, kind, array, peer, tag, nonblocking)
        if nonblocking:
            self.world.note_request(request)
        return request


class CheckedCall(CheckedMessages, CollectiveCall):
    """One collective call of a rank, in a world that programs run in."""

    highest_tag = MAX_OWN_TAG


def check(comm: CheckedMessages, kind: str, array: Any, peer: Any) -> int:
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


def tag_of(comm: CheckedMessages, tag: Any) -> int:
    """Return the tag of a message that names one; inside a collective call it lies above the call's number."""
    own, inside = _whole(comm, "tag", tag), comm.highest_tag != MAX_TAG
    if not 0 <= own <= comm.highest_tag:
        where = " inside a collective call" if inside else ""
        raise _refusal(comm, f"tag {own} is outside 0..{comm.highest_tag}{where}")
    return comm.tag + OWN_TAG * own if inside else own


def _whole(comm: CheckedMessages, what: str, value: Any) -> int:
    """Return a rank or a tag as an int of Python's; one of NumPy's would go into traces and reports."""
    try:
        number: int = operator.index(value)
        return number
    except TypeError:
        raise _refusal(
            comm, f"the {what} of a message is {str(value)[:80]!r}, a {type(value).__name__}", "; pass an integer"
        ) from None


def _refusal(comm: CheckedMessages, what: str, remedy: str = "") -> UsageError:
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
