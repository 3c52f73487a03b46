"""A communicator is a group of ranks; a collective call is one operation of all of them together.

Every collective is built from point-to-point messages (`minidist/core/collectives`), and all messages of one call carry
the number of the call as their tag. When two different collectives meet by mistake, the error names both, and no rank
continues with the other collective's bytes:

    rank 0   all_reduce #3 ──── tag 3, match key "all_reduce/ring" ────▶ rank 1   broadcast #3: MismatchError

Proved by: tests/comm/test_conformance.py, tests/comm/sim/test_world.py
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np

from minidist.core.comm.point_to_point import MAX_TAG, PointToPoint


class CollectiveCall(PointToPoint):
    """One collective call of a rank: point-to-point messages whose tag is the number of the call."""

    def __init__(self, comm: "Comm", operation: str, match_key: str) -> None:
        self.world, self.name, self.members, self.rank = comm.world, comm.name, comm.members, comm.rank
        self.size, self.ranks, self.nodes, self.context = comm.size, comm.ranks, comm.nodes, comm.of_calls
        self.operation, self.match_key = operation, match_key
        # The tag of all its messages wraps around after 16,384 calls, when the messages of the call that had it before
        # have long arrived.
        self.tag = next(comm.numbers) & MAX_TAG


class Comm(PointToPoint):
    """A rank's handle on a group of ranks.

    origin: the call that makes it, "world.2": the second one of `group` or `dup` on the world. label: what
    tells it from others of that origin. Both together are its name, equal on all members.
    """

    call_class = CollectiveCall

    def __init__(self, world: Any, origin: str, members: Sequence[int], rank: int, label: str = "") -> None:
        # A label that begins with a digit would be read as a part of the number before it.
        name = f"{origin}_{label}" if label[:1].isdigit() else f"{origin}{label}"
        super().__init__(world, name, members, rank)
        # Every rank makes the same calls in the same order, so equal numbers mean the same call, with no message sent.
        self.numbers, self._children, self.of_calls = count(), 0, name + "/collectives"

    def __repr__(self) -> str:
        return f"Comm({self.name!r}, rank {self.rank} of {self.size})"

    def collective(
        self,
        operation: str,
        equal: str = "",
        root: int | None = None,
        sends_itself: bool = False,
        array: np.ndarray | None = None,
    ) -> CollectiveCall:
        """Return this rank's next collective call.

        equal, root: what must be equal on every member, in addition to the operation: compared with each message.
        sends_itself: the algorithm is the user's, so a report names the lines of its messages instead of the line of
        the call. array: what this rank passes to it, for reports.
        """
        match_key = operation if root is None else f"{operation} root {root}"
        return self.call_class(self, operation, f"{match_key} {equal}" if equal else match_key)

    # groups -----------------------------------------------------------------------------------------------------------

    def dup(self) -> "Comm":
        """Return a communicator of the same ranks in another context, whose messages never meet this one's.

        All members must call it.
        """
        # Part of the name, so that two duplicates of one communicator are two contexts.
        self._children += 1
        return type(self)(self.world, f"{self.name}.{self._children}", self.members, self.rank, "dup")

    def group(self, ranks: Sequence[int], label: str) -> "Comm":
        """Return a communicator of `ranks` (of this one, in that order), this rank among them. Sends nothing.

        Every member must call it with the same ranks and label, as its same-numbered call of `group` or `dup`.
        """
        self._children += 1
        # A member is its world rank; its place in `ranks` is its number in the new communicator.
        members = [self.members[r] for r in ranks]
        return type(self)(
            self.world, f"{self.name}.{self._children}", members, list(ranks).index(self.rank), f"{label}"
        )
