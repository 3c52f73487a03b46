"""Reads a job of `minidist train` (the file that `--print-config` writes) as the input of the planner.

What the file gives is fixed, everything else is searched. A setting that changes memory or time and that the planner
has no formula for is refused with its name: a plan that leaves it out would be of another job.

Proved by: tests/planning/test_job_config.py
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.data import TokenDataset, load_dataset
from minidist.job.config.config_file import read_config
from minidist.job.config.models import llama_inner
from minidist.job.config.train_config import TrainConfig
from minidist.planning.architecture import Architecture, checked
from minidist.planning.cluster.layout import RECOMPUTE
from minidist.techniques import installed

AXES = ("dp", "tp", "pp", "cp", "ep", "zero", "sequence_parallel", "micro_batch", "recompute")
MODEL = ("model", "layers", "width", "heads", "kv_heads", "ffn", "context", "experts", "top_k", "dropout")
BATCH = ("global_batch", "accumulation", "microbatches", "precision", "optimizer", "schedule", "chunks")

# These change neither the bytes of a rank nor the time of a step by more than the planner's error.
WITHOUT_EFFECT = (
    "data",
    "evaluate_every", "every", "lr", "reduction", "save",
    "seed", "steps", "weight_decay",
    *(name for kind in installed() for name in (kind.Settings.model_fields if kind.observes else kind.unplanned)),
)  # fmt: skip

# The fields of an Architecture -> their settings in a file. How large an MLP and a vocabulary are follows from others.
NAMES = {
    "layers": "layers",
    "width": "width",
    "heads": "heads",
    "vocabulary": "the vocabulary of data",
    "positions": "context",
    "inner": "ffn",
    "kv_heads": "kv-heads",
    "experts": "experts",
    "top_k": "top-k",
}
Read = TypeVar("Read")


class PlannedJob(NamedTuple):
    """A job as the planner takes it: the model, and what the file fixes by the name of a flag of `minidist plan`."""

    model: Architecture
    fixed: dict[str, Any]
    global_batch: int | None
    precision: str | None
    dropout: bool


def read_job(path: str | Path) -> PlannedJob:
    """Return the job of a file; UsageError names a setting that is wrong, or that the planner has no formula for."""
    given = read_config(path, "the job file")
    file = quoted_path(path)
    if not given:
        raise UsageError(f"the job file {file} has no settings; write one with minidist train --print-config")
    config = _in_file(file, partial(TrainConfig.make, **given))
    _check_planned(config, given, file)

    # What is written in the file is fixed, but for --micro-batch auto. The default of a precision is the planner's.
    fixed = {name: getattr(config, name) for name in AXES if given.get(name, "auto") != "auto"}
    if "chunks" in given or "schedule" in given:
        fixed["vp"] = (config.chunks or 2) if config.schedule == "interleaved" else 1
    if "micro_batch" not in fixed and (config.accumulation or config.microbatches):
        fixed["micro_batch"] = _micro_batch(config, file)
    precision = config.precision if "precision" in given else None
    model, dropout = _in_file(file, partial(architecture, config)), bool(config.optional("dropout"))
    return PlannedJob(model, fixed, config.global_batch, precision, dropout)


def _check_planned(config: TrainConfig, given: Mapping[str, Any], file: str) -> None:
    """Raise UsageError for the first setting that the planner has no formula for."""
    if not config.is_language_model:
        raise UsageError(f"model {quoted(config.model)} in {file} is not planned; give model = 'gpt' or 'llama'")
    changed = {name for name in given if getattr(config, name) != TrainConfig.model_fields[name].default}
    for name in sorted(changed - {*AXES, *MODEL, *BATCH, *WITHOUT_EFFECT}):
        raise UsageError(f"{name} {quoted(given[name])} in {file} is not planned; leave it out of the file")
    if config.optimizer not in ("adam", "adamw"):
        raise UsageError(
            f"optimizer {quoted(config.optimizer)} in {file} is not planned, because memory is counted with Adam's two"
            " moments; give optimizer = 'adamw'"
        )
    if config.schedule not in ("1f1b", "interleaved"):
        raise UsageError(
            f"schedule {quoted(config.schedule)} in {file} is not planned; give schedule = '1f1b' or 'interleaved'"
        )
    recompute = config.optional("recompute") or "none"
    if recompute not in RECOMPUTE:
        raise UsageError(f"recompute {quoted(recompute)} in {file} is not planned; give one of {', '.join(RECOMPUTE)}")


def _in_file(file: str, read: Callable[[], Read]) -> Read:
    """Return what `read` returns; its errors name a setting, and get the name of the file here."""
    try:
        return read()
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None


def architecture(config: TrainConfig) -> Architecture:
    """Return the sizes of the model that a job trains; its data set says how many tokens there are."""
    inner = llama_inner(config) if config.model == "llama" else 4 * config.width
    dataset = load_dataset(config.data)
    if not isinstance(dataset, TokenDataset):
        raise UsageError(f"--model {config.model} trains on tokens, and --data {quoted(config.data)} has none")
    return checked(
        Architecture(
            config.layers,
            config.width,
            config.heads,
            dataset.vocab_size,
            config.context,
            inner,
            gated=config.model == "llama",
            kv_heads=config.kv_heads,
            experts=config.experts,
            top_k=(config.optional("top_k") or 1) if config.experts else 0,
        ),
        NAMES,
    )


def _micro_batch(config: TrainConfig, file: str) -> int:
    """Return the sequences of a micro-batch of a job that gives their number instead."""
    count = config.accumulation or config.microbatches or 1
    if config.global_batch is None or config.dp is None or config.global_batch % (config.dp * count):
        raise UsageError(
            f"{count} micro-batches in {file} give no size of one; give micro-batch, or global-batch and dp that the"
            " micro-batches divide"
        )
    return config.global_batch // (config.dp * count)
