"""The first program: every rank says who it is, in order, and rank 0 gathers a number from each.

    mpiexec -n 4 python mpi_examples/hello.py
    python mpi_examples/hello.py --ranks 4

The ranks print in order. mpiexec collects what they print from several processes and may still show it in another order.
"""

import numpy as np

from minidist.comm import launch


def gather_to_zero(comm, value):
    """Rank 0 returns the values of all ranks, the others None; n-1 messages of 8 B."""
    if comm.rank != 0:
        comm.send(np.array([value]), 0)
        return None
    values = np.array([value] * comm.size)
    for source in range(1, comm.size):
        comm.recv(values[source : source + 1], source)
    return values


def main(comm):
    token = np.zeros(1, dtype=np.uint8)
    if comm.rank > 0:
        comm.recv(token, comm.rank - 1)
    print(f"rank {comm.rank} of {comm.size}", flush=True)
    if comm.rank < comm.size - 1:
        comm.send(token, comm.rank + 1)
    squares = gather_to_zero(comm, comm.rank**2)
    if comm.rank == 0:
        print(f"squares: {squares.tolist()}", flush=True)


if __name__ == "__main__":
    launch(main)
