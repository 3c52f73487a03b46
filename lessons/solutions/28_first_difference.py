"""Our solutions of lesson 28; they are not a part of the package."""

import hashlib

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


SOLUTIONS = {"28.first_difference": first_difference}
