"""Data parallelism in one page: a small GPT learns text; every rank computes on its own rows.

mpiexec -n 4 python mpi_examples/2_data_parallel/data_parallel_gpt.py
python mpi_examples/2_data_parallel/data_parallel_gpt.py --ranks 4
"""

from minidist import (
    GPT,
    AdamW,
    DistributedDataParallel,
    FlatParameters,
    GPTConfig,
    batch_coordinates,
    global_loss,
    launch,
    load_dataset,
)
from minidist.data import GlobalBatchSampler

STEPS, ROWS, CONTEXT = 10, 4, 32  # rows of each rank


def train(comm):
    sampler = GlobalBatchSampler(load_dataset("pydoc"), ROWS * comm.size, CONTEXT, seed=0)
    model = GPT(
        GPTConfig(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4), seed=comm.rank
    )  # made equal below
    flat = FlatParameters(model.parameters())
    parallel = DistributedDataParallel(model, comm, reduction="sum", flat=flat)
    optimizer = AdamW(flat, lr=3e-3)
    divisor = ROWS * comm.size * CONTEXT  # the loss is the mean over the *global* batch
    for step in range(STEPS):
        tokens, targets = sampler.batch(step, comm.rank * ROWS, ROWS)
        flat.zero_grad()
        with batch_coordinates(step, comm.rank * ROWS):
            loss = parallel(tokens, targets, divisor)
            loss.backward()  # the gradients travel meanwhile
        optimizer.step()
        total = global_loss(comm, [loss.item()])
        if comm.rank == 0:
            print(f"step {step}  loss {total:.4f}", flush=True)
    if comm.rank == 0:
        sent = comm.trace.bytes_by_purpose()["gradient_reduce"]
        print(
            f"rank 0 sent {sent:,} bytes of gradients: 2 (n-1)/n of {flat.numel * 4:,} bytes, {STEPS} times", flush=True
        )


if __name__ == "__main__":
    launch(train)
