"""The file operations of a save, in one place, so that a test can kill a rank at each of them.

A file is on disk when `write` returns, and a rename is when `rename` returns: both wait for the disk (fsync). A rename
either has happened or has not, which is what makes a save atomic.

One job at a time saves into a directory. Rank 0 of the job holds a lock on the file DIR/.lock (flock), which the system
releases when the process ends, however it ends. Where a file system or a platform has no such locks, saving goes on
without one.

Proved by: tests/checkpoint/test_killed.py, tests/checkpoint/test_lock.py
"""

import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from minidist.base.errors import UsageError, quoted_path

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = ".lock"
SAVING = ".saving"  # the folders of saves that are not complete begin with this
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # any other error: a file system without locks


class Storage:
    """Files of the local or a shared file system. patience: seconds that `locked` waits for a job that is ending.

    tensor_bytes: of the last file of tensors.
    """

    patience = 1.0
    has_files = True
    tensor_bytes = 0
    _inside: Path | None = None  # the directory of the `locked` block that is running
    _alone = False  # no other job saves there, and the system guarantees it

    @contextmanager
    def locked(self, directory: Path) -> Iterator[None]:
        """Hold the lock of a directory, which is made; UsageError when another job holds it.

        A block inside a block of the same directory has no effect, so a job that holds the lock can save.
        """
        if self._inside == directory:
            yield
            return

        # The file stays when the lock is released: removing it would let two jobs lock two files of that name.
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / LOCK).open("ab+", buffering=0) as file:
            self._alone = fcntl is not None and self._lock(file, directory)
            self._inside = directory
            try:
                yield
            finally:
                self._inside, self._alone = None, False

    def _lock(self, file: IO[bytes], directory: Path) -> bool:
        """Lock the file, and write into it who did; UsageError when another job has it, False when nothing can."""
        until = time.monotonic() + self.patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in _HELD:
                    return False
                # A job that was killed a moment ago may not have ended yet.
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
                file.seek(0)
                owner = file.read(200).decode(errors="replace").strip() or "another process"
                raise UsageError(
                    f"another job saves into {quoted_path(directory)} ({owner}); wait until it has ended, or save into"
                    " another directory (--save)"
                ) from None

        import socket

        # For the sentence that another job prints; a job on a full disk reports the disk when it saves.
        with suppress(OSError):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        return True

    def make(self, path: Path) -> None:
        """Make an empty directory for a save; what earlier saves left next to it is removed, if no other job runs."""
        if self._alone and self._inside == path.parent:
            for left in path.parent.glob(SAVING + "*"):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink()
        path.mkdir(parents=True)

    def write(self, path: Path, data: bytes) -> None:
        """Write a whole file and wait until it is on disk; of a file that does not fit nothing is left."""
        try:
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                self.sync(file.fileno())
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise

    def write_tensors(self, path: Path, tensors: dict[str, Any]) -> int:
        """Write a file of tensors, or none where there are no tensors; return its bytes."""
        from safetensors.numpy import save as pack

        content = pack(tensors) if tensors else b""
        if tensors:
            self.write(path, content)
        self.tensor_bytes = len(content)
        return self.tensor_bytes

    def sync(self, descriptor: int) -> None:
        """Wait until the file or directory is on disk."""
        os.fsync(descriptor)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()

    def discard(self, path: Path) -> None:
        """Delete a whole directory; one that is left in part has the name of a save that is not complete."""
        hidden = path.with_name(f"{SAVING}-old-{path.name}")
        self.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def rename(self, source: Path, target: Path) -> None:
        """Replace the target in one step, and wait until the change is on disk."""
        os.replace(source, target)
        # A rename is on disk when its directory is. Windows opens no directory, and needs none of this.
        try:
            folder = os.open(target.parent, os.O_RDONLY)
        except PermissionError:
            return
        try:
            self.sync(folder)
        finally:
            os.close(folder)
