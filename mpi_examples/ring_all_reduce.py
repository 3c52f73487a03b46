"""The ring all-reduce from send and receive, beside the library's: the same sums, the same bytes.

    mpiexec -n 4 python mpi_examples/ring_all_reduce.py
    python mpi_examples/ring_all_reduce.py --ranks 4

A picture of it: add `--trace ring.jsonl`, then `minidist report ring.jsonl --picture space-time -o ring.svg`.
"""

import numpy as np

from minidist.collectives import all_reduce, closed_form
from minidist.comm import launch

ELEMENTS = 1003  # 17 x 59: divides evenly for hardly any number of ranks


def ring_all_reduce(comm, array):
    """Sum over all ranks, in place. Chunk j collects every rank's part on its way round, then goes round once more."""
    n, rank = comm.size, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    chunks = np.array_split(array, n)
    for step in range(n - 1):
        leaving, arriving = chunks[(rank - 1 - step) % n], chunks[(rank - 2 - step) % n]
        part = np.empty_like(arriving)
        comm.sendrecv(leaving, right, part, left)
        arriving += part
    for step in range(n - 1):  # now chunk r is complete on rank r
        leaving, arriving = chunks[(rank - step) % n], chunks[(rank - 1 - step) % n]
        comm.sendrecv(leaving, right, arriving, left)


def main(comm):
    array = np.arange(ELEMENTS, dtype=np.float64) + comm.rank
    ours, theirs = array.copy(), array.copy()
    ring_all_reduce(comm, ours)
    sent = sum(message.nbytes for message in comm.trace.sent())
    all_reduce(comm, theirs, algorithm="ring")
    library = sum(message.nbytes for message in comm.trace.sent()) - sent
    if comm.rank == 0:
        expected = comm.size * np.arange(ELEMENTS) + sum(range(comm.size))
        _, elements = closed_form.all_reduce(ELEMENTS, comm.size, 0)
        print(f"max |ours - expected| = {np.abs(ours - expected).max():g}", flush=True)
        print(f"max |ours - library| = {np.abs(ours - theirs).max():g}", flush=True)
        print(
            f"rank 0 sent {sent:,} B, the library's ring {library:,} B, the formula says {8 * elements:,} B", flush=True
        )


if __name__ == "__main__":
    launch(main)
