"""Every collective by every algorithm: the right values, and the bytes sent next to those of the closed form.

    mpiexec -n 4 python mpi_examples/1_messages/collectives.py
    python mpi_examples/1_messages/collectives.py --ranks 6
    python mpi_examples/1_messages/collectives.py --ranks 8 --algorithm recursive_doubling --trace t.jsonl

With --algorithm only the all-reduce by that one runs.

Broadcast, reduce, all-gather, reduce-scatter, all-reduce and all-to-all by trees, rings, doubling, halving, Bruck and
two levels (ranks 0 and 1 are a node, 2 and 3 the next, ...), all from send and receive.
"""

import argparse

import numpy as np

from minidist import ALGORITHMS, chunk_sizes, collectives, launch
from minidist.collectives import TwoLevel
from minidist.core.base.layout import offsets

OPERATIONS = ("broadcast", "reduce", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")


def call(comm, operation, algorithm, size):
    """(result, expected) on this rank, with an array of `size` numbers in all."""
    n, rank, sizes = comm.size, comm.rank, chunk_sizes(size, comm.size)
    start = offsets(sizes)
    mine = slice(start[rank], start[rank + 1])
    array = np.arange(size) + 1000.0 * rank
    total = n * np.arange(size) + 1000.0 * sum(range(n))
    if operation == "broadcast":
        return collectives.broadcast(comm, array, algorithm=algorithm), np.arange(size)
    if operation == "reduce":
        return collectives.reduce(comm, array, n - 1, algorithm=algorithm), total if rank == n - 1 else None
    if operation == "all_gather":
        return collectives.all_gather(
            comm, np.arange(size)[mine].astype(float), counts=sizes, algorithm=algorithm
        ), np.arange(size)
    if operation == "reduce_scatter":
        return collectives.reduce_scatter(comm, array, algorithm=algorithm), total[mine]
    if operation == "all_reduce":
        return collectives.all_reduce(comm, array, algorithm=algorithm), total
    part = np.repeat(np.arange(n) + 100.0 * rank, 3)  # three numbers for each rank
    return collectives.all_to_all(comm, part, algorithm=algorithm), np.repeat(rank + 100.0 * np.arange(n), 3)


def formula(operation, algorithm, size, n):
    """Bytes that leave rank 0."""
    elements, root = 3 * n if operation == "all_to_all" else size, n - 1 if operation == "reduce" else 0
    return 8 * collectives.volume(operation, algorithm, elements, n, 0, root).elements


def main(comm, size, only):
    for operation in OPERATIONS:
        for algorithm in sorted(ALGORITHMS[operation]):
            if only and (operation, algorithm) != ("all_reduce", only):
                continue
            before = len(comm.trace.messages)
            got, expected = call(comm, operation, algorithm, size)
            sent = sum(m.nbytes for m in comm.trace.messages[before:] if m.kind == "send")
            right = got is None if expected is None else np.array_equal(got, expected)
            if not right:
                raise SystemExit(f"rank {comm.rank}: {operation} by {algorithm} gave {got}, expected {expected}")
            if comm.rank == 0:
                name = f"{operation} by {algorithm}"
                print(
                    f"{name:40} right; rank 0 sent {sent:,} B, closed form"
                    f" {formula(operation, algorithm, size, comm.size):,} B",
                    flush=True,
                )
    if not only:
        levels = TwoLevel(comm, comm.rank // 2)
        total = levels.all_reduce(np.arange(size) + 1000.0 * comm.rank)
        assert np.array_equal(total, comm.size * np.arange(size) + 1000.0 * sum(range(comm.size)))
        levels.barrier()
        if comm.rank == 0:
            print(f"all_reduce in two levels, nodes {levels.nodes}: right", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=1003, help="float64 numbers; they need not divide by the ranks")
    parser.add_argument("--algorithm", default="", help="only this all-reduce")
    flags, _ = parser.parse_known_args()
    launch(main, flags.elements, flags.algorithm)
