"""What a process has for itself and the ranks of one process must not share. Needs no PyTorch.

A rank that runs in this process has its own modules, environment variables, working directory, arguments and output, as
a process would. They are put away when the rank lets others run, and put back when it goes on:

    rank 0 leaves    sys.modules ── its `__main__` and the modules of its program ──▶ kept
    rank 1 enters    sys.modules ◀── the modules that rank 1 has imported

Modules of Python, of installed packages and of this package are shared: they are imported once. A program's modules are
found in the time that they take themselves, not in that of all 3,000 modules: a marker is the last entry of sys.modules
when a rank enters, so that whatever follows it has been imported by this rank.

Proved by: tests/torch_ranks/test_rank_process.py
"""

import importlib._bootstrap as bootstrap
import io
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType
from typing import Any, TextIO

from minidist.comm.call_site import is_of_user
from minidist.comm.sim.process_state import folder_now
from minidist.core.base.errors import UsageError

MARKER = "minidist.debug.rank_process.marker"
_MARKER = ModuleType(MARKER)
NEVER = frozenset({"minidist", "torch", "numpy"})  # cannot be imported twice, or hold what ranks exchange
ALWAYS = frozenset({"__main__", "__mp_main__"})


class UserModules:
    """Which modules are the program's: those neither of Python nor installed, and those of the packages in `own`."""

    def __init__(self, own: Iterable[str] = ()) -> None:
        self.own = frozenset(own)
        for name in sorted(self.own):
            if name.partition(".")[0] in NEVER:
                raise UsageError(f"--own {name}: every rank needs the same {name}; leave it out")
            if not name.isidentifier():
                raise UsageError(f"--own {name}: give the name of a package as it is imported, such as accelerate")
        self._of_package: dict[str, bool] = {}

    def has(self, name: str) -> bool:
        """Return whether a module in sys.modules is the program's; its outermost package decides."""
        package = name.partition(".")[0]
        found = self._of_package.get(package)
        if found is None:
            found = self._of_package[package] = self._decide(package, sys.modules.get(package, sys.modules[name]))
        return found

    def _decide(self, package: str, module: Any) -> bool:
        if package in NEVER or package in ALWAYS or package in self.own:
            return package not in NEVER
        spec = getattr(module, "__spec__", None)
        places = [getattr(module, "__file__", None), *(getattr(spec, "submodule_search_locations", None) or ())]
        place = next((place for place in places if isinstance(place, str)), "")
        # One without a place is built in, or made by whoever uses it. An extension module exists once in a process.
        return os.path.isabs(place) and is_of_user(place) and not place.endswith(tuple(EXTENSION_SUFFIXES))


class Output(io.TextIOBase):
    """The standard output of one rank: passed on line by line, as the output of processes is, and kept."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.written, self._line = stream, io.StringIO(), ""

    def write(self, text: str) -> int:
        """Keep a text, and pass on the lines that it ends."""
        self.written.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self.stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Pass on what stands in an unfinished line."""
        self.stream.write(self._line)
        self._line = ""
        self.stream.flush()


class Variables(dict[Any, Any]):
    """Environment variables, as os.environ holds them. own: the names whose values may differ from the process's."""

    def __init__(self, beginning: dict[Any, Any], more: Mapping[Any, Any]) -> None:
        super().__init__({**beginning, **more})
        self.own = {*getattr(beginning, "own", ()), *more}

    def __setitem__(self, name: Any, value: Any) -> None:
        self.own.add(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: Any) -> None:
        self.own.add(name)
        super().__delitem__(name)


@dataclass(frozen=True)
class Beginning:
    """What every rank begins with: what the process had when the run began."""

    modules: UserModules
    variables: dict[Any, Any]
    folder: str
    argv: list[str]
    path: list[str]
    stdout: TextIO


class RankProcess:
    """What one rank has as if it were a process. environment: the variables that this rank begins with in addition."""

    def __init__(self, beginning: Beginning, environment: Mapping[str, str]) -> None:
        self.beginning, self.modules = beginning, dict[str, ModuleType]()
        self.output, self.folder = Output(beginning.stdout), beginning.folder
        self.argv, self.path = beginning.argv, list(beginning.path)
        key, value = os.environ.encodekey, os.environ.encodevalue
        encoded = {key(name): value(text) for name, text in environment.items()}
        self.variables = Variables(beginning.variables, encoded)

    def enter(self) -> None:
        """Make the process this rank's: called each time it goes on."""
        sys.modules[MARKER] = _MARKER
        sys.modules.update(self.modules)
        _set_variables(self.variables)
        sys.argv, sys.path[:], sys.stdout = self.argv, self.path, self.output
        _go_to(self.folder, self.beginning.folder)

    def leave(self) -> None:
        """Keep what this rank has, and take it out of the process: called each time it lets others run."""
        if MARKER not in sys.modules:
            return  # the run has ended, and this rank's thread ends late
        # Whatever stands behind the marker is new or this rank's, in the order of import.
        imported = []
        for name in reversed(sys.modules):
            if name == MARKER:
                break
            imported.append(name)
        names = [name for name in reversed(imported) if self.beginning.modules.has(name)]
        self.modules = {name: sys.modules.pop(name) for name in names}
        del sys.modules[MARKER]
        # A module that communicates while it is imported is locked by this rank; others import one of the same name.
        for name in names:
            bootstrap._module_locks.pop(name, None)  # type: ignore[attr-defined]
        self.argv, self.path = sys.argv, list(sys.path)
        sys.stdout = self.beginning.stdout
        self.folder = folder_now()
        _go_to(self.beginning.folder, self.folder)


@contextmanager
def own_process_state(modules: UserModules) -> Iterator[Beginning]:
    """Hide the program's modules that the process has, so that every rank imports its own; undo all at the end.

    Yields what a RankProcess begins with.
    """
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if modules.has(name)}
    variables, folder = _variables(), folder_now()
    beginning = Beginning(modules, variables, folder, sys.argv, list(sys.path), sys.stdout)
    try:
        yield beginning
    finally:
        sys.modules.update(hidden)
        _set_variables(variables)
        _go_to(folder, folder_now())
        sys.argv, sys.path[:], sys.stdout = beginning.argv, beginning.path, beginning.stdout


def _variables() -> dict[Any, Any]:
    return os.environ._data  # type: ignore[attr-defined,no-any-return]


def _set_variables(variables: dict[Any, Any]) -> None:
    """Give the process other environment variables: those that Python sees, and those that a new process inherits."""
    before = _variables()
    for name in getattr(before, "own", set()) | getattr(variables, "own", set()):
        value = variables.get(name)
        if value is None:
            os.unsetenv(name)
        elif value != before.get(name):
            os.putenv(name, value)
    os.environ._data = variables  # type: ignore[attr-defined]
    if os.supports_bytes_environ:
        os.environb._data = variables  # type: ignore[attr-defined]


def _go_to(folder: str, now: str) -> None:
    if folder and folder != now:
        with suppress(OSError):
            os.chdir(folder)
