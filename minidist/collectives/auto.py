"""`algorithm="auto"`: the cheapest algorithm for this many bytes, ranks and links, by the alpha-beta cost of each.

No algorithm is best everywhere: short messages want few rounds (latency alpha per message), long ones few bytes (beta
per byte), and where the two meet depends on the network:

    bytes      1 B ─────────── KiB ─────────────────── MiB ──▶
    all-reduce   few rounds    recursive doubling,      every byte sent twice only: rabenseifner,
                               trees                    segmented ring; two levels, where links differ

Where all links of the communicator are alike, the cost is the formula that each algorithm is registered with. Where
they differ (fast inside a node, slow across) there is no formula for all: each algorithm is run on meta arrays and a
clock of its own, once for each size. On more than 64 such ranks that takes too long, and the slowest link's formulas
decide. A world that does not know its links (MPI) is taken for the default `LinkModel`. All ranks choose alike, because
they choose from what all know. An algorithm that was registered without the formula of its seconds is never chosen.

Source of the method: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, 2005.
Proved by: tests/collectives/test_auto.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, text_of
from minidist.base.layout import chunk_sizes
from minidist.base.meta import MetaArray
from minidist.collectives.registry import ALGORITHMS, at_registration
from minidist.comm.communicator import Comm
from minidist.comm.point_to_point import PointToPoint
from minidist.comm.sim.clock import LinkModel
from minidist.comm.sim.world import SimWorld

MAX_REAL_BYTES = 2**28  # of all ranks' arrays, where a user's algorithm needs real ones
MAX_TRIED_RANKS = 64  # on links that differ; every algorithm is run once for so many ranks


def choose(comm: PointToPoint, operation: str, nbytes: int) -> str:
    """Return the name of the cheapest algorithm of `operation` on an array of `nbytes` in all."""
    links, members = getattr(comm.world, "links", LinkModel()), tuple(comm.members)
    # Uniform links have formulas. Too many ranks to try: the formulas of the slowest link, which bound the others.
    alike, alpha, beta = _slowest(links, members)
    if alike or comm.size > MAX_TRIED_RANKS:
        return cheapest(operation, nbytes, comm.size, alpha, beta)

    # Tuples, because `fastest` remembers its result for each set of arguments.
    nodes = tuple(map(tuple, comm.nodes)) if comm.nodes else None
    return fastest(operation, nbytes, links, members, nodes)


@lru_cache(4096)
def cheapest(operation: str, nbytes: int, ranks: int, alpha: float, beta: float) -> str:
    """Return the algorithm with the smallest formula; of equal ones the first in alphabetical order."""

    # Sorted, so that every rank breaks a tie in the same way.
    entries = sorted(ALGORITHMS[operation].items())
    costs = {name: entry.seconds(nbytes, ranks, alpha, beta) for name, entry in entries if entry.seconds is not None}
    return min(costs, key=costs.__getitem__)


@lru_cache(1024)
def fastest(
    operation: str,
    nbytes: int,
    links: LinkModel,
    members: tuple[int, ...],
    nodes: tuple[tuple[int, ...], ...] | None = None,
) -> str:
    """Return the algorithm that is done first on links that differ, by running each on the virtual clock."""
    link = links.link
    assert link is not None

    # In the trial world rank i takes the place of this communicator's member i.
    ours = replace(links, link=lambda a, b: link(members[a], members[b]))
    times = {
        name: virtual_seconds(operation, name, len(members), nbytes, ours, nodes)
        for name, entry in sorted(ALGORITHMS[operation].items())
        if entry.seconds is not None
    }
    return min(times, key=times.__getitem__)


# A program may register an algorithm after the first choice.
at_registration.extend((cheapest.cache_clear, fastest.cache_clear))


def virtual_seconds(
    operation: str,
    algorithm: str,
    ranks: int,
    nbytes: int,
    links: LinkModel,
    nodes: tuple[tuple[int, ...], ...] | None = None,
) -> float:
    """Return the seconds until the last rank is done with one call on `nbytes` in all.

    Runs the algorithm on meta arrays: nothing is allocated and nothing added. algorithm: "auto", too.
    """
    world = SimWorld(ranks, checks=False, record=False, timeout=0, links=links)
    own = algorithm != "auto" and ALGORITHMS[operation][algorithm].is_users
    try:
        world.run(_run_on_shapes, operation, algorithm, nbytes, nodes)
    except Exception as error:
        # A user's algorithm may look at the elements, which a meta array does not have.
        if not own:
            raise
        if ranks * nbytes > MAX_REAL_BYTES:
            raise UsageError(
                f"{operation}/{algorithm} does not run on arrays without elements ({text_of(error)}), and {ranks} ranks"
                f" with {nbytes:,} B each are more than {MAX_REAL_BYTES:,} B; take smaller sizes"
            ) from error
        world.run(_run_on_shapes, operation, algorithm, nbytes, nodes, np.zeros)
    return world.end_time


def _run_on_shapes(
    comm: Comm,
    operation: str,
    algorithm: str,
    nbytes: int,
    nodes: tuple[tuple[int, ...], ...] | None,
    make: Callable[..., Any] = MetaArray,
) -> None:
    """Make one rank's call, with the arguments that calls.py would pass on to the algorithm."""

    def _bytes(size: int) -> Any:
        return make(size, np.uint8)

    if nodes:
        comm.set_nodes([list(node) for node in nodes])
    # sizes: bytes of each rank's chunk. each: of an all_to_all, where all chunks have the same size, rounded up.
    sizes, each = chunk_sizes(nbytes, comm.size), [-(-nbytes // comm.size)] * comm.size
    if algorithm == "auto":
        algorithm = choose(comm, operation, {"scatter": 0, "all_to_all": sum(each)}.get(operation, nbytes))

    # The arguments of each operation's algorithms, in the order in which calls.py passes them.
    whole, chunk = _bytes(nbytes), _bytes(sizes[comm.rank])
    arguments: dict[str, tuple[Any, ...]] = {
        "all_gather": (chunk, sizes, whole),
        "all_reduce": (whole, "sum"),
        "all_to_all": (_bytes(sum(each)), each, each),
        "broadcast": (whole, 0),
        "gather": (chunk, sizes, 0),
        "reduce": (whole, 0, "sum"),
        "reduce_scatter": (whole, sizes, chunk, "sum"),
        "scatter": (whole if comm.rank == 0 else None, sizes, chunk, 0),
    }
    call = comm.collective(f"{operation}/{algorithm}")
    ALGORITHMS[operation][algorithm].run(call, *arguments[operation])


@lru_cache(256)
def _slowest(links: LinkModel, members: tuple[int, ...]) -> tuple[bool, float, float]:
    """Return whether all links have the same cost, and the greatest alpha and beta."""
    if links.link is None:
        return True, links.alpha, links.beta
    # One rank alone has no link, and so no cost.
    costs = {links.cost(a, b) for a in members for b in members if a != b} or {(0.0, 0.0)}
    return len(costs) == 1, max(alpha for alpha, _ in costs), max(beta for _, beta in costs)
