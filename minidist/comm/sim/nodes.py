"""Which simulated ranks are near to each other, for collectives on two levels.

Proved by: tests/collectives/test_two_level.py
"""

from collections.abc import Sequence

from minidist.core.comm.sim.matching import LinkModel


def nodes_of(links: LinkModel, members: Sequence[int]) -> list[list[int]]:
    """Return the places in `members` (world ranks) node by node.

    Ranks joined by the cheapest links form a node; with uniform links all ranks are one node.
    """
    # (alpha, beta) of each pair of places; with uniform links the table is empty, and all ranks end in one node.
    n = len(members)
    costs = (
        {(i, j): links.cost(members[i], members[j]) for i in range(n) for j in range(n) if i != j} if links.link else {}
    )
    fastest = min(costs.values(), key=lambda cost: cost[::-1], default=None)

    # Beta counts first, then alpha. A rank joins the first node whose first rank is joined to it by the fastest
    # link.
    nodes: list[list[int]] = []
    for i in range(n):
        near = next((node for node in nodes if costs.get((node[0], i)) == fastest), None)
        if near is None:
            nodes.append([i])
        else:
            near.append(i)
    return nodes
