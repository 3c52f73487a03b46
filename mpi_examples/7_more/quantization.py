"""Training for INT8 on several ranks: one grid for all, and a model of 8-bit integers at the end.

    mpiexec -n 4 python mpi_examples/7_more/quantization.py
    python mpi_examples/7_more/quantization.py --ranks 4 --observer min-max

Prints how many held-out digits the model recognises with weights and inputs rounded to 8 bits, as it was trained, and
as integers; and the bytes with which the ranks agreed on the ranges of the inputs, next to the closed form.
"""

import argparse

import numpy as np

from minidist import MLP, Adam, DistributedDataParallel, Tensor, all_reduce, cross_entropy, glyphs, launch, no_grad
from minidist.techniques.quantization.layers import convert, int8_bytes, observers_of, prepare_qat
from minidist.techniques.quantization.ranges import ranges_volume, update_ranges

STEPS, ROWS = 40, 1600


def main(comm, observer):
    images, labels = glyphs().rows(np.arange(2000))
    mine = np.array_split(np.arange(ROWS), comm.size)[comm.rank]
    # First the layers, then the strategy: it wraps what is there.
    model = prepare_qat(MLP([images.shape[1], 64, 10]), observer)
    observers = observers_of(model)
    parallel = DistributedDataParallel(model, comm, reduction="sum", algorithm="ordered")

    optimizer = Adam(parallel.flat, lr=0.01)
    for _ in range(STEPS):
        parallel.flat.zero_grad()
        cross_entropy(parallel(Tensor(images[mine])), labels[mine], divisor=ROWS).backward()
        optimizer.step()
        update_ranges(observers, comm)  # without it each rank rounds to a grid that only its rows define

    def right():
        with no_grad():
            outputs = model(Tensor(images[ROWS:])).data
        return 100 * (outputs.argmax(axis=1) == labels[ROWS:]).mean()

    model.eval()
    sizes, rounded = int8_bytes(model), right()
    integers = (convert(model), right())[1]
    print(f"rank {comm.rank} of {comm.size}: right {rounded:.1f} % rounded, {integers:.1f} % as integers", flush=True)
    (sent,) = all_reduce(comm, np.array([comm.trace.bytes_by_purpose().get("quantization_range", 0)]))
    if comm.rank == 0:
        formula = 4 * STEPS * ranges_volume(len(observers), comm.size)
        print("weights: {weight_bytes:,} bytes instead of {float_bytes:,}".format(**sizes), flush=True)
        print(f"ranges: {sent:,} bytes from all ranks, the formula says {formula:,}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--observer", default="moving-average", help="moving-average or min-max")
    flags, _ = parser.parse_known_args()
    launch(main, flags.observer)
