"""A batch that grows with the noise of its gradient: as large as its samples are worth, and no larger.

    mpiexec -n 4 python mpi_examples/7_more/adaptive_batch.py
    python mpi_examples/7_more/adaptive_batch.py --ranks 4

The trainer measures the noise scale from what data parallelism has anyway, a rank's own gradient and the sum over ranks
(McCandlish et al. 2018); one number of 8 bytes per step is sent for it. As the loss falls, its gradient becomes short
against its noise, and the batch grows by more micro-batches per step. Three jobs make equally many steps. The smallest
batch ends with a worse loss; the growing one ends with that of the largest batch, for about half of its samples. The
same from the command line, with a learning rate that follows the square root of the batch over 5 steps:

    minidist train --data markov --dp 4 --micro-batch 2 --adaptive-batch 64 --lr-scaling sqrt:5
"""

from minidist import TrainConfig, launch
from minidist.job.train.trainer import train

MODEL = {"data": "markov", "layers": 1, "width": 16, "context": 16, "optimizer": "adam", "lr": 0.03}
STEPS = 150
ROWS = 2  # of one rank's micro-batch
LARGEST = 8  # batch, in units of one micro-batch on every rank


def main(comm):
    unit = ROWS * comm.size
    jobs = {f"batch {unit}": {"micro_batch": ROWS}, f"batch {unit * LARGEST}": {"micro_batch": ROWS * LARGEST}}
    if comm.size > 1:  # one rank has one batch size, and no second one to compare it with
        jobs[f"batch {unit} to {unit * LARGEST}"] = {"micro_batch": ROWS, "adaptive_batch": unit * LARGEST}

    def show(state):
        if state.rank == 0 and state.job.config.adaptive_batch and state.step % 25 == 24:
            batch, noise = state.job.batch, state.job.plan.noise.simple
            print(f"step {state.step + 1:3}: batch {batch.shares.samples:3}, noise scale {noise:6.1f}", flush=True)

    show.reads_tensors = False
    for name, settings in jobs.items():
        config = TrainConfig.make(**MODEL, **settings, dp=comm.size, steps=STEPS)
        result = train(comm, config, [show])
        if comm.rank == 0:
            samples = sum(shares.samples * steps for shares, steps in result.runs)
            print(f"{name}: {samples:,} samples, loss {sum(result.losses[-40:]) / 40:.3f}", flush=True)


if __name__ == "__main__":
    launch(main)
