"""A training job in a checkpoint and back: weights, optimizer, position in the data, seed, losses.

Everything is stored by its global name and place, so a job that was saved by 4 ranks with ZeRO 3 can be resumed on 1
rank, or on 8 as tp 2 x pp 2 x ZeRO 1. On the same layout the next step has the same bits as without the interruption.

The position in the data is the number of steps: a step's global batch depends on the seed and the step alone. Dropout
masks depend on seed, step and sample. So there is no random state to save.

A job and a strategy are known here only by what a checkpoint asks of them (`SavedJob`, `SavedStrategy`): training
imports checkpoints, and not the other way round.

Proved by: tests/checkpoint/test_resume.py, tests/checkpoint/test_layouts.py
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol

from minidist.autograd import Parameter
from minidist.base.arrays import Array
from minidist.base.errors import UsageError
from minidist.checkpoint.directory import Checkpoint, CheckpointShard, ReplicaId, save
from minidist.checkpoint.error_feedback import CompressedAxis, error_feedback_shards, load_error_feedback
from minidist.checkpoint.parameter_shards import LocalShard, checkpoint_shards
from minidist.comm import Comm
from minidist.config.train_config import Batches, TrainConfig, flag
from minidist.parallel import OffloadedOptimizer
from minidist.parallel.dims import Axes
from minidist.parallel.tensor.sharding import local_tensor

# The settings on which the bits of the next step depend; a resumed job must not differ in them.
FIXED = (
    "model",
    "layers",
    "width",
    "heads",
    "kv_heads",
    "context",
    "dropout",
    "attention_dropout",
    "experts",
    "top_k",
    "capacity_factor",
    "aux_loss_weight",
    "data",
    "optimizer",
    "momentum",
    "weight_decay",
    "precision",
    "seed",
    "evaluate_every",
)


class SavedJob(Protocol):
    """What a checkpoint records of a job."""

    config: TrainConfig
    batches: Batches


class SavedAxis(CompressedAxis, Protocol):
    """What a checkpoint asks of a data axis; see `train.strategies.data_axis.DataAxis`."""

    optimizer: Any
    state_replica: ReplicaId

    def weights(self) -> list[LocalShard]: ...
    def state_ranges(self) -> list[tuple[Parameter, int, int]]: ...
    def updated(self) -> None: ...


class SavedStrategy(Protocol):
    """What a checkpoint asks of a strategy; see `train.strategies.mesh.MeshStrategy`."""

    axes: Axes

    @property
    def data_axes(self) -> Sequence[SavedAxis]: ...
    @property
    def step_count(self) -> int: ...
    def replica_of(self, axis: Any, parameter: Parameter) -> ReplicaId: ...
    def owns(self, axis: Any, parameter: Parameter) -> bool: ...
    def scalars(self) -> dict[str, float]: ...
    def load_scalars(self, scalars: dict[str, float]) -> None: ...


def save_job(
    comm: Comm, directory: str | Path, job: SavedJob, strategy: SavedStrategy, step: int, losses: list[float]
) -> Path:
    """Write the job after `step` steps; every rank calls it. Each replicated tensor is written by one rank."""
    state = job_state(job, step, losses, strategy.step_count, strategy.scalars())
    return save(comm, directory, step, [*_shards(strategy), *error_feedback_shards(strategy)], state)


def job_state(
    job: SavedJob, step: int, losses: list[float], optimizer_steps: int, scalars: dict[str, Any]
) -> dict[str, Any]:
    """Return the part of a checkpoint that is not tensors."""
    return {
        "config": {name: getattr(job.config, name) for name in FIXED},
        "global_batch": job.batches.global_batch,
        "samples": step * job.batches.global_batch,
        "optimizer_steps": optimizer_steps,
        "losses": losses,
        "scalars": scalars,
    }


def _shards(strategy: SavedStrategy) -> list[CheckpointShard]:
    """Return this rank's shards of weights and optimizer state."""
    result: list[CheckpointShard] = []
    for axis in strategy.data_axes:
        # (name, shard, replica on the data axis); on the other axes a parameter may have replicas, too.
        tensors = [(f"weights/{shard.parameter.name}", shard, axis.replica) for shard in axis.weights()]
        for p, start, stop in axis.state_ranges():
            for key, array in axis.optimizer.state.get(p.name, {}).items():
                tensors.append((f"optimizer/{p.name}/{key}", LocalShard(p, array, start, stop), axis.state_replica))
        for name, shard, replica in tensors:
            # A parameter that a pipeline holds on two stages is written by its first.
            if shard.start < shard.stop and strategy.owns(axis, shard.parameter):
                other = strategy.replica_of(axis, shard.parameter)
                # Replicas on the data axis times those on the other axes.
                both = ReplicaId(replica.number * other.size + other.number, replica.size * other.size)
                result += checkpoint_shards(name, shard, strategy.axes, both)
    return result


def resume_job(directory: str | Path, job: SavedJob, strategy: SavedStrategy) -> tuple[int, list[float]]:
    """Load the latest checkpoint into a newly built job; returns (steps done, their losses). Every rank calls it.

    All that this rank needs is read and checked before anything is changed. Errors: UsageError when the job is another
    one, and those of `Checkpoint`.
    """
    checkpoint = Checkpoint(directory)
    same_job(checkpoint, job)

    # [1] Read and check all that this rank needs.
    axes = strategy.axes
    writes = [
        (shard.values, _read(checkpoint, axes, shard.parameter, shard.start, shard.stop))
        for axis in strategy.data_axes
        for shard in axis.weights()
    ]
    states = [
        {p.name: _state(checkpoint, axes, p, start, stop) for p, start, stop in axis.state_ranges()}
        for axis in strategy.data_axes
    ]

    # [2] Change the job, when nothing can be missing any more.
    for array, values in writes:
        array[...] = values
    strategy.load_scalars(checkpoint.state.get("scalars", {}))
    for axis, state in zip(strategy.data_axes, states, strict=True):
        # A parameter without state (plain SGD) has no entry.
        known = {name: arrays for name, arrays in state.items() if arrays}
        axis.optimizer.load_state_dict({"step": checkpoint.state["optimizer_steps"], "state": known})
        axis.updated()
        if isinstance(axis.optimizer, OffloadedOptimizer):
            axis.optimizer.refresh()
    load_error_feedback(checkpoint, strategy)
    return checkpoint.step, list(checkpoint.state["losses"])


def _state(checkpoint: Checkpoint, axes: Axes, parameter: Parameter, start: int, stop: int) -> dict[str, Array]:
    prefix = f"optimizer/{parameter.name}/"
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    return {name[len(prefix) :]: _elements(checkpoint, axes, parameter, name, start, stop) for name in names}


def _read(checkpoint: Checkpoint, axes: Axes, parameter: Parameter, start: int, stop: int) -> Array:
    name = f"weights/{parameter.name}"
    entry = checkpoint.tensors.get(name)
    shape = parameter.shape if parameter.layout is None else parameter.layout.global_shape
    if entry is not None and (tuple(entry["shape"]), entry["dtype"]) != (shape, str(parameter.dtype)):
        raise UsageError(
            f"checkpoint {str(checkpoint.path)!r}: tensor {name!r} is {entry['dtype']}{entry['shape']}; the model has "
            f"{parameter.dtype}{list(shape)}"
        )
    return _elements(checkpoint, axes, parameter, name, start, stop)


def _elements(checkpoint: Checkpoint, axes: Axes, parameter: Parameter, name: str, start: int, stop: int) -> Array:
    """Return elements [start, stop) of this rank's tensor-parallel shard of a tensor in the checkpoint."""
    layout = parameter.layout
    if layout is None or not layout.axes:
        return checkpoint.read(name, start, stop)

    # The whole tensor, cut as tensor parallelism cuts it, and of that the range.
    return local_tensor(checkpoint.tensor(name), layout, axes).reshape(-1)[start:stop]


def same_job(checkpoint: Checkpoint, job: SavedJob) -> None:
    """Raise UsageError when the job differs from the checkpoint's in a setting on which the next step depends."""
    if "config" not in checkpoint.state:
        raise UsageError(
            f"the checkpoint {str(checkpoint.path)!r} is not one of minidist train: it does not say which job it is;"
            " load it with Checkpoint"
        )

    saved, config = checkpoint.state["config"], job.config
    for name in FIXED:
        # Older checkpoints have fewer settings.
        then = saved.get(name, TrainConfig.model_fields[name].default)
        if then != getattr(config, name):
            raise UsageError(
                f"the checkpoint {str(checkpoint.path)!r} was made with {flag(name)} {then}, this job has"
                f" {getattr(config, name)}; "
                + (f"leave out {flag(name)}" if then is None else f"resume with {flag(name)} {then}")
            )

    # Step n's samples are numbers n * global_batch and following, so another size would skip or repeat some.
    if checkpoint.state["global_batch"] != job.batches.global_batch:
        raise UsageError(
            f"the checkpoint {str(checkpoint.path)!r} was made with a global batch of"
            f" {checkpoint.state['global_batch']}, this job has {job.batches.global_batch}, so the data would not"
            f" continue where they stopped; resume with --global-batch {checkpoint.state['global_batch']}"
        )
    if checkpoint.step >= config.steps:
        raise UsageError(
            f"the checkpoint {str(checkpoint.path)!r} has {checkpoint.step} steps already; raise --steps above"
            f" {checkpoint.step}"
        )


def check_saving(config: TrainConfig) -> None:
    """Make the directory of --save; UsageError when nothing can be written there."""
    if config.save is not None and not config.resume:
        try:
            Path(config.save).mkdir(parents=True, exist_ok=True)
            # Only writing shows whether writing is allowed.
            with TemporaryFile(dir=config.save):
                pass
        except OSError as error:
            raise UsageError(
                f"checkpoints cannot be written to --save {config.save}: {error.strerror}; choose another directory"
            ) from None
