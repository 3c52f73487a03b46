"""How two contributions become one: sum, avg, max, min, prod, element by element and in place.

Of two-byte floats each addition is done in float32 and rounded, so the sum of n contributions is rounded n - 1 times,
at every rank that adds (as in NCCL). Who wants one rounding reduces in float32:
`MixedPrecisionPolicy(reduce_dtype=float32)`, twice the bytes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from minidist.base.errors import UsageError
from minidist.base.half import add_into, is_half, rounded, wide

_UFUNCS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.add,
    "avg": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
}


def check_op(op: str, array: np.ndarray) -> None:
    if op not in _UFUNCS:
        raise UsageError(f"unknown reduction {op!r}; one of {', '.join(_UFUNCS)}")
    if not _has(op, array.dtype):
        raise UsageError(f"{array.dtype} values have no {op!r}; reduce numbers, or send this array as bytes")
    if op == "avg" and array.dtype.kind in "iub":
        raise UsageError(
            f"the average of {array.dtype} values is not an integer; reduce with 'sum', or convert to a float dtype"
        )


@cache
def _has(op: str, dtype: np.dtype[Any]) -> bool:
    """Can two values of this dtype be combined into a third one? Not dates, text or records."""
    try:
        nothing = np.empty(0, dtype)
        _UFUNCS[op](nothing, nothing, out=nothing)
    except TypeError:
        return False
    return True


def accumulate(op: str, total: np.ndarray, contribution: np.ndarray) -> None:
    """total = total (op) contribution, in the arrays' own dtype, without a temporary."""
    if op in ("sum", "avg") and isinstance(total, np.ndarray) and is_half(total.dtype):
        add_into(total, contribution)
        return
    _UFUNCS[op](total, contribution, out=total)


def divide_if_average(op: str, total: np.ndarray, ranks: int) -> None:
    """The last step of 'avg': the sum is divided once, at the end, by whoever holds it."""
    if op == "avg" and is_half(total.dtype):
        total[...] = rounded(wide(total) / np.float32(ranks), total.dtype)  # 257 is no bfloat16
    elif op == "avg":
        total /= total.dtype.type(ranks)


def combine(op: str, first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    """out = first (op) second; `out` may be one of the two. For algorithms whose ranks must agree on who comes first."""
    _UFUNCS[op](first, second, out=out)
