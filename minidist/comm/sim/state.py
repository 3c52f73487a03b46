"""What the parts of a `SimWorld` share of a run, in addition to what its core has.

Proved by: tests/comm/sim/test_world.py
"""

from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from minidist.core.comm.point_to_point import Request, Work
from minidist.core.comm.sim.state import SimState


@dataclass(eq=False)
class RunState(SimState):
    """One run of a `SimWorld`."""

    chooser: Any = None  # see choosers.py
    eager_limit: int = -1  # sends of at most this size in bytes are buffered; -1: none, not even an empty one
    returned: set[int] = field(default_factory=set)
    dead: dict[int, float] = field(default_factory=dict)  # when each killed rank died
    unwaited: dict[int, Request | Work] = field(default_factory=dict)  # by id: those that no wait was called for

    def items_unwaited(self) -> list[tuple[int, Request | Work]]:
        """Return what no wait was called for, each with its rank, in their order."""
        ranks = ((item.comm.members[item.comm.rank], item) for item in self.unwaited.values())
        return sorted(ranks, key=itemgetter(0))
