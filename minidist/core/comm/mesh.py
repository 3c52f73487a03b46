"""Ranks in a grid: the *axes* of a mesh are the kinds of parallelism, and a slice along one axis is a communicator.

    init_device_mesh(comm, (2, 2, 2), ("pp", "dp", "tp"))        the last axis is the fastest:

                 tp 0  tp 1
    pp 0  dp 0    0     1        mesh["tp"] of rank 5 is {4, 5}: its neighbours differ in tp only
          dp 1    2     3        mesh["dp"] of rank 5 is {5, 7}
    pp 1  dp 0    4     5        mesh["pp"] of rank 5 is {1, 5}
          dp 1    6     7

Proved by: tests/comm/test_mesh.py
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minidist.core.base import hooks
from minidist.core.comm.communicator import Comm, PointToPoint


class Mesh:
    """A grid of ranks, seen from one of them.

    `mesh["tp"]` is this rank's communicator along axis tp, and `mesh["dp", "tp"]` is the one over both axes, in which
    the last axis is the fastest.
    """

    def __init__(self, comm: Comm, shape: Sequence[int], axis_names: Sequence[str]) -> None:
        # [1] The product of the axes must be the number of ranks.
        hooks.comm_checks().check_mesh(comm, shape, axis_names)
        self.comm, self.shape, self.axis_names = comm, tuple(shape), tuple(axis_names)

        # [2] ranks[coordinate] is the rank at a coordinate; the last axis is the fastest. `coordinate` is this rank's.
        self.ranks = np.arange(comm.size).reshape(self.shape)
        self.coordinate = tuple(map(int, np.unravel_index(comm.rank, self.shape))) if self.shape else ()

        # [3] One communicator per axis. All ranks make them here in the same order, so they have the same numbers on
        # all ranks.
        self._comms: dict[tuple[str, ...], Comm] = {(name,): self._slice((name,)) for name in self.axis_names}

    def __repr__(self) -> str:
        axes = dict(zip(self.axis_names, self.shape, strict=True))
        return f"Mesh({axes}, rank {self.comm.rank} at {self.coordinate})"

    def _slice(self, names: tuple[str, ...]) -> Comm:
        # All ranks that differ from this one on the named axes only.
        index, label = list[Any](), "x".join(names)
        for name, at in zip(self.axis_names, self.coordinate, strict=True):
            index.append(slice(None) if name in names else at)
            label += "" if name in names else f"_{name}{at}"
        return self.comm.group(self.ranks[tuple(index)].reshape(-1).tolist(), label)

    def __getitem__(self, names: str | tuple[str, ...]) -> Comm:
        names = tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else (names,)
        hooks.comm_checks().check_axes(self, names)
        if names not in self._comms:
            self._comms[names] = self._slice(names)
        return self._comms[names]

    def size(self, name: str) -> int:
        """Return the number of ranks along an axis."""
        return self[(name,)].size

    def get_local_rank(self, name: str) -> int:
        """Return this rank's coordinate on an axis."""
        return self[(name,)].rank


def init_device_mesh(comm: Comm, mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Mesh:
    """Return a mesh over all ranks of `comm`; the last axis is the fastest. No message is sent."""
    return Mesh(comm, mesh_shape, mesh_dim_names)


def check_communicator(comm: object, who: str) -> None:
    """Raise UsageError unless `comm` is a communicator. For a mesh the error names its axes; pass one of them.

    who: the name of the function or class that needs the communicator; the error begins with it.
    """
    if not isinstance(comm, PointToPoint):
        hooks.comm_checks().refuse_communicator(comm, who)
