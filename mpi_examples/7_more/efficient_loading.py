"""Batches that are ready when they are asked for: made by the rank itself, by a thread, and by worker processes.

mpiexec -n 2 python mpi_examples/7_more/efficient_loading.py
python mpi_examples/7_more/efficient_loading.py --ranks 2 --workers 2

Each rank reads its micro-batches of ten steps in the three ways. The order of the requests is known beforehand, so the
batches, their order and their bits are the same in all three; only who makes them differs.
"""

import argparse
import hashlib
from functools import partial

from minidist import launch
from minidist.data import PrefetchingSampler, WorkerSampler
from minidist.data.workers import open_sampler

STEPS, ROWS, CONTEXT = 10, 8, 64  # rows of each rank's micro-batch


def digest(sampler, requests):
    """Return a fingerprint of all batches, in their order."""
    result = hashlib.sha256()
    for request in requests:
        for array in sampler.batch(*request):
            result.update(array.tobytes())
    return result.hexdigest()[:16]


def main(comm, workers):
    # A worker process gets this function, which is small, and opens the data itself.
    make = partial(open_sampler, "pydoc", False, ROWS * comm.size, CONTEXT, 0)
    sampler, requests = make(), [(step, comm.rank * ROWS, ROWS) for step in range(STEPS)]
    alone = digest(sampler, requests)
    with PrefetchingSampler(make(), requests, depth=4) as thread:
        by_thread = digest(thread, requests)
    with WorkerSampler(make, sampler, requests, workers, ahead=2) as processes:
        by_workers = digest(processes, requests)
    print(
        f"rank {comm.rank}: {STEPS} batches {alone}; a thread made {thread.served}, equal: {by_thread == alone};"
        f" {workers} worker{'s' * (workers != 1)} made {processes.served}, equal: {by_workers == alone}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1, help="worker processes of each rank")
    flags, _ = parser.parse_known_args()
    launch(main, flags.workers)
