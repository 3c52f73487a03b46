"""The time of a message: rank 0 sends to rank 1, which sends it back. Half of a round trip is alpha + beta * bytes.

    mpiexec -n 2 python mpi_examples/1_messages/ping_pong.py         what your machine does
    python mpi_examples/1_messages/ping_pong.py --ranks 2            the virtual clock: exactly alpha + beta * bytes

With --deadlock both ranks send first. The simulated world reports the circle at once; under MPI it depends on the
message's size whether send waits, so let sends be synchronous, and the watchdog reports after --timeout seconds:

    python mpi_examples/1_messages/ping_pong.py --ranks 2 --deadlock
    mpiexec -n 2 python mpi_examples/1_messages/ping_pong.py --deadlock --synchronous --timeout 5
"""

import sys

import numpy as np

from minidist import UsageError, launch

SIZES, ROUNDS = (8, 1_000, 100_000, 1_000_000), 50


def main(comm):
    if comm.size < 2:
        raise UsageError("a ping-pong needs 2 ranks, there is 1; start it with --ranks 2 or mpiexec -n 2")
    if comm.rank > 1:
        return
    other = 1 - comm.rank
    if "--deadlock" in sys.argv:
        comm.send(np.zeros(1000), other)
        comm.recv(np.zeros(1000), other)
        print(
            f"rank {comm.rank}: no deadlock, since this MPI buffered the 8,000 B; with --synchronous every send waits",
            flush=True,
        )
        return
    for nbytes in SIZES:
        ball = np.zeros(nbytes, dtype=np.uint8)
        start = comm.time()
        for _ in range(ROUNDS):
            if comm.rank == 0:
                comm.send(ball, other)
                comm.recv(ball, other)
            else:
                comm.recv(ball, other)
                comm.send(ball, other)
        if comm.rank == 0:
            half = (comm.time() - start) / ROUNDS / 2
            print(f"{nbytes:>9,} B  {half * 1e6:8.2f} µs  {nbytes / half / 1e9:6.2f} GB/s", flush=True)


if __name__ == "__main__":
    launch(main)
