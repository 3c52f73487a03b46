"""Reads the weights that `--init-from` names: whole global tensors, so no layout matters. Sends nothing.

Proved by: tests/checkpoint/test_initial_weights.py
"""

from typing import Any

from minidist.base.errors import UsageError, quoted
from minidist.job.checkpoint.directory import Checkpoint
from minidist.job.checkpoint.huggingface import HuggingFaceFolder, is_huggingface_folder
from minidist.job.checkpoint.resume import read_job_state
from minidist.job.checkpoint.saved_model import load_weights, named_checkpoint
from minidist.job.config.train_config import TrainConfig, flag

# The settings that make the model; heads do not show in any shape.
ARCHITECTURE = ("model", "layers", "width", "heads", "kv_heads", "ffn", "experts")


def initial_checkpoint(directory: str, config: TrainConfig) -> Checkpoint | HuggingFaceFolder:
    """Return what --init-from names: a checkpoint or a folder of Hugging Face.

    Of a --save directory it is the latest checkpoint, and of a folder in it that one. UsageError when there is none,
    and when its model is not the job's.
    """
    if is_huggingface_folder(directory):
        folder = HuggingFaceFolder(directory)
        folder.check(config)
        return folder
    checkpoint = named_checkpoint("--init-from", directory)

    state = read_job_state(checkpoint)
    for name in ARCHITECTURE:
        then = state.config.get(name, TrainConfig.model_fields[name].default)
        if then != getattr(config, name):
            raise UsageError(
                f"--init-from {quoted(directory)} holds a model with {flag(name)} {quoted(then, marks=False)},"
                f" this job has {quoted(getattr(config, name), marks=False)}; "
                + (
                    f"leave out {flag(name)}"
                    if then is None
                    else f"train with {flag(name)} {quoted(then, marks=False)}, or start without --init-from"
                )
            )
    return checkpoint


def load_initial_weights(directory: str, config: TrainConfig, model: Any) -> None:
    """Give a whole new model the weights, and running statistics, of --init-from."""
    source = initial_checkpoint(directory, config)
    if isinstance(source, HuggingFaceFolder):
        source.load(model)
    else:
        load_weights(source, model)
