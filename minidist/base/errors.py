"""The exceptions of core/base/errors.py, and how a sentence quotes values, paths and the errors of other programs.

Proved by: tests/base/test_errors.py
"""

# ruff: noqa: F403, F405

from collections.abc import Iterable

from minidist.core.base.errors import *

MAX_QUOTED = 80  # characters of a user's value in a message
MAX_REASON = 200  # characters of the text of another program's error
MAX_PATH = 4096  # characters of a path that can exist


def quoted(value: object, marks: bool = True, most: int = MAX_QUOTED) -> str:
    """Return a user's value for an error message: its repr, shortened to at most `most` characters.

    The middle is left out. marks: with quotation marks around a text.
    """
    # A text is cut before its repr is made: it may have megabytes. Other values may be too deep or too large for one.
    size = 0
    if isinstance(value, str):
        size = len(value)
        if size > most:
            value = value[:most] + value[-most:]
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a very large {type(value).__name__}"
    if isinstance(value, str) and not marks:
        text = text[1:-1]

    # Control characters grow in a repr, so it is measured again.
    if max(size, len(text) - 2 * marks) <= most:
        return text
    half = most // 2 - 2
    return f"{text[:half]}...{text[-half:]}" + (f" ({size:,} characters)" if size > most else "")


def quoted_path(path: object, marks: bool = True) -> str:
    """Return a path for an error message, whole, so that it can be copied; what is too long for a path is shortened."""
    text = str(path)
    return quoted(text, marks, MAX_PATH if len(text) <= MAX_PATH else MAX_QUOTED)


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error message: `" (did you mean 'adam'?)"`, or nothing when no name is near."""
    from difflib import get_close_matches

    # No name is near a text of a thousand characters, and comparing one takes long.
    close = get_close_matches(name, list(names), n=1, cutoff=0.5) if len(name) <= MAX_QUOTED else []
    return f" (did you mean {quoted(close[0])}?)" if close else ""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as 1 rank or 1,024 ranks."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def ranges_text(numbers: Iterable[int]) -> str:
    """Return numbers in ascending order as text, those that follow each other as first-last: "0-3, 8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def text_of(error: BaseException) -> str:
    """Return an exception's text; of one whose `str()` raises, its class."""
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} without a text: its str() raises>"


def reason(error: BaseException, named: bool = False) -> str:
    """Return the text of another program's exception for an error message: one line of at most MAX_REASON characters.

    named: after the name of its class. An exception without a text is its class.
    """
    text, kind = quoted(text_of(error), marks=False, most=MAX_REASON), type(error).__name__
    return f"{kind}: {text}" if named and text else text or kind


def check_divisible(
    number: int, what: str, ranks: int, group: str = "", *, blocks: int = 1, or_else: str | None = None
) -> None:
    """Raise a UsageError with the nearest numbers that work unless `number` can be cut into `ranks` equal parts.

    what: the things that are divided ("heads of attn"). group: the kind of ranks ("tensor-parallel"). blocks: the
    things lie in this number of equal blocks, and each block is cut. or_else: another remedy ("use ring attention").
    """
    unit = ranks * blocks
    if number % unit == 0:
        return
    below, above = number // unit * unit, (number // unit + 1) * unit
    divisors = ", ".join(str(n) for n in range(1, number + 1) if number % (n * blocks) == 0)
    raise UsageError(
        f"{number} {what} cannot be divided among {ranks} {group}{'-parallel ' if group else ''}ranks;"
        f" use {f'{below} or {above}' if below else above}, or one of {divisors} ranks"
        + (f", or {or_else}" if or_else else "")
    )
