"""What a communicator of the simulated world holds when its run is over: the record, and an error for all else.

    def main(comm): kept.append(comm)
    SimWorld(2).run(main)
    kept[0].trace                    the record can be read
    all_reduce(kept[0], array)       UsageError: no other rank runs; on one rank it would return without an error

Proved by: tests/comm/sim/test_misuse.py
"""

import sys
from collections.abc import Sequence
from typing import Any

from minidist.base.traces import Trace
from minidist.comm.call_site import CallSite, call_site
from minidist.core.base.errors import UsageError
from minidist.core.comm.communicator import PointToPoint


class EndedWorld:
    """Stands for the world of a run that is over."""

    kind = "simulated"

    def __init__(self, traces: Sequence[Trace], end_time: float) -> None:
        self.traces, self.end_time = traces, end_time

    def trace_of(self, comm: PointToPoint) -> Trace:
        """Return the record of the rank that `comm` belonged to."""
        return self.traces[comm.members[comm.rank]]

    def time(self) -> float:
        """Return the virtual time at which the run ended."""
        return self.end_time

    def post_or_wait(self, first: Any, *_: Any) -> Any:
        """Refuse a message, or the wait for one, of something else that a program has kept."""
        raise used_after_run(call_site(sys._getframe(1)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise used_after_run(call_site(sys._getframe(1)))


def used_after_run(site: CallSite) -> UsageError:
    """Return the error for a communicator, or a request of one, that is used after its run."""
    return UsageError(
        f"a communicator is used after its run has ended, at {site}; communicate only inside the function that the run "
        "calls, on the communicator that it is given"
    )
