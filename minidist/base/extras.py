"""Imports by name: all files of a package, and packages that are not installed with minidist itself.

    import_modules(__name__, __path__)                       every file that adds an entry to a registry
    nbclient = extra("nbclient", "minidist lesson build")    says how to install it where it is missing

Proved by: tests/base/test_extras.py, tests/base/test_registry.py
"""

import importlib
import pkgutil
from collections.abc import Collection, Iterable
from typing import Any

from minidist.base.errors import UsageError, reason

# The extra of pyproject.toml that brings each package.
EXTRAS = {
    "cupy": "cuda",
    "hypothesis": "test",
    "ipykernel": "lessons",
    "jupyterlab": "learn",
    "jupytext": "lessons",
    "markdown_it": "lessons",
    "mpi4py": "mpi",
    "nbclient": "lessons",
    "nbformat": "lessons",
    "torch": "torch",
}


def extra(module: str, user: str) -> Any:
    """Return a module of an optional package, imported; UsageError with the remedy where it cannot be imported.

    user: what needs the package, such as "minidist lesson build"; it begins the sentence.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{user} needs {package} ({reason(error)}); install it with: pip install 'minidist[{EXTRAS[package]}]'"
        ) from None


def import_modules(package: str, path: Iterable[str], without: Collection[str] = ()) -> None:
    """Import every module of a package, so that the entries of all its files are registered.

    without: modules that register nothing, and are imported by what uses them.
    """
    for info in pkgutil.iter_modules(path):
        if info.name not in without:
            importlib.import_module(f"{package}.{info.name}")
