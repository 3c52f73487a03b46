"""Muon on one page: whole matrices are orthogonalised, although ZeRO 3 gives each rank a shard of every layer.

mpiexec -n 4 python mpi_examples/7_more/muon.py
python mpi_examples/7_more/muon.py --ranks 4
"""

import numpy as np

from minidist import (
    GPT,
    GPTConfig,
    all_reduce,
    batch_coordinates,
    fully_shard,
    global_loss,
    launch,
    load_dataset,
    purpose,
    sharded_parameters,
)
from minidist.data import GlobalBatchSampler
from minidist.optim import NO_DECAY, Muon
from minidist.parallel import WholeMatrices

STEPS, ROWS, CONTEXT = 3, 8, 32  # rows of the global batch


def main(comm):
    if ROWS % comm.size:
        raise SystemExit(f"{ROWS} rows do not divide over {comm.size} ranks; use 1, 2, 4 or 8")
    sampler, rows = GlobalBatchSampler(load_dataset("pydoc"), ROWS, CONTEXT, seed=0), ROWS // comm.size
    model = GPT(GPTConfig(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4), seed=0)
    parameters = list(model.parameters())
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=comm, reduction="sum", algorithm="ordered")

    # Momentum stays sharded; a matrix's momentum goes to its owner, which orthogonalises it and returns the shards.
    whole = WholeMatrices(parameters, form="owner")
    optimizer = Muon(sharded_parameters(model), lr=0.02, groups=[NO_DECAY], whole_matrices=whole)
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

    sent = np.array([float(comm.trace.bytes_by_purpose().get("muon", 0))])
    with purpose("metrics"):
        all_reduce(comm, sent)
    if comm.rank == 0:
        paper = STEPS * 4 * whole.sent(optimizer.shapes)
        print(f"{len(optimizer.shapes)} matrices: all ranks sent {sent[0]:,.0f} B, on paper {paper:,} B", flush=True)


if __name__ == "__main__":
    launch(main)
