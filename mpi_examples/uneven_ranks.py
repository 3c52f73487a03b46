"""Ranks of different speeds: rows in proportion, one sum, and the same step as one device.

    python mpi_examples/uneven_ranks.py --ranks 4
    mpiexec -n 4 python mpi_examples/uneven_ranks.py

Rank 0 is three times as fast as the others. With equal shards it waits for them in every step; with weighted ones all
are done at the same time. The loss is divided by the global count and gradients are summed, so nothing else changes.
"""

import numpy as np

from minidist.autograd import Tensor, cross_entropy
from minidist.comm import launch
from minidist.data import glyphs, weighted_shards
from minidist.nn import MLP
from minidist.optim import SGD
from minidist.parallel import DistributedDataParallel

ROWS, SECONDS_A_ROW = 60, 1e-3


def train(comm, weights=None):
    """Three steps; this rank's weights after them, and the (virtual) seconds that they took."""
    speeds = [3.0] + [1.0] * (comm.size - 1)
    first, rows = weighted_shards(ROWS, weights or speeds)[comm.rank]
    images, labels = glyphs().rows(np.arange(first, first + rows))
    model = DistributedDataParallel(MLP([images.shape[1], 32, 10], dtype=np.float64), comm, reduction="sum")
    optimizer = SGD(model.flat, lr=0.5)
    for _ in range(3):
        model.flat.zero_grad()
        loss = cross_entropy(model(Tensor(images.astype(np.float64))), labels, divisor=ROWS)
        comm.compute(seconds=rows * SECONDS_A_ROW / speeds[comm.rank])  # the virtual clock's; nothing under MPI
        loss.backward()
        optimizer.step()
    return model.flat.data.copy(), comm.time()


def main(comm):
    equal, slow = train(comm, [1.0] * comm.size)
    start = comm.time()
    weighted, end = train(comm)
    difference = np.abs(equal - weighted).max()
    print(
        f"rank {comm.rank}: {slow:.4f} s with equal shards, {end - start:.4f} s with weighted ones, max |difference|"
        f" {difference:.1e}",
        flush=True,
    )
    assert difference < 1e-12


if __name__ == "__main__":
    launch(main)
