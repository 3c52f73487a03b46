"""Our solutions of lesson 00; they are not a part of the package."""

from collections.abc import Callable

import numpy as np

from minidist.core.comm import Comm


def in_rank_order(comm: Comm, say: Callable[[str], None]) -> None:
    """Pass a token from rank 0 to the last one; the rank that holds it may speak. Sends n-1 messages of 1 B."""
    token = np.zeros(1, dtype=np.uint8)
    if comm.rank > 0:
        comm.recv(token, comm.rank - 1)
    say(f"rank {comm.rank} of {comm.size}")
    if comm.rank < comm.size - 1:
        comm.send(token, comm.rank + 1)


SOLUTIONS = {"00.in_rank_order": in_rank_order}
