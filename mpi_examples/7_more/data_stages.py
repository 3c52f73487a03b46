"""Data preparation that costs time: how long a rank waits for its batches without worker processes, and with them.

mpiexec -n 2 python mpi_examples/7_more/data_stages.py
python mpi_examples/7_more/data_stages.py --ranks 2 --workers 2

Images are stored compressed. `fetch` waits for each as for a disk or a network, `decode` unpacks them, and `crop` and
`flip` draw another window and side at every visit of a sample. The draws depend on the place of a sample in the job's
endless list, so the batches have the same bits whoever makes them. While the rank trains, workers fill a queue of at
most `ahead` batches each; a rank waits only for what is not in the queue yet.
"""

import argparse
import time
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from minidist import launch
from minidist.data import SampleDataset, WorkerSampler, glyphs
from minidist.data.workers import open_sampler

STEPS, ROWS = 12, 8  # rows of each rank's micro-batch
HERE = Path(__file__)
DATA = f"{HERE}:compressed | {HERE}:fetch | {HERE}:decode | crop:1 | flip | shuffle:32"
LONGEST = 256  # bytes of a compressed image
LATENCY = 0.005  # seconds that storage takes for an image


def compressed():
    """The data set as it is stored: each image compressed, and filled with zeros to one length."""
    images = glyphs()
    rows = [np.frombuffer(zlib.compress(image.tobytes(), 9)[:LONGEST], np.uint8) for image in images.inputs > 0.5]
    return SampleDataset(
        "compressed", np.stack([np.pad(row, (0, LONGEST - row.size)) for row in rows]), images.targets, 10
    )


def fetch(samples):
    """A stage: storage takes a few milliseconds for each image."""
    time.sleep(LATENCY * len(samples))
    return samples


def decode(samples):
    """A stage: compressed images, (rows, 256), become images of 12 x 12 pixels of 0 and 1."""
    images = [np.frombuffer(zlib.decompressobj().decompress(row.tobytes()), np.bool_) for row in samples]
    return np.stack(images).reshape(-1, 12, 12).astype(np.float32)


def train(sampler, requests):
    """Train on all but the first batch; return (seconds of waiting, seconds of all, sum of all pixels)."""
    weights, waited, total = np.ones((512, 512), np.float32), 0.0, 0.0
    sampler.batch(*requests[0])  # files are open and workers have started, as in a job that has trained for a while
    start = time.perf_counter()
    for request in requests[1:]:
        asked = time.perf_counter()
        inputs, _ = sampler.batch(*request)
        waited += time.perf_counter() - asked
        total += float(inputs.sum(dtype=np.float64))
        for _ in range(8):
            weights @ weights  # stands for forward and backward
    return waited, time.perf_counter() - start, total


def main(comm, workers):
    make = partial(open_sampler, DATA, False, ROWS * comm.size, 1, 0)
    sampler, requests = make(), [(step, comm.rank * ROWS, ROWS) for step in range(STEPS)]
    waited, seconds, total = train(sampler, requests)
    with WorkerSampler(make, sampler, requests, workers, ahead=4) as processes:
        waited_less, less, same = train(processes, requests)
    print(
        f"rank {comm.rank}: alone it waits {waited:.2f} of {seconds:.2f} s; with {workers} worker{'s' * (workers != 1)}"
        f" {waited_less:.2f} of {less:.2f} s; the same pixels: {total == same}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1, help="worker processes of each rank")
    flags, _ = parser.parse_known_args()
    launch(main, flags.workers)
