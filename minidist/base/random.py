"""Draws of a key that begin anywhere in its stream.

The counter of a draw is the place of the element in the *global* array: (global sample, position, feature), row-major.
A rank that holds rows [a:b) of the global batch skips to row a and draws exactly those rows, so masks of dropout are
the same numbers under every strategy. Philox is counter-based, so skipping is free: NumPy's `Philox.advance(k)` skips
4k doubles.

Proved by: tests/base/test_random.py
"""

import numpy as np

from minidist.core.base.random import Key as Key


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
