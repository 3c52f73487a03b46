"""The files of a package that add entries to a registry of the core.

Proved by: tests/base/test_registry.py
"""

import importlib
import pkgutil
from collections.abc import Collection, Iterable


def import_modules(package: str, path: Iterable[str], without: Collection[str] = ()) -> None:
    """Import every module of a package, so that the entries of all its files are registered.

    without: modules that register nothing, and are imported by what uses them.
    """
    for info in pkgutil.iter_modules(path):
        if info.name not in without:
            importlib.import_module(f"{package}.{info.name}")
