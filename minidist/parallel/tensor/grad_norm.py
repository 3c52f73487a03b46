"""The norm of the global gradient, although each rank has shards of it.

    weight sharded over tp    | rank 0 | rank 1 |     squares summed over the ranks: one all-reduce of a float64
    norm's weight, whole      same on rank 0 and 1    counted as it is, on each rank

The norm adds each global element once. (Counting replicated parameters once per rank, or clipping by the norm of a
rank's own shards, are known bugs: every rank then scales by another number, and the replicas drift apart.)

Proved by: tests/parallel/test_tensor.py, tests/parallel/test_expert.py
"""

import math
from collections.abc import Iterable

import numpy as np

from minidist.core.autograd import Parameter
from minidist.core.base import arrays as xp
from minidist.core.base.trace import purpose
from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm
from minidist.core.nn.module import Module
from minidist.optim import clip_coefficient, scale_gradients_
from minidist.parallel.tensor.full_state import MeshLike


def clip_grad_norm_(module: Module, max_norm: float, mesh: Comm | MeshLike) -> float:
    """Scale all gradients so that the norm of the *global* gradient is at most max_norm; returns the norm before.

    mesh: where the axes of the layouts are found; or the communicator of the one axis over which the module is sharded.
    """
    parameters = list(module.parameters())
    norm = math.sqrt(global_square_sum(parameters, mesh))
    scale_gradients_(parameters, clip_coefficient(norm, max_norm))
    return norm


def global_square_sum(parameters: Iterable[Parameter], mesh: Comm | MeshLike) -> float:
    """Return the sum of the squares of all elements of the *global* gradients, in float64.

    A parameter without a gradient is left out. Sends an all-reduce of one float64 over each axis for every set of axes
    that shard parameters (purpose `clip_norm`): one for tensor parallelism. All ranks must have gradients of the same
    parameters.
    """

    def comm_of(axis: str) -> Comm:
        return mesh if isinstance(mesh, Comm) else mesh[axis]

    # This rank's squares, by the axes over which the parameters are sharded.
    squares: dict[tuple[str, ...], float] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = xp.as_array(parameter.grad, xp.float64).reshape(-1)
            # A shard that neighbouring ranks share is counted by the first of them only.
            axes, replicas = sharded_over(parameter)
            counts = replicas == 1 or comm_of(axes[0]).rank % replicas == 0
            squares[axes] = squares.get(axes, 0.0) + (float(grad @ grad) if counts else 0.0)

    # Each set's sum goes over its own axes; replicated parameters have none, and are counted as they are. Sorted, so
    # that all ranks send in the same order.
    total = 0.0
    for axes in sorted(squares):
        value = np.array([squares[axes]])
        for axis in axes:
            if comm_of(axis).size > 1:
                with purpose("clip_norm"):
                    all_reduce(comm_of(axis), value)
        total += float(value[0])
    return total


def sharded_over(parameter: Parameter) -> tuple[tuple[str, ...], int]:
    """Return (the axes over which it is sharded, how many neighbouring ranks hold the same shard)."""
    return ((), 1) if parameter.layout is None else (parameter.layout.axes, parameter.layout.copies)
