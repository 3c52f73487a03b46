"""Context parallelism in one page: a small Llama whose *sequences* are split; keys and values travel round in
attention.

mpiexec -n 2 python mpi_examples/5_context_and_experts/context_parallel_llama.py [--ulysses]
python mpi_examples/5_context_and_experts/context_parallel_llama.py --ranks 2

With --all-gather, keys and values are gathered instead, and attention stays inside paragraphs; with --ulysses-ring two
neighbours exchange heads, and rings join such pairs.
"""

import sys

import numpy as np

from minidist import (
    AdamW,
    DistributedDataParallel,
    FlatParameters,
    Llama,
    LlamaConfig,
    RingAttention,
    UlyssesAttention,
    all_reduce,
    gradient_axes,
    init_device_mesh,
    launch,
    load_dataset,
    part_order,
    purpose,
    sequence_positions,
)
from minidist.data import GlobalBatchSampler
from minidist.parallel.context import AllGatherAttention, UlyssesRingAttention, document_ids, documents

STEPS, ROWS, CONTEXT, WORDS = 10, 4, 64, 256


NEWLINE = 10  # the byte at which a document ends


def train(comm, kind):
    mesh = init_device_mesh(comm, (1, comm.size), ("dp", "cp"))
    cp = mesh["cp"]
    kinds = {"ring": RingAttention, "ulysses": UlyssesAttention, "all-gather": AllGatherAttention}
    attention = UlyssesRingAttention(cp, CONTEXT, 2) if kind == "ulysses-ring" else kinds[kind](cp, CONTEXT)
    mine = sequence_positions(CONTEXT, cp.rank, cp.size, part_order(kind, 2))  # which tokens I hold
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    model = Llama(config, seed=0, attention_fn=attention)
    flat = FlatParameters(model.parameters())
    parallel = DistributedDataParallel(model, gradient_axes(mesh), reduction="sum", flat=flat)
    sampler = GlobalBatchSampler(load_dataset("pydoc"), ROWS, CONTEXT, seed=0)
    optimizer = AdamW(flat, lr=3e-3)
    for step in range(STEPS):
        tokens, targets = sampler.batch(step, 0, ROWS)
        flat.zero_grad()
        # The documents of whole sequences: the keys of a rank's queries lie everywhere.
        with documents(document_ids(tokens, NEWLINE) if kind == "all-gather" else None):
            loss = parallel(tokens[:, mine], targets[:, mine], ROWS * CONTEXT, positions=mine)
        loss.backward()
        optimizer.step()
        total = np.array([loss.item()])
        with purpose("metrics"):
            all_reduce(comm, total)
        if comm.rank == 0:
            print(f"step {step}  loss {total[0]:.4f}", flush=True)
    if comm.rank == 0:
        sent = comm.trace.bytes_by_purpose()
        print(f"rank 0 holds tokens {mine.tolist()}", flush=True)
        print(
            f"rank 0 sent {sent.get('tensor_forward', 0):,} bytes in forward, {sent.get('tensor_backward', 0):,} in"
            " backward"
        )


if __name__ == "__main__":
    launch(train, next((kind for kind in ("ulysses", "all-gather", "ulysses-ring") if f"--{kind}" in sys.argv), "ring"))
