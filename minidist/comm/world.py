"""What a world must offer to its communicators: post, wait, clock and lanes. `SimWorld` and `MPIWorld` are the two."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from minidist.base.trace import Trace
from minidist.comm.call_site import Site
from minidist.comm.communicator import Comm, Request, Work


class World(Protocol):
    checks: bool  # compare headers and watch buffers in flight
    lean: bool  # may there be a shorter way for a sendrecv?

    @property
    def dead(self) -> dict[int, float]:
        """World ranks that were killed -> when (SimWorld(on_failure="isolate") only)."""
        ...

    def nodes(self, members: Sequence[int]) -> list[list[int]]:
        """Places in `members` (world ranks) of those that are near to each other, node by node."""
        ...

    def register(self, comm: Comm) -> None:
        """A communicator was made on this rank."""

    def post(self, comm: Comm, kind: str, array: np.ndarray, peer: int, tag: int, site: Site, guarded: bool) -> Request:
        """Start a send or a receive; `guarded` when the user's program runs before the wait."""
        ...

    def exchange(
        self, comm: Comm, outgoing: np.ndarray, dest: int, incoming: np.ndarray, source: int, tag: int
    ) -> bool:
        """A whole sendrecv at once, in a lean world; False when it must go the ordinary way."""
        ...

    def wait(self, request: Request) -> None:
        """Return when the request is complete; other lanes of the rank run meanwhile."""

    def post_work(self, work: Work) -> Work:
        """Queue work in the lane of its communicator."""
        ...

    def wait_work(self, work: Work) -> Any:
        """Return the work's result when it is there."""

    def time(self) -> float: ...

    def compute(self, operations: Sequence[tuple[float, float]], seconds: float, name: str) -> None: ...

    def progress(self) -> None: ...

    def trace_of(self, comm: Comm) -> Trace: ...


Main = Callable[..., Any]
