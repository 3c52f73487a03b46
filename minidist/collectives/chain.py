"""A chain around the ring: from the root to the rank before it, or from the rank after it to the root.

Each message is the whole array, so a chain of n ranks takes n-1 steps of alpha + beta times its bytes.

Proved by: tests/collectives/test_collectives.py, tests/collectives/test_closed_form.py
"""

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.collectives.calls import accumulate, algorithm, divide
from minidist.core.comm.communicator import PointToPoint


@algorithm(
    "broadcast",
    "ring",
    sends=lambda sizes, rank: (1, sum(sizes)) if rank < len(sizes) - 1 else (0, 0),
    seconds=lambda nbytes, n, alpha, beta: (n - 1) * (alpha + beta * nbytes),
)
def broadcast(comm: PointToPoint, array: np.ndarray, root: int) -> np.ndarray:
    """Pass the whole array along a chain of n-1 messages from the root around the ring."""
    distance = (comm.rank - root) % comm.size

    # The chain begins with the rank after the root: it only sends.
    if distance > 0:
        comm.recv(array, (comm.rank - 1) % comm.size)
    if distance < comm.size - 1:
        comm.send(array, (comm.rank + 1) % comm.size)
    return array


@algorithm(
    "reduce",
    "ring",
    sends=lambda sizes, rank: (1, sum(sizes)) if rank else (0, 0),
    seconds=lambda nbytes, n, alpha, beta: (n - 1) * (alpha + beta * nbytes),
)
def reduce(comm: PointToPoint, array: np.ndarray, root: int, op: str) -> np.ndarray | None:
    """Add along a chain that ends at the root: each rank adds its part to what arrives and passes it on."""
    n = comm.size
    distance = (comm.rank - root - 1) % n  # 0 is the rank after the root, n-1 the root
    total = array
    if distance > 0:
        total = xp.empty_like(array)
        comm.recv(total, (comm.rank - 1) % n)
        accumulate(op, total, array)
    if distance < n - 1:
        comm.send(total, (comm.rank + 1) % n)
        return None

    # The root is the end of the chain. One rank alone returns a copy all the same.
    total = total.copy() if total is array else total
    if op == "avg":
        divide(total, n)
    return total
