"""Tensor, pipeline and data parallelism on one page, without a strategy class.

    mpiexec -n 8 python mpi_examples/5_context_and_experts/three_axes.py
    python mpi_examples/5_context_and_experts/three_axes.py --ranks 8

The order matters: first the tiles (a plan speaks of the whole model's names), then the stages, then the flat arrays
whose gradients are summed over the replicas. `minidist train --tp 2 --pp 2 --dp 2` does the same with every axis there
is, see minidist/core/train/parallelize.py. With 4 ranks there is one replica.
"""

import numpy as np

from minidist import (
    GPT,
    AdamW,
    GPTConfig,
    Pipeline,
    Reduction,
    all_gather,
    batch_coordinates,
    get_schedule,
    gpt_plan,
    launch,
    load_dataset,
    parallelize_module,
    purpose,
    split_model,
)
from minidist.data import GlobalBatchSampler
from minidist.parallel.fitting_dims import dims_of

STEPS, MICROBATCHES, ROWS, CONTEXT, WORDS = 5, 4, 2, 32, 256


def train(comm):
    axes = dims_of(comm.size, tp=2, pp=2).axes(comm)  # what is left is dp
    replica, replicas = axes.dp.rank, axes.dp.size
    model = GPT(GPTConfig(vocab_size=WORDS, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=4), seed=0)
    model = parallelize_module(model, axes.tp, gpt_plan(WORDS))
    plan = get_schedule("1f1b").plan(2, MICROBATCHES)
    stages, tied = split_model(model, plan.stages, plan.stages_of(axes.pp.rank))
    divisor = replicas * MICROBATCHES * ROWS * CONTEXT  # the mean over all replicas' tokens

    def loss(logits, targets):
        return model.loss_fn(logits, targets, divisor)  # each rank has the logits of its words

    # "ordered" adds in rank order wherever a value lies, so the two copies of the tied embedding stay equal.
    pipeline = Pipeline(
        axes.pp,
        plan,
        stages,
        loss,
        tied=tied,
        reduce=Reduction(axes.dp, "ordered"),
        coordinates=lambda i: batch_coordinates(0, i),
    )
    optimizer = AdamW(pipeline.flats, lr=3e-3)
    sampler = GlobalBatchSampler(load_dataset("pydoc"), replicas * MICROBATCHES * ROWS, CONTEXT, seed=0)
    for step in range(STEPS):
        batch = [sampler.batch(step, (replica * MICROBATCHES + i) * ROWS, ROWS) for i in range(MICROBATCHES)]
        pipeline.zero_grad()
        losses = pipeline.step([tokens for tokens, _ in batch], [targets for _, targets in batch])
        optimizer.step()
        with purpose("metrics"):
            losses_of_all = all_gather(axes.dp, np.array(losses))
        if comm.rank == 0:
            print(f"step {step}  loss {losses_of_all.sum():.4f}", flush=True)
    if comm.rank == 0:
        print("rank 0 sent", dict(sorted(comm.trace.bytes_by_purpose().items())), flush=True)


if __name__ == "__main__":
    launch(train)
