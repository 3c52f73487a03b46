"""Heat spreads along a rod that the ranks divide: a program of mpi4py, which needs nothing of minidist.

    minidist mpi --ranks 4 mpi_examples/1_messages/heat.py       simulated ranks, without an MPI library
    mpiexec -n 4 python mpi_examples/1_messages/heat.py          processes

Each rank has a part of the rod and one point of each neighbor, which it receives before every step. With --unsafe all
ranks send before they receive: MPI buffers a message so short, and minidist reports the deadlock that a longer one is.
"""

import sys

import numpy as np
from mpi4py import MPI

POINTS, STEPS = 40, 200


def exchange(line, part):
    """Receive the neighbors' points next to this rank's: 8 B to each side."""
    left, right = line.Shift(0, 1)
    if "--unsafe" in sys.argv:
        line.Send(part[1:2], left)
        line.Send(part[-2:-1], right)
        line.Recv(part[-1:], right)
        line.Recv(part[:1], left)
        return
    line.Sendrecv(part[1:2], left, recvbuf=part[-1:], source=right)
    line.Sendrecv(part[-2:-1], right, recvbuf=part[:1], source=left)


def main():
    world = MPI.COMM_WORLD
    line = world.Create_cart([world.size], periods=[False])
    mine = POINTS // line.size
    part = np.zeros(mine + 2)
    if line.rank == 0:
        part[0] = 1.0  # the end of the rod is hot
    for _ in range(STEPS):
        exchange(line, part)
        part[1:-1] += 0.25 * (part[2:] - 2 * part[1:-1] + part[:-2])

    heat = line.allreduce(float(part[1:-1].sum()))
    whole = np.empty(mine * line.size) if line.rank == 0 else None
    line.Gather(part[1:-1].copy(), whole)
    if line.rank == 0:
        print(f"{line.size} ranks: heat {heat:.6f}, and {(whole > 1e-3).sum()} of {whole.size} points are warm")


if __name__ == "__main__":
    main()
