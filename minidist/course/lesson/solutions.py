"""Finds our solutions of the exercises: lessons/solutions/ of the repository, which the package does not contain.

Nothing that judges an answer needs them: expected answers are computed by the exercises, and par is in par.json.
`reveal` prints one to a reader who has tried, in this session or in an earlier one; a stub that is not filled in, and
our solution itself, are no tries.

Proved by: tests/lesson/test_solutions.py
"""

import hashlib
import importlib.util
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from minidist.core.base.errors import UsageError
from minidist.course import progress
from minidist.course.lesson.catalogue import find
from minidist.course.lesson.exercise import Exercise
from minidist.course.lesson.numbers import number_of

PREFIX = "solutions_"  # of the names of the modules


def solution(name: str) -> Callable[..., Any]:
    """Return our solution of an exercise; `reveal` prints it.

    Raises UsageError when there is no such exercise, and when the repository's lessons/solutions/ is not at hand.
    """
    exercise = find(name)
    for path in sorted(folder().glob("*.py")):
        if number_of(path) in exercise.name.split(".") and (function := defined(loaded(path), exercise)):
            return function
    raise UsageError(f"{folder()} has no solution of {exercise.name}; it belongs to another version of minidist")


def defined(module: ModuleType, exercise: Exercise) -> Callable[..., Any] | None:
    """Return a module's answer to an exercise, or None: the functions of an assignment have their course's names."""
    if exercise.adapter is not None:
        known = all(hasattr(module, name) for name in exercise.functions)
        return exercise.adapter(vars(module)) if known else None
    solutions: dict[str, Callable[..., Any]] = getattr(module, "SOLUTIONS", {})
    return solutions.get(exercise.name)


TRIES = 3  # answers that are not right, after which `reveal` prints the solution
_session: dict[str, set[str]] = defaultdict(set)  # what this process has added, where the file cannot be written


def count(name: str, function: Any, passed: bool) -> None:
    """Count an answer as a try, unless it is our solution. The same code counts once, however often its cell runs."""
    if getattr(function, "__module__", "").startswith(PREFIX):
        return
    what, entry = ("passed", name) if passed else ("tries", f"{name} {fingerprint(function)}")
    _session[what].add(entry)
    with suppress(UsageError):
        progress.add(what, entry)


def fingerprint(function: Any) -> str:
    """Return a text that is the same for the same code, in every process."""
    code = getattr(function, "__code__", None)
    text = _text_of(code) if code is not None else getattr(function, "__qualname__", type(function).__qualname__)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _text_of(code: CodeType) -> str:
    """Return what a function does as a text. A function in it is a constant, whose own text has an address."""
    constants = [_text_of(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return repr((code.co_code, constants, code.co_names))


def kept(what: str) -> set[str]:
    """Return what was counted: the exercises that were "passed", or the "tries", with the exercise's name first."""
    entries = set(_session[what])
    with suppress(UsageError):
        entries |= set(progress.names_of(what))
    return entries


def reveal(name: str) -> None:
    """Print our solution of an exercise when an answer of the reader has passed, or TRIES answers have not.

    Raises UsageError like `solution`.
    """
    function, name = solution(name), find(name).name
    tries = sum(entry.split(" ")[0] == name for entry in kept("tries"))
    if name in kept("passed") or tries >= TRIES:
        print(inspect.getsource(function))
    else:
        left = TRIES - tries
        print(
            f"{name}: our solution is printed here when your answer passes, or after {left} more"
            f" {'try' if left == 1 else 'tries'}"
        )


def folder() -> Path:
    """Return the folder of the solutions: that of this checkout, or one next to the lessons that are worked on."""
    checkout, here = Path(__file__).resolve().parents[3], Path.cwd()
    places = [place / "lessons" / "solutions" for place in (checkout, here, *here.parents)] + [here / "solutions"]
    for place in places:
        if (place / "04_ring_all_reduce.py").exists():
            return place
    raise UsageError(
        "the solutions are not a part of the installed package; run this in a clone of minidist's repository, which has"
        " them in lessons/solutions/"
    )


@cache
def loaded(path: Path) -> ModuleType:
    """Return the module of a file of solutions."""
    name = f"{PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its functions are sent to the process that judges by value
    spec.loader.exec_module(module)
    return module
