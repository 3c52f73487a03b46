"""Ranks of different speeds: rows in proportion to what is measured, one sum, and the same step as one device.

    python mpi_examples/2_data_parallel/uneven_ranks.py --ranks 3
    mpiexec -n 3 python mpi_examples/2_data_parallel/uneven_ranks.py

Rank 0 computes every row once; the others compute it three times, so they really are slower. With equal shares rank 0
waits for them in every step. Here the ranks measure their seconds per row, exchange them (8 B each) and take shares in
proportion to their speeds. The loss is divided by the global count and gradients are summed, so nothing else changes.

The two kinds of steps alternate, after steps that warm up the caches and do not count, and medians are compared: under
mpiexec a machine is never quiet, and a job that runs first pays for what the next one finds ready. What is printed is
what was measured. Where processes share cores, the work that rank 0 saves by waiting is not lost, and little is gained.
"""

from functools import cache
from statistics import median

import numpy as np

from minidist import (
    MLP,
    SGD,
    DistributedDataParallel,
    FlopCounter,
    Tensor,
    all_gather,
    cross_entropy,
    glyphs,
    launch,
    purpose,
)
from minidist.data import weighted_shards

ROWS, WARM_UP, ROUNDS = 600, 2, 5
FEATURES = 144  # of an image
TIMES = 3  # that a slow rank computes each row


def make(comm):
    """This rank's model and optimizer."""
    model = DistributedDataParallel(MLP([FEATURES, 64, 10], dtype=np.float64), comm, reduction="sum")
    return model, SGD(model.flat, lr=0.5)


@cache
def digits():
    """The data, drawn once: that would take longer than a step does."""
    return glyphs()


def step(comm, model, optimizer, shares, repeat):
    """One step on this rank's share; the seconds until all ranks are done, and those that this rank computed."""
    first, rows = shares[comm.rank]
    images, labels = digits().rows(np.arange(first, first + rows))
    images = images.astype(np.float64)

    def loss():
        return cross_entropy(model(Tensor(images)), labels, divisor=ROWS)

    comm.barrier()
    comm.trace.take_computed()
    began = comm.time()
    with FlopCounter():
        for _ in range(repeat - 1):  # a slow machine: the same work again, for nothing
            with model.no_sync():
                loss().backward()
            comm.advance_clock("backward")
        model.flat.zero_grad()
        loss().backward()
        comm.advance_clock("backward")
    computed = comm.trace.take_computed()
    optimizer.step()
    comm.barrier()
    return comm.time() - began, computed


def train(comm, weights=None, steps=3):
    """Some steps with these weights (None: the true speeds); this rank's weights after them, and seconds per step."""
    speeds = [TIMES] + [1] * (comm.size - 1)
    model, optimizer = make(comm)
    shares, repeat = weighted_shards(ROWS, weights or speeds), TIMES // speeds[comm.rank]
    seconds = [step(comm, model, optimizer, shares, repeat)[0] for _ in range(steps)]
    return model.flat.data.copy(), seconds


def main(comm):
    repeat = TIMES if comm.rank else 1
    equal = weighted_shards(ROWS, [1] * comm.size)

    # [1] Warm up; then the seconds per row of every rank, without those in which it waited.
    model, optimizer = make(comm)
    measured = [step(comm, model, optimizer, equal, repeat)[1] for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    with purpose("load_balance"):
        per_row = all_gather(comm, np.array([median(measured) / equal[comm.rank][1]]))
    weighted = weighted_shards(ROWS, (1 / per_row).tolist())

    # [2] Steps with equal and with weighted shares in turn, each with a separate model.
    jobs = {"equal": (equal, *make(comm)), "weighted": (weighted, *make(comm))}
    times = {name: [] for name in jobs}
    for _ in range(WARM_UP + ROUNDS):
        for name, (shares, model, optimizer) in jobs.items():
            times[name].append(step(comm, model, optimizer, shares, repeat)[0])
    seconds = {name: median(values[WARM_UP:]) for name, values in times.items()}

    # [3] Both have trained on the same batches, so they have the same weights.
    difference = np.abs(jobs["equal"][1].flat.data - jobs["weighted"][1].flat.data).max()
    print(
        f"rank {comm.rank}: {equal[comm.rank][1]} rows or {weighted[comm.rank][1]}, max |difference| {difference:.1e}",
        flush=True,
    )
    if comm.rank == 0:
        print(
            f"a step takes {seconds['equal'] * 1e3:.4f} ms with equal shares, {seconds['weighted'] * 1e3:.4f} ms with"
            f" measured ones: {seconds['weighted'] / seconds['equal']:.2f} times as long",
            flush=True,
        )
    assert difference < 1e-12


if __name__ == "__main__":
    launch(main)
