"""Our solutions of lesson 28; they are not a part of the package."""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from minidist.core.collectives import all_gather
from minidist.core.comm import Comm


def first_difference(comm: Comm, weights: np.ndarray) -> int:
    """Gather the digest of every rank, 16 B each, and look for the first that is not rank 0's."""
    mine = np.frombuffer(
        hashlib.blake2b(weights.tobytes(), digest_size=16).digest(), np.uint8
    ).copy()
    digests = all_gather(comm, mine).reshape(comm.size, 16)
    different = np.flatnonzero((digests != digests[0]).any(axis=1))
    return int(different[0]) if different.size else -1


def wrong_steps(
    comm: Comm,
    steps: Sequence[Callable[..., np.ndarray]],
    gradient: Callable[..., np.ndarray],
    w: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
) -> list[int]:
    """Compare every entry on every rank, and gather the largest differences: one number per step."""
    right = gradient(w, x, y)
    own = np.array([np.abs(step(comm, w, x, y) - right).max() for step in steps])
    off = all_gather(comm, own).reshape(comm.size, len(steps)).max(axis=0)
    return np.flatnonzero(off > 1e-9 * np.abs(right).max()).tolist()


SOLUTIONS = {"28.first_difference": first_difference, "28.wrong_steps": wrong_steps}
