"""Sparse training on several ranks: four fifths of the weights become zero, and their gradients are not sent.

    mpiexec -n 4 python mpi_examples/7_more/sparsity.py
    python mpi_examples/7_more/sparsity.py --ranks 4 --sparsity 0.9

Prints, every few steps, how many weights are left, what a rank sent in the step next to the closed form, and how many
held-out digits are recognised. No mask is sent: all ranks have the same weights, and find the same ones.
"""

import argparse

import numpy as np

from minidist import MLP, Adam, DistributedDataParallel, Tensor, cross_entropy, glyphs, launch, no_grad
from minidist.parallel.compressor import compress
from minidist.parallel.replica_check import check_module_replicas
from minidist.techniques.pruning.pruner import KeptEntries, Part, Pruner, prunable
from minidist.techniques.pruning.schedule import SparsitySchedule

STEPS, ROWS = 150, 1600


def main(comm, sparsity):
    images, labels = glyphs().rows(np.arange(2000))
    mine = np.array_split(np.arange(ROWS), comm.size)[comm.rank]
    model = DistributedDataParallel(MLP([images.shape[1], 128, 10]), comm, reduction="sum", algorithm="ordered")
    flat, optimizer = model.flat, Adam(model.flat, lr=0.03)

    # Dense for 30 steps, then sparser every fifth step until step 100, then 50 steps to recover.
    pruner = Pruner(prunable(model.module), SparsitySchedule(sparsity, 30, 100, 5))
    hook = KeptEntries(comm, pruner, "sum", "ordered")
    model.register_comm_hook(hook, compress)
    for step in range(STEPS):
        flat.zero_grad()
        before = comm.trace.bytes_by_purpose().get("gradient_reduce", 0)
        formula = sum(hook.sent_bytes(bucket, comm.rank) for bucket in model.reducer.buckets)
        cross_entropy(model(Tensor(images[mine])), labels[mine], divisor=ROWS).backward()
        sent = comm.trace.bytes_by_purpose().get("gradient_reduce", 0) - before
        optimizer.step()
        pruner.prune(step + 1, [Part(p.name, p.data.reshape(-1)) for p in flat.parameters])
        flat.updated()

        if step % 30 == 29 and comm.rank == 0:
            with no_grad():
                outputs = model.module(Tensor(images[ROWS:])).data
            right = 100 * (outputs.argmax(axis=1) == labels[ROWS:]).mean()
            left = int((flat.data != 0).sum())
            print(
                f"step {step + 1}: {left:,} of {flat.numel:,} weights left; a rank sent {sent:,} bytes, the formula"
                f" says {formula:,}; {right:.1f} % right",
                flush=True,
            )
    check_module_replicas(model.module, comm)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sparsity", type=float, default=0.8, help="share of zeros at the end")
    flags, _ = parser.parse_known_args()
    launch(main, flags.sparsity)
