"""Names of a package that are imported when they are used first, so that a program loads only what it runs.

    # minidist/core/nn/__init__.py
    if TYPE_CHECKING:
        from minidist.core.nn.layers import Linear     <- what type checkers read, and this module
    __getattr__, __dir__ = lazy_imports(__name__, __file__)

`from minidist.core.nn import Linear` then imports `minidist/core/nn/layers.py` alone. A name must differ from the names
of the package's modules, because Python would find the module.

Proved by: tests/base/test_lazy.py
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_imports(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose `if TYPE_CHECKING:` imports the names that it offers.

    file: of the package, which is read when a name is used. AttributeError for another name, as of any module.
    """

    def get(name: str) -> Any:
        if name == "__all__":  # for `import *`
            return sorted(places(file))
        if name not in places(file):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = places(file)[name]
        value = getattr(import_module(module), original)
        # Kept, so that it is looked up once.
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *places(file)})


@cache
def places(file: str) -> dict[str, tuple[str, str]]:
    """Return {name: (module, name there)} of the imports below `if TYPE_CHECKING:` in a module."""
    return {
        alias.asname or alias.name: (line.module or "", alias.name)
        for block in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for line in block.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
