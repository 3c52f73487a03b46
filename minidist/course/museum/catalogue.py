"""The list of all exhibits, in the order of their numbers: catalogue.toml.

Proved by: tests/museum/test_museum.py
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, nearest, quoted
from minidist.base.read_file import parse_toml
from minidist.course.museum.exhibit import Catch, Exhibit, Recording


@cache
def exhibits() -> list[Exhibit]:
    """Return all exhibits, sorted by number."""
    rows = parse_toml(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))["exhibit"]
    return sorted(map(_exhibit, rows), key=lambda e: (_number(e.number), e.number))


def _exhibit(row: dict[str, Any]) -> Exhibit:
    caught_by = [Catch(**{**catch, "arguments": _tuple(catch.get("arguments", ()))}) for catch in row["caught_by"]]
    return Exhibit(**{**row, "inject": _named(row["inject"]), "job": _job(**row["job"]), "caught_by": tuple(caught_by)})


def _job(function: str = "jobs.train_job", **settings: Any) -> Callable[[], Recording]:
    """Return the job of a function: what it returns, or the job that it returns."""

    def job() -> Recording:
        made: Any = _named(function)(**settings)
        recording: Recording = made() if callable(made) else made
        return recording

    return job


def _named(name: str) -> Callable[..., Any]:
    """Return a function of the museum by its file and its name."""
    file, _, function = name.partition(".")
    found: Callable[..., Any] = getattr(import_module(f"minidist.course.museum.{file}"), function)
    return found


def _tuple(value: Any) -> Any:
    """Return a value with tuples in the place of lists, as the arguments of tests are."""
    if isinstance(value, dict):
        return {key: _tuple(each) for key, each in value.items()}
    return tuple(map(_tuple, value)) if isinstance(value, list) else value


def _number(text: str) -> int:
    return int(text.rstrip("abcdefg"))


def find(text: str) -> list[Exhibit]:
    """Return the exhibits of a number, or of a range: "1" gives 1a and 1b, "27-29" all from 27a to 29.

    Raises UsageError when there is none.
    """
    first, _, last = text.partition("-")
    if first.isdecimal() and last.isdecimal():
        found = [e for e in exhibits() if int(first) <= _number(e.number) <= int(last)]
    else:
        found = [e for e in exhibits() if text in (e.number, str(_number(e.number)))]
    if not found:
        numbers = [e.number for e in exhibits()]
        raise UsageError(
            f"the museum has no exhibit {quoted(text)}{nearest(text, numbers)}; it has {', '.join(numbers)}"
        )
    return found
