"""A cache of arrays that are made from data once: unpacked text, tokens, features, a teacher's logits.

An entry is found by its content, not by a path or a time stamp. Its key is the SHA-256 of

    what is made | its version | its parameters | the SHA-256 of the source's content

so a changed source or another parameter has another key, and a copied or touched file the same. Any number of
processes may read and write one directory:

    two writers        each writes a file of its own; the last rename wins, and both hold the same bytes
    a kill             before the rename there is no entry, after it a whole one; fsync puts its bytes on the disk first
    a damaged entry    it ends with the SHA-256 of its bytes; another hash is said in one line, and it is made again

Proved by: tests/data/test_loading.py
"""

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from minidist.base.errors import UsageError, quoted

CHUNK = 1 << 20
HASH_BYTES = 32
STALE_SECONDS = 3600.0  # after which an unfinished file is that of a killed writer


def folder() -> Path:
    """Return where cached arrays are: MINIDIST_CACHE, or minidist in the user's cache directory."""
    if os.environ.get("MINIDIST_CACHE"):
        return Path(os.environ["MINIDIST_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidist"


def content_hash(source: str | Path | np.ndarray) -> str:
    """Return the SHA-256 of a file's bytes, which are read piece by piece, or of an array's dtype, shape and bytes."""
    digest = hashlib.sha256()
    if isinstance(source, np.ndarray):
        digest.update(f"{source.dtype} {source.shape} ".encode())
        digest.update(np.ascontiguousarray(source).view(np.uint8).data)
        return digest.hexdigest()
    with Path(source).open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def key_of(content: str, what: str, version: int = 1, **parameters: Any) -> str:
    """Return an entry's key. content: the `content_hash` of the source. UsageError for parameters without a spelling.

    parameters: what else the result depends on; numbers, texts, or lists and dictionaries of them.
    """
    try:
        text = json.dumps([what, version, parameters, content], sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the parameters {quoted(parameters)} of a cached {what} have no spelling ({error}); pass numbers, texts,"
            " or lists and dictionaries of them"
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

    source: a file, or an array. what: the name of what is made of it. version: raise it when `make` changes.
    parameters: all that `make` depends on besides. cache: the directory (default: `folder()`). Where that cannot be
    written, the array is returned as it was made: slower the next time, but not wrong.
    """
    # The usual case: made by an earlier run, or by a process that was faster.
    place = (cache or folder()) / f"{what}-{key_of(content_hash(source), what, version, **parameters)}.npy"
    try:
        return _mapped(place)
    except OSError:  # not there
        pass
    except (ValueError, EOFError) as error:
        print(f"minidist: the cache entry {place} {error}; it is made again", file=sys.stderr, flush=True)
    array = make()
    try:
        _write(place, array)
        return _mapped(place)
    except OSError:
        return array


def _write(place: Path, array: np.ndarray) -> None:
    """Make an entry appear whole, or not at all."""
    place.parent.mkdir(parents=True, exist_ok=True)
    _discard_unfinished(place)
    # [1] A file of this writer alone, with the hash of its bytes at its end, and all of it on the disk.
    descriptor, name = tempfile.mkstemp(".tmp", f"{place.stem}.", place.parent)
    own = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            file.write(bytes.fromhex(content_hash(own)))
            file.flush()
            os.fsync(file.fileno())
        # [2] The rename is what other processes see. A reader that has mapped an older entry keeps it.
        own.replace(place)
    finally:
        own.unlink(missing_ok=True)


def _discard_unfinished(place: Path) -> None:
    """Delete what writers of this entry left that were killed."""
    for left in place.parent.glob(f"{place.stem}.*.tmp"):
        try:
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink()
        except OSError:
            continue  # another process was faster


def _mapped(path: Path) -> np.ndarray:
    # Behind the array stands the hash of all bytes before it; NumPy reads no further than the array.
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
