"""Par: the bytes, messages, virtual time and memory that our solution of an exercise needs on a case.

par.json is measured and never typed: `python -m tests.lesson.par_table` runs the solutions of the repository on every
case and writes it, and a test compares it with such runs. The package has the numbers, and not the solutions.

Proved by: tests/lesson/test_solutions.py
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from minidist.base.read_file import parse_json
from minidist.core.base.errors import UsageError
from minidist.course.lesson.catalogue import find
from minidist.course.lesson.exercise import Case, Exercise

TABLE = Path(__file__).with_name("par.json")
COLUMNS = ("bytes", "messages", "time", "memory")


@dataclass(frozen=True)
class Par:
    """What our solution needs on a case. messages: those of all ranks. forms: of the ranks' answers, in words."""

    metrics: dict[str, float]
    messages: int
    forms: list[str]


NOTHING = Par(dict.fromkeys(COLUMNS, 0.0), 0, [])


def is_measured(exercise: Exercise) -> bool:
    """Return whether an exercise has rows in the table: it sends, has a limit, or names the form of an answer."""
    return exercise.communicates or bool(exercise.limits) or exercise.check_answers is not None


def par_of(name: str, case: Case) -> Par:
    """Return par of an exercise on one of its cases, those that a seed may draw included."""
    exercise = find(name)
    if not is_measured(exercise):
        return NOTHING
    try:
        *numbers, messages, forms = _table()[name][key_of(case)]
    except KeyError:
        raise UsageError(f"par.json has no {name} on {case}; run python -m tests.lesson.par_table") from None
    return Par(
        dict(zip(COLUMNS, numbers, strict=True)), messages, [forms] * case.ranks if isinstance(forms, str) else forms
    )


def all_cases(exercise: Exercise) -> list[Case]:
    """Return every case on which an answer may be run, each once."""
    return sorted({*exercise.cases(), *exercise.pool(), exercise.par})


def key_of(case: Case) -> str:
    return f"{case.ranks},{case.size},{case.seed}"


@cache
def _table() -> dict[str, dict[str, list[Any]]]:
    table: dict[str, dict[str, list[Any]]] = parse_json(TABLE.read_text(encoding="utf-8"), any_float=True)
    return table
