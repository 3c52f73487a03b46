"""Data that must be made before it can be used (unpacked, tokenised) is made once and memory-mapped from then on.

The key is the content's hash together with the name of what is done to it, not a path or a time stamp: a changed file
is another key, a copied or touched one is the same. Whoever comes first writes a file of its own and renames it, so
processes that start together do not see half a file.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

CHUNK = 1 << 20


def folder() -> Path:
    """Where cached arrays are: MINIDIST_CACHE, or minidist in the user's cache directory."""
    if os.environ.get("MINIDIST_CACHE"):
        return Path(os.environ["MINIDIST_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minidist"


def content_hash(path: str | Path) -> str:
    """Of a file's bytes, read piece by piece."""
    digest = hashlib.blake2b(digest_size=16)
    with Path(path).open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def cached(path: str | Path, what: str, make: Callable[[], np.ndarray], cache: Path | None = None) -> np.ndarray:
    """What `make()` returns, as a read-only memory map; made only when it has not been for this content. what: of the
    content is made.

    Where the cache cannot be written, the array is returned as it was made: slower the next time, and not wrong.
    """
    place = (cache or folder()) / f"{what}-{content_hash(path)}.npy"
    try:
        return np.load(place, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):  # not there, or cut short by a full disk
        array = make()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        own = place.with_suffix(f".{os.getpid()}.npy")
        np.save(own, array, allow_pickle=False)
        own.replace(place)
        return np.load(place, mmap_mode="r", allow_pickle=False)
    except OSError:
        return array
