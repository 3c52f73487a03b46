"""LAMB on one page: a step as long as each layer's weights, although ZeRO 3 gives each rank a shard of every layer.

mpiexec -n 4 python mpi_examples/7_more/trust_ratios.py
python mpi_examples/7_more/trust_ratios.py --ranks 4
"""

from minidist import (
    GPT,
    GPTConfig,
    batch_coordinates,
    fully_shard,
    global_loss,
    launch,
    load_dataset,
    sharded_parameters,
)
from minidist.data import GlobalBatchSampler
from minidist.optim import LAMB, NO_DECAY
from minidist.parallel import LayerSums
from minidist.parallel.layer_sums import layer_sums_volume

STEPS, ROWS, CONTEXT = 3, 8, 32  # rows of the global batch


def main(comm):
    if ROWS % comm.size:
        raise SystemExit(f"{ROWS} rows do not divide over {comm.size} ranks; use 1, 2, 4 or 8")
    sampler, rows = GlobalBatchSampler(load_dataset("pydoc"), ROWS, CONTEXT, seed=0), ROWS // comm.size
    model = GPT(GPTConfig(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4), seed=0)
    layers = list(model.parameters())
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=comm, reduction="sum", algorithm="ordered")

    # Each rank has a shard of every layer, and a ratio needs norms of whole layers: LayerSums adds their squares.
    sums = LayerSums(layers, shards=comm)
    optimizer = LAMB(sharded_parameters(model), lr=0.02, weight_decay=0.01, groups=[NO_DECAY], layer_sums=sums)
    for step in range(STEPS):
        model.zero_grad()
        tokens, targets = sampler.batch(step, comm.rank * rows, rows)
        with batch_coordinates(step, comm.rank * rows):
            loss = model(tokens, targets, ROWS * CONTEXT)
        loss.backward()
        optimizer.step()
        total = global_loss(comm, [loss.item()])
        if comm.rank == 0:
            print(f"step {step}: loss {total:.6f}", flush=True)

    # What a rank of a ring sends differs by a chunk from rank to rank; the formula is that of all ranks together.
    sent = comm.trace.bytes_by_purpose().get("trust_ratio", 0)
    if comm.rank == 0:
        share = STEPS * 8 * layer_sums_volume(len(layers), comm.size) / comm.size
        print(f"norms of {len(layers)} layers: rank 0 sent {sent:,} B, on paper about {share:,.0f} B", flush=True)


if __name__ == "__main__":
    launch(main)
