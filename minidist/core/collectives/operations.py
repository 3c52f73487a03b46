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

LINE = 64  # bytes of a cache line
READ_BY_OTHERS = range(64 * 1024, 1024 * 1024 + 1)  # bytes of arrays that are sent as they are and that a cache holds


def accumulate(op: str, total: np.ndarray, contribution: np.ndarray, out: np.ndarray | None = None) -> None:
    """total = total (op) contribution, in the arrays' own dtype, without a temporary.

    out: where the result goes instead; it may be `contribution`, where ranks must agree on which of the two is first.
    """
    # 16-bit floats are added in float32, and integers that may not hold the result are checked.
    out = total if out is None else out
    if out.dtype.char in "fd" or not hooks.narrow_sum(op, total, contribution, out):
        function = UFUNCS[op]
        if head := elements_before_line(out):
            function(total[:head], contribution[:head], out=out[:head])
            total, contribution, out = total[head:], contribution[head:], out[head:]
        function(total, contribution, out=out)


def elements_before_line(out: np.ndarray) -> int:
    """Return how many elements of a 1-D array lie before its first whole cache line; 0 if it does not matter.

    Another core that has read the array, as a message, holds its cache lines too. A vector store that crosses from one
    line into the next takes both back, and so each line twice: stores of whole lines take half the time.
    """
    if out.nbytes not in READ_BY_OTHERS or out.ndim != 1 or type(out) is not np.ndarray:
        return 0
    return -out.ctypes.data % LINE // out.itemsize


def divide(total: np.ndarray, ranks: int) -> None:
    """Divide a sum in place, once, at the end: the last step of "avg"."""
    if total.itemsize == 2 and is_half(total.dtype):
        total[...] = downcast(upcast(total) / np.float32(ranks), total.dtype)  # bfloat16 cannot hold 257 ranks
    else:
        total /= total.dtype.type(ranks)
