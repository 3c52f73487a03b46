"""`algorithm="auto"`: the cheapest algorithm for this many bytes, ranks and links, by the alpha-beta cost of each.

No algorithm is the cheapest for every size. The time of short messages is mostly latency (alpha per message), so few
rounds are best; the time of long messages is mostly bytes (beta per byte). The size at which the choice changes depends
on the network:

    bytes      1 B ─────────── KiB ─────────────────── MiB ──▶
    all-reduce   few rounds    recursive doubling,      every byte sent twice only: rabenseifner,
                               trees                    segmented ring; two levels, where links differ

Where all links of the communicator have the same alpha and beta, the cost is the formula that each algorithm is
registered with. Where they differ (fast inside a node, slow between nodes) no formula fits every group of ranks. Then
each algorithm runs once per size, on meta arrays in another simulated world, and the virtual time is its cost. On
more than 64 such ranks that takes too long, and the formulas with the slowest link's alpha and beta are used. Under MPI
a communicator of all ranks chooses by measured times (see tuning.py), and a group of some of them by the formulas of
the default `LinkModel`. All ranks choose the same algorithm, because they choose from values that are equal on all
ranks. An algorithm that was registered without a formula for its time is never chosen.

Source of the method: Thakur, Rabenseifner, Gropp, Optimization of collective communication operations in MPICH, 2005.
Proved by: tests/collectives/test_auto.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from minidist.base.errors import UsageError, reason
from minidist.base.meta import MetaArray
from minidist.collectives.algorithms import ALGORITHMS, Call, candidates
from minidist.collectives.closed_forms import seconds
from minidist.collectives.tuning import MeasuredTimes, measured_times
from minidist.collectives.user_algorithms import at_registration
from minidist.comm.mpi.world import MPIWorld
from minidist.comm.sim.links import LinkModel
from minidist.comm.sim.sim_world import SimWorld
from minidist.core.comm.communicator import Comm, PointToPoint

MAX_REAL_BYTES = 2**28  # bytes of all ranks' arrays together, when a user's algorithm needs real arrays
MAX_TRIED_RANKS = 64  # with links that differ, algorithms are run on at most this many ranks
OVERHEAD_SHARE = 0.25  # of a measured latency; lesson 05 measures it on your machine

_tables: "WeakKeyDictionary[Comm, dict[str, MeasuredTimes | None]]" = WeakKeyDictionary()  # see `choose`
# Of a communicator what `CheckedMessages.choices` has.
_chosen: "WeakKeyDictionary[PointToPoint, dict[tuple[str, int], str]]" = WeakKeyDictionary()


def choose(comm: Any, operation: str, nbytes: int) -> str:
    """Return the name of the cheapest algorithm of `operation` on an array of `nbytes` in all."""
    # A choice of MPI ranks is looked up once: a call with 4 KiB takes 5 us, and this is to be a small part of it.
    choices = getattr(comm, "choices", None)  # a `Sim` measures nothing
    if choices is not None and (known := choices.get((operation, nbytes))) is not None:
        return known  # type: ignore[no-any-return]

    # MPI ranks have a table of measured times. The first call measures or reads it, and this involves all ranks. For
    # groups of some ranks formulas choose, and so they do for longer arrays where only the first size was measured.
    if isinstance(comm.world, MPIWorld):
        links, measured = LinkModel(), _table(comm, operation)
        taken = measured.fastest(nbytes) if measured is not None else None
        if taken is None:
            taken = cheapest(operation, nbytes, comm.size, links.alpha, links.beta, links.overhead)
        comm.choices = _chosen.setdefault(comm, {})
        comm.choices[operation, nbytes] = taken
        return taken

    links, members = getattr(comm.world, "links", None) or LinkModel(), tuple(comm.members)
    if not isinstance(links, LinkModel):  # of a `Sim`
        links = LinkModel(links.alpha, links.beta)
    # Formulas hold for uniform links. For too many ranks the formulas of the slowest link are an upper bound.
    uniform, alpha, beta = _slowest(links, members)
    if uniform or comm.size > MAX_TRIED_RANKS:
        return cheapest(operation, nbytes, comm.size, alpha, beta, links.overhead)

    # Tuples, because `fastest` remembers its result for each set of arguments.
    nodes = tuple(map(tuple, comm.nodes)) if comm.nodes else None
    return fastest(operation, nbytes, links, members, nodes)


def _table(comm: PointToPoint, operation: str) -> MeasuredTimes | None:
    """Return the measured times for a communicator of all ranks of an MPI world, or None for any other communicator."""
    world = comm.world
    if not (isinstance(world, MPIWorld) and isinstance(comm, Comm) and 1 < comm.size == world.size):
        return None
    tables = _tables.setdefault(comm, {})
    if operation not in tables:
        tables[operation] = measured_times(comm, world, operation)
    return tables[operation]


@lru_cache(4096)
def cheapest(operation: str, nbytes: int, ranks: int, alpha: float, beta: float, overhead: float | None = None) -> str:
    """Return the algorithm with the smallest formula; of equal ones the first in alphabetical order.

    overhead: seconds of alpha in which a port is busy with a message; by default OVERHEAD_SHARE of alpha, because no
    machine handles messages in no time. `choose` passes that of the world's links.
    """
    overhead = OVERHEAD_SHARE * alpha if overhead is None else overhead
    costs = {name: seconds(operation, name, nbytes, ranks, alpha, beta, overhead) for name in candidates(operation)}
    return min(costs, key=costs.__getitem__)


@lru_cache(1024)
def fastest(
    operation: str,
    nbytes: int,
    links: LinkModel,
    members: tuple[int, ...],
    nodes: tuple[tuple[int, ...], ...] | None = None,
) -> str:
    """Return the algorithm that finishes first on links that differ. Runs each algorithm on the virtual clock."""
    link = links.link
    assert link is not None

    # In the trial world rank i takes the place of this communicator's member i.
    ours = replace(links, link=lambda a, b: link(members[a], members[b]))
    times = {
        name: virtual_seconds(operation, name, len(members), nbytes, ours, nodes) for name in candidates(operation)
    }
    return min(times, key=times.__getitem__)


def _forget() -> None:
    """Forget every choice by measured times."""
    for choices in _chosen.values():
        choices.clear()


# A program may register an algorithm after the first choice.
at_registration.extend((cheapest.cache_clear, fastest.cache_clear, _tables.clear, _forget))


def virtual_seconds(
    operation: str,
    algorithm: str,
    ranks: int,
    nbytes: int,
    links: LinkModel,
    nodes: tuple[tuple[int, ...], ...] | None = None,
) -> float:
    """Return the virtual seconds until the last rank has finished one call on `nbytes` in all.

    The algorithm runs on meta arrays: nothing is allocated, and nothing is added. algorithm: a name, or "auto".
    Raises UsageError when a user's algorithm needs real arrays, and these would be too large.
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
                f"{operation}/{algorithm} does not run on arrays without elements ({reason(error)}), and {ranks} ranks"
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
    """Make one rank's call, with the arguments that calls.py passes to the algorithm."""

    if nodes:
        comm.nodes = [list(node) for node in nodes]
    if algorithm == "auto":
        whole = {"scatter": 0, "all_to_all": -(-nbytes // comm.size) * comm.size}.get(operation, nbytes)
        algorithm = choose(comm, operation, whole)
    arguments = Call.of_size(operation, comm.size, nbytes).arguments(comm.rank, lambda size: make(size, np.uint8))
    call = comm.collective(f"{operation}/{algorithm}")
    ALGORITHMS[operation][algorithm].run(call, *arguments)


@lru_cache(256)
def _slowest(links: LinkModel, members: tuple[int, ...]) -> tuple[bool, float, float]:
    """Return whether all links have the same cost, and the greatest alpha and beta."""
    if links.link is None:
        return True, links.alpha, links.beta
    # One rank alone has no link, and so no cost.
    costs = {links.cost(a, b) for a in members for b in members if a != b} or {(0.0, 0.0)}
    return len(costs) == 1, max(alpha for alpha, _ in costs), max(beta for _, beta in costs)
