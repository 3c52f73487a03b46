"""What can be wrong with a message on one rank alone, refused with the line of the program before anything is sent.

A message is plain when its array is contiguous, and its rank and tag are integers in their ranges.
`message_refusals.py` checks all others; it is imported with the first of them.

Proved by: tests/comm/test_conformance.py, tests/misuse/test_misuse.py
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from minidist.comm.call_site import CallSite, call_site
from minidist.comm.errors import BufferReuseError
from minidist.core.base.arrays import ndarray
from minidist.core.comm.communicator import MAX_TAG, CollectiveCall, PointToPoint, Request

# Inside a collective call the tag of a message is the call's number; a separate tag lies above the header's bit, so
# that messages are told apart as they would be outside, and still belong to their call. 2**23 - 1 is the highest tag of
# UCX, the lowest limit of today's MPI libraries.
OWN_TAG = 2**15
MAX_OWN_TAG = 255  # the highest tag that a message of a collective call may name


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
            self._refuse("wait", request)
        if not request.finished:
            self.world.note_wait(request)
        return super().wait(request)

    def waitall(self, requests: Sequence[Request]) -> None:
        if not isinstance(requests, Iterable):
            self._refuse("waitall", requests)
        for request in requests:
            self.wait(request)

    def _refuse(self, call: str, value: Any) -> NoReturn:
        from minidist.comm.message_refusals import no_request

        raise no_request(self, call, value)

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
            from minidist.comm.message_refusals import tag_named

            # Inside a collective call it lies above the call's number.
            named = tag_named(self, tag)
            tag = named if self.highest_tag == MAX_TAG else self.tag + OWN_TAG * named
        # Most are a plain array, C-contiguous and writeable, and a rank in its range.
        plain = array.__class__ is ndarray and array.flags.carray and not array.dtype.hasobject
        if not (plain and peer.__class__ is int and 0 <= peer < self.size):
            from minidist.comm.message_refusals import check

            peer = check(self, kind, array, peer)
        post = self.world.post
        request: Request = post(self, kind, array, peer, tag, nonblocking)
        if nonblocking:
            self.world.note_request(request)
        return request


class CheckedCall(CheckedMessages, CollectiveCall):
    """One collective call of a rank, in a world that programs run in."""

    highest_tag = MAX_OWN_TAG
