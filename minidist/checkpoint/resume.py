"""A training job in a checkpoint and back: weights, optimizer, position in the data, seed, losses.

Everything is stored by its global name and place, so a job that was saved by 4 ranks with ZeRO 3 goes on on 1 rank, or
on 8 as tp 2 x pp 2 x ZeRO 1. On the same layout the next step has the same bits as if nothing had happened.

The position in the data is the number of steps: a step's global batch depends on the seed and the step alone. Dropout
masks depend on seed, step and sample. So there is no random state to be saved, and none of another rank to be restored.
"""

from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from minidist.autograd import Parameter
from minidist.base.errors import UsageError
from minidist.checkpoint import Checkpoint, Piece, save
from minidist.checkpoint.error_feedback import load_residuals, residual_pieces
from minidist.checkpoint.shards import pieces_of
from minidist.comm import Comm
from minidist.config.train_config import TrainConfig, flag
from minidist.parallel import OffloadedOptimizer
from minidist.parallel.dims import Axes
from minidist.parallel.tensor.sharding import local_tensor
from minidist.train.job import Job
from minidist.train.strategies.base import Strategy

# What the bits of the next step depend on; a resumed job must not differ in it.
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


def save_job(comm: Comm, directory: str | Path, job: Job, strategy: Strategy, step: int, losses: list[float]) -> Path:
    """Write the job after `step` steps; every rank calls it. Replicated tensors are written once, by turns."""
    state = job_state(job, step, losses, strategy.optimizer.step_count, strategy.scalars())
    return save(comm, directory, step, [*_pieces(strategy), *residual_pieces(strategy)], state)


def job_state(
    job: Job, step: int, losses: list[float], optimizer_steps: int, scalars: dict[str, Any]
) -> dict[str, Any]:
    """What a checkpoint says beside its tensors."""
    return {
        "config": {name: getattr(job.config, name) for name in FIXED},
        "global_batch": job.batches.global_batch,
        "samples": step * job.batches.global_batch,
        "optimizer_steps": optimizer_steps,
        "losses": losses,
        "scalars": scalars,
    }


def _pieces(strategy: Strategy) -> list[Piece]:
    """What this rank holds of weights and optimizer state, with the number of ranks that hold the same."""
    pieces: list[Piece] = []
    for axis in strategy.data_axes:
        state = axis.optimizer.state
        tensors = [
            (axis.copies, p, f"weights/{p.name}", array, start, stop) for p, array, start, stop in axis.weights()
        ]
        for p, start, stop in axis.state_ranges():
            for key, array in state.get(p.name, {}).items():
                tensors.append((axis.state_copies, p, f"optimizer/{p.name}/{key}", array, start, stop))
        for (holder, holders), p, name, array, start, stop in tensors:
            number, alike = strategy.copy_of(axis, p)
            if start < stop and strategy.counts(axis, p):
                pieces += pieces_of(
                    name, p, strategy.axes, array, start, stop, (holder * alike + number, holders * alike)
                )
    return pieces


def resume_job(directory: str | Path, job: Job, strategy: Strategy) -> tuple[int, list[float]]:
    """Load the latest checkpoint into a job that was built anew; returns (steps done, their losses). Every rank calls
    it.

    All that this rank needs is read and checked before anything is changed. Errors: UsageError when the job is another
    one, and those of `Checkpoint`.
    """
    checkpoint = Checkpoint(directory)
    same_job(checkpoint, job)
    axes = strategy.axes
    writes = [
        (array, _read(checkpoint, axes, p, start, stop))
        for axis in strategy.data_axes
        for p, array, start, stop in axis.weights()
    ]
    states = [
        {p.name: _state(checkpoint, axes, p, start, stop) for p, start, stop in axis.state_ranges()}
        for axis in strategy.data_axes
    ]
    for array, values in writes:
        array[...] = values
    strategy.load_scalars(checkpoint.state.get("scalars", {}))
    for axis, state in zip(strategy.data_axes, states, strict=True):
        known = {name: arrays for name, arrays in state.items() if arrays}
        axis.optimizer.load_state_dict({"step": checkpoint.state["optimizer_steps"], "state": known})
        axis.updated()
        if isinstance(axis.optimizer, OffloadedOptimizer):
            axis.optimizer.refresh()
    load_residuals(checkpoint, strategy)
    return checkpoint.step, list(checkpoint.state["losses"])


def _state(checkpoint: Checkpoint, axes: Axes, parameter: Parameter, start: int, stop: int) -> dict[str, Any]:
    prefix = f"optimizer/{parameter.name}/"
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    return {name[len(prefix) :]: _elements(checkpoint, axes, parameter, name, start, stop) for name in names}


def _read(checkpoint: Checkpoint, axes: Axes, parameter: Parameter, start: int, stop: int) -> np.ndarray:
    name = f"weights/{parameter.name}"
    entry = checkpoint.tensors.get(name)
    shape = parameter.shape if parameter.layout is None else parameter.layout.global_shape
    if entry is not None and (tuple(entry["shape"]), entry["dtype"]) != (shape, str(parameter.dtype)):
        raise UsageError(
            f"checkpoint {str(checkpoint.path)!r}: tensor {name!r} is {entry['dtype']}{entry['shape']}; the model has "
            f"{parameter.dtype}{list(shape)}"
        )
    return _elements(checkpoint, axes, parameter, name, start, stop)


def _elements(checkpoint: Checkpoint, axes: Axes, parameter: Parameter, name: str, start: int, stop: int) -> np.ndarray:
    """Elements [start, stop) of this rank's tile of a tensor in the checkpoint."""
    layout = parameter.layout
    if layout is None or not layout.axes:
        return checkpoint.read(name, start, stop)
    return local_tensor(checkpoint.tensor(name), layout, axes).reshape(-1)[start:stop]  # type: ignore[no-any-return]


def same_job(checkpoint: Checkpoint, job: Job) -> None:
    """UsageError where the job differs from the checkpoint's in what the next step depends on."""
    if "config" not in checkpoint.state:
        raise UsageError(
            f"the checkpoint {str(checkpoint.path)!r} is not one of minidist train: it does not say which job it is;"
            " load it with Checkpoint"
        )
    saved, config = checkpoint.state["config"], job.config
    for name in FIXED:
        then = saved.get(
            name, TrainConfig.model_fields[name].default
        )  # of a checkpoint from before there was this setting
        if then != getattr(config, name):
            raise UsageError(
                f"the checkpoint {str(checkpoint.path)!r} was made with {flag(name)} {then}, this job has"
                f" {getattr(config, name)}; "
                + (f"leave out {flag(name)}" if then is None else f"resume with {flag(name)} {then}")
            )
    if checkpoint.state["global_batch"] != job.batches.global_batch:
        raise UsageError(
            f"the checkpoint {str(checkpoint.path)!r} was made with a global batch of"
            f" {checkpoint.state['global_batch']}, this job has {job.batches.global_batch}, so the data would not go on"
            f" where they stopped; resume with --global-batch {checkpoint.state['global_batch']}"
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
            with TemporaryFile(dir=config.save):
                pass
        except OSError as error:
            raise UsageError(
                f"checkpoints cannot be written to --save {config.save}: {error.strerror}; choose another directory"
            ) from None
