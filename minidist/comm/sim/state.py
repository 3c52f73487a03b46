"""What the parts of a `SimWorld` share of a run, in addition to what its core has.

Proved by: tests/comm/sim/test_world.py
"""

from dataclasses import dataclass, field
from typing import Any

from minidist.core.comm.point_to_point import Request, Work
from minidist.core.comm.sim.state import SimRequest, SimState

AnyKey = tuple[str, int, int]  # context, destination, tag: of a receive from any rank


@dataclass(eq=False)
class RunState(SimState):
    """One run of a `SimWorld`."""

    chooser: Any = None  # see any_source.py
    eager_limit: int = -1  # sends of at most so many bytes are buffered; -1: none, not even an empty one
    open: dict[AnyKey, list[SimRequest]] = field(default_factory=dict)  # receives from any rank, and those behind them
    returned: set[int] = field(default_factory=set)
    dead: dict[int, float] = field(default_factory=dict)  # when each killed rank died

    def __post_init__(self) -> None:
        # By rank and id: the requests and works that no wait has been called for.
        self.unwaited: list[dict[int, Request | Work]] = [{} for _ in range(self.size)]
