"""Two asynchronous pipelines next to PipeDream's weight stashing (pipedream.py): vertical sync, and PipeDream-2BW.

mpiexec -n 3 python mpi_examples/6_pipeline/asynchronous.py --weights vertical
mpiexec -n 3 python mpi_examples/6_pipeline/asynchronous.py --weights 2bw
python mpi_examples/6_pipeline/asynchronous.py --ranks 3 --weights 2bw

vertical    mini-batch t uses version max(0, t - (p-1)) on every stage: the one that stage 0 had when t entered.
            So all stages agree, and a stage keeps up to p versions.
2bw         micro-batch t of batches of m uses version max(0, t // m - 1) on every stage: two versions are enough
            (double-buffered weights), because the next one begins only when a whole batch has been added up.
"""

import argparse

from minidist import MLP, Adam, cross_entropy, get_schedule, glyphs, launch, split_model
from minidist.pipeline.runtime.pipedream import WeightVersions
from minidist.pipeline.runtime.versioned import VersionedPipeline

UPDATES, ROWS = 100, 32


def train(comm, weights):
    # The number of micro-batches per update, and the version that micro-batch t must use.
    p = comm.size
    if weights == "vertical":
        m, plan = 1, get_schedule("pipedream-vertical-sync").plan(p, UPDATES)
        version = [max(0, t - (p - 1)) for t in range(UPDATES)]
    else:
        m, plan = p, get_schedule("pipedream-2bw").plan(p, p, batches=UPDATES)
        version = [max(0, t // p - 1) for t in range(UPDATES * p)]

    data = glyphs()
    batches = [data.rows([(t * ROWS + k) % 64 for k in range(ROWS)]) for t in range(UPDATES * m)]
    model = MLP([data.features, *[32] * (p - 1), data.classes])
    stages, _ = split_model(model, plan.stages, plan.stages_of(comm.rank))
    versions = WeightVersions(comm, plan, stages, lambda flat: Adam(flat, lr=0.003), keep_history=True)
    pipeline = VersionedPipeline(
        comm, plan, stages, lambda y, labels: cross_entropy(y, labels, ROWS * m), versions=versions
    )
    losses = pipeline.step([images for images, _ in batches], [labels for _, labels in batches])
    if comm.rank == 0:
        for update in (0, UPDATES - 1):
            print(f"batch {update:3}  loss {sum(losses[update * m : (update + 1) * m]):.4f}", flush=True)

    # Forward and backward of every micro-batch used the version of the formula.
    used = {kind: [versions.used[kind, comm.rank, t] for t in range(UPDATES * m)] for kind in ("F", "B")}
    assert used["F"] == used["B"] == version
    print(f"rank {comm.rank}: versions as on paper; at most {versions.own[comm.rank].most} of them kept", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", choices=["vertical", "2bw"], default="vertical")
    flags, _ = parser.parse_known_args()
    launch(train, flags.weights)
