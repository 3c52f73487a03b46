"""Before MPI makes a communicator, each member learns whether the one before it in the list means the same one.

MPI would wait for ever for members that are named on one rank only, and it knows no labels. So each rank sends its
claim to the next member in its list, and receives a claim from any rank whose next member it is: n messages, on a
communicator that only the world uses. They do not appear in the trace.

Proved by: tests/comm/mpi/test_groups.py
"""

import os
from typing import Any

from minidist.comm.communicator import Claim, unlike_claims

_TAG = 1  # on the world's own communicator, whose other messages are collective calls of MPI's


class Membership:
    """This rank's claims, and those that other ranks have sent to it. base: MPI's communicator of the whole world."""

    def __init__(self, base: Any, any_source: int) -> None:
        self.base, self.any_source = base, any_source
        self.made: dict[str, Claim] = {}  # by origin
        self.making = ""  # origin of the communicator that waits for a claim
        self.received: dict[str, Claim] = {}  # of communicators that this rank has not made yet

    def compare(self, claim: Claim) -> None:
        """Raise MismatchError when the member before this rank claims something else. Blocks until it has claimed."""
        origin, members = claim.origin, claim.members
        self.made[origin], self.making = claim, origin
        if len(members) > 1:
            following = members[(members.index(claim.rank) + 1) % len(members)]
            sent = self.base.isend(claim, following, _TAG)
            while origin not in self.received:
                os.sched_yield()
                self.take()
            theirs = self.received.pop(origin)
            if not theirs.agrees(claim):
                raise unlike_claims(claim, theirs)
            sent.wait()
        self.making = ""

    def take(self) -> None:
        """Receive the claims that have come; raise for one of a communicator that this rank has made already."""
        while self.base.iprobe(self.any_source, _TAG):
            claim = self.base.recv(source=self.any_source, tag=_TAG)
            if claim.origin in self.made and claim.origin != self.making:
                raise unlike_claims(self.made[claim.origin], claim)
            self.received[claim.origin] = claim
