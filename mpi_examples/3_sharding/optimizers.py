"""Optimizers and their state: SGD, momentum, RMSProp and Adam, whole on every rank and sharded by ZeRO 1.

mpiexec -n 4 python mpi_examples/3_sharding/optimizers.py
python mpi_examples/3_sharding/optimizers.py --ranks 4

They step element by element, so a rank that owns 1/n of the weights keeps 1/n of the state, and all weights have the
same bits. What travels does not depend on the optimizer.
"""

from minidist import TrainConfig, launch
from minidist.job.train.trainer import train

OPTIMIZERS = {
    "sgd": {"optimizer": "sgd", "lr": 0.1},
    "momentum": {"optimizer": "sgd", "lr": 0.05, "momentum": 0.9},
    "rmsprop": {"optimizer": "rmsprop", "lr": 0.003},
    "adam": {"optimizer": "adam", "lr": 0.003},
}


def main(comm):
    for name, settings in OPTIMIZERS.items():
        results, state = [], []  # without ZeRO and with it
        for zero in (0, 1):
            config = TrainConfig.make(
                data="markov", width=32, context=16, steps=30, zero=zero, reduction="ordered", **settings
            )
            results.append(train(comm, config))
            state.append(results[-1].held.get("optimizer", 0))
        same = results[0].losses == results[1].losses
        if comm.rank == 0:
            losses = results[0].losses
            print(
                f"{name:8} loss {losses[0]:.3f} to {losses[-1]:.3f}; state of a rank {state[0]:9,} B, with ZeRO 1"
                f" {state[1]:9,} B; the same bits: {same}",
                flush=True,
            )


if __name__ == "__main__":
    launch(main)
