"""The first program: rank 0 gathers a number from every rank.

mpiexec -n 4 python mpi_examples/1_messages/hello.py
python mpi_examples/1_messages/hello.py --ranks 4
"""

import numpy as np

from minidist import launch


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
    values = gather_to_zero(comm, 10.0 * comm.rank)
    if comm.rank == 0:
        more = ", ..." if comm.size > 8 else ""
        print(f"rank 0 of {comm.size} has [{', '.join(map(str, values[:8]))}{more}]", flush=True)


if __name__ == "__main__":
    launch(main)
