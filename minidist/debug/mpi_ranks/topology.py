"""Topologies: ranks in a grid or a graph, and collectives among neighbors.

    Create_cart([2, 3])     rank 0 1 2      neighbors of rank 4: 1 above, 7 no rank, 3 left, 5 right
                                 3 4 5

Of two messages from one neighbor, in a grid of one or two ranks along an axis, each says which side it was sent to.

Proved by: tests/mpi_ranks/test_collectives.py
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from minidist.core import collectives
from minidist.core.comm.communicator import PointToPoint
from minidist.debug.mpi_ranks.buffers import Buffer, as_many, each, one, vector
from minidist.debug.mpi_ranks.collective import Plan, collective, size_of, to_bytes
from minidist.debug.mpi_ranks.communicator import Comm, Intracomm
from minidist.debug.mpi_ranks.constants import PROC_NULL, UNDEFINED, failed
from minidist.debug.mpi_ranks.objects import pickle

CART, GRAPH, DIST_GRAPH = 2, 1, 3
UNWEIGHTED, WEIGHTS_EMPTY = 10, 11


class Neighbors:
    """Whom a rank receives from and sends to. sources, destinations: (rank, tag) of each, in order.

    Messages of one pair of ranks that have equal tags meet in their order; the tag tells the sides of a grid apart.
    """

    kind: int
    communicator: "type[Topocomm]"

    def __init__(self, sources: Sequence[tuple[int, int]], destinations: Sequence[tuple[int, int]]) -> None:
        self.sources, self.destinations = list(sources), list(destinations)


class Topocomm(Intracomm):
    """A communicator with a topology. needs: its class, which a subclass names as `of`."""

    needs: ClassVar[type[Neighbors]] = Neighbors

    def __init_subclass__(cls, of: type[Neighbors] | None = None) -> None:
        if of is not None:  # a program's own subclass has none, and needs what its base class needs
            cls.needs, of.communicator = of, cls

    def __new__(cls, comm: Any = None) -> Any:
        if comm is not None and comm.held is not None and not isinstance(comm.held.topology, cls.needs):
            raise TypeError(f"{cls.__name__}() of a communicator that has no such topology")
        return super().__new__(cls, comm)

    @property
    def place(self) -> Any:
        """The topology."""
        return self.context.topology

    inedges = property(lambda self: [rank for rank, _ in self.place.sources])
    outedges = property(lambda self: [rank for rank, _ in self.place.destinations])
    inoutedges = property(lambda self: (self.inedges, self.outedges))
    indegree = property(lambda self: len(self.inedges))
    outdegree = property(lambda self: len(self.outedges))


# grids ----------------------------------------------------------------------------------------------------------------


class Grid(Neighbors):
    """A grid of ranks. dims, periods: of each axis. rank: this one."""

    kind = CART

    def __init__(self, dims: list[int], periods: list[bool], rank: int) -> None:
        self.dims, self.periods, self.rank = dims, periods, rank
        steps = [(axis, step) for axis in range(len(dims)) for step in (-1, 1)]
        ranks = [self.moved(axis, step) for axis, step in steps]
        # What goes to the lower side of one rank comes from the upper side of the other.
        super().__init__([(r, k ^ 1) for k, r in enumerate(ranks)], [(r, k) for k, r in enumerate(ranks)])

    def coords(self, rank: int) -> list[int]:
        """Return the place of a rank, the last axis being the fastest."""
        return [int(c) for c in np.unravel_index(rank, self.dims)] if self.dims else []

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the rank at a place; along a periodic axis any place counts, along others PROC_NULL is outside."""
        rank = 0
        for place, size, periodic in zip(coords, self.dims, self.periods, strict=True):
            if not 0 <= place < size and not periodic:
                return PROC_NULL
            rank = rank * size + place % size
        return rank

    def moved(self, axis: int, step: int) -> int:
        """Return the rank `step` places along an axis."""
        coords = self.coords(self.rank)
        coords[axis] += step
        return self.rank_at(coords)


class Cartcomm(Topocomm, of=Grid):
    """A communicator whose ranks form a grid."""

    def Get_dim(self) -> int:
        return len(self.place.dims)

    def Get_topo(self) -> tuple[list[int], list[int], list[int]]:
        """Return the sizes of the axes, whether they are periodic (1 or 0), and this rank's place."""
        grid = self.place
        return list(grid.dims), self.periods, grid.coords(grid.rank)

    def Get_cart_rank(self, coords: Sequence[int]) -> int:
        """Return the rank at a place."""
        rank: int = self.place.rank_at(coords)
        if rank == PROC_NULL:
            raise failed("ERR_ARG", f"no rank at {list(coords)} of a grid of {self.place.dims} that is not periodic")
        return rank

    def Get_coords(self, rank: int) -> list[int]:
        """Return the place of a rank."""
        if not 0 <= rank < self.Get_size():
            raise failed("ERR_RANK", f"rank {rank}; the grid has ranks 0..{self.Get_size() - 1}")
        return list(self.place.coords(rank))

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return the ranks from which data comes and to which it goes when all move by `disp` along an axis."""
        if not 0 <= direction < self.Get_dim():
            raise failed("ERR_DIMS", f"axis {direction} of a grid that has {self.Get_dim()} axes")
        return self.place.moved(direction, -disp), self.place.moved(direction, disp)

    def Sub(self, remain_dims: Sequence[bool]) -> Any:
        """Return the communicator of the ranks that differ along the remaining axes only."""
        grid, keep = self.place, [bool(axis) for axis in remain_dims]
        coords = grid.coords(grid.rank)
        same = [
            rank
            for rank in range(self.Get_size())
            if all(k or a == b for k, a, b in zip(keep, coords, grid.coords(rank), strict=True))
        ]
        dims = [size for size, k in zip(grid.dims, keep, strict=True) if k]
        periods = [periodic for periodic, k in zip(grid.periods, keep, strict=True) if k]
        members = self.context.comm.members
        self.context.comm.collective("Cart_sub")
        topology = Grid(dims, periods, same.index(grid.rank))
        return self.make([members[rank] for rank in same], f"grid{same[0]}", topology=topology)

    dim = ndim = property(Get_dim)
    topo = property(Get_topo)
    dims = property(lambda self: list(self.place.dims))
    periods = property(lambda self: [int(periodic) for periodic in self.place.periods])
    coords = property(lambda self: self.place.coords(self.place.rank))


def compute_dims(nnodes: int, dims: Any) -> list[int]:
    """Return sizes of axes whose product is `nnodes`, as equal as can be; those that are not 0 stay as they are."""
    sizes = [0] * dims if isinstance(dims, int) else list(dims)
    fixed = math.prod(size for size in sizes if size)
    if any(size < 0 for size in sizes) or nnodes % max(1, fixed):
        raise failed("ERR_DIMS", f"{nnodes} ranks in a grid of {sizes}; the sizes given must divide the ranks")
    free = [k for k, size in enumerate(sizes) if size == 0]
    rest, factors = nnodes // fixed, [1] * len(free)
    if not free and rest != 1:
        raise failed("ERR_DIMS", f"{nnodes} ranks in a grid of {sizes}, which has {fixed}")
    divisor, primes = 2, []
    while rest > 1:
        while rest % divisor == 0:
            primes.append(divisor)
            rest //= divisor
        divisor += 1
    for prime in reversed(primes):
        factors[factors.index(min(factors))] *= prime
    for k, size in zip(free, sorted(factors, reverse=True), strict=True):
        sizes[k] = size
    return sizes


def _grid(self: Comm, dims: Sequence[int], periods: Any) -> tuple[list[int], list[bool], int]:
    sizes = [int(size) for size in dims]
    if periods is None or isinstance(periods, bool | int):
        periods = [bool(periods)] * len(sizes)
    if len(periods) != len(sizes):
        raise ValueError(f"expecting {len(sizes)} items, got {len(periods)}")
    ranks = math.prod(sizes)
    if any(size < 1 for size in sizes) or ranks > self.Get_size():
        raise failed("ERR_DIMS", f"a grid of {sizes} needs {ranks} ranks, and the communicator has {self.Get_size()}")
    return sizes, [bool(periodic) for periodic in periods], ranks


def create_cart(self: Comm, dims: Sequence[int], periods: Any = None, reorder: bool = False) -> Any:
    """Return a communicator whose ranks form a grid; COMM_NULL on ranks beyond it."""
    sizes, periodic, ranks = _grid(self, dims, periods)
    comm = self.context.comm
    comm.collective("Create_cart")
    inside = comm.rank < ranks
    return self.make(comm.members[:ranks], "cart", topology=Grid(sizes, periodic, comm.rank) if inside else None)


def cart_map(self: Comm, dims: Sequence[int], periods: Any = None) -> int:
    """Return the rank that this one would have in a grid."""
    rank = self.Get_rank()
    return rank if rank < _grid(self, dims, periods)[2] else UNDEFINED


# graphs ---------------------------------------------------------------------------------------------------------------


class Graph(Neighbors):
    """A graph that every rank knows. index: the number of edges up to each rank. edges: their ends."""

    kind = GRAPH

    def __init__(self, index: list[int], edges: list[int], rank: int) -> None:
        self.index, self.edges = index, edges
        neighbors = [(other, 0) for other in self.of(rank)]
        super().__init__(neighbors, neighbors)

    def of(self, rank: int) -> list[int]:
        """Return the neighbors of a rank."""
        return self.edges[self.index[rank - 1] if rank else 0 : self.index[rank]]


class Graphcomm(Topocomm, of=Graph):
    """A communicator whose ranks form a graph that all of them know."""

    def Get_dims(self) -> tuple[int, int]:
        """Return the number of ranks and of edges."""
        return len(self.place.index), len(self.place.edges)

    def Get_topo(self) -> tuple[list[int], list[int]]:
        """Return the number of edges up to each rank, and the edges."""
        return list(self.place.index), list(self.place.edges)

    def Get_neighbors(self, rank: int) -> Any:
        return self.place.of(rank)

    def Get_neighbors_count(self, rank: int) -> int:
        return len(self.place.of(rank))

    dims, topo = property(Get_dims), property(Get_topo)
    nnodes = property(lambda self: self.Get_dims()[0])
    nedges = property(lambda self: self.Get_dims()[1])
    index = property(lambda self: list(self.place.index))
    edges = property(lambda self: list(self.place.edges))
    neighbors = property(lambda self: self.Get_neighbors(self.Get_rank()))
    nneighbors = property(lambda self: len(self.neighbors))


def create_graph(self: Comm, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> Any:
    """Return a communicator whose ranks form a graph."""
    ends = _ends(index)
    comm = self.context.comm
    comm.collective("Create_graph")
    inside = comm.rank < len(ends)
    topology = Graph(ends, list(edges), comm.rank) if inside else None
    return self.make(comm.members[: len(ends)], "graph", topology=topology)


def _ends(index: Sequence[int]) -> list[int]:
    """Return the number of edges up to each rank; a leading 0 is left out."""
    ends = list(index)
    return ends[1:] if len(ends) > 1 and ends[0] == 0 else ends


def graph_map(self: Comm, index: Sequence[int], edges: Sequence[int]) -> int:
    """Return the rank that this one would have in a graph."""
    rank = self.Get_rank()
    return rank if rank < len(_ends(index)) else UNDEFINED


class Distributed(Neighbors):
    """A graph in which each rank knows only its neighbors. weights: of the edges in and out; None: there are none."""

    kind = DIST_GRAPH

    def __init__(self, sources: list[int], destinations: list[int], weights: Any) -> None:
        super().__init__([(rank, 0) for rank in sources], [(rank, 0) for rank in destinations])
        self.weights = weights


class Distgraphcomm(Topocomm, of=Distributed):
    """A communicator whose ranks form a graph, in which each knows only its neighbors."""

    def Get_dist_neighbors_count(self) -> tuple[int, int, bool]:
        """Return the number of ranks it receives from and sends to, and whether edges have weights."""
        return self.indegree, self.outdegree, self.place.weights is not None

    def Get_dist_neighbors(self) -> tuple[list[int], list[int], Any]:
        """Return the ranks it receives from and sends to, and the weights."""
        return self.inedges, self.outedges, self.place.weights


def _weights(given: Any, edges: Sequence[int]) -> list[int] | None:
    """Return the weights of edges; None when they have none."""
    if isinstance(given, int) and given == WEIGHTS_EMPTY:
        given = []
    if given is None or isinstance(given, int):
        return None
    if len(given) != len(edges):
        raise ValueError(f"expecting {len(edges)} items, got {len(given)}")
    return list(given)


def create_dist_graph_adjacent(
    self: Comm,
    sources: Any,
    destinations: Any,
    sourceweights: Any = None,
    destweights: Any = None,
    info: Any = None,
    reorder: bool = False,
) -> Any:
    """Return a communicator whose ranks form a graph; each names its own neighbors."""
    comm = self.context.comm
    into, out = list(sources or ()), list(destinations or ())
    weights = _weights(sourceweights, into), _weights(destweights, out)
    comm.collective("Create_dist_graph_adjacent")
    known = None if weights == (None, None) else (weights[0] or [], weights[1] or [])
    return self.make(comm.members, "graph", topology=Distributed(into, out, known))


def create_dist_graph(
    self: Comm,
    sources: Sequence[int],
    degrees: Sequence[int],
    destinations: Sequence[int],
    weights: Any = None,
    info: Any = None,
    reorder: bool = False,
) -> Any:
    """Return a communicator whose ranks form a graph; each names any edges of it."""
    comm = self.context.comm
    given = _weights(weights, destinations)
    starts = [source for source, degree in zip(sources, degrees, strict=True) for _ in range(degree)]
    rows = [(a, b, w) for a, b, w in zip(starts, destinations, given or [1] * len(starts), strict=True)]
    # Every rank learns all edges: their numbers first.
    call = comm.collective("Create_dist_graph")
    flat = np.array(rows, np.int64).reshape(-1)
    sizes = collectives.all_gather(call, np.array([flat.size, given is not None], np.int64)).reshape(-1, 2)
    table = collectives.all_gather(call, flat, counts=sizes[:, 0].tolist()).reshape(-1, 3).tolist()
    into = [(a, w) for a, b, w in table if b == comm.rank]
    out = [(b, w) for a, b, w in table if a == comm.rank]
    known = ([w for _, w in into], [w for _, w in out]) if sizes[:, 1].any() else None
    return self.make(comm.members, "graph", topology=Distributed([a for a, _ in into], [b for b, _ in out], known))


for _function in (create_cart, cart_map, create_graph, graph_map, create_dist_graph_adjacent, create_dist_graph):
    setattr(Intracomm, _function.__name__.capitalize(), _function)


# collectives among neighbors ------------------------------------------------------------------------------------------

on_topology = partial(collective, Topocomm)


def exchange(
    call: PointToPoint, topology: Neighbors, outgoing: Sequence[np.ndarray], incoming: Sequence[np.ndarray]
) -> None:
    """Send one array to each destination and receive one from each source."""
    pairs = zip(topology.sources, incoming, strict=True)
    receives = [call.irecv(array, rank, tag) for (rank, tag), array in pairs if rank != PROC_NULL]
    sends = [
        call.isend(np.ascontiguousarray(array), rank, tag)
        for (rank, tag), array in zip(topology.destinations, outgoing, strict=True)
        if rank != PROC_NULL
    ]
    call.waitall([*receives, *sends])


def parts(message: Any, writable: bool, neighbors: int, letter: str) -> list[Buffer]:
    """Return a buffer for each neighbor. letter: "" for equal parts, "v" for other sizes, "w" for other datatypes."""
    if letter == "w":
        return each(message, writable, neighbors)
    if letter == "v":
        return vector(message, writable, neighbors).blocks()
    return one(message, writable, blocks=max(1, neighbors)).blocks()[:neighbors]


def neighbor_allgather(self: Topocomm, sendbuf: Any, recvbuf: Any, *, letter: str) -> Plan:
    """Send a buffer to each destination, and receive one from each source."""
    targets = parts(recvbuf, True, self.indegree, letter)
    return _among_neighbors(self, [one(sendbuf, False)] * self.outdegree, targets)


def neighbor_alltoall(self: Topocomm, sendbuf: Any, recvbuf: Any, *, letter: str) -> Plan:
    """Send a part of a buffer to each destination, and receive one from each source."""
    sources = parts(sendbuf, False, self.outdegree, letter)
    return _among_neighbors(self, sources, parts(recvbuf, True, self.indegree, letter))


def _among_neighbors(self: Topocomm, sources: Sequence[Buffer], targets: Sequence[Buffer]) -> Plan:
    """Return the plan of an exchange of one buffer with each neighbor."""
    topology = self.place

    def run(call: PointToPoint) -> None:
        arrived = [np.empty(sum(b.sizes), b.layout.element) for b in targets]
        exchange(call, topology, [buffer.get() for buffer in sources], arrived)
        for (rank, _), array, buffer in zip(topology.sources, arrived, targets, strict=True):
            if rank != PROC_NULL:
                buffer.put(array)

    return Plan(run)


for _plan, _letters in ((neighbor_allgather, ("", "v")), (neighbor_alltoall, ("", "v", "w"))):
    for _letter in _letters:
        on_topology(f"{_plan.__name__.capitalize()}{_letter}")(partial(_plan, letter=_letter))


def _objects(self: Topocomm, values: Sequence[Any]) -> Plan:
    topology = self.place

    def run(call: PointToPoint) -> list[Any]:
        outgoing = [to_bytes(value) for value in values]
        sizes = [np.zeros(1, np.int64) for _ in topology.sources]
        exchange(call, topology, [size_of(data) for data in outgoing], sizes)
        incoming = [np.empty(int(size[0]), np.uint8) for size in sizes]
        exchange(call, topology, outgoing, incoming)
        return [pickle.loads(data) for data in incoming]

    return Plan(run)


@on_topology("neighbor_allgather")
def neighbor_allgather_objects(self: Topocomm, sendobj: Any) -> Plan:
    """Send an object to each destination, and return the list of those of the sources."""
    return _objects(self, [sendobj] * self.outdegree)


@on_topology("neighbor_alltoall")
def neighbor_alltoall_objects(self: Topocomm, sendobj: Sequence[Any]) -> Plan:
    """Send each destination its object, and return the list of those of the sources."""
    return _objects(self, as_many(sendobj, self.outdegree))
