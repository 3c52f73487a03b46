"""Writing files: what the operating system refuses becomes one sentence that names the file and the remedy.

A full disk is noticed by `write`, `flush` or `close`, and the error then names no file; a folder without permission is
noticed by `open`. Whoever writes a file that a user asked for does so in a `writing` block.

Proved by: tests/base/test_files.py, tests/equality/test_not_finite.py
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minidist.base.errors import UsageError, quoted_path


@contextmanager
def writing(what: str, path: str | Path, remedy: str) -> Iterator[None]:
    """Raise an OSError of the block as a UsageError: "`what` cannot be written to `path`: why; `remedy`"."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{what} cannot be written to {quoted_path(path, marks=False)}: {error.strerror or error}; {remedy}"
        ) from None


def strict(value: Any) -> Any:
    """Return a value of JSON with null for NaN and infinity, which JSON does not have, as JavaScript writes them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value
