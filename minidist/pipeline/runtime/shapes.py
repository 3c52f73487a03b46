"""What will arrive, said before it does: shapes and dtypes of all stage borders, sent ahead once.

    stage 0 ──(4, 8) float32──▶ stage 1 ──(4, 6) float32──▶ stage 2        one message a border for each input shape

A receive needs a buffer of exactly the sender's shape. The last micro-batch may be smaller than the others, so every distinct
input shape goes through the stages once, as zeros and without gradients, before the first step that brings it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.trace import purpose
from minidist.comm import Comm

Meta = list[tuple[tuple[int, ...], str]]  # shape and dtype of each tensor at a border
Key = tuple[int, int]  # stage, micro-batch


WORDS = 64  # of a border's message, 512 B: eight tensors of a dtype, a number of dims and at most six dims


def _pack(meta: Meta) -> np.ndarray:
    words = np.zeros((8, 8), np.int64)
    if len(meta) > 8 or any(len(shape) > 6 for shape, _ in meta):
        raise UsageError(f"a stage sends {meta}; at most eight tensors of at most six dims can cross a border")
    for row, (shape, dtype) in zip(words, meta, strict=False):
        row[:2] = np.dtype(dtype).num + 1, len(shape)
        row[2 : 2 + len(shape)] = shape
    return words.reshape(-1)


def _unpack(words: np.ndarray) -> Meta:
    rows = [row for row in words.reshape(8, 8).tolist() if row[0]]
    return [(tuple(row[2 : 2 + row[1]]), _DTYPES[row[0] - 1]) for row in rows]


_DTYPES = {np.dtype(code).num: np.dtype(code).str for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}


def _receive(comm: Comm, source: int) -> np.ndarray:
    words = np.empty(WORDS, np.int64)
    comm.recv(words, source)
    return words


def signature(value: Any) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an array."""
    return tuple(value.shape), value.dtype.str


def exchange_shapes(
    comm: Comm, home: Mapping[Key, int], stages: int, inputs: Sequence[Any], run: Callable[[int, list[Any]], list[Any]]
) -> dict[Key, Meta]:
    """(stage, micro-batch) -> what enters the stage, for every border of this rank. run(stage, arrays): a forward pass."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, value in enumerate(inputs):
        path = tuple(home[stage, i] for stage in range(stages))
        groups.setdefault((path, signature(value)), []).append(i)
    entering: dict[Key, Meta] = {}
    with purpose("startup"):
        for (path, first), members in groups.items():
            meta: Meta = [first]
            for stage in range(stages):  # along the path, rank after rank
                if stage and comm.rank == path[stage] != path[stage - 1]:
                    meta = _unpack(_receive(comm, path[stage - 1]))
                if comm.rank == path[stage]:
                    entering.update({(stage, i): meta for i in members})
                    if stage + 1 < stages:
                        meta = [signature(array) for array in run(stage, [np.zeros(shape, dtype) for shape, dtype in meta])]
                        entering.update({(stage + 1, i): meta for i in members})
                        if path[stage + 1] != comm.rank:
                            comm.send(_pack(meta), path[stage + 1])
    return entering
