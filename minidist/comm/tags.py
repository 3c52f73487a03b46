"""The tags of messages, and a message in words, for reports: with the line of the program that posted it.

    outside a collective call   the tag that the program names
    inside one                  the number of the call + OWN_TAG * the tag that the algorithm names

Proved by: tests/comm/sim/test_world.py, tests/comm/test_conformance.py, tests/comm/test_error_lines.py
"""

import sys
from dataclasses import dataclass
from typing import Any

from minidist.base.traces import MessageEvent
from minidist.comm.call_site import NOWHERE, CallSite, call_site
from minidist.comm.message_checks import OWN_TAG, CheckedMessages
from minidist.core.base.errors import RankDeadError
from minidist.core.comm.communicator import ANY
from minidist.core.comm.sim.matching import SimRequest


def describe(request: Any) -> str:
    """Return the operation, the peer, the tag, the bytes and the line of a message."""
    direction = "to" if request.kind == "send" else "from"
    other = "any rank" if request.peer == ANY else f"rank {request.comm.members[request.peer]}"
    key = request.comm.match_key
    what = request.kind if key == "message" else f"{key}: {request.kind}"
    return f"{what} {direction} {other}, tag {tag_text(request.tag, key)}, {request.array.nbytes} B, at {request.site}"


def tag_text(tag: int, key: str = "") -> str:
    """Return a message's tag in words: "3", or in a collective call that tells its messages apart "3 (own tag 1)".

    key: the match key of the message. A program's own may have any tag, and its receives may take any.
    """
    if key == "message":
        return "any" if tag < 0 else f"{tag}"
    own, number = divmod(tag, OWN_TAG)
    return f"{number} (own tag {own})" if own else f"{number}"


@dataclass(eq=False, init=False)
class LocatedRequest(SimRequest):
    """A request whose line is found when somebody asks for it.

    posted_at: the line, None where it can be found. event: its record, where one is kept. error: it cannot complete.
    is_free: it takes no time (`LinkModel.free_startup`).
    """

    comm: CheckedMessages
    posted_at: CallSite | None = None
    event: MessageEvent | None = None
    error: RankDeadError | None = None
    is_free: bool = False
    describe = describe

    @property
    def site(self) -> CallSite:
        """The line that posted it. A blocking call still is at its line while its request is open."""
        if self.posted_at is not None:
            return self.posted_at
        if self.comm.site is not None:
            return self.comm.site
        fiber = self.stream.fiber
        if fiber is None or fiber.dead:
            return NOWHERE
        return call_site(fiber.gr_frame or sys._getframe(1), self.comm.opened)
