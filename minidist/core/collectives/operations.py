"""How two contributions become one: sum, avg, max, min, prod, element by element and in place.

In half precision each addition is done in float32 and rounded, so the sum of n contributions is rounded n - 1 times,
at every rank that adds (as in NCCL). To round only once, reduce in float32:
`MixedPrecisionPolicy(reduce_dtype=float32)`, twice the bytes.

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
    # 16-bit floats are added in float32, and integers that may not hold the result are checked.
    out = total if out is None else out
    if out.dtype.char in "fd" or not hooks.narrow_sum(op, total, contribution, out):
        function = UFUNCS[op]
        if out.nbytes > xp.READ_BY_OTHERS and (head := xp.elements_before_line(out)):
            function(total[:head], contribution[:head], out=out[:head])
            total, contribution, out = total[head:], contribution[head:], out[head:]
        function(total, contribution, out=out)


def divide(total: np.ndarray, ranks: int) -> None:
    """Divide a sum in place, once, at the end: the last step of "avg"."""
    if total.itemsize == 2 and is_half(total.dtype):
        total[...] = downcast(upcast(total) / np.float32(ranks), total.dtype)  # bfloat16 cannot hold 257 ranks
    else:
        total /= total.dtype.type(ranks)
