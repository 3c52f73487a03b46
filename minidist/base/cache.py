"""A cache of arrays that are made once: unpacked text, tokens, features, a teacher's logits, measured times.

An entry is found by its content, not by a path or a time stamp. Its key is the SHA-256 of

    what is made | its version | its parameters | the SHA-256 of the source's content

A changed source or another parameter therefore has another key, and a copied or touched file has the same key. Any
number of processes may read and write one directory:

    two writers        Each writes a separate file. The last rename wins, and both files hold the same bytes.
    a killed writer    The entry appears, complete, when its file is renamed; fsync has written the bytes to the disk
                       before that. A writer that is killed earlier leaves no entry.
    a damaged entry    An entry ends with the SHA-256 of its bytes. When the hash is wrong, one line on standard error
                       says so, and the entry is made again.

Proved by: tests/data/test_loading.py, tests/collectives/test_tuning.py
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, quoted, reason

CHUNK = 1 << 20
HASH_BYTES = 32
STALE_SECONDS = 3600.0  # an unfinished file that is older was left by a writer that was killed


def folder() -> Path:
    """Return the directory of cached arrays: MINIDIST_CACHE, or minidist in the user's cache directory."""
    if os.environ.get("MINIDIST_CACHE"):
        return Path(os.environ["MINIDIST_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidist"


def content_hash(source: str | Path | np.ndarray) -> str:
    """Return the SHA-256 of a file's bytes, which are read piece by piece, or of an array's dtype, shape and bytes."""
    if isinstance(source, np.ndarray):
        digest = hashlib.sha256(f"{source.dtype} {source.shape} ".encode())
        digest.update(np.ascontiguousarray(source).view(np.uint8).data)
        return digest.hexdigest()
    with Path(source).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def key_of(content: str, what: str, version: int = 1, **parameters: Any) -> str:
    """Return an entry's key, as hexadecimal digits.

    content: the `content_hash` of the source. parameters: what else the result depends on; numbers, texts, or lists and
    dictionaries of them. Raises UsageError for parameters that JSON cannot express, such as NaN.
    """
    try:
        text = json.dumps([what, version, parameters, content], sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the parameters {quoted(parameters)} of a cached {what} cannot be written as JSON ({reason(error)}); pass"
            " numbers, texts, or lists and dictionaries of them"
        ) from None
    return hashlib.sha256(text.encode()).hexdigest()


def cached(
    source: str | Path | np.ndarray,
    what: str,
    make: Callable[[], np.ndarray],
    cache: Path | None = None,
    version: int = 1,
    **parameters: Any,
) -> np.ndarray:
    """Return the array that `make()` returns as a read-only memory map; it is made only once for the same content.

    source: a file, or an array. what: the name of what is made of it. version: increase it when `make` changes.
    parameters: everything else that `make` depends on. cache: the directory (default: `folder()`). If it cannot be
    written, nothing is stored: `make` runs again in the next call, and the array is returned as `make` returned it.
    """
    # Usually the entry exists: an earlier run made it, or another process that was faster.
    place = (cache or folder()) / f"{what}-{key_of(content_hash(source), what, version, **parameters)}.npy"
    entry = read_entry(place)
    if entry is not None:
        return entry
    array = make()
    try:
        write_entry(place, array)
        return _mapped(place)
    except OSError:
        return array


def read_entry(place: Path) -> np.ndarray | None:
    """Return an entry as a read-only memory map, or None without one. A damaged one is reported, and counts as none."""
    try:
        return _mapped(place)
    except OSError:  # there is no such entry
        pass
    except (ValueError, EOFError) as error:
        print(f"minidist: the cache entry {place} {reason(error)}; it is made again", file=sys.stderr, flush=True)
    return None


def write_entry(place: Path, array: np.ndarray) -> None:
    """Write an entry so that other processes see all of it or nothing. Raises OSError where it cannot be written."""
    import tempfile

    place.parent.mkdir(parents=True, exist_ok=True)
    _discard_unfinished(place)
    # [1] Write a temporary file that no other process writes, with the hash of its bytes at its end, and wait until all
    # of it is on the disk.
    descriptor, name = tempfile.mkstemp(".tmp", f"{place.stem}.", place.parent)
    own = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            file.write(bytes.fromhex(content_hash(own)))
            file.flush()
            os.fsync(file.fileno())
        # [2] With the rename the entry appears to other processes. One that has mapped an older file keeps that file.
        own.replace(place)
    finally:
        own.unlink(missing_ok=True)


def _discard_unfinished(place: Path) -> None:
    """Delete the temporary files of writers of this entry that were killed."""
    for left in place.parent.glob(f"{place.stem}.*.tmp"):
        try:
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink()
        except OSError:
            continue  # another process has deleted it


def _mapped(path: Path) -> np.ndarray:
    # The hash follows the array's bytes. NumPy does not read beyond the array.
    if not _is_whole(path):
        raise ValueError("is damaged: its checksum is not that of its bytes")
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _is_whole(path: Path) -> bool:
    """Whether the last bytes of a file are the hash of all others."""
    digest, left = hashlib.sha256(), path.stat().st_size - HASH_BYTES
    with path.open("rb") as file:
        while left > 0 and (piece := file.read(min(CHUNK, left))):
            digest.update(piece)
            left -= len(piece)
        return left == 0 and file.read() == digest.digest()
