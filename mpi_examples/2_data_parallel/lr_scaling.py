"""A batch eight times as large in an eighth of the steps: which learning rate, and how to begin with it.

    mpiexec -n 4 python mpi_examples/2_data_parallel/lr_scaling.py
    python mpi_examples/2_data_parallel/lr_scaling.py --ranks 4

A rate that is right for batches of 4 samples is too small for batches of 32: there are fewer steps, and the gradient
is less noisy. `--lr-scaling linear` takes eight times the rate (Goyal et al. 2017). From the first step on this
overshoots, while the weights change fast; with `linear:20` the rate climbs to it over 20 steps, and the loss on
held-out data is the best of the large batches. All of them read the same number of samples. Nothing is sent for it,
and it is the same whether the batch has grown by ranks or by accumulation. From the command line:

    mpiexec -n 4 minidist train --dp 4 --global-batch 32 --base-batch 4 --lr-scaling linear:20 --optimizer sgd
"""

from minidist import TrainConfig, launch
from minidist.job.train.trainer import train

MODEL = {"data": "markov", "layers": 1, "width": 16, "heads": 2, "context": 16}
MODEL |= {"optimizer": "sgd", "momentum": 0.9, "lr": 0.1}
BASE, LARGE, STEPS = 4, 32, 50  # samples of a batch, and steps with large ones


def main(comm):
    jobs = {
        f"batch {BASE}, its rate": {"global_batch": BASE, "steps": STEPS * LARGE // BASE},
        f"batch {LARGE}, the same rate": {},
        f"batch {LARGE}, sqrt:20": {"base_batch": BASE, "lr_scaling": "sqrt:20"},
        f"batch {LARGE}, linear": {"base_batch": BASE, "lr_scaling": "linear"},
        f"batch {LARGE}, linear:20": {"base_batch": BASE, "lr_scaling": "linear:20"},
    }
    for name, values in jobs.items():
        settings = {**MODEL, "global_batch": LARGE, "dp": comm.size, "steps": STEPS, **values}
        settings["evaluate_every"] = settings["steps"]
        config = TrainConfig.make(**settings)
        result = train(comm, config)
        if comm.rank == 0:
            factor = result.measured.get("lr_scaling", {"factor": 1})["factor"]
            (loss,) = result.held_out.values()
            print(f"{name}: {config.steps} steps, rate x {factor:.2f}, held-out loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    launch(main)
