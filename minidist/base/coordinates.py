"""Where the rows of a batch lie in the global batch of the step, so that what is drawn for them is the same everywhere.

The counter of a draw is the place of the element in the *global* array: (global sample, position, feature), row-major.
A rank that holds rows [a:b) of the global batch skips to row a and draws exactly those rows. Skipping is free, because
the generator is counter-based: NumPy's `Philox.advance(k)` skips 4k doubles.

Proved by: tests/base/test_random.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from minidist.core.base.errors import UsageError
from minidist.core.base.random import Key as Key


@dataclass(frozen=True)
class BatchCoordinates:
    """Where the rows of the current (micro-)batch lie in the global batch of the step.

    `sample_offset` is the global number of the first row. `calls` counts the calls of each module in this batch, so
    that a module that runs twice draws twice; it starts empty for each batch. `positions`: of each row only these
    places of a text of `length` tokens are here (context parallel); None: all.
    """

    step: int = 0
    sample_offset: int = 0
    seed: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    positions: Any = None
    length: int = 0

    def next_call(self, name: str) -> int:
        """Number of earlier calls of module `name` in this batch."""
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        return call


running_batch: ContextVar[BatchCoordinates | None] = ContextVar("minidist_batch_coordinates", default=None)


@contextmanager
def batch_coordinates(
    step: int = 0, sample_offset: int = 0, seed: int = 0, positions: Any = None, length: int = 0
) -> Iterator[BatchCoordinates]:
    """Rows computed in the block are rows `sample_offset`, `sample_offset` + 1, ... of the global batch of `step`.

    positions, length: with the sequence split, the places (integers, rising) that are here of texts of `length` tokens.
    """
    coordinates = BatchCoordinates(step, sample_offset, seed, positions=positions, length=length)
    token = running_batch.set(coordinates)
    try:
        yield coordinates
    finally:
        running_batch.reset(token)


def current_coordinates(who: str = "dropout") -> BatchCoordinates:
    """The coordinates of the current batch; an error outside `batch_coordinates`. who: needs them."""
    coordinates = running_batch.get()
    if coordinates is None:
        raise UsageError(
            f"{who} needs to know the step and the place of its rows in the global batch; wrap the step in"
            " minidist.batch_coordinates(step=...), or call model.eval() first"
        )
    return coordinates


def uniform(key: Key, start: int, count: int) -> np.ndarray:
    """Elements `start` to `start + count` of the key's stream of float64 uniforms in [0, 1)."""
    bits = np.random.Philox(key)  # type: ignore[arg-type]
    bits.advance(start // 4)
    generator = np.random.Generator(bits)
    generator.random(start % 4)
    return generator.random(count)


def normal(key: Key, shape: tuple[int, ...]) -> np.ndarray:
    """The global array of standard normals of `shape`, float64. (Not sliceable without drawing it whole.)"""
    return np.random.Generator(np.random.Philox(key)).standard_normal(shape)  # type: ignore[arg-type]


def uniform_rows(key: Key, row_start: int, rows: int, row_shape: tuple[int, ...]) -> np.ndarray:
    """Rows [row_start, row_start + rows) of the global array (any number of rows, *row_shape) of uniforms, float64."""
    size = prod(row_shape)
    return uniform(key, row_start * size, rows * size).reshape(rows, *row_shape)
