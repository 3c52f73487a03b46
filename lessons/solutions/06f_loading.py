"""Our solutions of lesson 06f; they are not a part of the package."""

from collections.abc import Callable

import numpy as np

from minidist.core.comm import Comm


def in_order(comm: Comm, batches: int, make: Callable[[int], np.ndarray]) -> np.ndarray:
    """Loader i mod N makes batch i, and the trainer receives batch i from that loader, in the order of the batches."""
    loaders, result = comm.size - 1, np.zeros((batches, 2))
    if comm.rank > 0:
        for i in range(comm.rank - 1, batches, loaders):
            comm.send(make(i), 0)
        return result[:0]
    for i in range(batches):
        if loaders:
            comm.recv(result[i], 1 + i % loaders)
        else:
            result[i] = make(i)
    return result


SOLUTIONS = {"06f.in_order": in_order}
