"""An exhibit is data: a patch that injects the bug, its story, a small job that shows it, and tests that catch it.

Proved by: tests/museum/test_museum.py
"""

import builtins
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from minidist.base.errors import reason
from minidist.core.base.arrays import Array

_MISSING = object()


class Patch:
    """Changes to objects, which `undo` reverts, the last first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Set target.name = value, until `undo`. A module must have the name: a bug replaces something."""
        if isinstance(target, ModuleType) and not (hasattr(target, name) or hasattr(builtins, name)):
            raise AttributeError(f"{target.__name__} has no {name} to replace")
        own = vars(target).get(name, _MISSING) if isinstance(target, type) else getattr(target, name, _MISSING)
        setattr(target, name, value)
        self._undo.append((lambda: delattr(target, name)) if own is _MISSING else (lambda: setattr(target, name, own)))

    def setitem(self, mapping: Any, key: Any, value: Any) -> None:
        """Set mapping[key] = value, until `undo`."""
        own = mapping.get(key, _MISSING)
        mapping[key] = value
        self._undo.append((lambda: mapping.pop(key)) if own is _MISSING else (lambda: mapping.__setitem__(key, own)))

    def undo(self) -> None:
        """Revert every change, the last one first."""
        while self._undo:
            self._undo.pop()()


def replaces(target: Any, name: str) -> Callable[[Callable[..., Any]], Callable[[Patch], None]]:
    """Make a bug of a function that takes the place of target.name: what was there is its first argument."""

    def bug(function: Callable[..., Any]) -> Callable[[Patch], None]:
        @wraps(function)
        def inject(patch: Patch) -> None:
            right = getattr(target, name)

            def wrong(*arguments: Any, **keywords: Any) -> Any:
                return function(right, *arguments, **keywords)

            patch.setattr(target, name, wrong)

        return inject

    return bug


@dataclass
class Recording:
    """What a job computed.

    tensors: for each rank, kind ("gradients" of the first step, "weights" after the last) -> name -> values.
    measured: other numbers by name, such as peak bytes.
    """

    losses: list[float]
    tensors: list[dict[str, dict[str, Array]]]
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckResult:
    """What a test did with the bug injected. status: one of

    - "caught": it failed with the error that the exhibit declares; text is that error in one line;
    - "passed": it does not detect the bug;
    - "other failure": it failed, but with another error than the declared one, which proves nothing about the bug;
    - "not run": it could not run here; text says why and what to do.
    """

    status: str
    text: str = ""


@dataclass(frozen=True)
class Catch:
    """A test of minidist's suite, with its arguments: it passes, and with the bug injected it fails with `error`."""

    file: str  # tests/parallel/test_zero.py
    test: str
    arguments: tuple[Any, ...] = ()
    error: str = "AssertionError"  # the class of the error; pytest.fail and pytest.raises fail with "Failed"

    def __str__(self) -> str:
        return f"{self.file}::{self.test}" + (f"{self.arguments!r}".replace(",)", ")") if self.arguments else "")

    def load(self) -> Callable[..., Any]:
        """Return the test function. Raises ImportError, with the remedy, where minidist's tests cannot be imported."""
        if not (_root() / self.file).is_file():
            raise ImportError("minidist's tests are not part of an installed package; run the museum from a clone")
        if str(_root()) not in sys.path:
            sys.path.insert(0, str(_root()))
        try:
            module = importlib.import_module(self.file.removesuffix(".py").replace("/", "."))
        except ModuleNotFoundError as error:
            raise ImportError(f"{error.name} is not installed; pip install -e '.[test]'") from error
        test: Callable[..., Any] = getattr(module, self.test)
        return test

    def run(self) -> None:
        """Run the test, with pytest's `monkeypatch` and `tmp_path` if it takes them; raises what the test raises."""
        test = self.load()
        names = inspect.signature(test).parameters
        with ExitStack() as stack:
            fixtures: dict[str, Any] = {}
            if "monkeypatch" in names:
                pytest = importlib.import_module("pytest")
                fixtures["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
            if "tmp_path" in names:
                fixtures["tmp_path"] = Path(stack.enter_context(TemporaryDirectory()))
            test(*self.arguments, **fixtures)

    def check(self) -> CheckResult:
        """Run the test while the bug is injected, and return what it did. Only the declared error counts as caught."""
        try:
            self.load()
        except ImportError as error:
            return CheckResult("not run", reason(error))
        try:
            self.run()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # pytest.fail raises a BaseException
            lines = [line.strip() for line in str(error).splitlines()]
            text = next((line for line in lines if line and line != "assert"), "")
            kind = type(error).__name__
            said = f"{kind}: {text}".removesuffix(": ")
            if kind == "Skipped":
                return CheckResult("not run", text)
            return CheckResult("caught" if kind == self.error else "other failure", said)
        return CheckResult("passed")


def _root() -> Path:
    return Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Exhibit:
    """One bug, with everything that is needed to show it.

    number: with a letter where one cause shows in several ways. story: what happened. inject: puts the bug into the
    running program. job: what runs with and without it; a MinidistError that it raises is a symptom too. caught_by:
    tests that fail. thread: the address of the public report, where there is one.
    """

    number: str
    title: str
    story: str
    inject: Callable[[Patch], None]
    job: Callable[[], Recording]
    caught_by: tuple[Catch, ...]
    thread: str = ""

    @contextmanager
    def injected(self) -> Iterator[None]:
        """Inject the bug for the time of the block."""
        patch = Patch()
        try:
            self.inject(patch)
            yield
        finally:
            with suppress(KeyError):
                patch.undo()
