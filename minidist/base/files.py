"""Writing files: what the operating system refuses becomes one sentence that names the file and the remedy.

A full disk is noticed by `write`, `flush` or `close`, and the error then names no file; a folder without permission is
noticed by `open`. Whoever writes a file that a user asked for does so in a `writing` block.

Proved by: tests/base/test_files.py
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
