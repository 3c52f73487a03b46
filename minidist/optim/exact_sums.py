"""Sums of squares without rounding: the same bits for every order of addition, and so for every cut over ranks.

A trust ratio (LARS, LAMB) needs the norm of a layer whose elements may lie on many ranks. Floating-point addition
rounds, so each cut would give another norm, another ratio and other weights. Whole numbers do not round. Every square
is a whole number of 2^-320; their sum is a whole number too, kept as limbs of 32 bits:

    sum of squares = limbs[0] 2^-320 + limbs[1] 2^-288 + ... + limbs[17] 2^224      each limb a float64 below 2^53

Arrays of limbs add like any other array, in an all-reduce for example, and stay exact for up to two million summands.
`value_of` rounds once, at the end. (Squares of float32 numbers are exact in float64, so the whole norm is rounded once;
of float64 numbers each square is rounded by itself, which no order changes.)

Source of the idea: U. Kulisch, "Computer arithmetic and validity" (2008), chapter 8: a fixed-point accumulator.
Proved by: tests/optim/test_layerwise.py
"""

import numpy as np

from minidist.base import arrays as xp

LIMBS, LIMB_BITS, LOWEST = 18, 32, -320
_HIGH, _LOW = 26, 27  # bits: the two parts of a float64's 53-bit mantissa


def square_sum(array: xp.Array) -> np.ndarray:
    """Return the sum of the squares of a 1-D array of at most 2^26 elements, as float64 limbs of shape (18,).

    Squares below 2^-267 count as 0 (numbers below 6e-41: no normal float32 is). Where a number is not finite, or its
    square is 2^256 or more, all limbs are NaN.
    """
    # Each square is mantissa * 2^exponent, with a mantissa from 1/2 to 1.
    squares = xp.square(xp.as_array(array, xp.float64))
    mantissas, exponents = xp.frexp(squares)
    if squares.size and not float(squares.max()) < 2.0**256:
        return np.full(LIMBS, np.nan)

    # The mantissa as two whole numbers, so small that sums of 2^26 of them are exact in float64.
    high = xp.floor(mantissas * 2.0**_HIGH)
    low = mantissas * 2.0 ** (_HIGH + _LOW) - high * 2.0**_LOW

    # Sums by exponent; the lowest bit of a mantissa is worth 2^(exponent - 53).
    places = exponents - (_HIGH + _LOW + LOWEST)
    kept = places >= 0
    if not kept.all():
        places, high, low = places[kept], high[kept], low[kept]
    sums = [xp.bincount(places, part).tolist() for part in (high, low)]

    # From here on Python's whole numbers, which have no limit.
    total = sum((int(h) << _LOW) + int(l) << place for place, (h, l) in enumerate(zip(*sums, strict=True)) if h or l)
    mask = (1 << LIMB_BITS) - 1
    limbs = [total >> (LIMB_BITS * i) & mask for i in range(LIMBS - 1)]
    return np.array([*limbs, total >> (LIMB_BITS * (LIMBS - 1))], np.float64)


def value_of(limbs: np.ndarray) -> float:
    """Return the number that `limbs` stand for, rounded once; NaN where a limb is not finite."""
    if not xp.isfinite(limbs).all():
        return float("nan")
    total = sum(int(limb) << (LIMB_BITS * i) for i, limb in enumerate(limbs.tolist()))
    return total / (1 << -LOWEST)  # Python rounds the quotient of two whole numbers correctly
