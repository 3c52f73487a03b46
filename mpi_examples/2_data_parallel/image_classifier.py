"""Images and batch normalisation: each rank's statistics apart, or those of all ranks together (SyncBatchNorm).

    mpiexec -n 2 python mpi_examples/2_data_parallel/image_classifier.py --batch-norm local
    mpiexec -n 2 python mpi_examples/2_data_parallel/image_classifier.py --batch-norm sync
    python mpi_examples/2_data_parallel/image_classifier.py --ranks 2 --batch-norm sync

Data parallelism is one device with a large batch, but batch norm looks at all rows of what it is given: at 8 rows on
each of 2 ranks, and not at 16. With `sync` the ranks exchange mean and variance in every forward pass, and two sums in
every backward pass, and then it is one device with 16 rows again. For evaluation both have the statistics of all rows.
It prints the losses, how many of 400 other images the model recognises, and how far the weights are from one device's.
"""

import argparse

import numpy as np

from minidist import (
    Adam,
    DistributedDataParallel,
    Tensor,
    batch_coordinates,
    cross_entropy,
    global_loss,
    glyphs,
    launch,
    no_grad,
)
from minidist.data import GlobalBatchSampler
from minidist.nn import CNN
from minidist.parallel.sync_batch_norm import convert_sync_batchnorm

STEPS, ROWS, CHANNELS, BLOCKS = 60, 8, 8, 1  # rows of each rank


def train(comm, batch_norm):
    batch = ROWS * comm.size
    sampler = GlobalBatchSampler(glyphs(), batch, 1, seed=0)
    model, alone = (CNN((1, 12, 12), 10, CHANNELS, BLOCKS, dtype=np.float64) for _ in range(2))
    if batch_norm == "sync":
        convert_sync_batchnorm(model, comm)
    parallel = DistributedDataParallel(model, comm, reduction="sum")
    optimizer, expected = Adam(parallel.flat, lr=0.01), Adam(alone.parameters(), lr=0.01)
    for step in range(STEPS):
        # This rank's rows; the loss is divided by the rows of all ranks, so gradients are summed.
        parallel.zero_grad()
        images, labels = sampler.batch(step, comm.rank * ROWS, ROWS)
        with batch_coordinates(step, comm.rank * ROWS):
            loss = cross_entropy(parallel(Tensor(images.astype(np.float64))), labels, batch)
        loss.backward()
        optimizer.step()
        total = global_loss(comm, [loss.item()])

        # One device with all rows.
        alone.zero_grad()
        images, labels = sampler.batch(step, 0, batch)
        with batch_coordinates(step, 0):
            loss = cross_entropy(alone(Tensor(images.astype(np.float64))), labels, batch)
        loss.backward()
        expected.step()
        if comm.rank == 0 and (step % 20 == 0 or step == STEPS - 1):
            print(f"step {step:2}  loss {total:.6f}, of one device {loss.item():.6f}", flush=True)

    # Images that it was not trained on, with the running statistics.
    model.eval()
    images, labels = glyphs(2400).rows(np.arange(2000, 2400))
    with no_grad():
        right = np.mean(model(Tensor(images.reshape(-1, 1, 12, 12).astype(np.float64))).data.argmax(axis=1) == labels)

    # Weights and running statistics.
    theirs = alone.state_dict()
    worst = max(np.abs(array - theirs[name]).max() for name, array in model.state_dict().items())
    sent = comm.trace.bytes_by_purpose().get("batch_norm", 0)
    print(
        f"rank {comm.rank}: {batch_norm}, {right:.1%} right, max |difference| {worst:.0e}, statistics sent {sent:,} B",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-norm", choices=["local", "sync"], default="sync")
    flags, _ = parser.parse_known_args()
    launch(train, flags.batch_norm)
