"""What a message costs: the alpha-beta model, with one port in and one port out for each stream of a rank.

    sender    post ──▶ depart = max(post, out_free)          out_free = depart + o + beta n
    wire      arrival = depart + alpha + beta n
    receiver  landed = max(arrival, in_free + o + beta n, receive posted)              in_free = landed
              its wait ends at max(landed, now): a message that has landed costs nothing

The overhead o is the part of alpha in which a port is busy with a message, however short it is. One message takes alpha
+ beta n with any o; n-1 messages into one port take n-2 times o longer. With o = 0, the default, a port handles any
number of empty messages in no time, so a root is never a bottleneck for short arrays.

Every term depends only on the order in which a stream's program posts and waits, never on the order in which a
scheduler happens to run the ranks. So a program without wildcards has exactly one virtual time. In return, contention
inside the network is not modelled, because it would depend on the schedule.

Source: Hockney, The communication challenge for MPP, Parallel Computing 20 (1994), for alpha and beta; Culler et al.,
LogP: Towards a realistic model of parallel computation, PPoPP 1993, for the overhead.

Proved by: tests/comm/sim/test_clock.py, tests/comm/sim/test_world.py
"""

from collections.abc import Callable
from dataclasses import dataclass

from minidist.core.base import hooks


@dataclass(frozen=True)
class LinkModel:
    """Costs of links and of computing. Defaults: 1 µs latency, 10 GB/s links, 100 GFLOP/s and 50 GB/s per rank.

    alpha: seconds of latency per message. beta: seconds per byte. flops: floating-point operations per second of a
    rank. memory_bandwidth: bytes per second of a rank. link: optional `(source, destination) -> (alpha, beta)` in world
    ranks, for networks whose links differ (fast inside a node, slow across nodes). slowdown: optional `rank -> factor`
    by which its computing takes longer, for machines that differ. overhead: the seconds of alpha in which the port of
    the sender, and later that of the receiver, is busy with the message (LogP's o); from 0 to alpha. free_startup:
    messages of purpose startup, which are sent before the first step, take no time; a dry run measures steps.
    """

    alpha: float = 1e-6
    beta: float = 1e-10
    flops: float = 1e11
    memory_bandwidth: float = 5e10
    link: Callable[[int, int], tuple[float, float]] | None = None
    slowdown: Callable[[int], float] | None = None
    overhead: float = 0.0
    free_startup: bool = False

    def __post_init__(self) -> None:
        hooks.comm_checks().check_links(self)

    def cost(self, source: int, destination: int) -> tuple[float, float]:
        """Return (alpha, beta) of the link between two world ranks."""
        return (self.alpha, self.beta) if self.link is None else self.link(source, destination)

    def seconds(self, operations: list[tuple[float, float]]) -> float:
        """Return the time of a list of operations, each (FLOPs, bytes moved): the roofline, summed."""
        return sum(max(flops / self.flops, moved / self.memory_bandwidth) for flops, moved in operations)
