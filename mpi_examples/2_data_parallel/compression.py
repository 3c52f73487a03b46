"""Gradient compression: data parallelism with a communication hook that sends fewer bytes, with error feedback.

    mpiexec -n 4 python mpi_examples/2_data_parallel/compression.py --compression topk:0.01
    python mpi_examples/2_data_parallel/compression.py --ranks 4 --compression powersgd:2

Prints the bytes that a rank sent next to those of the closed form, and checks the error feedback: what has arrived,
plus what all ranks still hold back, is the sum of all gradients that were computed.
"""

import argparse

import numpy as np

from minidist import MLP, SGD, DistributedDataParallel, Tensor, all_reduce, cross_entropy, glyphs, launch
from minidist.techniques.compression import compress, make_compressor

STEPS, ROWS = 60, 480


def main(comm, method):
    images, labels = glyphs().rows(np.arange(ROWS))
    mine = slice(comm.rank * ROWS // comm.size, (comm.rank + 1) * ROWS // comm.size)
    model = DistributedDataParallel(
        MLP([images.shape[1], 64, 10], dtype=np.float64), comm, reduction="sum", bucket_cap_mb=0.05
    )

    # The hook compresses a bucket; here it also adds up what this rank computed, for the check at the end.
    state, buckets = make_compressor(method, comm, "sum"), model.reducer.buckets
    ever, arrived = np.zeros(model.flat.padded_numel), np.zeros(model.flat.padded_numel)

    def hook(state, bucket):
        ever[bucket.slice] += bucket.buffer  # what this rank has computed
        return compress(state, bucket)

    model.register_comm_hook(state, hook)

    optimizer, losses = SGD(model.flat, lr=0.5), []
    for _ in range(STEPS):
        model.flat.zero_grad()
        loss = cross_entropy(model(Tensor(images[mine].astype(np.float64))), labels[mine], divisor=ROWS)
        loss.backward()
        arrived += model.flat.grad
        optimizer.step()
        losses.append(loss.item())

    # The bytes and the sums over all ranks, against what they must be.
    sent = comm.trace.bytes_by_purpose().get("gradient_reduce", 0)
    formula = STEPS * sum(state.sent_bytes(bucket, comm.rank) for bucket in buckets)
    first, last = all_reduce(comm, np.array([losses[0], losses[-1]]))
    everything = all_reduce(comm, np.stack([ever, state.residual(buckets)]).reshape(-1)).reshape(2, -1)
    if comm.rank == 0:
        whole = 2 * (comm.size - 1) / comm.size * model.flat.data.nbytes * STEPS
        print(f"{method}: loss {first:.4f} -> {last:.4f} in {STEPS} steps", flush=True)
        print(f"rank 0 sent {sent:,} bytes, the formula says {formula:,}; uncompressed about {whole:,.0f}", flush=True)
        if state.error_feedback:
            off = np.abs(arrived + everything[1] - everything[0]).max()
            print(f"arrived + held back - all gradients: at most {off:.1e}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--compression", default="topk:0.01", help="fp16, bf16, topk:K, sign, qsgd:LEVELS or powersgd:RANK"
    )
    flags, _ = parser.parse_known_args()
    launch(main, flags.compression)
