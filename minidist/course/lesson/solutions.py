"""Finds our solutions of the exercises: lessons/solutions/ of the repository, which the package does not contain.

Nothing that judges an answer needs them: expected answers are computed by the exercises, and par is in par.json.
`reveal` prints one to a reader who has tried; a stub that is not filled in, and our solution itself, are no tries.

Proved by: tests/lesson/test_solutions.py
"""

import importlib.util
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from minidist.core.base.errors import UsageError
from minidist.course.lesson.exercise import Exercise, find
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
_wrong: dict[str, set[Any]] = defaultdict(set)  # exercise -> answers of this process that were not right
_passed: set[str] = set()


def count(name: str, function: Any, passed: bool) -> None:
    """Count an answer as a try, unless it is our solution. The same code counts once, however often its cell runs."""
    if getattr(function, "__module__", "").startswith(PREFIX):
        return
    if passed:
        _passed.add(name)
    else:
        code = getattr(function, "__code__", None)
        _wrong[name].add(function if code is None else (code.co_code, repr(code.co_consts), code.co_names))


def reveal(name: str) -> None:
    """Print our solution of an exercise when an answer of this session has passed, or TRIES answers have not.

    Raises UsageError like `solution`.
    """
    function, name = solution(name), find(name).name
    if name in _passed or len(_wrong[name]) >= TRIES:
        print(inspect.getsource(function))
    else:
        left = TRIES - len(_wrong[name])
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
