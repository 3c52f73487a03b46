"""The model of a checkpoint: which job made it, and its weights in a new model.

A checkpoint is a set of named global tensors, so the layout that trained the model does not matter. `--init-from`
begins a job with such a model, a technique may use one in addition to the job's own, and `minidist generate` writes
text with one. Sends nothing.

Proved by: tests/checkpoint/test_initial_weights.py, tests/techniques/test_distillation.py
"""

import hashlib
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from minidist.base import arrays as xp
from minidist.base.errors import UsageError, quoted_path
from minidist.job.checkpoint.buffers import load_buffers
from minidist.job.checkpoint.directory import Checkpoint
from minidist.job.checkpoint.resume import read_job_state
from minidist.job.config.models import make_model, parameter_count
from minidist.job.config.train_config import TrainConfig
from minidist.techniques import defaults

EMBEDDINGS = {"gpt": "weights/transformer.wte.weight", "llama": "weights/model.embed_tokens.weight"}


def named_checkpoint(flag: str, directory: str | Path, step: int | None = None) -> Checkpoint:
    """Return the checkpoint of a --save directory (the latest, or that of `step`), or of one folder in it.

    flag: what names it, for the sentence. Raises UsageError when there is none.
    """
    path, shown = Path(directory), f"{flag} {quoted_path(directory)}"
    if (path / "metadata.json").exists():
        if step is not None:
            raise UsageError(
                f"{shown} is the checkpoint of one step; leave --from-step {step} out, or name {path.parent}"
            )
        return Checkpoint(path.parent, path.name)
    if step is None and not (path / "latest").exists():
        raise UsageError(
            f"{shown} has no checkpoint in it; name a directory that train --save has"
            " written, or one of the folders in it, such as step-00000040"
        )
    return Checkpoint(path, step=step)


def saved_config(checkpoint: Checkpoint) -> TrainConfig:
    """Return the settings of the job that saved a checkpoint, as far as it records them."""
    return TrainConfig.make(**read_job_state(checkpoint).config)


def load_weights(checkpoint: Checkpoint, model: Any) -> None:
    """Give a whole model the weights and running statistics of a checkpoint, converted to the model's own dtype."""
    for parameter in model.parameters():
        name = f"weights/{parameter.name}"
        checkpoint.expect(name, parameter.shape)
        xp.store(parameter.data, checkpoint.tensor(name).astype(parameter.dtype))
        parameter.updated()
    load_buffers(checkpoint, model)


def vocabulary_of(checkpoint: Checkpoint, config: TrainConfig) -> int:
    """Return the rows of the embedding; UsageError when the weights cannot be those of a language model of `config`.

    Making the model allocates what the config says, so it is compared with what is stored first.
    """
    shapes = [entry["shape"] for name, entry in checkpoint.tensors.items() if name.startswith("weights/")]
    name, stored = EMBEDDINGS[config.model], sum(map(prod, shapes))
    rows = checkpoint.tensors.get(name, {"shape": [0]})["shape"][0]
    checkpoint.expect(name, (rows, config.width))
    # Position embeddings are stored in a GPT only; no layer has less than one tensor.
    counted = config if config.model == "gpt" else config.model_copy(update={"context": 1})
    expected = parameter_count(counted, rows)
    if expected > 2 * stored or config.layers > len(shapes):
        raise UsageError(
            f"the checkpoint {quoted_path(checkpoint.path)} describes a model of {config.layers} layers and about"
            f" {expected:,} parameters, and holds {stored:,}; {checkpoint.remedy}"
        )
    return int(rows)


class SavedModel:
    """The model that a checkpoint holds, for techniques, which know neither checkpoints nor jobs.

    flag, directory: as in `named_checkpoint`. config: the settings of the job that saved it.
    """

    def __init__(self, flag: str, directory: str | Path) -> None:
        self.checkpoint = named_checkpoint(flag, directory)
        self.config = saved_config(self.checkpoint)

    @property
    def vocabulary(self) -> int:
        """The tokens that a language model knows: see `vocabulary_of`."""
        return vocabulary_of(self.checkpoint, self.config)

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the stored weights, the same wherever the checkpoint lies."""
        result = hashlib.sha256()
        for name in sorted(name for name in self.checkpoint.tensors if name.startswith("weights/")):
            result.update(name.encode() + self.checkpoint.tensor(name).tobytes())
        return result.hexdigest()

    def make(self, precision: str, dataset: Any) -> Any:
        """Return the whole model with its weights, in this precision, whatever it was trained in."""
        # The techniques with which it was trained are no part of it.
        config = self.config.model_copy(update={"precision": precision, **defaults()})
        model = make_model(config, dataset)
        load_weights(self.checkpoint, model)
        return model
