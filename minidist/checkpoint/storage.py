"""The file operations of a save, in one place, so that a test can kill a rank at each of them.

A file is on disk when `write` returns, and a rename is when `rename` returns: both wait for the disk (fsync). A rename
either has happened or has not, which is what makes a save atomic.

Proved by: tests/checkpoint/test_killed.py
"""

import os
import shutil
from pathlib import Path


class Storage:
    """Files of the local or a shared file system."""

    def make(self, path: Path) -> None:
        """Make an empty directory; what was there is removed."""
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)

    def write(self, path: Path, data: bytes) -> None:
        """Write a whole file and wait until it is on disk."""
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            self.sync(file.fileno())

    def sync(self, descriptor: int) -> None:
        """Wait until the file or directory is on disk."""
        os.fsync(descriptor)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()

    def rename(self, source: Path, target: Path) -> None:
        """Replace the target in one step, and wait until the change is on disk."""
        os.replace(source, target)
        # A rename is on disk when its directory is.
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            self.sync(folder)
        finally:
            os.close(folder)
