"""Checks of numbers that a program passes, such as a learning rate, a divisor or a bandwidth.

True is not 1 here, and NaN, for which every comparison is false, is refused.

Proved by: tests/base/test_limits.py
"""

import math
import operator
from contextlib import suppress
from typing import Any

import numpy as np

from minidist.core.base.errors import UsageError, quoted


def check_number(
    name: str, value: Any, *, least: float = 0.0, above: float | None = None, below: float = math.inf
) -> float:
    """Return a number as a float; raise UsageError unless it is finite and in the range.

    The range: `least` <= value < `below`, or with `above` above < value < below.
    """
    number = math.nan
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        with suppress(OverflowError):  # a whole number of hundreds of digits
            number = float(value)
    if math.isfinite(number) and (number >= least if above is None else number > above) and number < below:
        return number

    # What is allowed, in words: "above 0 and below 1", "at least 0".
    low = f"above {above:g}" if above is not None else f"at least {least:g}" if least > -math.inf else ""
    high = f"below {below:g}" if below < math.inf else ""
    allowed = " and ".join(filter(None, (low, high)))
    what = (
        allowed if high else f"a finite number{' ' + allowed if above is not None else f' of {allowed}' if low else ''}"
    )
    raise UsageError(f"{name}={quoted(value)}; it must be {what}")


def check_whole(name: str, value: Any, least: int = 0) -> int:
    """Return a whole number as an int; raise UsageError unless it is one of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, (bool, np.bool_)) or number < least:
        raise UsageError(f"{name}={quoted(value)}; it must be a whole number of at least {least}")
    return number
