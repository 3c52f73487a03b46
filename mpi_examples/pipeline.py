"""One step of a pipeline: a deep MLP cut into one stage a rank. Lessons 16 and 17 explain it.

    mpiexec -n 4 python mpi_examples/pipeline.py --schedule 1f1b --microbatches 8
    python mpi_examples/pipeline.py --ranks 4 --schedule gpipe --microbatches 8
"""

import argparse

import numpy as np

from minidist.autograd import Tensor, cross_entropy
from minidist.comm import launch
from minidist.nn import MLP
from minidist.pipeline.plan import get_schedule
from minidist.pipeline.runtime import Pipeline, split_model

ROWS, SIZES = 24, [16] * 8 + [10]


def loss_of(output, target):
    return cross_entropy(output, target, divisor=ROWS)  # rows of the whole batch: micro-batches are summed


def step(comm, schedule, microbatches):
    rng = np.random.default_rng(0)
    rows, targets = rng.normal(size=(ROWS, SIZES[0])), rng.integers(0, SIZES[-1], ROWS)
    plan = get_schedule(schedule).plan(comm.size, microbatches)
    model = MLP(SIZES, dtype=np.float64)
    stages, _ = split_model(model, plan.stages, plan.stages_of(comm.rank))
    losses = Pipeline(comm, plan, stages, loss_of).step(
        np.array_split(rows, microbatches), np.array_split(targets, microbatches)
    )
    single = MLP(SIZES, dtype=np.float64)
    loss_of(single(Tensor(rows)), targets).backward()
    expected = {parameter.name: parameter.grad for parameter in single.parameters()}
    off = max(np.abs(p.grad - expected[p.name]).max() for stage in stages for p in stage.flat.parameters)
    line = f"rank {comm.rank}: loss {sum(losses):.6f}, max |g_parallel - g_single| = {off:.0e}\n"
    print(line, end="", flush=True)  # in one piece, or the ranks' lines mix
    assert off < 1e-12


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=("naive", "gpipe", "1f1b"), default="1f1b")
    parser.add_argument("--microbatches", type=int, default=8)
    flags, _ = parser.parse_known_args()
    launch(step, flags.schedule, flags.microbatches)
