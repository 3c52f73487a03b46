"""ZeRO 3 (FSDP) on one page: parameters are kept as shards, and a block's are whole only while it computes.

mpiexec -n 4 python mpi_examples/3_sharding/fully_shard.py
python mpi_examples/3_sharding/fully_shard.py --ranks 4
"""

from minidist import (
    GPT,
    AdamW,
    GPTConfig,
    batch_coordinates,
    fully_shard,
    global_loss,
    launch,
    load_dataset,
    sharded_parameters,
    shards_of,
)
from minidist.base.memory import account_memory
from minidist.data import GlobalBatchSampler

STEPS, ROWS, CONTEXT = 3, 4, 32  # rows of each rank


def main(comm):
    sampler = GlobalBatchSampler(load_dataset("pydoc"), ROWS * comm.size, CONTEXT, seed=0)
    with account_memory() as account:
        model = GPT(GPTConfig(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=4, n_head=4), seed=0)

        # Bottom up: each block is a unit, and what is left of the model is the last one.
        for block in model.transformer.h:
            fully_shard(block, mesh=comm, reduction="sum")
        fully_shard(model, mesh=comm, reduction="sum")

        # An ordinary optimizer works on the shards.
        optimizer, shards = AdamW(sharded_parameters(model), lr=3e-3), shards_of(model)
        for step in range(STEPS):
            for shard in shards:
                shard.zero_grad()
            tokens, targets = sampler.batch(step, comm.rank * ROWS, ROWS)
            with batch_coordinates(step, comm.rank * ROWS):
                loss = model(tokens, targets, ROWS * comm.size * CONTEXT)  # gathers each block, and drops it
                loss.backward()  # gathers again, reduces, drops
            optimizer.step()
            total = global_loss(comm, [loss.item()])
    if comm.rank == 0:
        psi = sum(shard.flat.padded_numel for shard in shards) * 4
        sent = comm.trace.bytes_by_purpose()
        print(f"loss {total:.4f}; the model has {psi:,} B, a rank holds {account.by_purpose['parameter']:,} B of it")
        print(f"whole at once, at most: {account.peak_by_purpose['unsharded']:,} B")
        for name in ("parameter_gather", "gradient_reduce"):
            print(
                f"  {name:16} {sent.get(name, 0):10,} B = {sent.get(name, 0) / psi / STEPS:.2f} Psi a step", flush=True
            )


if __name__ == "__main__":
    launch(main)
