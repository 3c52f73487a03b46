"""Two things that must see the whole model although each rank has tiles: the gradient norm, and the replicas' equality.

A norm adds each global element once: tiles are summed over the ranks, replicated parameters counted on one of them.
(Counting the latter once a rank, or clipping by the norm of a rank's own tiles, are known bugs: every rank then scales
by another number, and the replicas drift apart.)
"""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from minidist.autograd import Parameter
from minidist.base import arrays as xp
from minidist.base.errors import MismatchError
from minidist.base.fingerprint import fingerprint_number
from minidist.base.trace import purpose
from minidist.collectives import all_gather, all_reduce
from minidist.comm import Comm
from minidist.nn.module import Module
from minidist.optim.clip import clip_coefficient, scale_gradients_
from minidist.parallel.tensor.sharding import MeshLike


def clip_grad_norm_(module: Module, max_norm: float, mesh: Comm | MeshLike) -> float:
    """Scale all gradients so that the norm of the *global* gradient is at most max_norm; returns the norm before.

    mesh: where the axes of the layouts are found; or the communicator of the one axis over which the module is cut.
    """
    parameters = list(module.parameters())
    norm = math.sqrt(global_square_sum(parameters, mesh))
    scale_gradients_(parameters, clip_coefficient(norm, max_norm))
    return norm


def global_square_sum(parameters: Iterable[Parameter], mesh: Comm | MeshLike) -> float:
    """Sum of the squares of all elements of the *global* gradients, in float64; a parameter without one is left out.

    Sends an all-reduce of one float64 over each axis for every set of axes that cut parameters (purpose `clip_norm`):
    one for tensor parallelism. All ranks must have gradients of the same parameters.
    """
    axes = _EveryAxis(mesh) if isinstance(mesh, Comm) else mesh
    squares: dict[tuple[str, ...], float] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = xp.as_array(parameter.grad, xp.float64).reshape(-1)
            cut_over, copies = _cut_over(parameter)
            counts = copies == 1 or axes[cut_over[0]].rank % copies == 0  # one of those that hold the same tile
            squares[cut_over] = squares.get(cut_over, 0.0) + (float(grad @ grad) if counts else 0.0)
    total = 0.0
    for cut_over in sorted(squares):
        value = np.array([squares[cut_over]])
        for axis in cut_over:
            if axes[axis].size > 1:
                with purpose("clip_norm"):
                    all_reduce(axes[axis], value)
        total += float(value[0])
    return total


class _EveryAxis:
    """A mesh of which every axis is the same communicator."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __getitem__(self, name: Any, /) -> Comm:
        return self.comm


def _cut_over(parameter: Parameter) -> tuple[tuple[str, ...], int]:
    """(the axes over which it is cut, how many neighbours hold the same tile)."""
    return ((), 1) if parameter.layout is None else (parameter.layout.axes, parameter.layout.copies)


def check_replicas(module: Module, comm: Comm, axis: str | None = None) -> None:
    """Raise MismatchError, on every rank alike, when a replicated parameter is not bitwise the same on all ranks.

    axis: the name of `comm` in the layouts; what is cut over another axis is then compared, too (over the data axis
    every tile is a replica). By default only what is not cut at all. Of a tile with copies, the copies are compared.
    Sends 8 B for each parameter that is compared (an all-gather of fingerprints, purpose `metrics`).
    """
    if comm.size == 1:
        return
    compared = [(name, p, _copies(p, comm, axis)) for name, p in module.named_parameters()]
    compared = [(name, p, copies) for name, p, copies in compared if copies > 1]
    prints = np.array([fingerprint_number(p.data.tobytes()) for _, p, _ in compared], dtype=np.uint64)
    with purpose("metrics"):
        every = all_gather(comm, prints).reshape(comm.size, -1)
    for i, (name, parameter, copies) in enumerate(compared):
        groups = every[:, i].reshape(-1, copies)
        different = np.argwhere(groups != groups[:, :1])
        if different.size:
            group, place = (int(n) for n in different[0])
            first = group * copies
            raise MismatchError(
                f"replicated parameter {name!r} of shape {parameter.shape} is not the same on rank {first + place} as"
                f" on rank {first}; its gradient was not summed over all ranks that use it, or its update depends on"
                " the rank"
            )


def _copies(parameter: Parameter, comm: Comm, axis: str | None) -> int:
    """How many neighbouring ranks of `comm` hold the same values."""
    axes, copies = _cut_over(parameter)
    return comm.size if not axes or (axis is not None and axis not in axes) else copies
