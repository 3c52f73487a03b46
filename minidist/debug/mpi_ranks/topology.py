"""Ranks in a grid.

    Create_cart([2, 3])     rank 0 1 2      neighbors of rank 4: 1 above, 7 no rank, 3 left, 5 right
                                 3 4 5

Proved by: tests/mpi_ranks/test_collectives.py
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from minidist.debug.mpi_ranks.communicator import Comm, Intracomm
from minidist.debug.mpi_ranks.constants import PROC_NULL, UNDEFINED, failed


class Grid:
    """A grid of ranks. dims, periods: of each axis. rank: this one."""

    communicator: type[Intracomm]

    def __init__(self, dims: list[int], periods: list[bool], rank: int) -> None:
        self.dims, self.periods, self.rank = dims, periods, rank

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


class Cartcomm(Intracomm):
    """A communicator whose ranks form a grid."""

    def __new__(cls, comm: Any = None) -> Any:
        if comm is not None and comm.held is not None and comm.held.topology is None:
            raise TypeError("Cartcomm() of a communicator whose ranks form no grid")
        return super().__new__(cls, comm)

    @property
    def place(self) -> Grid:
        """The grid."""
        found: Grid = self.context.topology
        return found

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
        coords: list[int] = self.place.coords(rank)
        return coords

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


Grid.communicator = Cartcomm


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


Intracomm.Create_cart, Intracomm.Cart_map = create_cart, cart_map  # type: ignore[attr-defined]
