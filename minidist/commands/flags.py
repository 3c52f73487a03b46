"""Flags of any command, with their checks. Those of a training job, which take longer to import, are in options.py.

Proved by: tests/commands/test_flags.py, tests/commands/test_endings.py
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from minidist.base.errors import UsageError, quoted
from minidist.base.file_format import format_of
from minidist.base.limits import check_size
from minidist.commands.command import Option

if TYPE_CHECKING:
    from minidist.planning.architecture import Architecture


def within_limits(flag: str, value: float | None) -> float | None:
    """Return the number of a flag; UsageError for one that is negative, not finite, or out of range of a size.

    Every flag that takes a float has it, or `above_zero`, as its callback.
    """
    if value is not None:
        check_size(value, flag)
    return value


def above_zero(flag: str, value: float | None) -> float | None:
    """Return the number of a flag, as `within_limits`; UsageError for 0, too."""
    if value is not None:
        check_size(value, flag, zero=False)
    return value


def picture_file(flag: str, value: Path | None) -> Path | None:
    """Return the file of a picture; UsageError, before anything is computed, for an ending that is not a picture's."""
    from minidist.report.frame import SUFFIXES

    format_of(value, None, {"picture": SUFFIXES}, flags=(flag, ""))
    return value


Timeout = Annotated[float, Option(help="seconds until a silent rank is reported", callback=within_limits)]


def described_model(model: str | Path) -> "Architecture":
    """Return the model of a file or of a name; what its file leaves out is printed on standard error."""
    from minidist.planning.huggingface_config import read_architecture, read_model

    found = read_architecture(model) if isinstance(model, Path) else read_model(model)
    for sentence in found.approximations:
        print(sentence, file=sys.stderr)
    return found


def whole_numbers(text: str, name: str) -> list[int]:
    """Return the numbers of a comma-separated list."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(
            f"{name} {quoted(text)}; it must be whole numbers with commas between them, such as 4096,1048576"
        ) from None


def one_of(value: str, flag: str, choices: Sequence[str]) -> str:
    """Return the value of a flag; UsageError unless it is one of the choices."""
    if value not in choices:
        raise UsageError(f"{flag} {quoted(value)}; it must be {', '.join(choices[:-1])} or {choices[-1]}")
    return value
