"""What will cross the stage boundaries: shapes and dtypes of all tensors, exchanged once before the first step.

    stage 0 ──(4, 8) float32──▶ stage 1 ──(4, 6) float32──▶ stage 2     one message per boundary and input shape
        └──── a skip connection, (4, 8) float32: told along the way, sent directly ─────┘

A receive needs a buffer of exactly the sender's shape. The last micro-batch may be smaller than the others, so every
distinct input shape goes through the stages once, as zeros and without gradients, before the first step that brings it.

Proved by: tests/pipeline/test_messages.py, tests/pipeline/test_runtime.py
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.arrays import named_dtype
from minidist.core.base.trace import purpose
from minidist.core.comm import Comm

Tensors = list[tuple[tuple[int, ...], str]]  # shape and dtype of each tensor
Key = tuple[int, int]  # stage, micro-batch
Way = tuple[int, int]  # from stage, to stage; the inputs come from stage -1

FLOATS = "fV"  # kinds of dtypes whose tensors have gradients (bfloat16's is "V"); numbers of tokens have none

TENSORS, DIMS = 8, 6  # at most, that can cross one boundary
# How a message describes one tensor.
ROW = np.dtype([("source", "i8"), ("target", "i8"), ("dtype", "S8"), ("ndim", "i8"), ("shape", "i8", DIMS)])
MESSAGE = TENSORS * ROW.itemsize  # bytes of what is told at a boundary


@dataclass
class StageMetadata:
    """What crosses the boundaries of one rank's stages.

    tensors: by (from stage, to stage, micro-batch). sources, targets: (stage, micro-batch) -> the stages that it gets
    from and sends to, the neighbour first, then those of the skip connections in stage order. inputs: the shapes and
    dtypes of the micro-batches that all this follows from.
    """

    inputs: list[tuple[tuple[int, ...], np.dtype[Any]]] | None = None
    tensors: dict[tuple[int, int, int], Tensors] = field(default_factory=dict)
    sources: dict[Key, list[int]] = field(default_factory=dict)
    targets: dict[Key, list[int]] = field(default_factory=dict)

    def note(self, stage: int, i: int, arriving: Mapping[Way, Tensors], leaving: Mapping[Way, Tensors]) -> None:
        """Note what a stage gets and sends of micro-batch i."""
        self.tensors.update({(*way, i): tensors for way, tensors in (*arriving.items(), *leaving.items())})
        self.sources[stage, i] = [source for source, _ in arriving]
        self.targets[stage, i] = [target for _, target in leaving]


def signature(value: Any) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of an array; UsageError for a dtype that cannot be sent."""
    hooks.pipeline_refusals().check_crossing(value)
    return tuple(value.shape), value.dtype.name


def _by_path(rank_of: Mapping[Key, int], stages: int, inputs: Sequence[Any]) -> dict[tuple[Any, ...], list[int]]:
    """Return the micro-batches of each path and shape: these have the same tensors everywhere."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, value in enumerate(inputs):
        path = tuple(rank_of[stage, i] for stage in range(stages))
        groups.setdefault((path, signature(value)), []).append(i)
    return groups


def _arriving(stage: int, travelling: dict[Way, Tensors]) -> dict[Way, Tensors]:
    """Return what arrives at a stage: the neighbour's, then the skip connections by stage."""
    ways = sorted((way for way in travelling if way[1] == stage), reverse=True)
    return {way: travelling[way] for way in ways[:1] + ways[:0:-1]}


def _outputs(
    stage: int, stages: int, arriving: Tensors, run: Callable[[int, list[Any]], list[tuple[int, Any]]]
) -> dict[Way, Tensors]:
    """Return what leaves a stage that runs on zeros of these shapes: nothing leaves the last one."""
    if stage + 1 == stages:
        return {}
    leaving: dict[Way, Tensors] = {(stage, stage + 1): []}
    for target, array in run(stage, [xp.zeros(shape, named_dtype(dtype)) for shape, dtype in arriving]):
        hooks.pipeline_refusals().check_target(stage, target, stages)
        leaving.setdefault((stage, target), []).append(signature(array))
    return leaving


def exchange_shapes(
    comm: Comm,
    rank_of: Mapping[Key, int],
    stages: int,
    inputs: Sequence[Any],
    run: Callable[[int, list[Any]], list[tuple[int, Any]]],
) -> StageMetadata:
    """Return what crosses the boundaries of this rank's stages.

    run(stage, arrays): a forward pass, which returns the stage that each output goes to and the output.

    Each distinct path through the ranks and input shape sends one message of 640 B per boundary between ranks
    (startup); what skips stages is told in it, so that the message to the next stage is the only one.
    """
    groups = _by_path(rank_of, stages, inputs)
    metadata = StageMetadata([(value.shape, value.dtype) for value in inputs])
    # Also what layers send in it: this pass is none of a step.
    with purpose("startup", whole=True):
        for (path, first), members in groups.items():
            travelling: dict[Way, Tensors] = {(-1, 0): [first]}
            for stage in range(stages):
                # Along the path, rank after rank.
                if stage and comm.rank == path[stage] != path[stage - 1]:
                    rows = np.empty(TENSORS, ROW)
                    comm.recv(rows.view(np.int64), path[stage - 1])
                    travelling = _unpack(rows)
                if comm.rank != path[stage]:
                    continue

                # Run what arrives as zeros, note it for every micro-batch of the group, and tell the next stage.
                arriving = _arriving(stage, travelling)
                leaving = _outputs(stage, stages, [tensor for tensors in arriving.values() for tensor in tensors], run)
                for i in members:
                    metadata.note(stage, i, arriving, leaving)
                travelling = {way: tensors for way, tensors in travelling.items() if way[1] > stage} | leaving
                if stage + 1 < stages and path[stage + 1] != comm.rank:
                    comm.send(_pack(travelling).view(np.int64), path[stage + 1])
    return metadata


def _pack(travelling: Mapping[Way, Tensors]) -> np.ndarray:
    tensors = [(*way, dtype, shape) for way, crossing in travelling.items() for shape, dtype in crossing]
    hooks.pipeline_refusals().check_crossings(tensors, TENSORS, DIMS)
    rows = np.zeros(TENSORS, ROW)
    for row, (source, target, dtype, shape) in zip(rows, tensors, strict=False):
        row["source"], row["target"], row["dtype"], row["ndim"] = source, target, dtype, len(shape)
        row["shape"][: len(shape)] = shape
    return rows


def _unpack(rows: np.ndarray) -> dict[Way, Tensors]:
    travelling: dict[Way, Tensors] = {}
    for source, target, dtype, ndim, shape in rows.tolist():
        if dtype:
            travelling.setdefault((source, target), []).append((tuple(shape[:ndim]), dtype.decode()))
    return travelling
