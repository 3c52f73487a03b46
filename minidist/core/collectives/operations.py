"""How two contributions become one: sum, avg, max, min, prod, element by element and in place.

In half precision each addition is done in float32 and rounded, so the sum of n contributions is rounded n - 1 times,
at every rank that adds (as in NCCL). To round only once, reduce in float32:
`MixedPrecisionPolicy(reduce_dtype=float32)`, twice the bytes.

Proved by: tests/collectives/test_collectives.py
"""

from collections.abc import Callable

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.arrays import add_into, downcast, is_half, quiet_overflow, upcast
from minidist.core.base.errors import UsageError, quoted

UFUNCS: dict[str, Callable[..., np.ndarray]] = {
    "sum": xp.add,
    "avg": xp.add,
    "max": xp.maximum,
    "min": xp.minimum,
    "prod": xp.multiply,
}


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


def accumulate(op: str, total: np.ndarray, contribution: np.ndarray) -> None:
    """total = total (op) contribution, in the arrays' own dtype, without a temporary."""
    # Half precision: upcast, add in float32, downcast, in pieces that stay in the cache.
    if op in ("sum", "avg") and isinstance(total, np.ndarray) and total.itemsize == 2 and is_half(total.dtype):
        add_into(total, contribution)
    elif total.itemsize <= 4 and op in ("sum", "prod") and total.dtype.kind in "iu":
        _checked(op, total, contribution, total)
    else:
        UFUNCS[op](total, contribution, out=total)


def divide(total: np.ndarray, ranks: int) -> None:
    """Divide a sum in place, once, at the end: the last step of "avg"."""
    if total.itemsize == 2 and is_half(total.dtype):
        total[...] = downcast(upcast(total) / np.float32(ranks), total.dtype)  # bfloat16 cannot hold 257 ranks
    else:
        total /= total.dtype.type(ranks)


def combine(op: str, first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    """Store first (op) second in `out`, which may be one of the two, where ranks must agree on which comes first."""
    if op in ("sum", "avg") and out.itemsize == 2 and is_half(out.dtype):
        with quiet_overflow():  # a sum that is too large becomes infinite, and a loss scaler looks for it
            xp.add(first, second, out=out)
    elif out.itemsize <= 4 and op in ("sum", "prod") and out.dtype.kind in "iu":
        _checked(op, first, second, out)
    else:
        UFUNCS[op](first, second, out=out)
