"""PipeDream: a pipeline that never drains. Each mini-batch keeps the weights it began with (weight stashing).

    mpiexec -n 4 python mpi_examples/6_pipeline/pipedream.py
    python mpi_examples/6_pipeline/pipedream.py --ranks 4
    mpiexec -n 4 python mpi_examples/6_pipeline/pipedream.py --save runs/pipedream    and a hundred mini-batches more:
    mpiexec -n 4 python mpi_examples/6_pipeline/pipedream.py --save runs/pipedream --resume

An update follows every backward, so stage s works with weights that are p-1-s updates old, and holds p-s versions of
them. At the end of the plan the pipeline has drained: every stage has its latest weights and nothing is on its way, so
a checkpoint holds no stashed version.
"""

import argparse

from minidist import MLP, Adam, cross_entropy, get_schedule, glyphs, launch, split_model
from minidist.job.checkpoint import Checkpoint, CheckpointShard, save
from minidist.pipeline.runtime.pipedream import WeightVersions
from minidist.pipeline.runtime.versioned import VersionedPipeline

MINIBATCHES, ROWS = 100, 32


def train(comm, directory, resume):
    plan = get_schedule("pipedream").plan(comm.size, MINIBATCHES)
    checkpoint = Checkpoint(directory) if resume else None
    first = checkpoint.step if resume else 0
    data = glyphs()
    batches = [data.rows([((first + t) * ROWS + k) % 64 for k in range(ROWS)]) for t in range(MINIBATCHES)]
    features = batches[0][0].shape[1]
    model = MLP([features, *[32] * (comm.size - 1), 10])
    if resume:
        model.load_state_dict({name: checkpoint.tensor(f"weights/{name}") for name, _ in model.named_parameters()})
    stages, _ = split_model(model, plan.stages, plan.stages_of(comm.rank))
    versions = WeightVersions(comm, plan, stages, lambda flat: Adam(flat, lr=0.003), keep_history=True)
    # This rank has one stage, and the stage one unit.
    (unit,) = versions.units[comm.rank]
    if resume:
        load(checkpoint, unit)

    pipeline = VersionedPipeline(comm, plan, stages, cross_entropy, versions=versions)
    losses = pipeline.step([images for images, _ in batches], [labels for _, labels in batches])
    if comm.rank == 0:
        for t in (0, 24, 49, 99):
            print(f"mini-batch {first + t:3}  loss {losses[t]:.4f}", flush=True)
    kept = versions.own[comm.rank].most
    seen = first + versions.used["B", comm.rank, MINIBATCHES - 1]
    print(
        f"rank {comm.rank}: mini-batch {first + MINIBATCHES - 1} used version {seen}; at most {kept} versions kept",
        flush=True,
    )
    if directory is not None:
        save(comm, directory, first + MINIBATCHES, shards(unit), {})


def shards(unit):
    """The latest weights of this rank's stage and Adam's averages, under their names in the whole model."""
    for p in unit.flat.parameters:
        yield CheckpointShard(f"weights/{p.name}", p.shape, unit.weights[unit.flat.slice_of(p)])
        for key, array in unit.optimizer.state[p.name].items():
            yield CheckpointShard(f"optimizer/{p.name}/{key}", p.shape, array)


def load(checkpoint, unit):
    """Give Adam its averages, and the number of updates, which its bias correction needs."""
    names = {p.name: unit.optimizer.state_names(p.dtype, p.name) for p in unit.flat.parameters}
    state = {name: {key: checkpoint.read(f"optimizer/{name}/{key}") for key in keys} for name, keys in names.items()}
    unit.optimizer.load_state_dict({"step": checkpoint.step, "state": state})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", help="directory of checkpoints; one is written at the end")
    parser.add_argument("--resume", action="store_true", help="continue from the latest checkpoint in --save")
    args, _ = parser.parse_known_args()
    if args.resume and args.save is None:
        parser.error("--resume continues from a checkpoint; add --save DIRECTORY")
    launch(train, args.save, args.resume)
