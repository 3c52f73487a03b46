"""A batch that grows with the noise of its gradient: as large as its samples are worth, and no larger.

    mpiexec -n 4 python mpi_examples/adaptive_batch.py
    python mpi_examples/adaptive_batch.py --ranks 4

The noise scale is measured from what data parallelism has anyway, a rank's own gradient and the sum over ranks
(McCandlish et al. 2018); one number of 8 bytes per step is sent for it. As the loss falls, its gradient becomes short
against its noise, and the batch grows by more micro-batches per step.
"""

import numpy as np

from minidist.autograd import Tensor, cross_entropy
from minidist.comm import launch
from minidist.data import glyphs
from minidist.nn import MLP
from minidist.optim import SGD
from minidist.parallel import DistributedDataParallel
from minidist.parallel.noise_scale import AdaptiveBatch, LocalGradient, NoiseScale, step_estimate

STEPS = 60
ROWS = 4  # of one rank's micro-batch
LARGEST = 32  # batch, in units of one micro-batch on every rank


def main(comm):
    images, labels = glyphs().rows(np.arange(2000))
    model = DistributedDataParallel(MLP([images.shape[1], 64, 10]), comm, reduction="sum")
    optimizer, local = SGD(model.flat, lr=0.7), LocalGradient(model.reducer)
    unit = ROWS * comm.size
    batch, scale, samples = AdaptiveBatch(unit, unit, LARGEST * unit), NoiseScale(), 0
    for step in range(STEPS):
        # This rank's part of the batch, in micro-batches; only the last one reduces the gradients.
        order = np.random.default_rng(step).permutation(2000)[: batch.samples]  # the same on every rank
        mine = np.array_split(order, comm.size)[comm.rank]
        model.flat.zero_grad()
        parts = np.split(mine, mine.size // ROWS)
        for i, rows in enumerate(parts):
            if i < len(parts) - 1:
                with model.no_sync():
                    cross_entropy(model(Tensor(images[rows])), labels[rows], divisor=batch.samples).backward()
            else:
                cross_entropy(model(Tensor(images[rows])), labels[rows], divisor=batch.samples).backward()

        # Measure the noise scale, step, and choose the next batch.
        used, samples = batch.samples, samples + batch.samples
        scale.add(step_estimate(comm, local.take(), model.flat.grad, used))
        optimizer.step()
        batch.next(scale.simple)
        if comm.rank == 0 and step % 20 == 19:
            loss = cross_entropy(model.module(Tensor(images)), labels).item()
            print(
                f"step {step:3}: batch {used:4}, noise scale {scale.simple:7.1f} samples, loss {loss:.4f}", flush=True
            )
    if comm.rank == 0:
        print(
            f"{samples:,} samples in {STEPS} steps; the largest batch throughout would be {STEPS * LARGEST * unit:,}",
            flush=True,
        )


if __name__ == "__main__":
    launch(main)
