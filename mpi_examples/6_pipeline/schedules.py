"""Three schedules that give a rank more than one stage: the interleaved schedule, ZB-V and DualPipe.

    mpiexec -n 2 python mpi_examples/6_pipeline/schedules.py --schedule interleaved
    mpiexec -n 2 python mpi_examples/6_pipeline/schedules.py --schedule zbv
    python mpi_examples/6_pipeline/schedules.py --ranks 2 --schedule dualpipe

    interleaved   rank 0: 0 2    rank 1: 1 3     stages in two rounds: smaller stages, a smaller bubble (Megatron)
    zbv           rank 0: 0 3    rank 1: 1 2     a V: rank 0 has the loss, too; weight gradients (W) fill the bubble
    dualpipe      rank 0: 0 1    rank 1: 1 0     two streams that meet; every stage is there twice (DeepSeek-V3)

All of them compute the gradients of one device. The bubble on paper is for F, I and W of one second for a rank's part.
"""

import argparse

import numpy as np

from minidist import MLP, Pipeline, Tensor, get_schedule, launch, split_model
from minidist.pipeline.times import uniform
from minidist.pipeline.timing import time_plan

NAMES = {"interleaved": "interleaved", "zbv": "zb-v", "dualpipe": "dualpipe"}
MICROBATCHES, ROWS, WIDTH = 8, 4, 16


def train(comm, name):
    plan = get_schedule(NAMES[name]).plan(comm.size, MICROBATCHES)
    model, whole = (MLP([WIDTH] * (2 * comm.size + 1), dtype=np.float64) for _ in range(2))
    inputs = [np.random.default_rng(i).standard_normal((ROWS, WIDTH)) for i in range(MICROBATCHES)]

    def loss(y, target):
        return (y * Tensor(target)).sum()

    # This rank's stages, run in the order of the plan.
    stages, _ = split_model(model, plan.stages, plan.stages_of(comm.rank))
    pipeline = Pipeline(comm, plan, stages, loss)
    losses = pipeline.step(inputs, inputs)

    # One device, micro-batch after micro-batch.
    expected = []
    for x in inputs:
        alone = loss(whole(Tensor(x)), x)
        alone.backward()
        expected.append(alone.item())
    gradients = {parameter.name: parameter.grad for parameter in whole.parameters()}
    worst = max(np.abs(p.grad - gradients[p.name]).max() for stage in stages for p in stage.parameters)
    assert worst < 1e-12
    assert np.allclose(losses, expected, rtol=1e-12)

    part = comm.size / plan.stages  # of a rank's work that a stage is
    paper = time_plan(plan, uniform(plan.stages, part, part, part))
    print(
        f"rank {comm.rank}: stages {plan.stages_of(comm.rank)}, idle for {paper.idle[comm.rank]:.1f} s of"
        f" {paper.cost:.1f} s on paper; gradients equal those of one device",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=NAMES, default="interleaved")
    flags, _ = parser.parse_known_args()
    launch(train, flags.schedule)
