"""Our solution of lesson 09b; it is not a part of the package."""

import numpy as np

from minidist.core.collectives import all_reduce
from minidist.core.comm import Comm


def one_grid(comm: Comm, x: np.ndarray) -> np.ndarray:
    """Agree on the largest magnitude, in one number, and round to its grid."""
    largest = np.array([np.abs(x).max(initial=0.0)])
    all_reduce(comm, largest, "max")
    scale = largest[0] / 127 or 1.0
    return np.clip(np.round(x / scale), -127, 127) * scale


SOLUTIONS = {"09b.one_grid": one_grid}
