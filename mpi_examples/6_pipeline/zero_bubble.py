"""Zero bubble: one model under 1F1B, under ZB-H1, where the weight gradients fill the bubble, and under V-Half.

    mpiexec -n 4 python mpi_examples/6_pipeline/zero_bubble.py
    python mpi_examples/6_pipeline/zero_bubble.py --ranks 4

All give the same gradients, bit for bit. On virtual ranks the clock shows the bubble that the papers compute, 1F1B's
(p-1)(F+I+W) against (p-1)(F+I-W), when each of F, I and W of a rank takes one second; V-Half's is less than half of
1F1B's, for half of its activations. (Under MPI the times are this machine's.)
"""

import numpy as np

from minidist import MLP, Pipeline, Tensor, get_schedule, launch, split_model
from minidist.pipeline.times import GivenTimes, uniform
from minidist.pipeline.timing import time_plan

MICROBATCHES, ROWS, WIDTH = 8, 4, 32


def train(comm):
    inputs = [np.random.default_rng(i).standard_normal((ROWS, WIDTH)).astype(np.float32) for i in range(MICROBATCHES)]
    gradients = {}
    for name in ("1f1b", "zb-h1", "v-half"):
        plan = get_schedule(name).plan(comm.size, MICROBATCHES)
        times = uniform(plan.stages, *[comm.size / plan.stages] * 3)  # a stage of V-Half is half of a rank's part
        stages, _ = split_model(MLP([WIDTH] * (2 * comm.size + 1)), plan.stages, plan.stages_of(comm.rank))
        pipeline = Pipeline(
            comm, plan, stages, lambda y, target: (y * Tensor(target)).sum(), observers=[GivenTimes(comm, times)]
        )
        before = len(comm.trace.spans)
        pipeline.step(inputs, inputs)
        gradients[name] = {q.name: q.grad.copy() for stage in stages for q in stage.flat.parameters}
        spans = [span for span in comm.trace.spans[before:] if span.name[:1].isdigit()]
        if comm.world.kind == "simulated":
            idle = spans[-1].end - spans[0].start - sum(span.end - span.start for span in spans)
            paper = time_plan(plan, times)
            print(
                f"rank {comm.rank}  {name:6} idle {idle:.1f} s, on paper {paper.idle[comm.rank]:.1f},"
                f" {paper.peak[comm.rank] * comm.size / plan.stages:g} micro-batches alive",
                flush=True,
            )

    # V-Half places layers differently, so all ranks' gradients meet on rank 0.
    if comm.rank:
        comm.send_object(gradients, 0)
        return
    for other in range(1, comm.size):
        for name, arrays in comm.recv_object(other).items():
            gradients[name] |= arrays
    for name in ("zb-h1", "v-half"):
        same = all(np.array_equal(array, gradients[name][key]) for key, array in gradients["1f1b"].items())
        print(f"gradients of {name} and of 1f1b equal bit for bit: {same}", flush=True)
        assert same


if __name__ == "__main__":
    launch(train)
