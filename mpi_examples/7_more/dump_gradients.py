"""A data-parallel program that writes its gradients as a dump, with one of three bugs, for `compare --theirs`.

mpiexec -n 2 python mpi_examples/7_more/dump_gradients.py --bug sum
minidist compare --theirs runs/dump --model gpt --heads 4

The program stands for one in another framework. Each rank has its rows of a batch, and reduces its gradients by an
all-reduce. `sum` does not divide by the number of ranks; `one` leaves a matrix out of the reduction; `late` runs one
row less on rank 1. `none` is right, and equal. Nothing is sent but the gradients and, for the dump, their arrays.
"""

import argparse

import numpy as np

from minidist import GPT, GPTConfig, all_reduce, gather, launch
from minidist.debug.dumps.dump import write_dump

ROWS, LENGTH, WORDS = 4, 8, 32
LEFT_OUT = "transformer.h.1.mlp.c_fc.weight"


def main(comm, bug, folder):
    """Compute this rank's gradients, reduce them, and let rank 0 write those of all ranks."""
    model = GPT(GPTConfig(WORDS, LENGTH, n_embd=16, n_layer=2, n_head=4), seed=1)
    tokens = np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH + 1))
    mine = np.array_split(np.arange(ROWS), comm.size)[comm.rank]
    if bug == "late" and comm.rank == 1:
        mine = mine[1:]

    # The mean over this rank's rows is divided by the ranks, so that their sum is the mean over the batch.
    share = len(mine) * LENGTH if bug == "sum" else ROWS * LENGTH
    model(tokens[mine, :-1], tokens[mine, 1:], divisor=share).backward()
    for parameter in model.parameters():
        if not (bug == "one" and parameter.name == LEFT_OUT):
            all_reduce(comm, parameter.grad)

    # One file per rank; rank 0 writes them, so that the ranks need no common disk.
    arrays = {
        f"{kind}/{p.name}": a for p in model.parameters() for kind, a in (("weights", p.data), ("gradients", p.grad))
    }
    gathered = {name: gather(comm, np.ascontiguousarray(a)) for name, a in arrays.items()}
    if comm.rank == 0:
        ranks = [
            {name: all_ranks.reshape(comm.size, *arrays[name].shape)[r] for name, all_ranks in gathered.items()}
            for r in range(comm.size)
        ]
        write_dump(folder, [{**tensors, "batch/tokens": tokens} for tensors in ranks], {"dp": comm.size})
        print(f"written: {folder}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bug", default="none", choices=["none", "sum", "one", "late"])
    parser.add_argument("-o", "--output", default="runs/dump")
    own, _ = parser.parse_known_args()
    launch(main, own.bug, own.output)
