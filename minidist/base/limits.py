"""The limits of sizes, in one place: what a number must lie below before anything is allocated or repeated for it.

A number with a few zeros too many, from a flag or a damaged file, is refused with a sentence. Without a limit it would
take all memory of the machine, or never end. The limits are far above what a laptop can run.

Numbers that a program passes (a learning rate, a divisor) go through `check_number` and `check_whole`: True is not 1
there, and NaN, for which every comparison is false, is refused. The last functions raise the errors of `core/base`.

Proved by: tests/base/test_limits.py
"""

import math
import operator
from collections.abc import Iterable
from contextlib import suppress
from numbers import Real
from typing import Any, NoReturn

from minidist.base.errors import UsageError, quoted

MAX_RANKS = 100_000  # of a simulated world; each rank has a stack, and in training a model
MAX_SWEPT_RANKS = 4_096  # of a world that is run many times, or drawn
MAX_LAYERS = 10_000  # of a model; each is built, so more would take minutes before the first step
MAX_BATCH = 10_000_000  # samples of one step; their numbers are drawn for every step
MAX_COUNT = 10**15  # of anything that is only counted, such as steps or elements; floats count exactly up to 9e15
MAX_VALUE = 1e30  # of a time, a rate or a number of bytes; sums and squares of more do not fit a float
MIN_VALUE = 1e-30  # of one that is not zero; a quotient by less does not fit a float
MAX_DIGITS = 18  # of a whole number that is written as text
BOOL = "bool"  # the name of Python's class, and of NumPy's, which not every user of this file has loaded


def check_ranks(ranks: int, flag: str = "--ranks", most: int = MAX_RANKS) -> None:
    """Raise UsageError unless a simulated world can have this number of ranks."""
    if not 1 <= ranks <= most:
        raise UsageError(f"{flag} {quoted(ranks)}; a simulated world has 1 to {most:,} ranks here")


def check_count(number: int, flag: str, least: int = 0, most: int = MAX_COUNT) -> None:
    """Raise UsageError unless `least` <= number <= `most`."""
    if not least <= number <= most:
        raise UsageError(f"{flag} is {quoted(number)}; it must be from {least:,} to {most:,}")


def whole_number(text: str) -> int | None:
    """Return the number that plain decimal digits write, at most MAX_DIGITS of them; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else None


def check_flag(name: str, value: Any) -> bool:
    """Return what is on or off as a bool; raise UsageError unless it is True or False."""
    if type(value).__name__ != BOOL:
        raise UsageError(f"{name}={quoted(value)}; it must be True or False")
    return bool(value)


def is_size(number: float) -> bool:
    """Whether a number can be a time, a rate or a size: 0, or from MIN_VALUE up to MAX_VALUE. False for NaN."""
    return isinstance(number, Real) and (number == 0 or MIN_VALUE <= number <= MAX_VALUE)


def check_size(number: float, flag: str, zero: bool = True) -> None:
    """Raise UsageError unless `is_size`; with zero=False also for 0."""
    if not is_size(number) or (number == 0 and not zero):
        shown = f"{number:g}" if isinstance(number, Real) else quoted(number)
        raise UsageError(f"{flag} is {shown}; it must be {size_range(zero)}")


def size_range(zero: bool = True) -> str:
    """Return in words which numbers can be a size; zero: 0 is one of them."""
    return f"{'0, or ' * zero}a number from {MIN_VALUE:g} to {MAX_VALUE:g}"


def check_number(
    name: str, value: Any, *, least: float = 0.0, above: float | None = None, below: float = math.inf
) -> float:
    """Return a number as a float; raise UsageError unless it is finite and in the range.

    The range: `least` <= value < `below`, or with `above` above < value < below.
    """
    number = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
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
    if type(value).__name__ == BOOL or number < least:
        raise UsageError(f"{name}={quoted(value)}; it must be a whole number of at least {least}")
    return number


def check_chunks(total: Any, parts: Any) -> None:
    """Raise UsageError unless a number of elements can be cut into chunks: two whole numbers, at least one part."""
    try:
        for number in (total, parts):
            operator.index(number)
    except TypeError:
        raise UsageError(f"chunk_sizes({quoted(total)}, {quoted(parts)}); pass two whole numbers") from None
    if parts < 1:
        raise UsageError(f"cannot cut {total} elements into {parts} parts; parts must be at least 1")


def check_cuts(layout: Any) -> None:
    """Raise ValueError unless a `Layout` has a dim for each axis; over several axes it has one block, unpadded."""
    axes, dims = layout.axes, layout.dims
    if len(axes) != len(dims):
        raise ValueError(f"layout has {len(axes)} axes {axes} but {len(dims)} dims {dims}")
    if len(axes) > 1 and (layout.blocks, layout.padding, layout.copies) != (1, 0, 1):
        raise ValueError(f"a tensor cut over {axes} has one block, no padding and no copies; this layout is {layout}")


def refuse_law(law: Any, name: Any) -> NoReturn:
    """Raise ValueError: there is no law of this name for initial weights."""
    raise ValueError(
        f"unknown law {quoted(law)} of the initial weight {quoted(name)}; one of normal, uniform, constant"
    )


def refuse_purpose(name: Any, purposes: Iterable[str]) -> NoReturn:
    """Raise UsageError: there is no message purpose of this name."""
    raise UsageError(f"unknown message purpose {quoted(name)}; one of {', '.join(purposes)}; new_purpose adds it")
