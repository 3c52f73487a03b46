"""What a message costs: the alpha-beta model, with one port in and one port out for each lane of a rank.

    sender    post ──▶ depart = max(post, out_free)          out_free = depart + beta n
    wire      arrival = depart + alpha + beta n
    receiver  landed = max(arrival, in_free + beta n, receive posted)                  in_free = landed
              its wait ends at max(landed, now): what has landed already costs nothing

Every term depends only on the order in which a lane's program posts and waits, never on the order in which a scheduler
happens to run the ranks. So a program without wildcards has exactly one virtual time. The price: contention inside the
fabric is not modelled here (it would depend on the schedule); it can be replayed from a trace afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from minidist.base.errors import UsageError


@dataclass(frozen=True)
class LinkModel:
    """Costs of links and of computing. Defaults: 1 µs latency, 10 GB/s links, 100 GFLOP/s and 50 GB/s a rank.

    alpha: seconds of latency a message. beta: seconds a byte. flops: floating-point operations a second a rank.
    memory_bandwidth: bytes a second a rank. link: optional `(source, destination) -> (alpha, beta)` in world ranks, for
    networks whose links differ (fast inside a node, slow across nodes).
    """

    alpha: float = 1e-6
    beta: float = 1e-10
    flops: float = 1e11
    memory_bandwidth: float = 5e10
    link: Callable[[int, int], tuple[float, float]] | None = None

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            if not 0 <= getattr(self, name) < inf:
                raise UsageError(
                    f"link model: {name} is {getattr(self, name)}; it must be at least 0 seconds, and finite"
                )
        for name in ("flops", "memory_bandwidth"):
            if not getattr(self, name) > 0:
                raise UsageError(f"link model: {name} is {getattr(self, name)}; it must be above 0 a second")

    def cost(self, source: int, destination: int) -> tuple[float, float]:
        """(alpha, beta) of the link between two world ranks."""
        return (self.alpha, self.beta) if self.link is None else self.link(source, destination)

    def nodes(self, members: Sequence[int]) -> list[list[int]]:
        """Ranks between which there are links of the least cost are a node; where all links are alike all are one.

        Returns places in `members`, world ranks, node by node.
        """
        n = len(members)
        costs = (
            {(i, j): self.cost(members[i], members[j]) for i in range(n) for j in range(n) if i != j}
            if self.link
            else {}
        )
        fastest = min(costs.values(), key=lambda cost: cost[::-1], default=None)
        nodes: list[list[int]] = []
        for i in range(n):
            near = next((node for node in nodes if costs.get((node[0], i)) == fastest), None)
            if near is None:
                nodes.append([i])
            else:
                near.append(i)
        return nodes

    def seconds(self, operations: list[tuple[float, float]]) -> float:
        """Time of a list of operations, each (FLOPs, bytes moved): the roofline, summed."""
        return sum(max(flops / self.flops, moved / self.memory_bandwidth) for flops, moved in operations)
