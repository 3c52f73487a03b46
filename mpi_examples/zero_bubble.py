"""Zero bubble: the same pipeline under 1F1B and under ZB-H1, where the weight gradients fill the bubble.

    mpiexec -n 4 python mpi_examples/zero_bubble.py
    python mpi_examples/zero_bubble.py --ranks 4

Both give the same gradients, bit for bit. On virtual ranks the clock shows the bubble that the papers compute, 1F1B's
(p-1)(F+I+W) against (p-1)(F+I-W), when each of F, I and W takes one second. (Under MPI the times are this machine's.)
"""

import numpy as np

from minidist.autograd import Tensor
from minidist.comm import launch
from minidist.nn import MLP
from minidist.pipeline.plan import get_schedule
from minidist.pipeline.runtime import Pipeline, split_model
from minidist.pipeline.times import uniform
from minidist.pipeline.timing import time_plan

MICROBATCHES, ROWS, WIDTH = 8, 4, 32


def train(comm):
    inputs = [np.random.default_rng(i).standard_normal((ROWS, WIDTH)).astype(np.float32) for i in range(MICROBATCHES)]
    gradients = {}
    for name in ("1f1b", "zb-h1"):
        plan = get_schedule(name).plan(comm.size, MICROBATCHES)
        stages, _ = split_model(MLP([WIDTH] * (comm.size + 1)), plan.stages, plan.stages_of(comm.rank))
        pipeline = Pipeline(
            comm, plan, stages, lambda y, target: (y * Tensor(target)).sum(), times=uniform(plan.stages)
        )
        before = len(comm.trace.spans)
        pipeline.step(inputs, inputs)
        gradients[name] = stages[0].flat.grad.copy()
        spans = [span for span in comm.trace.spans[before:] if span.name[:1].isdigit()]
        if spans:  # virtual time
            idle = spans[-1].end - spans[0].start - sum(span.end - span.start for span in spans)
            print(
                f"rank {comm.rank}  {name:6} idle {idle:.1f}, on paper {time_plan(plan).idle[comm.rank]:.1f}",
                flush=True,
            )
    same = np.array_equal(gradients["1f1b"], gradients["zb-h1"])
    print(f"rank {comm.rank}  both gradients equal bit for bit: {same}", flush=True)
    assert same


if __name__ == "__main__":
    launch(train)
