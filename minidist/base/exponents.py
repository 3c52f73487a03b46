"""How large the entries of arrays are, as powers of two: what decides whether float16 can hold them.

    2^-24 .. 2^-15    float16's subnormals: fewer digits the smaller         below half of 2^-24: zero, flushed
    2^-14 .. 2^15     its normal numbers                                     from 2^16 - 16 on: infinite

A loss scale of 2^s moves every entry s places to the right.

Proved by: tests/base/test_exponents.py
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from minidist.base import arrays as xp

SMALLEST, NORMAL, LARGEST = -24, -14, 15  # exponents of float16
_PIECE = 2**20  # elements at a time


def count_exponents(arrays: Iterable[Any], scale: float = 1.0) -> dict[str, int]:
    """Count entries by size, of all arrays together.

    Returns {"-12": how many entries x have 2^-12 <= |x| < 2^-11, ..., "zero": ..., "not finite": ...}.

    scale: a power of two by which the entries were multiplied, and are divided here. Keys are words because that is
    what a trace's header keeps.
    """
    total: Counter[int] = Counter()
    zero = other = 0
    for piece in (array.reshape(-1)[i : i + _PIECE] for array in arrays for i in range(0, array.size, _PIECE)):
        if xp.is_meta(piece):
            continue  # a dry run has no values to count
        values = np.asarray(xp.to_host(piece), np.float64) / scale
        finite = values[np.isfinite(values)]
        nonzero = finite[finite != 0]
        exponents = np.frexp(nonzero)[1] - 1
        lowest = int(exponents.min(initial=0))
        total.update({e + lowest: count for e, count in enumerate(np.bincount(exponents - lowest).tolist()) if count})
        zero, other = zero + finite.size - nonzero.size, other + values.size - finite.size
    return {**{str(e): total[e] for e in sorted(total)}, "zero": zero, "not finite": other}


def by_exponent(counts: Mapping[str, int]) -> dict[int, int]:
    """The powers of two among the counts, smallest first."""
    return {e: counts[str(e)] for e in sorted(int(key) for key in counts if key.lstrip("-").isdigit())}


def flushed_share(counts: Mapping[str, int], scale: float = 1.0) -> float:
    """The share of the nonzero entries that becomes zero in float16 when multiplied by `scale`, a power of two."""
    powers, shift = by_exponent(counts), math.frexp(scale)[1] - 1
    return sum(c for e, c in powers.items() if e + shift < SMALLEST - 1) / max(1, sum(powers.values()))
