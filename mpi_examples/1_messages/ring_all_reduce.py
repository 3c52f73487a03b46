"""The ring all-reduce from send and receive: the right sums, and the bytes that the formula says.

    mpiexec -n 4 python mpi_examples/1_messages/ring_all_reduce.py
    python mpi_examples/1_messages/ring_all_reduce.py --ranks 4 --elements 12
    python mpi_examples/1_messages/ring_all_reduce.py --ranks 4 --algorithm naive    the library's: ring, ordered, naive

A picture of it: add `--trace t.jsonl`, then `minidist report t.jsonl --picture space-time`.
"""

import argparse

import numpy as np

from minidist import all_reduce, launch
from minidist.collectives import volume


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


def main(comm, elements, algorithm):
    array = np.arange(elements) + 100.0 * comm.rank
    if algorithm == "by-hand":
        ring_all_reduce(comm, array)
    else:
        all_reduce(comm, array, algorithm=algorithm)
    if comm.rank == 0:
        expected = comm.size * np.arange(elements) + 100.0 * sum(range(comm.size))
        sent = sum(message.nbytes for message in comm.trace.sent())
        formula = volume("all_reduce", "ring", elements, comm.size, 0).elements
        print(f"max |sum - expected| = {np.abs(array - expected).max():g}", flush=True)
        print(f"rank 0 sent {sent:,} B; a ring sends {8 * formula:,} B: 2 (n-1)/n of {8 * elements:,} B", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=1003, help="float64 numbers; they need not divide by the ranks")
    parser.add_argument("--algorithm", default="by-hand", help="by-hand, or one of the library's: ring, ordered, naive")
    flags, _ = parser.parse_known_args()
    launch(main, flags.elements, flags.algorithm)
