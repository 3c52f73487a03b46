"""Our solutions of lesson 10c; they are not a part of the package."""

import numpy as np

from minidist.core.collectives import all_gather
from minidist.core.comm import Comm


def shares_by_time(comm: Comm, rows: int, mine: int, seconds: float) -> list[int]:
    """All ranks know how long a row takes each of them; a row goes to the rank that will have computed it first."""
    paces = all_gather(comm, np.array([seconds / mine]))
    shares = np.zeros(comm.size, int)
    for _ in range(rows):
        shares[np.argmin((shares + 1) * paces)] += 1
    return shares.tolist()


SOLUTIONS = {"10c.shares_by_time": shares_by_time}
