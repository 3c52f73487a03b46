"""Profile and partition: measure each block of a model, and cut the pipeline so that its slowest stage is fastest,
or as GPipe does so that the variance of the stages' times is least.

    mpiexec -n 2 python mpi_examples/6_pipeline/profile_and_partition.py
    python mpi_examples/6_pipeline/profile_and_partition.py --ranks 2

The last block has the head on a vocabulary of 256 words behind it and is slower than the others, so it should get fewer
neighbours. Where a pipeline is cut changes no bit of its losses. The same by command:

    minidist profile --layers 6 --width 16 -o profile.json
    mpiexec -n 2 minidist train --layers 6 --width 16 --pp 2 --partition profile.json
"""

import numpy as np

from minidist import (
    SGD,
    Pipeline,
    TrainConfig,
    batch_coordinates,
    broadcast,
    cross_entropy,
    get_schedule,
    launch,
    load_dataset,
    split_model,
)
from minidist.data import GlobalBatchSampler
from minidist.job.config.models import make_model
from minidist.pipeline.partition import by_cost, by_slowest
from minidist.planning.profiler import profile_layers

STEPS, MICROBATCHES, ROWS = 2, 4, 2
CONFIG = TrainConfig.make(layers=6, width=16, context=32, micro_batch=ROWS)


def train(comm):
    # One rank measures, so that all cut in the same places.
    times = np.zeros(CONFIG.layers)
    if comm.rank == 0:
        times[...] = [layer.fwd_ms + layer.bwd_ms for layer in profile_layers(CONFIG, rounds=2)]
    broadcast(comm, times)
    cuts = {"equal": [len(part) for part in np.array_split(times, comm.size)]}
    for name, method in (("by time", by_slowest), ("GPipe", by_cost)):
        cuts[name] = [stage.last - stage.first + 1 for stage in method(times.tolist(), comm.size)]
    if comm.rank == 0:
        for name, sizes in cuts.items():
            stages = [part.sum() for part in np.split(times, np.cumsum(sizes)[:-1])]
            print(
                f"{name:8} blocks {sizes}, slowest stage {max(stages):.2f} ms, variance {np.var(stages):.3f}",
                flush=True,
            )

    losses = [run(comm, sizes) for sizes in cuts.values()]
    same = losses[0] == losses[1] == losses[2]
    if comm.rank == 0:
        print(f"loss {losses[0][-1]:.4f}; the same bits with all cuts: {same}", flush=True)


def run(comm, cuts):
    """The losses of a job whose stages have these numbers of blocks."""
    dataset, plan = load_dataset(CONFIG.data), get_schedule("1f1b").plan(comm.size, MICROBATCHES)
    stages, tied = split_model(make_model(CONFIG, dataset), plan.stages, plan.stages_of(comm.rank), cuts)
    count = MICROBATCHES * ROWS * CONFIG.context
    pipeline = Pipeline(
        comm,
        plan,
        stages,
        lambda logits, targets: cross_entropy(logits, targets, count),
        tied=tied,
        coordinates=lambda i: batch_coordinates(0, i * ROWS),
    )
    optimizer, losses = SGD(pipeline.flats, lr=0.1), []
    sampler = GlobalBatchSampler(dataset, MICROBATCHES * ROWS, CONFIG.context, seed=0)
    for step in range(STEPS):
        batch = [sampler.batch(step, i * ROWS, ROWS) for i in range(MICROBATCHES)]
        pipeline.zero_grad()
        losses.append(sum(pipeline.step([x for x, _ in batch], [y for _, y in batch])))
        optimizer.step()
    return losses


if __name__ == "__main__":
    launch(train)
