"""How a technique translates its keys of a DeepSpeed file, and the phrases that all translations share.

`job/config/deepspeed.py` translates a file, and asks each technique that is installed about the sections that it reads.

Proved by: tests/config/test_deepspeed.py
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from minidist.base.errors import UsageError, quoted

AUTO = "auto: another program fills it in, and here the flags decide"


class Applied(NamedTuple):
    """A key that becomes flags: an example of its value, what it becomes, and where."""

    example: Any
    becomes: str


class Noted(NamedTuple):
    """A key without a flag. values: those that say what minidist does anyway. why: why no other value applies."""

    values: tuple[Any, ...]
    why: str


class DeepSpeedKeys:
    """The keys of a technique, by their place in a file (`fp16.loss_scale`), for the tables of docs/deepspeed.md."""

    applied: ClassVar[Mapping[str, Applied]] = {}
    noted: ClassVar[Mapping[str, Noted]] = {}

    def translate(self, name: str, section: dict[str, Any], result: Any) -> None:
        """Translate the technique's keys of a section that is enabled, and remove them from it.

        result: a `job.config.deepspeed.Translation`, which gets the settings.
        """

    def complete(self, result: Any) -> None:
        """Add what depends on several sections, once all of them are translated."""


def whole(key: str, value: Any) -> int:
    """Return a whole number, which DeepSpeed's files may write as 5e8."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value < 2**63 or value != int(value):
        raise UsageError(f"DeepSpeed's {key} is {quoted(value)}; it must be a whole number")
    return int(value)


def number(key: str, value: Any, least: float | None = None) -> int | float:
    """Return a number; UsageError for another value, or for one below `least`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (least is not None and not value >= least):
        limit = "" if least is None else f" of at least {least}"
        raise UsageError(f"DeepSpeed's {key} is {quoted(value)}; it must be a number{limit}")
    return value  # type: ignore[no-any-return]
