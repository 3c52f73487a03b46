"""Hints as data: hints.toml has, for each exercise, texts and the failures that they are for.

    [["04.ring_all_reduce"]]                   of this exercise, in the order in which they are tried
    raised = ["IndexError", "ValueError"]      conditions; all of them must hold
    size_from = 1
    text = "the chunks are numbered 0 to n-1"

Proved by: tests/lesson/test_exercises.py
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from minidist.base.read_file import parse_toml
from minidist.course.lesson.exercise import Failure, Hint, is_wrong

Condition = Callable[[Failure], bool]


def listed(value: Any) -> list[Any]:
    """Return a value that may stand alone as a list."""
    return value if isinstance(value, list) else [value]


# A key of the file -> the condition that it makes of its value.
CONDITIONS: dict[str, Callable[[Any], Condition]] = {
    "kind": lambda kinds: lambda failure: failure.kind in listed(kinds),
    "metric": lambda metric: lambda failure: failure.metric == metric,
    "says": lambda words: lambda failure: any(word in failure.message for word in listed(words)),
    "raised": lambda names: lambda failure: any(c.__name__ in listed(names) for c in type(failure.error).__mro__),
    "ranks_from": lambda least: lambda failure: failure.case.ranks >= least,
    "ranks_to": lambda most: lambda failure: failure.case.ranks <= most,
    "size_from": lambda least: lambda failure: failure.case.size >= least,
    "size_to": lambda most: lambda failure: failure.case.size <= most,
}


def hint_of(row: Mapping[str, Any], names: Mapping[str, Any]) -> Hint:
    """Return the hint of a row.

    names: the functions that a row names. `when` is one of a failure; `returns` is one of a case, whose answers, of a
    typical mistake, are those that were given. `with`: their second argument, or a table of more by name. The condition
    `is_wrong` alone is that of a hint that is taken when no other one and no pattern fits.
    """
    conditions = dict(row)
    text = conditions.pop("text")
    given = conditions.pop("with", {})
    more, named = ([], given) if isinstance(given, dict) else ([given], {})
    if conditions == {"when": "is_wrong"}:
        return Hint(is_wrong, text)

    whens: list[Condition] = []
    if "when" in conditions:
        function = names[conditions.pop("when")]
        whens.append(lambda failure: function(failure, *more, **named))
    if "returns" in conditions:
        answers = names[conditions.pop("returns")]
        whens.append(lambda failure: failure.answers_are(answers(failure.case, *more, **named)))
    whens += [CONDITIONS[key](value) for key, value in conditions.items()]
    return Hint(lambda failure: all(when(failure) for when in whens), text)


@cache
def rows() -> dict[str, list[dict[str, Any]]]:
    """Return the file: the name of an exercise, or of what several have in common -> its rows."""
    return parse_toml(Path(__file__).with_name("hints.toml").read_text(encoding="utf-8"))


def hints_of(names: Mapping[str, Any], *keys: str, **more: Any) -> tuple[Hint, ...]:
    """Return the hints of an exercise, and after them what it has in common with others.

    names: the functions of the exercise's file. more: functions that only hints need.
    """
    return tuple(hint_of(row, {**names, **more}) for key in keys for row in rows().get(key, ()))
