"""A request of a simulated world that knows the line of the program that posted it.

Proved by: tests/comm/sim/test_world.py, tests/comm/test_error_lines.py
"""

import sys
from dataclasses import dataclass

from minidist.comm.call_site import NOWHERE, CallSite, call_site
from minidist.comm.tags import describe
from minidist.core.comm.sim.state import SimRequest


@dataclass(slots=True, eq=False)
class LocatedRequest(SimRequest):
    """A request whose line is found when somebody asks for it."""

    describe = describe

    @property
    def site(self) -> CallSite:
        """The line that posted it. A blocking call still is at its line while its request is open."""
        if self.posted_at is not None:
            return self.posted_at  # type: ignore[no-any-return]
        fiber = self.stream.fiber
        if fiber is None or fiber.dead:
            return NOWHERE
        return call_site(fiber.gr_frame or sys._getframe(1), self.comm.opened)
