"""A rank on a shared machine: the micro-batch follows the memory that is there now, also inside a pipeline.

    mpiexec -n 2 python mpi_examples/7_more/memory_budget.py
    python mpi_examples/7_more/memory_budget.py --ranks 4 --pp 2

Each rank may hold what its file says, and reads it between two steps. Here rank 0's file is rewritten while the job
trains, as by a program that shares its machine: little memory first, then plenty, then little again. All ranks take the
largest micro-batch that fits on every one of them; the global batch stays, so the losses do, too, up to rounding. The
second job has the micro-batch that always fits: its steps are slower while there is memory for more.
"""

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from minidist import TrainConfig, launch
from minidist.job.train.trainer import train

LITTLE, PLENTY = 1.8e6, 1e9  # bytes
CHANGES = {7: PLENTY, 15: LITTLE}  # step -> the budget of rank 0 from then on
STEPS = 24


def main(comm, pp):
    # A folder that all ranks know, with a file for each.
    if comm.rank == 0:
        folder = tempfile.mkdtemp()
        for rank in range(1, comm.size):
            comm.send_object(folder, rank)
    else:
        folder = comm.recv_object(0)
    file = Path(folder) / f"rank{comm.rank}"
    file.write_text(str(LITTLE if comm.rank == 0 else PLENTY))
    shape = {"dp": comm.size // pp, "pp": pp, "global_batch": 16 * comm.size // pp, "context": 32, "width": 32}
    seen = []

    def watch(state):
        seen.append((state.job.batches.micro_batch, time.perf_counter()))
        if comm.rank == 0 and state.step in CHANGES and state.job.config.memory_budget_file:
            file.write_text(str(CHANGES[state.step]))

    watch.reads_tensors = False
    jobs = {"follows the budget": {"memory_budget_file": f"{folder}/rank{{rank}}"}, "always fits": {}}
    for name, settings in jobs.items():
        seen.clear()
        config = TrainConfig.make(**shape, **settings, micro_batch=1, steps=STEPS)
        result = train(comm, config, [watch])
        if comm.rank == 0:
            took = {}
            for (_, before), (micro, after) in pairwise(seen):
                took.setdefault(micro, []).append(after - before)
            times = "; ".join(f"micro-batch {m}: {min(s) * 1e3:.1f} ms" for m, s in took.items())
            print(f"{name}: loss {result.losses[-1]:.4f}; fastest step with {times}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    flags, _ = parser.parse_known_args()
    launch(main, flags.pp)
