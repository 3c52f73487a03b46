"""Our solutions of lesson 06; they are not a part of the package."""

import numpy as np

from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm


def weighted_average(comm: Comm, gradient: np.ndarray, count: int) -> np.ndarray:
    """Sum count * mean, and count, in one all-reduce of one element more."""
    weighted = np.zeros(gradient.size + 1)
    if count > 0:  # the mean of no rows is not a number, and 0 * nan is nan
        weighted[:-1], weighted[-1] = gradient * count, count
    all_reduce(comm, weighted)
    return weighted[:-1] / weighted[-1]


SOLUTIONS = {"06.weighted_average": weighted_average}
