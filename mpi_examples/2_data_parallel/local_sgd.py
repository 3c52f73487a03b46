"""Fewer messages: every rank trains alone for H steps, then the weights are averaged (local SGD).

mpiexec -n 4 python mpi_examples/2_data_parallel/local_sgd.py --every 10
mpiexec -n 4 python mpi_examples/2_data_parallel/local_sgd.py --every 10 --outer
mpiexec -n 4 python mpi_examples/2_data_parallel/local_sgd.py --every 10 --fragments 2 --delay 2
python mpi_examples/2_data_parallel/local_sgd.py --ranks 4 --every 1

With --outer an outer Nesterov step follows each average (DiLoCo); with --fragments they are averaged in turns, while
the ranks train on.
"""

import argparse

import numpy as np

from minidist import MLP, SGD, FlatParameters, Tensor, cross_entropy, glyphs, launch
from minidist.techniques.local_sgd.averaging import OuterOptimizer, PeriodicModelAverager
from minidist.techniques.local_sgd.streaming import StreamingOuterOptimizer, Turns

STEPS, ROWS = 60, 480


def main(comm, every, outer, fragments, delay):
    images, labels = glyphs().rows(np.arange(ROWS))
    mine = slice(comm.rank * ROWS // comm.size, (comm.rank + 1) * ROWS // comm.size)
    model = MLP([images.shape[1], 64, 10], seed=comm.rank)  # rank 0's weights are sent to all ranks
    flat = FlatParameters(model.parameters())
    average, optimizer = PeriodicModelAverager(flat, comm, every), SGD(flat, lr=1.0)
    if outer:
        optimizer = OuterOptimizer(optimizer, flat, lr=0.7, momentum=0.6)
    if fragments:
        optimizer = StreamingOuterOptimizer(optimizer, flat, comm, Turns(every, fragments, delay, 0.25), 0.7, 0.6)
    for _ in range(STEPS):
        flat.zero_grad()
        cross_entropy(model(Tensor(images[mine])), labels[mine], divisor=mine.stop - mine.start).backward()
        optimizer.step()
        if not fragments and average.step() and outer:
            optimizer.outer_step()
    if fragments:
        optimizer.wait()
        flat.data[...] = optimizer.common  # the model; each rank's own weights are on their way
    elif STEPS % every:
        average.average()
    sent = comm.trace.bytes_by_purpose().get("parameter_gather", 0)
    if comm.rank == 0:
        loss = cross_entropy(model(Tensor(images)), labels).item()
        print(
            f"averaged every {every} steps: loss {loss:.4f} after {STEPS} steps, rank 0 sent {sent:,} bytes of weights",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=10, help="steps between two averages")
    parser.add_argument("--outer", action="store_true", help="DiLoCo's outer optimizer")
    parser.add_argument("--fragments", type=int, default=0, help="Streaming DiLoCo: they are averaged in turn")
    parser.add_argument("--delay", type=int, default=0, help="steps that a fragment has to arrive")
    flags, _ = parser.parse_known_args()
    launch(main, flags.every, flags.outer, flags.fragments, flags.delay)
