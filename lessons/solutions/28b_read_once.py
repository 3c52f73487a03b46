"""Our solutions of lesson 28b; they are not a part of the package."""

import numpy as np

from minidist.core.collectives import all_gather
from minidist.core.comm import Comm
from minidist.techniques.data_ledger.ledger import digest


def read_once(comm: Comm, numbers: np.ndarray, samples: int) -> int:
    """Gather the count and the digest of every rank, 16 B each: digests of multisets add up, modulo 2^64."""
    mine = np.array([numbers.size, digest(numbers)], np.uint64)
    counts, digests = all_gather(comm, mine).reshape(comm.size, 2).T
    whole = np.uint64(digest(np.arange(samples)))
    return int(counts.sum() == samples and digests.sum() == whole)


SOLUTIONS = {"28b.read_once": read_once}
