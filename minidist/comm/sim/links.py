"""The cost model of a `SimWorld`: Hockney's alpha-beta model, and four properties of machines that it leaves out.

    link          networks whose links differ         overhead       a port is busy with every message
    slowdown      ranks that compute more slowly      free_startup   messages before the first step take no time

The overhead o is the part of alpha in which a port is busy with a message, however short it is:

    sender    out_free = depart + o + beta n
    receiver  landed = max(arrival, in_free + o + beta n, receive posted)

One message takes alpha + beta n with any o; n-1 messages into one port take n-2 times o longer. With o = 0, the
default, a port handles any number of empty messages in no time, so a root is never a bottleneck for short arrays.

A `SimWorld` uses all of them. A `Sim`, the world of the core, uses alpha, beta and the rates of computing, and refuses
a model that sets one of the four.

Source: Culler et al., LogP: Towards a realistic model of parallel computation, PPoPP 1993, for the overhead.

Proved by: tests/collectives/test_overhead.py, tests/comm/sim/test_clock.py
"""

from collections.abc import Callable
from dataclasses import dataclass

from minidist.comm.tags import LocatedRequest
from minidist.core.comm.sim.matching import AlphaBeta


@dataclass(frozen=True)
class LinkModel(AlphaBeta):
    """Costs of links and of computing. Defaults: 1 µs latency, 10 GB/s links, 100 GFLOP/s and 50 GB/s per rank.

    alpha: seconds of latency per message. beta: seconds per byte. flops: floating-point operations per second of a
    rank. memory_bandwidth: bytes per second of a rank. link: optional `(source, destination) -> (alpha, beta)` in world
    ranks, for networks whose links differ (fast inside a node, slow across nodes). slowdown: optional `rank -> factor`
    by which its computing takes longer, for machines that differ. overhead: the seconds of alpha in which the port of
    the sender, and later that of the receiver, is busy with the message (LogP's o); from 0 to alpha. free_startup:
    messages of purpose startup, which are sent before the first step, take no time; a dry run measures steps.
    """

    link: Callable[[int, int], tuple[float, float]] | None = None
    slowdown: Callable[[int], float] | None = None
    overhead: float = 0.0
    free_startup: bool = False

    def cost(self, source: int, destination: int) -> tuple[float, float]:
        """Return (alpha, beta) of the link between two world ranks."""
        return (self.alpha, self.beta) if self.link is None else self.link(source, destination)

    def _costs_of(self, request: LocatedRequest) -> tuple[float, float, float]:
        """Return alpha, beta and overhead of a message."""
        if self.free_startup and request.is_free:
            return 0.0, 0.0, 0.0
        pair = request.stream.rank, request.other
        return *self.cost(*(pair if request.kind == "send" else pair[::-1])), self.overhead

    def leave(self, request: LocatedRequest) -> None:
        """Set when a send has left the out-port, and when it arrives."""
        alpha, beta, overhead = self._costs_of(request)
        left = request.depart + beta * request.nbytes
        request.end = request.stream.out_free = left + overhead
        request.arrival = left + alpha

    def busy(self, request: LocatedRequest) -> float:
        """Return the seconds for which the in-port is busy with a message that is received."""
        _, beta, overhead = self._costs_of(request)
        return overhead + beta * request.nbytes
