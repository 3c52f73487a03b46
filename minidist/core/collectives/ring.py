"""The ring: every rank exchanges messages with its two neighbours only, and every link carries the same bytes.

Reduce-scatter, 4 ranks; chunk j travels once around, collects each rank's part and ends at rank j:

    step 1    0 ──3──▶ 1 ──0──▶ 2 ──1──▶ 3 ──2──▶ 0        rank r sends chunk r-1, receives r-2 and adds its own part
    step 2    0 ──2──▶ 1 ──3──▶ 2 ──0──▶ 3 ──1──▶ 0        ... passes on what it has just added
    step 3    0 ──1──▶ 1 ──2──▶ 2 ──3──▶ 3 ──0──▶ 0        chunk r has arrived at rank r: complete

All-gather takes the same steps without adding; all-reduce is a reduce-scatter and then an all-gather. In an all-reduce
a rank sends 2 (n-1)/n of the array, the least that is possible, in 2 (n-1) steps, more than many other algorithms take.
Additions are in the ring's order, so the bits of a sum depend on the chunk boundaries; with `ordered` they do not.
The closed forms are in the decorators; `Algorithm` in calls.py explains `sends` and `seconds`.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69 (2009).

Proved by: tests/collectives/test_collectives.py, tests/collectives/test_closed_form.py
"""

import numpy as np

from minidist.core.base import arrays as xp
from minidist.core.base.layout import chunk_sizes, cut
from minidist.core.base.trace import track, watchers
from minidist.core.collectives.calls import accumulate, algorithm, divide
from minidist.core.comm.communicator import PointToPoint


@algorithm(
    "reduce_scatter",
    "ring",
    sends=lambda sizes, rank: (len(sizes) - 1, sum(sizes) - sizes[rank]),  # every chunk but its own
    seconds=lambda nbytes, n, alpha, beta: (n - 1) * (alpha + beta * nbytes / n),
)
def reduce_scatter(comm: PointToPoint, array: np.ndarray, sizes: list[int], out: np.ndarray, op: str) -> np.ndarray:
    """Send every chunk but its own to the next rank: all bytes of the array but those of chunk r leave rank r."""
    n, rank = comm.size, comm.rank
    # chunks[j]: this rank's part of chunk j. The first to leave is r-1: it ends at rank r-1 after n-1 steps.
    chunks = cut(array.reshape(-1), sizes)
    travelling = chunks[(rank - 1) % n]  # what this rank sends next
    for step in range(1, n):  # the steps of the picture
        mine = chunks[(rank - 1 - step) % n]
        incoming = out if step == n - 1 else track(xp.empty_like(mine), "communication")
        comm.sendrecv(travelling, (rank + 1) % n, incoming, (rank - 1) % n)
        accumulate(op, incoming, mine)
        travelling = incoming

    # A ring of one takes no step.
    if n == 1:
        out[...] = chunks[0]
    if op == "avg":
        divide(out, n)
    return out


@algorithm(
    "all_gather",
    "ring",
    sends=lambda sizes, rank: (len(sizes) - 1, sum(sizes) - sizes[(rank + 1) % len(sizes)]),  # all but the next rank's
    seconds=lambda nbytes, n, alpha, beta: (n - 1) * (alpha + beta * nbytes / n),
)
def all_gather(comm: PointToPoint, shard: np.ndarray, sizes: list[int], out: np.ndarray) -> np.ndarray:
    """Send every chunk but the next rank's to the next rank, in n-1 messages."""
    chunks = cut(out, sizes)
    # The own shard goes to its place in `out`, from where it is sent. If it lies there already, NumPy copies nothing.
    chunks[comm.rank][...] = shard.reshape(-1)
    circulate(comm, chunks)
    return out


def circulate(comm: PointToPoint, chunks: list[np.ndarray]) -> None:
    """Send each rank's chunk once around: what arrives in one step is what leaves in the next."""
    n, rank = comm.size, comm.rank
    for step in range(n - 1):
        comm.sendrecv(chunks[(rank - step) % n], (rank + 1) % n, chunks[(rank - step - 1) % n], (rank - 1) % n)


@algorithm(
    "all_reduce",
    "ring",
    sends=lambda sizes, rank: (
        2 * (len(sizes) - 1),
        2 * sum(sizes) - sizes[rank] - sizes[(rank + 1) % len(sizes)],  # 2 (n-1)/n of the array when n divides it
    ),
    seconds=lambda nbytes, n, alpha, beta: 2 * ((n - 1) * (alpha + beta * nbytes / n)),
)
def all_reduce(comm: PointToPoint, array: np.ndarray, op: str) -> np.ndarray:
    """Reduce-scatter, then all-gather: 2 (n-1) messages per rank.

    The sums grow inside `array`, which is overwritten anyway, so one more chunk of memory is enough.
    """
    n, rank = comm.size, comm.rank
    flat, sizes = array.reshape(-1), chunk_sizes(array.size, n)
    chunks = cut(flat, sizes)
    arrived = xp.empty_like(flat, shape=(sizes[0],))  # chunk 0 is a largest one
    for watcher in watchers.get():
        watcher.allocated(arrived, "communication")

    # Reduce-scatter: steps 1 to n-1 of the picture. Afterwards chunk r of rank r is complete.
    for step in range(1, n):
        leaving, growing = (rank - step) % n, (rank - step - 1) % n
        incoming = arrived[: sizes[growing]]
        comm.sendrecv(chunks[leaving], (rank + 1) % n, incoming, (rank - 1) % n)
        accumulate(op, chunks[growing], incoming)
    if op == "avg":
        divide(chunks[rank], n)

    # All-gather: the complete chunks travel once around.
    circulate(comm, chunks)
    return array
