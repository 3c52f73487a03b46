"""Packages that are not installed with minidist itself: what is said where one is missing.

    nbclient = extra("nbclient", "minidist lesson build")

Proved by: tests/base/test_extras.py
"""

import importlib
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
