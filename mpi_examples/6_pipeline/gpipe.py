"""GPipe in one page: four micro-batches fill a pipeline of stages, gradients are added up, then one update.

    mpiexec -n 4 python mpi_examples/6_pipeline/gpipe.py
    python mpi_examples/6_pipeline/gpipe.py --ranks 4

Every rank holds one stage of a small GPT. Each stage keeps only its input and runs its forward again before backward,
which is what makes "all forwards, then all backwards" affordable: the peak has one input per micro-batch and the
activations of one. `--keep` keeps all activations instead; the losses have the same bits.
"""

import sys

from minidist import (
    GPT,
    AdamW,
    GPTConfig,
    Pipeline,
    batch_coordinates,
    cross_entropy,
    get_schedule,
    launch,
    load_dataset,
    split_model,
)
from minidist.base.memory import account_memory
from minidist.data import GlobalBatchSampler
from minidist.pipeline.passes import recompute

STEPS, MICROBATCHES, ROWS, CONTEXT = 5, 4, 4, 32


def train(comm):
    with account_memory() as account:
        run(comm)
    sent = comm.trace.bytes_by_purpose()
    print(
        f"rank {comm.rank} sent {sent.get('pipeline_activation', 0):,} B of activations,"
        f" {sent.get('pipeline_gradient', 0):,} B of their gradients;"
        f" it held at most {account.peak_by_purpose['activation']:,} B of activations",
        flush=True,
    )


def run(comm):
    plan = get_schedule("gpipe").plan(comm.size, MICROBATCHES)
    plan = plan if "--keep" in sys.argv else recompute(plan)
    model = GPT(GPTConfig(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=comm.size, n_head=4))
    stages, tied = split_model(model, plan.stages, plan.stages_of(comm.rank))
    divisor = (
        MICROBATCHES * ROWS * CONTEXT
    )  # the loss is the mean over the whole batch, so micro-batches' losses are summed

    def loss(logits, targets):
        return cross_entropy(logits, targets, divisor)

    pipeline = Pipeline(comm, plan, stages, loss, tied=tied, coordinates=lambda i: batch_coordinates(0, i * ROWS))
    optimizer = AdamW(pipeline.flats, lr=3e-3)
    sampler = GlobalBatchSampler(load_dataset("pydoc"), MICROBATCHES * ROWS, CONTEXT, seed=0)
    for step in range(STEPS):
        batch = [sampler.batch(step, i * ROWS, ROWS) for i in range(MICROBATCHES)]
        pipeline.zero_grad()
        losses = pipeline.step([tokens for tokens, _ in batch], [targets for _, targets in batch])
        optimizer.step()
        if comm.rank == 0:
            print(f"step {step}  loss {sum(losses):.4f}", flush=True)


if __name__ == "__main__":
    launch(train)
