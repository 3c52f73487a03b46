"""What attention keeps in a dry run, where arrays have no values.

Proved by: tests/train/test_dry_run.py
"""

from functools import lru_cache
from typing import Any

from minidist.core.autograd.modes import saved_tensors
from minidist.core.autograd.tensor import Tensor
from minidist.core.base import arrays as xp


def saved_shapes(q: xp.Array, step: int, queries: int, source: Tensor) -> list[Any]:
    """What `_forward` saves in a dry run: arrays of as many bytes, those of all blocks but the last two as one.

    Backward reads the last two blocks first, and that is where its peak is.
    """
    sizes = _sizes(q.shape[:3], step, queries)
    saved: list[Any] = []
    # What a `saved_tensors_hook` keeps elsewhere moves block by block.
    if len(sizes) > 2 and saved_tensors.get() is None:
        scores, rows = (sum(column) for column in zip(*sizes[:-2], strict=True))
        saved.append((Tensor(xp.empty(scores, source.dtype, q)), xp.empty(rows, q.dtype, q)))
        sizes = sizes[-2:]
    for scores, rows in sizes:
        saved.append((source.save(xp.empty(scores, q.dtype, q)), xp.empty(rows, q.dtype, q)))
    return saved


@lru_cache
def _sizes(shape: tuple[int, int, int], step: int, queries: int) -> list[tuple[int, int]]:
    """Return of each block the numbers of exponentials and of rows, a row for each head and query."""
    batch, heads, length = shape
    blocks = [(n, start) for n in range(0, batch, step) for start in range(0, length, queries)]
    rows = [min(step, batch - n) * heads * min(queries, length - start) for n, start in blocks]
    return [(n * min(start + queries, length), n) for n, (_, start) in zip(rows, blocks, strict=True)]
