"""Tensor parallelism in one page: a small GPT whose every matrix is cut into tiles, one per rank.

mpiexec -n 2 python mpi_examples/4_tensor_parallel/tensor_parallel_gpt.py [--sequence-parallel]
python mpi_examples/4_tensor_parallel/tensor_parallel_gpt.py --ranks 2
"""

import sys

from minidist import (
    GPT,
    AdamW,
    FlatParameters,
    GPTConfig,
    batch_coordinates,
    gpt_plan,
    init_device_mesh,
    launch,
    load_dataset,
    parallelize_module,
)
from minidist.data import GlobalBatchSampler

STEPS, ROWS, CONTEXT, WORDS = 10, 8, 32, 256


def train(comm, sequence_parallel):
    mesh = init_device_mesh(comm, (comm.size,), ("tp",))
    sampler = GlobalBatchSampler(load_dataset("pydoc"), ROWS, CONTEXT, seed=0)
    model = GPT(GPTConfig(vocab_size=WORDS, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4), seed=0)
    whole = sum(p.size for p in model.parameters())
    model = parallelize_module(model, mesh["tp"], gpt_plan(WORDS, sequence_parallel))  # each rank keeps its tiles
    flat = FlatParameters(model.parameters())
    optimizer = AdamW(flat, lr=3e-3)
    for step in range(STEPS):
        tokens, targets = sampler.batch(step, 0, ROWS)  # every rank sees the whole batch
        flat.zero_grad()
        with batch_coordinates(step):
            loss = model(tokens, targets, ROWS * CONTEXT)  # the sums inside the layers travel here
            loss.backward()  # and here
        optimizer.step()
        if comm.rank == 0:
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
    if comm.rank == 0:
        print(
            f"rank 0 holds {flat.numel:,} of {whole:,} parameters and sent", comm.trace.bytes_by_purpose(), flush=True
        )


if __name__ == "__main__":
    launch(train, "--sequence-parallel" in sys.argv)
