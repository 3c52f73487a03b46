"""A user's program as `python FILE.py ARGUMENTS` or `python -m MODULE ARGUMENTS` runs it, inside this process.

The program is a module `__main__` in sys.modules, as under Python, so that pickle, dataclasses and `from __main__
import` find its classes and functions. A process that a program starts runs the same file as `__mp_main__`.

Proved by: tests/torch_ranks/test_rank_process.py
"""

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from minidist.base.errors import UsageError, quoted, quoted_path, reason

_IS_LOCAL_RANK = re.compile("--local[-_]rank")
_LOCAL_RANK = re.compile(r"""["'](--local[-_]rank)["']""")


@dataclass(frozen=True)
class UserProgram:
    """source: FILE.py, or the name of a module where `is_module`. arguments: its own."""

    source: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    def check(self) -> None:
        """Raise UsageError when the program cannot be read, before any rank runs."""
        if not self.is_module:
            self._code_of_file()

    def run(self, name: str = "__main__", local_rank: int | None = None) -> dict[str, Any]:
        """Run the program as module `name` and return its namespace.

        local_rank: given to a file that has the flag --local-rank, as torch.distributed.launch does. UsageError when
        the program cannot be read; otherwise what the program raises.
        """
        module = ModuleType(name)
        if name == "__main__":
            sys.argv = [self.source, *self._local_rank(local_rank), *self.arguments]
        # Its neighbours can be imported; those of the folder where the command was given, with -m.
        folder = os.getcwd() if self.is_module else str(Path(self.source).resolve().parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        if self.is_module:
            spec, code = self._code_of_module()
            module.__spec__, module.__package__, module.__file__ = spec, spec.parent, spec.origin
            sys.argv[:1] = [spec.origin or self.source]
        else:
            code = self._code_of_file()
            module.__file__ = self.source
        vars(module)["__builtins__"] = __builtins__
        sys.modules[name] = module
        if name == "__mp_main__":
            sys.modules["__main__"] = module
        exec(code, vars(module))
        return vars(module)

    def names(self, library: str) -> bool:
        """Return whether the text of the program's file has the name of a library; True for a module."""
        return self.is_module or library in Path(self.source).read_text(encoding="utf-8")

    def _local_rank(self, rank: int | None) -> list[str]:
        if rank is None or self.is_module or any(_IS_LOCAL_RANK.match(argument) for argument in self.arguments):
            return []
        flag = _LOCAL_RANK.search(Path(self.source).read_text(encoding="utf-8"))
        return [f"{flag[1]}={rank}"] if flag else []

    def _code_of_file(self) -> CodeType:
        path = Path(self.source)
        try:
            return compile(path.read_text(encoding="utf-8"), str(path), "exec")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or reason(error)  # without the path, which the sentence has
            raise UsageError(f"{quoted_path(self.source)} cannot be read ({why}); give a Python file") from None
        except SyntaxError as error:
            raise UsageError(f"{quoted_path(self.source)} line {error.lineno}: {error.msg}; correct the file") from None

    def _code_of_module(self) -> tuple[ModuleSpec, CodeType]:
        for name in (self.source, f"{self.source}.__main__"):  # a package runs its __main__
            try:
                spec = importlib.util.find_spec(name)
                if spec is not None and spec.submodule_search_locations is None:
                    code = spec.loader.get_code(name)  # type: ignore[union-attr]
                    if code is not None:
                        return spec, code
            except (ImportError, ValueError, AttributeError):
                continue
        raise UsageError(f"-m {quoted(self.source)}: no module of that name can be run; write it as under python -m")
