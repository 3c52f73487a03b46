"""Sums of numbers that may not hold the result: 16-bit floats are rounded, integers of less than 64 bits are checked.

Proved by: tests/collectives/test_collectives.py
"""

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.arrays import add_into, is_half, quiet_overflow
from minidist.core.base.errors import UsageError, quoted
from minidist.core.collectives.operations import UFUNCS


def narrow_sum(op: str, total: np.ndarray, contribution: np.ndarray) -> bool:
    """total = total (op) contribution where that is a sum or a product of narrow numbers; return whether it was."""
    # Half precision: upcast, add in float32, downcast, in pieces that stay in the cache.
    if op in ("sum", "avg") and isinstance(total, np.ndarray) and is_half(total.dtype):
        add_into(total, contribution)
        return True
    if total.itemsize <= 4 and op in ("sum", "prod") and total.dtype.kind in "iu":
        _checked(op, total, contribution, total)
        return True
    return False


def combine(op: str, first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    """Store first (op) second in `out`, which may be one of the two, where ranks must agree on which comes first."""
    if op in ("sum", "avg") and out.itemsize == 2 and is_half(out.dtype):
        with quiet_overflow():  # a sum that is too large becomes infinite, and a loss scaler looks for it
            xp.add(first, second, out=out)
    elif out.itemsize <= 4 and op in ("sum", "prod") and out.dtype.kind in "iu":
        _checked(op, first, second, out)
    else:
        UFUNCS[op](first, second, out=out)


def _checked(op: str, first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    """Store first (op) second of integers of less than 64 bits in `out`; UsageError where the result is too large.

    NumPy keeps the lower bits, so that the int8 100 + 100 would be -56. A sum of 64 bits is not checked.
    """
    if not xp.has_values(out):
        UFUNCS[op](first, second, out=out)
        return
    wide = UFUNCS[op](first.astype(xp.int64), second.astype(xp.int64))
    range_of = np.iinfo(out.dtype)
    right = (wide >= range_of.min) & (wide <= range_of.max)
    if not right.all():
        value = int(wide.reshape(-1)[int((~right).reshape(-1).argmax())])
        raise UsageError(
            f"{quoted(op)} of {out.dtype} values gives {value}, and {out.dtype} ends at"
            f" {range_of.max if value > 0 else range_of.min}; reduce in int64: array.astype(numpy.int64)"
        )
    out[...] = wide
