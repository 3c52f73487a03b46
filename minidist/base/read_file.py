"""The one way to read a user's JSON, TOML or text file: every limit is checked here, and every defect is one sentence.

    size        a file of gigabytes, or a device, is not read to its end
    depth       a parser, and whoever walks the result, calls itself once per level
    numbers     NaN, Infinity, 1e400, and whole numbers of thousands of digits are neither sizes nor rates
    keys        a key that appears twice is a mistake: the first one would be lost
    path        a NUL character or half a surrogate pair does not belong in a path

`parse_json` and `parse_toml` check a text that was read elsewhere, such as a line of a trace or the value of a flag. No
other module of minidist parses JSON or TOML.

Proved by: tests/base/test_read_file.py
"""

import json
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, quoted, quoted_path, reason
from minidist.base.limits import MAX_VALUE

MAX_BYTES = 16_000_000  # of a JSON or text file
MAX_TOML_BYTES, MAX_TOML_LINE = 100_000, 1_000  # dotted keys take the square of their number of parts
MAX_DEPTH = 50  # tables or lists inside each other
MAX_NUMBER_DIGITS = 40
SHORT = 4_000  # characters of a text; Python converts numbers of 4,300 digits


def check_path(path: str | Path, what: str) -> Path:
    """Return the path; raise UsageError when it has a character that no path can have. what: "--config", say."""
    text = str(path)
    # Bytes that are not UTF-8 arrive from the command line as surrogates 0xDC80 to 0xDCFF, and are valid.
    if "\0" in text or any(0xD800 <= ord(c) < 0xDC80 or 0xDCFF < ord(c) <= 0xDFFF for c in text):
        raise UsageError(f"{what} {quoted_path(text)} has a character that no path can have; correct the name")
    return Path(path)


def read_text(path: str | Path, what: str, remedy: str, most: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file of at most `most` bytes, without a byte order mark.

    what: the flag or the kind of file, the beginning of the sentence of an error; remedy: its end.
    """
    path = check_path(path, what)
    # One byte more than allowed is asked for, so that a device that never ends is not read to its end.
    try:
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise UsageError(f"{what} {quoted_path(path)} cannot be read ({error.strerror}); {remedy}") from None
    if len(content) > most:
        raise UsageError(f"{what} {quoted_path(path)} has more than {most:,} bytes; {remedy}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} {quoted_path(path)} is not UTF-8 at byte {error.start}; {remedy}") from None


def read_json(path: str | Path, what: str, remedy: str, most: int = MAX_BYTES) -> Any:
    """Return the content of a JSON file; see `read_text` for the arguments, and `parse_json` for what is refused.

    A number beyond the limits is its text, "Infinity" or "1e308": it does not matter in a key that nothing reads, and
    whoever reads the key says that it must be a number.
    """
    text = read_text(path, what, remedy, most)
    try:
        return parse_json(text, any_number=True)
    except ValueError as error:
        raise UsageError(f"{what} {quoted_path(path)} is not JSON: {reason(error)}; {remedy}") from None


def read_toml(path: str | Path, what: str, remedy: str) -> dict[str, Any]:
    """Return the content of a TOML file; see `read_text` for the arguments, and `parse_toml` for what is refused."""
    text = read_text(path, what, remedy, MAX_TOML_BYTES)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise UsageError(f"{what} {quoted_path(path)} is not TOML: {reason(error)}; {remedy}") from None


def parse_json(text: str | bytes, any_float: bool = False, any_number: bool = False) -> Any:
    """Return what a JSON text says. Raises ValueError with the reason, without the text.

    Refused are duplicate keys, more than MAX_DEPTH levels, and numbers beyond MAX_VALUE. any_float: floats of any size
    are allowed, and NaN and Infinity, which Python writes for the losses of a run that diverges. any_number: a number
    that would be refused is returned as its text, for files that another program wrote.
    """
    text = text if isinstance(text, str) else text.decode("utf-8")
    # In a short text no whole number is so long that converting it would take time.
    decoder = _ANY_NUMBER if any_number else _DECODERS[any_float, len(text) > SHORT]
    try:
        content = decoder.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check(content, any_float)
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """Return what a TOML text says. Raises ValueError with the reason; refused is what `parse_json` refuses."""
    # Python's parser takes the square of the number of parts of a dotted key, and a key ends with its line.
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_TOML_LINE:
            raise ValueError(f"line {number} has more than {MAX_TOML_LINE:,} characters")
    import tomllib

    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except tomllib.TOMLDecodeError as error:
        # Some of its sentences repeat a key.
        raise ValueError(reason(error)) from None
    except ValueError:
        # A whole number of thousands of digits, or a date that is not in the calendar.
        raise ValueError("it has a number or a date that is out of range") from None
    # inf and nan are numbers of TOML: whoever reads a setting refuses them with the sentence of the setting.
    _check(content, any_float=True)
    return content


_TOO_DEEP = f"it has more than {MAX_DEPTH} levels"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {quoted(key)} appears twice in one object")
    return content


def _whole(digits: str) -> int:
    if len(digits) > MAX_NUMBER_DIGITS:
        raise ValueError(f"it has a whole number of {len(digits):,} digits")
    return int(digits)


def _constant(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _number_or_text(text: str) -> Any:
    try:
        number = float(text) if text.strip("-0123456789") else _whole(text)
    except ValueError:
        return text
    return number if -MAX_VALUE <= number <= MAX_VALUE else text


_ANY_NUMBER = json.JSONDecoder(
    object_pairs_hook=_without_duplicates,
    parse_float=_number_or_text,
    parse_int=_number_or_text,
    parse_constant=_number_or_text,
)
# By (any_float, is the text long). Made once, because a trace has a text per line.
_DECODERS = {
    (any_float, is_long): json.JSONDecoder(
        object_pairs_hook=_without_duplicates,
        parse_int=_whole if is_long else None,
        parse_constant=float if any_float else _constant,
    )
    for any_float in (False, True)
    for is_long in (False, True)
}


def _check(content: Any, any_float: bool) -> None:
    """Raise ValueError for more than MAX_DEPTH levels, and for numbers that are too large. Level by level."""
    level = [content]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                deeper += value.values()
            elif kind is list:
                deeper += value
            elif (
                (kind is int or kind is float)
                and not -MAX_VALUE <= value <= MAX_VALUE
                and not (any_float and kind is float)
            ):
                raise ValueError(f"the number {quoted(value)} is too large")
        level = deeper
        if not level:
            return
    raise ValueError(_TOO_DEEP)
