"""Expert parallelism in one page: a small GPT whose MLPs are mixtures of four experts, sharded over the ranks.

mpiexec -n 2 python mpi_examples/5_context_and_experts/expert_parallel_gpt.py [--top-2]
python mpi_examples/5_context_and_experts/expert_parallel_gpt.py --ranks 4
"""

import sys

import numpy as np

from minidist import (
    GPT,
    AdamW,
    ExpertParallel,
    GPTConfig,
    all_reduce,
    batch_coordinates,
    init_device_mesh,
    launch,
    load_dataset,
    parallelize_module,
    purpose,
)
from minidist.data import GlobalBatchSampler
from minidist.parallel.expert import ExpertDataParallel

STEPS, ROWS, CONTEXT = 10, 4, 32  # rows of each rank


def train(comm, top_k):
    mesh = init_device_mesh(comm, (1, comm.size), ("dp", "ep"))
    config = GPTConfig(
        vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4, n_experts=4, expert_top_k=top_k
    )
    model = parallelize_module(GPT(config, seed=0), mesh["ep"], {"transformer.h.*.mlp": ExpertParallel()}, axis="ep")
    parallel = ExpertDataParallel(model, mesh)
    optimizer = AdamW(parallel.flats, lr=3e-3)
    sampler = GlobalBatchSampler(load_dataset("pydoc"), ROWS * comm.size, CONTEXT, seed=0)
    divisor = ROWS * comm.size * CONTEXT
    for step in range(STEPS):
        tokens, targets = sampler.batch(step, comm.rank * ROWS, ROWS)
        parallel.zero_grad()
        with batch_coordinates(step, comm.rank * ROWS):
            loss = parallel(tokens, targets, divisor)
            loss.backward()
        optimizer.step()
        dropped = sum(block.mlp.assignment.dropped for block in model.transformer.h)
        total = np.array([loss.item(), dropped])
        with purpose("metrics"):
            all_reduce(comm, total)
        if comm.rank == 0:
            print(f"step {step}  loss {total[0]:.4f}  dropped {int(total[1])}", flush=True)
    if comm.rank == 0:
        sent = comm.trace.bytes_by_purpose()
        print(f"rank 0 sent {sent.get('dispatch', 0):,} bytes of tokens to experts and back", flush=True)


if __name__ == "__main__":
    launch(train, 2 if "--top-2" in sys.argv else 1)
