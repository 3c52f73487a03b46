"""PipeDream: a pipeline that never drains. Each mini-batch keeps the weights it began with (weight stashing).

    mpiexec -n 4 python mpi_examples/pipedream.py
    python mpi_examples/pipedream.py --ranks 4

An update follows every backward, so stage s works with weights that are p-1-s updates old, and holds p-s versions of
them.
"""

from minidist.autograd import cross_entropy
from minidist.comm import launch
from minidist.data import glyphs
from minidist.nn import MLP
from minidist.optim import Adam
from minidist.pipeline.plan import get_schedule
from minidist.pipeline.runtime import Pipeline, WeightVersions, split_model

MINIBATCHES, ROWS = 100, 32


def train(comm):
    plan = get_schedule("pipedream").plan(comm.size, MINIBATCHES)
    data = glyphs()
    batches = [data.rows([(t * ROWS + k) % 512 for k in range(ROWS)]) for t in range(MINIBATCHES)]
    features = batches[0][0].shape[1]
    model = MLP([features, *[32] * (comm.size - 1), 10])
    stages, _ = split_model(model, plan.stages, plan.stages_of(comm.rank))
    versions = WeightVersions(comm, plan, stages, lambda flat: Adam(flat, lr=0.01), keep_history=True)
    pipeline = Pipeline(comm, plan, stages, cross_entropy, versions=versions)
    losses = pipeline.step([images for images, _ in batches], [labels for _, labels in batches])
    if comm.rank == 0:
        for t in (0, 24, 49, 99):
            print(f"mini-batch {t:3}  loss {losses[t]:.4f}", flush=True)
    kept = versions.own[comm.rank].most
    seen = versions.used["B", comm.rank, MINIBATCHES - 1]
    print(
        f"rank {comm.rank}: mini-batch {MINIBATCHES - 1} used version {seen}; at most {kept} versions kept", flush=True
    )


if __name__ == "__main__":
    launch(train)
