"""Our solutions of lesson 10b; they are not a part of the package."""

import numpy as np

from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm


def gradient_and_noise(comm: Comm, rows: np.ndarray) -> np.ndarray:
    """All-reduce this rank's gradient with its square; two batch sizes then give the line of McCandlish et al."""
    own = rows.mean(axis=0)
    total = all_reduce(comm, np.append(own, own @ own)) / comm.size
    gradient, small = total[:-1], total[-1]
    big = gradient @ gradient

    few, many = len(rows), comm.size * len(rows)
    noise = (small - big) / (1 / few - 1 / many)
    return np.append(gradient, [big - noise / many, noise])


SOLUTIONS = {"10b.gradient_and_noise": gradient_and_noise}
