"""A batch that grows with the noise of its gradient: as large as its samples are worth, and no larger.

    mpiexec -n 4 python mpi_examples/adaptive_batch.py
    python mpi_examples/adaptive_batch.py --ranks 4

The trainer measures the noise scale from what data parallelism has anyway, a rank's own gradient and the sum over ranks
(McCandlish et al. 2018); one number of 8 bytes per step is sent for it. As the loss falls, its gradient becomes short
against its noise, and the batch grows by more micro-batches per step. The same from the command line, with a learning
rate that follows the square root of the batch over 5 steps:

    minidist train --model mlp --layers 1 --dp 4 --micro-batch 4 --adaptive-batch 512 --lr-scaling sqrt:5
"""

from minidist.comm import launch
from minidist.config.train_config import TrainConfig
from minidist.train.trainer import train

STEPS = 60
ROWS = 4  # of one rank's micro-batch
LARGEST = 32  # batch, in units of one micro-batch on every rank


def main(comm):
    unit = ROWS * comm.size
    config = TrainConfig.make(
        model="mlp",
        layers=1,
        dp=comm.size,
        micro_batch=ROWS,
        optimizer="sgd",
        lr=1.5,
        steps=STEPS,
        adaptive_batch=LARGEST * unit if comm.size > 1 else None,  # one rank has one batch size, and no second one
    )

    def show(state):
        if state.rank == 0 and state.step % 20 == 0:
            batch, noise = state.job.batch, state.job.plan.noise.simple
            print(
                f"step {state.step:3}: batch {batch.shares.samples:4}, noise scale {noise:7.1f} samples, loss"
                f" {state.loss:.4f}",
                flush=True,
            )

    show.reads_tensors = False
    result = train(comm, config, [show])
    if comm.rank == 0:
        samples = sum(shares.samples * steps for shares, steps in result.runs)
        print(
            f"{samples:,} samples in {STEPS} steps; the largest batch throughout would be {STEPS * LARGEST * unit:,}",
            flush=True,
        )


if __name__ == "__main__":
    launch(main)
