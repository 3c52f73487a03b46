"""The ring in segments: a message is cut, and the first piece travels on while the next one still arrives.

A chain of n ranks that each receive the whole array before they pass it on takes (n-1) (alpha + beta N). In k segments
all links are busy at once, and only the first segment feels the length of the chain:

    rank 0 ▶ 1    |a|b|c|d|                     time:  (n-1) (alpha + beta N/k)  until the first one is there
    rank 1 ▶ 2      |a|b|c|d|                          + (k-1) beta N/k          for the others, one behind the other
    rank 2 ▶ 3        |a|b|c|d|

All-reduce is the ring's with every chunk in segments: the latency of a step hides behind the segments that follow.

Source: van de Geijn and Watts, SUMMA, 1997 (the pipelined ring broadcast); Open MPI's `ring_segmented` all-reduce.
"""

import numpy as np

from minidist.base.layout import chunk_sizes, offsets
from minidist.collectives.operations import accumulate, divide_if_average
from minidist.collectives.registry import algorithm
from minidist.comm.communicator import Comm, Request

SEGMENT_BYTES = 64 * 1024


def segments(nbytes: int) -> int:
    """Into how many pieces, nearly equal, an array of so many bytes is cut."""
    return max(1, -(-nbytes // SEGMENT_BYTES))


def cut(array: np.ndarray, pieces: int) -> list[np.ndarray]:
    """A 1-D array as views of its segments."""
    start = offsets(chunk_sizes(array.size, pieces))
    return [array[start[i] : start[i + 1]] for i in range(pieces)]


@algorithm("broadcast", "segmented_ring")
def broadcast(comm: Comm, array: np.ndarray, root: int) -> np.ndarray:
    """A pipeline from the root around the ring: each rank but the last sends the array once, in segments."""
    n, distance = comm.size, (comm.rank - root) % comm.size
    pieces = cut(array.reshape(-1), segments(array.nbytes))
    receives = [comm.irecv(piece, (comm.rank - 1) % n) for piece in pieces] if distance else []
    sends = []
    for i, piece in enumerate(pieces):
        if distance:
            comm.wait(receives[i])
        if distance < n - 1:
            sends.append(comm.isend(piece, (comm.rank + 1) % n))
    comm.waitall(sends)
    return array


@algorithm("reduce", "segmented_ring")
def reduce(comm: Comm, array: np.ndarray, root: int, op: str) -> np.ndarray | None:
    """The pipeline that ends at the root: each rank adds its part to every segment and passes it on."""
    n = comm.size
    distance = (comm.rank - root - 1) % n  # 0 is the rank after the root, n-1 the root
    total = np.empty_like(array) if distance else array
    k = segments(array.nbytes)
    mine, growing = cut(array.reshape(-1), k), cut(total.reshape(-1), k)
    receives = [comm.irecv(piece, (comm.rank - 1) % n) for piece in growing] if distance else []
    sends = []
    for i, piece in enumerate(growing):
        if distance:
            comm.wait(receives[i])
            accumulate(op, piece, mine[i])
        if distance < n - 1:
            sends.append(comm.isend(piece, (comm.rank + 1) % n))
    comm.waitall(sends)
    if distance < n - 1:
        return None
    total = total.copy() if total is array else total
    divide_if_average(op, total, n)
    return total


@algorithm("all_reduce", "segmented_ring")
def all_reduce(comm: Comm, array: np.ndarray, op: str) -> np.ndarray:
    """The ring's steps, chunks and sums (the same bits), each chunk in k segments: 2 (n-1) k messages a rank.

    What arrives in one step is what leaves in the next, segment by segment: steps 1 to n-1 add, the others copy.
    """
    n, rank = comm.size, comm.rank
    if n == 1:
        divide_if_average(op, array, n)
        return array
    sizes = chunk_sizes(array.size, n)
    k, start, flat = segments(sizes[0] * array.itemsize), offsets(sizes), array.reshape(-1)
    chunks = [cut(flat[start[j] : start[j + 1]], k) for j in range(n)]
    waiting = np.empty_like(flat, shape=(sizes[0],))  # where segments arrive that are to be added
    slots = cut(waiting, k)

    def receive(step: int, i: int) -> Request:
        target = chunks[(rank - step - 1) % n][i]
        return comm.irecv(slots[i][: target.size] if step < n else target, (rank - 1) % n)

    def send(step: int, i: int) -> Request:
        return comm.isend(chunks[(rank - step) % n][i], (rank + 1) % n)

    receives, sends = [receive(1, i) for i in range(k)], [send(1, i) for i in range(k)]
    for step in range(1, 2 * n - 1):
        for i in range(k):
            arrived = comm.wait(receives[i])
            if step < n:
                target = chunks[(rank - step - 1) % n][i]
                accumulate(op, target, arrived)
                if step == n - 1:
                    divide_if_average(op, target, n)
            comm.wait(sends[i])
            if step < 2 * n - 2:
                receives[i], sends[i] = receive(step + 1, i), send(step + 1, i)
    return array
