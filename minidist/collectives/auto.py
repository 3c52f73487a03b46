"""`algorithm="auto"`: the cheapest algorithm for this many bytes, ranks and links, by the alpha-beta cost of each.

No algorithm is best everywhere: short messages want few rounds (latency alpha a message), long ones few bytes (beta a
byte), and where the two meet depends on the network:

    bytes      1 B ─────────── KiB ─────────────────── MiB ──▶
    all-reduce   few rounds    recursive doubling,      every byte sent twice only: rabenseifner,
                               trees                    segmented ring; two levels, where links differ

Where all links of the communicator are alike the cost is `virtual_time.TIMES`, the same formulas that the traces of the
algorithms are tested against. Where they differ (fast inside a node, slow across) there is no formula for all: each
algorithm is run on phantom arrays and a clock of its own, once for each size. On more than 64 such ranks that takes too
long, and the slowest link's formulas decide. A world that does not know its links (MPI) is taken for the default
`LinkModel`. All ranks choose alike, because they choose from what all know.

Source of the method: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, 2005.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import numpy as np

from minidist.base.layout import chunk_sizes
from minidist.base.phantom import Phantom
from minidist.collectives import virtual_time
from minidist.collectives.registry import algorithms
from minidist.comm.clock import LinkModel
from minidist.comm.communicator import Comm
from minidist.comm.simulated import SimWorld

MOST = 64  # ranks on links that differ for which every algorithm is tried


def choose(comm: Comm, operation: str, nbytes: int) -> str:
    """The name of the cheapest algorithm of `operation` on an array of `nbytes` in all."""
    links, members = getattr(comm.world, "links", LinkModel()), tuple(comm.members)
    alike, alpha, beta = _slowest(links, members)
    if alike or comm.size > MOST:
        return cheapest(operation, nbytes, comm.size, alpha, beta)
    nodes = tuple(map(tuple, comm.nodes)) if comm.nodes else None
    return fastest(operation, nbytes, links, members, nodes)


@lru_cache(4096)
def cheapest(operation: str, nbytes: int, ranks: int, alpha: float, beta: float) -> str:
    """The same, from numbers alone. Of equal costs the first in alphabetical order."""
    costs = {
        name: time(nbytes, ranks, alpha, beta)
        for (what, name), time in sorted(virtual_time.TIMES.items())
        if what == operation
    }
    return min(costs, key=costs.__getitem__)


@lru_cache(1024)
def fastest(
    operation: str,
    nbytes: int,
    links: LinkModel,
    members: tuple[int, ...],
    nodes: tuple[tuple[int, ...], ...] | None = None,
) -> str:
    """The same on links that differ: who is done first on the virtual clock."""
    link = links.link
    assert link is not None
    ours = replace(links, link=lambda a, b: link(members[a], members[b]))
    times = {
        name: virtual_seconds(operation, name, len(members), nbytes, ours, nodes)
        for name in sorted(algorithms()[operation])
    }
    return min(times, key=times.__getitem__)


def virtual_seconds(
    operation: str,
    algorithm: str,
    ranks: int,
    nbytes: int,
    links: LinkModel,
    nodes: tuple[tuple[int, ...], ...] | None = None,
) -> float:
    """Until the last rank is done with one call, for `nbytes` in all. Nothing is allocated and nothing added."""
    world = SimWorld(ranks, checks=False, record=False, timeout=0, links=links)
    world.run(_call, operation, algorithm, nbytes, nodes)
    return world.end_time


def _call(comm: Comm, operation: str, algorithm: str, nbytes: int, nodes: tuple[tuple[int, ...], ...] | None) -> Any:
    from minidist.collectives import calls  # which asks this file

    if nodes:
        comm.nodes = [list(node) for node in nodes]
    counts = chunk_sizes(nbytes, comm.size)
    whole, mine = cast(Any, Phantom(nbytes, np.uint8)), cast(Any, Phantom(counts[comm.rank], np.uint8))
    function = getattr(calls, operation)
    if operation in ("gather", "all_gather"):
        return function(comm, mine, counts=counts, algorithm=algorithm)
    if operation == "scatter":
        return function(comm, whole if comm.rank == 0 else None, mine, algorithm=algorithm)
    if operation == "all_to_all":
        whole = Phantom(-(-nbytes // comm.size) * comm.size, np.uint8)
    return function(comm, whole, algorithm=algorithm)


@lru_cache(256)
def _slowest(links: LinkModel, members: tuple[int, ...]) -> tuple[bool, float, float]:
    """Are all links alike? And the greatest alpha and beta."""
    if links.link is None:
        return True, links.alpha, links.beta
    costs = {links.cost(a, b) for a in members for b in members if a != b} or {(0.0, 0.0)}
    return len(costs) == 1, max(alpha for alpha, _ in costs), max(beta for _, beta in costs)
