"""Activations computed twice: the same losses, fewer bytes, with parameters sharded as well.

mpiexec -n 2 python mpi_examples/7_more/recompute.py
python mpi_examples/7_more/recompute.py --ranks 2
"""

from minidist import TrainConfig, launch
from minidist.job.train.trainer import train


def main(comm):
    for what in ("none", "selective", "sqrt", "full"):
        config = TrainConfig.make(layers=4, context=64, micro_batch=4, steps=3, zero=3, dropout=0.1, recompute=what)
        result = train(comm, config)
        if comm.rank == 0:
            print(f"{what:10} loss {result.losses[-1]:.6f}  peak {result.peak_bytes:11,} B", flush=True)


if __name__ == "__main__":
    launch(main)
