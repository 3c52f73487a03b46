"""What will cross the stage boundaries: shapes and dtypes of all tensors, exchanged once before the first step.

    stage 0 ──(4, 8) float32──▶ stage 1 ──(4, 6) float32──▶ stage 2     one message per boundary and input shape

A receive needs a buffer of exactly the sender's shape. The last micro-batch may be smaller than the others, so every
distinct input shape goes through the stages once, as zeros and without gradients, before the first step that brings it.

Proved by: tests/pipeline/test_messages.py, tests/pipeline/test_runtime.py
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.arrays import named_dtype
from minidist.core.base.trace import purpose
from minidist.core.comm import Comm

Tensors = list[tuple[tuple[int, ...], str]]  # shape and dtype of each tensor
Key = tuple[int, int]  # stage, micro-batch
Boundaries = Mapping[Key, Tensors]  # (stage, micro-batch) -> what the stage gets from the one before it

FLOATS = "fV"  # kinds of dtypes whose tensors have gradients (bfloat16's is "V"); numbers of tokens have none

TENSORS, DIMS = 8, 8  # at most, that can cross one boundary
# How a message describes one tensor.
ROW = np.dtype([("dtype", "S8"), ("ndim", "i8"), ("shape", "i8", DIMS)])
MESSAGE = TENSORS * ROW.itemsize  # bytes of what is told at a boundary


def signature(value: Any) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of an array; UsageError for a dtype that cannot be sent."""
    hooks.pipeline_refusals().check_crossing(value)
    return tuple(value.shape), value.dtype.name


def exchange_shapes(
    comm: Comm,
    rank_of: Mapping[Key, int],
    stages: int,
    inputs: Sequence[Any],
    run: Callable[[int, int, list[Any]], list[Any]],
) -> Boundaries:
    """Return what crosses the boundaries of this rank's stages.

    run(stage, micro-batch, arrays): a forward pass, which returns the output arrays.

    Each distinct path through the ranks and input shape sends one message of 640 B per boundary between ranks
    (startup).
    """
    # Micro-batches of one path and shape have the same tensors everywhere.
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, value in enumerate(inputs):
        path = tuple(rank_of[stage, i] for stage in range(stages))
        groups.setdefault((path, signature(value)), []).append(i)

    boundaries: dict[Key, Tensors] = {}
    # Also what layers send in it: this pass is none of a step.
    with purpose("startup", whole=True):
        for (path, first), members in groups.items():
            # Along the path, rank after rank: run what arrives as zeros, and tell the next stage what leaves.
            tensors: Tensors = [first]
            for stage in (stage for stage in range(stages) if path[stage] == comm.rank):
                if stage and path[stage - 1] != comm.rank:
                    told = np.empty(MESSAGE // 8, np.int64)
                    comm.recv(told, path[stage - 1])
                    tensors = unpack(told)
                boundaries.update({(stage, i): tensors for i in members})
                if stage + 1 == stages:
                    break

                zeros = [xp.zeros(shape, named_dtype(dtype)) for shape, dtype in tensors]
                tensors = [signature(array) for array in run(stage, members[0], zeros)]
                boundaries.update({(stage + 1, i): tensors for i in members})
                if path[stage + 1] != comm.rank:
                    comm.send(pack(tensors), path[stage + 1])
    return boundaries


def pack(tensors: Tensors) -> np.ndarray:
    """Return shapes and dtypes as numbers that can be sent, 640 B; UsageError for too many."""
    hooks.pipeline_refusals().check_crossings(tensors, TENSORS, DIMS)
    rows = np.zeros(TENSORS, ROW)
    for row, (shape, dtype) in zip(rows, tensors, strict=False):
        row["dtype"], row["ndim"] = dtype, len(shape)
        row["shape"][: len(shape)] = shape
    return rows.view(np.int64)


def unpack(told: np.ndarray) -> Tensors:
    """Return the shapes and dtypes that `pack` has packed."""
    return [(tuple(shape[:ndim]), dtype.decode()) for dtype, ndim, shape in told.view(ROW).tolist() if dtype]
