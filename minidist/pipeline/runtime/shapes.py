"""What will arrive, said before it does: shapes and dtypes of all stage borders, sent ahead once.

    stage 0 ──(4, 8) float32──▶ stage 1 ──(4, 6) float32──▶ stage 2        one message a border for each input shape
        └───────── a skip, (4, 8) float32: told along the way, sent directly ───────┘

A receive needs a buffer of exactly the sender's shape. The last micro-batch may be smaller than the others, so every
distinct input shape goes through the stages once, as zeros and without gradients, before the first step that brings it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.trace import purpose
from minidist.comm import Comm

Meta = list[tuple[tuple[int, ...], str]]  # shape and dtype of each tensor at a border
Key = tuple[int, int]  # stage, micro-batch
Way = tuple[int, int, int]  # from stage, to stage, micro-batch

TENSORS, DIMS = 8, 6  # at most, that one border can carry
ROW = 4 + DIMS  # numbers that describe a tensor: dtype, from stage, to stage, number of dims, dims
WORDS = TENSORS * ROW  # of a border's message, 640 B
DTYPES = (
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)


@dataclass
class Borders:
    """What crosses which border: `meta` by (from stage, to stage, micro-batch); the borders into and out of a stage,
    the neighbour's first, then the skips by stage. Only of the stages of one rank.
    """

    meta: dict[Way, Meta] = field(default_factory=dict)
    into: dict[Key, list[int]] = field(default_factory=dict)  # (stage, micro-batch) -> stages that it gets from
    out: dict[Key, list[int]] = field(default_factory=dict)

    def floats(self, way: Way) -> Meta:
        """The tensors of a border that get a gradient back."""
        return [(shape, dtype) for shape, dtype in self.meta[way] if has_gradient(dtype_of(dtype))]


def dtype_of(name: str) -> np.dtype[Any]:
    """The dtype of that name, bfloat16 too."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def has_gradient(dtype: np.dtype[Any]) -> bool:
    """Floats do (bfloat16's kind is "V"); numbers of tokens do not."""
    return dtype.kind in "fV"


def signature(value: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an array."""
    if value.dtype.name not in DTYPES:
        raise UsageError(f"a tensor of {value.dtype} cannot cross a stage border; take one of {', '.join(DTYPES)}")
    return tuple(value.shape), value.dtype.name


def exchange_shapes(
    comm: Comm,
    home: Mapping[Key, int],
    stages: int,
    inputs: Sequence[Any],
    run: Callable[[int, list[Any]], list[tuple[int, Any]]],
) -> Borders:
    """The borders of this rank's stages. run(stage, arrays): a forward pass, the stage that each output goes to and the
    output.

    Each distinct way through the ranks and input shape sends one message of `WORDS` numbers a border between ranks
    (startup); what skips stages is told in it, so that the message to the next stage is the only one.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, value in enumerate(inputs):
        path = tuple(home[stage, i] for stage in range(stages))
        groups.setdefault((path, signature(value)), []).append(i)
    borders = Borders()
    with purpose("startup"):
        for (path, first), members in groups.items():
            travelling: dict[tuple[int, int], Meta] = {(-1, 0): [first]}
            for stage in range(stages):  # along the path, rank after rank
                if stage and comm.rank == path[stage] != path[stage - 1]:
                    words = np.empty(WORDS, np.int64)
                    comm.recv(words, path[stage - 1])
                    travelling = _unpack(words)
                if comm.rank != path[stage]:
                    continue
                arriving = sorted(
                    (way for way in travelling if way[1] == stage), reverse=True
                )  # the neighbour's, then the rest
                arriving = arriving[:1] + arriving[:0:-1]
                arrays = [np.zeros(shape, dtype_of(dtype)) for way in arriving for shape, dtype in travelling[way]]
                leaving: dict[tuple[int, int], Meta] = {}
                if stage + 1 < stages:
                    leaving = {(stage, stage + 1): []}
                    for target, array in run(stage, arrays):
                        _check_target(stage, target, stages)
                        leaving.setdefault((stage, target), []).append(signature(array))
                for i in members:
                    borders.meta.update(
                        {(*way, i): travelling[way] for way in arriving}
                        | {(*way, i): meta for way, meta in leaving.items()}
                    )
                    borders.into[stage, i] = [source for source, _ in arriving]
                    borders.out[stage, i] = [target for _, target in leaving]
                travelling = {way: meta for way, meta in travelling.items() if way[1] > stage} | leaving
                if stage + 1 < stages and path[stage + 1] != comm.rank:
                    comm.send(_pack(travelling), path[stage + 1])
    return borders


def _check_target(stage: int, target: int, stages: int) -> None:
    if not stage < target < stages:
        raise UsageError(
            f"stage {stage} sends a tensor to stage {target}; it must go to a later one, {stage + 1} to {stages - 1}"
        )


def _pack(travelling: Mapping[tuple[int, int], Meta]) -> np.ndarray:
    rows = [(*way, *tensor) for way, meta in travelling.items() for tensor in meta]
    if len(rows) > TENSORS or any(len(shape) > DIMS for _, _, shape, _ in rows):
        described = ", ".join(
            f"{shape} of {dtype} from stage {source} to {target}" for source, target, shape, dtype in rows
        )
        raise UsageError(
            "at most eight tensors of at most six dims can cross a border, those that skip stages included, and here"
            f" are: {described}"
        )
    words = np.zeros((TENSORS, ROW), np.int64)
    for row, (source, target, shape, dtype) in zip(words, rows, strict=False):
        row[:4] = DTYPES.index(dtype) + 1, source, target, len(shape)
        row[4 : 4 + len(shape)] = shape
    return words.reshape(-1)


def _unpack(words: np.ndarray) -> dict[tuple[int, int], Meta]:
    travelling: dict[tuple[int, int], Meta] = {}
    for dtype, source, target, dims, *shape in words.reshape(TENSORS, ROW).tolist():
        if dtype:
            travelling.setdefault((source, target), []).append((tuple(shape[:dims]), DTYPES[dtype - 1]))
    return travelling
