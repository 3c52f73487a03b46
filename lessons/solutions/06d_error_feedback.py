"""Our solutions of lesson 06d; they are not a part of the package."""

from collections.abc import Callable

import numpy as np

from minidist.core.comm import Comm


def load_residual(
    comm: Comm, old_ranks: int, read: Callable[[int], np.ndarray], length: int
) -> np.ndarray:
    """Assign the old ranks' residuals round-robin, and add up those of this rank."""
    total = np.zeros(length)
    for old in range(comm.rank, old_ranks, comm.size):
        total = read(old) if old == comm.rank else total + read(old)
    return total


SOLUTIONS = {"06d.load_residual": load_residual}
