"""Data that must be made before it can be used (unpacked, tokenised) is made once and memory-mapped from then on.

The key is the content's hash together with the name of what is made of it, not a path or a time stamp: a changed file
has another key, a copied or touched one the same. A process writes a file of its own and renames it, so processes that
start together never see half a file. An entry ends with the hash of its bytes, so a damaged one is made again.

Proved by: tests/data/test_loading.py
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

CHUNK = 1 << 20


def folder() -> Path:
    """Return where cached arrays are: MINIDIST_CACHE, or minidist in the user's cache directory."""
    if os.environ.get("MINIDIST_CACHE"):
        return Path(os.environ["MINIDIST_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidist"


def content_hash(path: str | Path) -> str:
    """Return the BLAKE2b hash of a file's bytes, which are read piece by piece."""
    digest = hashlib.blake2b(digest_size=16)
    with Path(path).open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def cached(path: str | Path, what: str, make: Callable[[], np.ndarray], cache: Path | None = None) -> np.ndarray:
    """Return the array that `make()` returns as a read-only memory map; it is made only once for the same content.

    what: the name of what is made of the content. Where the cache cannot be written, the array is returned as it was
    made: slower the next time, but not wrong.
    """
    # The usual case: made by an earlier run, or by a process that was faster.
    place = (cache or folder()) / f"{what}-{content_hash(path)}.npy"
    try:
        return _mapped(place)
    except (OSError, ValueError, EOFError):  # not there, or cut short by a full disk
        array = make()
    try:
        # A file of its own name first: the rename makes it appear whole, or not at all.
        place.parent.mkdir(parents=True, exist_ok=True)
        own = place.with_suffix(f".{os.getpid()}.npy")
        np.save(own, array, allow_pickle=False)
        with own.open("ab") as file:
            file.write(bytes.fromhex(content_hash(own)))
        own.replace(place)
        return _mapped(place)
    except OSError:
        return array


def _mapped(path: Path) -> np.ndarray:
    # Behind the array stands the hash of all bytes before it; NumPy reads no further than the array.
    if not _is_whole(path):
        raise ValueError(f"{path} is damaged")
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def _is_whole(path: Path) -> bool:
    """Whether the last 16 bytes of a file are the hash of all others."""
    digest, left = hashlib.blake2b(digest_size=16), path.stat().st_size - 16
    with path.open("rb") as file:
        while left > 0 and (piece := file.read(min(CHUNK, left))):
            digest.update(piece)
            left -= len(piece)
        return left == 0 and file.read() == digest.digest()
