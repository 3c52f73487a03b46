"""`--init-from`: a new job that begins with the weights of a checkpoint, such as fine-tuning on other data.

Of the checkpoint only the weights count. Optimizer state, step count, losses, seed and data are those of a new job. The
weights are whole global tensors, and every rank puts them into the whole model before any axis cuts it, so neither the
layout that saved them nor the one that loads them matters. Sends nothing.

Proved by: tests/checkpoint/test_initial_weights.py
"""

from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.checkpoint.directory import Checkpoint
from minidist.checkpoint.resume import read_job_state
from minidist.checkpoint.saved_model import load_weights, named_checkpoint
from minidist.config.train_config import TrainConfig, flag

# The settings that make the model; heads do not show in any shape.
ARCHITECTURE = ("model", "layers", "width", "heads", "kv_heads", "experts")


def initial_checkpoint(config: TrainConfig) -> Checkpoint | None:
    """Return the checkpoint of --init-from, or None without one: the latest of a --save directory, or a folder in it.

    UsageError when there is none, and when its model is not the job's.
    """
    if config.init_from is None:
        return None
    checkpoint = named_checkpoint("--init-from", config.init_from)

    state = read_job_state(checkpoint)
    for name in ARCHITECTURE:
        then = state.config.get(name, TrainConfig.model_fields[name].default)
        if then != getattr(config, name):
            raise UsageError(
                f"--init-from {quoted(config.init_from)} holds a model with {flag(name)} {quoted(then, marks=False)},"
                f" this job has {quoted(getattr(config, name), marks=False)}; "
                + (
                    f"leave out {flag(name)}"
                    if then is None
                    else f"train with {flag(name)} {quoted(then, marks=False)}, or start without --init-from"
                )
            )
    return checkpoint


def load_initial_weights(config: TrainConfig, model: Any) -> None:
    """Give a whole new model the weights, and running statistics, of --init-from; without the flag do nothing."""
    checkpoint = initial_checkpoint(config)
    if checkpoint is not None:
        load_weights(checkpoint, model)
