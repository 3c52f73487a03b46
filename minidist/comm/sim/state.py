"""What the parts of a `SimWorld` share of a run, in addition to what its core has.

Proved by: tests/comm/sim/test_world.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from minidist.core.comm.communicator import Request, Work
from minidist.core.comm.sim.matching import SimState


class Candidate(NamedTuple):
    """A possible match: `receiver` (world rank) would get the oldest message of `sender`, ready at virtual `time`.

    context, tag: of the receive; a rank may have several wildcard receives open.
    """

    time: float
    receiver: int
    sender: int
    context: str = ""
    tag: int = 0


Chooser = Callable[[Sequence[Candidate]], int]  # which of the candidates a receive from any rank gets


def earliest(candidates: Sequence[Candidate]) -> int:
    """Choose the message that is there first; ties by receiver, then sender. The default."""
    return min(range(len(candidates)), key=candidates.__getitem__)


@dataclass(eq=False)
class RunState(SimState):
    """One run of a `SimWorld`."""

    chooser: Chooser = earliest
    eager_limit: int = -1  # sends of at most this size in bytes are buffered; -1: none, not even an empty one
    returned: set[int] = field(default_factory=set)
    dead: dict[int, float] = field(default_factory=dict)  # when each killed rank died
    unwaited: dict[int, Request | Work] = field(default_factory=dict)  # by id: those that no wait was called for

    def items_unwaited(self) -> list[tuple[int, Request | Work]]:
        """Return what no wait was called for, each with its rank, in their order."""
        ranks = ((item.comm.members[item.comm.rank], item) for item in self.unwaited.values())
        return sorted(ranks, key=itemgetter(0))
