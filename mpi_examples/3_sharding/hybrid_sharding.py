"""Hybrid sharding: parameters are sharded inside a node and copied between nodes, so gathers stay on the fast links.

    mpiexec -n 4 python mpi_examples/3_sharding/hybrid_sharding.py
    python mpi_examples/3_sharding/hybrid_sharding.py --ranks 4

    node 0   rank 0 [first half]   rank 1 [second half]      gather, reduce-scatter: inside a node
    node 1   rank 2 [first half]   rank 3 [second half]      all-reduce of a shard: between the nodes

A rank holds 1/2 of the model where ZeRO 3 over all four ranks holds 1/4; in return only a shard's gradient, half of
the bytes, leaves a node.
"""

from minidist import (
    GPT,
    AdamW,
    GPTConfig,
    batch_coordinates,
    fully_shard,
    global_loss,
    init_device_mesh,
    launch,
    load_dataset,
    sharded_parameters,
    shards_of,
)
from minidist.data import GlobalBatchSampler

STEPS, ROWS, CONTEXT, NODES = 2, 2, 16, 2  # rows of each rank


def main(comm):
    if comm.size % NODES:
        raise SystemExit(f"{comm.size} ranks are not {NODES} equal nodes; use 2, 4, 6, ...")
    mesh = init_device_mesh(comm, (NODES, comm.size // NODES), ("replicate", "shard"))
    sampler = GlobalBatchSampler(load_dataset("pydoc"), ROWS * comm.size, CONTEXT, seed=0)
    model = GPT(GPTConfig(vocab_size=256, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4), seed=0)
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=mesh, reduction="sum")
    optimizer, shards = AdamW(sharded_parameters(model), lr=3e-3), shards_of(model)
    for step in range(STEPS):
        model.zero_grad()
        tokens, targets = sampler.batch(step, comm.rank * ROWS, ROWS)
        with batch_coordinates(step, comm.rank * ROWS):
            loss = model(tokens, targets, ROWS * comm.size * CONTEXT)
            loss.backward()
        optimizer.step()
        total = global_loss(comm, [loss.item()])
        if comm.rank == 0:
            print(f"step {step}  loss {total:.4f}", flush=True)

    # To whom a rank sent how much: its own node gets gathers and reduce-scatters, the other one shards of gradients.
    node, sent = comm.rank // (comm.size // NODES), {"inside": 0, "between": 0}
    for event in comm.trace.messages:
        if event.kind == "send" and event.purpose in ("parameter_gather", "gradient_reduce"):
            near = event.peer // (comm.size // NODES) == node
            sent["inside" if near else "between"] += event.nbytes
    held = sum(shard.data.nbytes for shard in shards) / sum(shard.flat.padded_numel * 4 for shard in shards)
    print(
        f"rank {comm.rank}: holds {held:.2f} of the model; sent {sent['inside']:,} B inside its node,"
        f" {sent['between']:,} B to the other",
        flush=True,
    )


if __name__ == "__main__":
    launch(main)
