"""How two contributions become one: sum, avg, max, min, prod, element by element and in place.

Proved by: tests/collectives/test_collectives.py
"""

from collections.abc import Callable

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base import hooks
from minidist.core.base.arrays import downcast, is_half, upcast

UFUNCS: dict[str, Callable[..., np.ndarray]] = {
    "sum": xp.add,
    "avg": xp.add,
    "max": xp.maximum,
    "min": xp.minimum,
    "prod": xp.multiply,
}


def accumulate(op: str, total: np.ndarray, contribution: np.ndarray, out: np.ndarray | None = None) -> None:
    """total = total (op) contribution, in the arrays' own dtype, without a temporary.

    out: where the result goes instead; it may be `contribution`, where ranks must agree on which of the two is first.
    """
    # A library adds narrow numbers (16-bit floats, short integers) and large arrays in another way.
    out = total if out is None else out
    plain = out.dtype.char in "fd" and out.nbytes <= hooks.read_by_others
    if plain or not hooks.special_sum(op, total, contribution, out):
        UFUNCS[op](total, contribution, out=out)


def divide(total: np.ndarray, ranks: int) -> None:
    """Divide a sum in place, once, at the end: the last step of "avg"."""
    if total.itemsize == 2 and is_half(total.dtype):
        total[...] = downcast(upcast(total) / np.float32(ranks), total.dtype)  # bfloat16 cannot hold 257 ranks
    else:
        total /= total.dtype.type(ranks)
