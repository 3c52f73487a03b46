"""`minidist train`: train a model on virtual ranks or under mpiexec.

Proved by: tests/commands/test_cli.py
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from minidist.base.errors import UsageError, quoted
from minidist.base.limits import MAX_RANKS, check_count
from minidist.comm.launched import launched_rank
from minidist.commands.command import Option, Result, command_line, json_or_table, say
from minidist.commands.flags import Timeout
from minidist.commands.options import DeepSpeed, DeviceName, EagerBytes, Ranks, on_device, takes_config, with_deepspeed
from minidist.job.config.train_config import TrainConfig, resolve_dims

MAX_TRACED_RANKS = 64  # whose events are kept where no --trace is given


@dataclass(frozen=True)
class HuggingFaceFlags:
    """The flags of weights that are written as Hugging Face stores them."""

    save_hf: Annotated[
        Path | None,
        Option("--save-hf", help="with --save: a new folder for the trained weights as Hugging Face stores them"),
    ] = None
    hf_shards: Annotated[
        int | None,
        Option(
            "--hf-shards",
            help="with --save-hf: the number of files; each has a part of every tensor, as torch's DCP writes them",
        ),
    ] = None

    def check(self) -> None:
        """Raise UsageError for a number of files without a folder, or out of range."""
        if self.hf_shards is None:
            return
        if self.save_hf is None:
            raise UsageError("--hf-shards says how --save-hf writes its files; add --save-hf FOLDER, or leave it out")
        check_count(self.hf_shards, "--hf-shards", least=1, most=MAX_RANKS)


@dataclass(frozen=True)
class DryFlags:
    """The flags of a run without values."""

    dry: Annotated[
        bool, Option("--dry-run", help="run on arrays without data: bytes, peaks of memory and virtual time")
    ] = False
    gpu: Annotated[
        str | None, Option(help="with --dry-run: whose speeds the clock has, such as h100 (see minidist plan)")
    ] = None
    fold: Annotated[
        bool, Option(help="with --dry-run: one rank of each pipeline stage runs and stands for all, for many ranks")
    ] = False

    def check(self, trace: Path | None) -> None:
        """Raise UsageError for a flag of a dry run that there is none of, and for a trace of folded ranks."""
        if self.gpu is not None and not self.dry:
            raise UsageError(f"--gpu {quoted(self.gpu)} is the clock of a dry run; add --dry-run, or leave it out")
        if self.fold and not self.dry:
            raise UsageError("--fold requires --dry-run; add it, or leave out --fold")
        if self.fold and trace not in (None, Path("none")):
            raise UsageError("--fold keeps no events; leave out --trace, or --fold")


@takes_config
@json_or_table
def train(
    *,
    config: TrainConfig,
    ranks: Ranks = None,
    timeout: Timeout = 60.0,
    trace: Annotated[
        Path | None,
        Option(help="where the trace goes (default: runs/train.jsonl, of at most 64 ranks), or none: keep no events"),
    ] = None,
    eager_bytes: EagerBytes = 0,
    metrics: Annotated[
        Path | None, Option(help="a file of JSON lines, one per step; steps are numbered from 0")
    ] = None,
    files: HuggingFaceFlags,
    deepspeed: DeepSpeed = None,
    device: DeviceName = "cpu",
    run: DryFlags,
) -> Result | None:
    """Train a model on virtual ranks, or, under mpiexec, as one of its ranks."""
    from minidist.commands.runner import chosen, run_training

    config = config if deepspeed is None else with_deepspeed(config, deepspeed)
    path = _trace_path(trace, config, ranks, run.fold)
    run.check(trace)
    files.check()
    if files.save_hf is not None and _is_trained(config, files.save_hf, run.dry):
        return _written(config, files)
    if run.dry:
        from minidist.commands.dry_run import check_dry_run, dry_run

        check_dry_run(config, metrics)
    config = chosen(config, ranks, has_values=not run.dry)
    if run.dry:
        return dry_run(config, ranks, timeout, path, eager_bytes, command_line(), run.gpu, run.fold)

    # Under mpiexec only rank 0 has a summary to print.
    with on_device(device, config):
        summary = run_training(config, ranks, timeout, path, eager_bytes, command_line(), metrics)
    if summary is None:
        return None
    written = _written(config, files)

    def show() -> None:
        print(summary.table())
        if written is not None:
            written.show()
        if path is not None:
            say(f"trace: {path}   picture: minidist report {path} --picture space-time -o runs/space-time.svg")

    return Result(summary.as_dict(), show)


def _trace_path(trace: Path | None, config: TrainConfig, ranks: int | None, fold: bool) -> Path | None:
    """Return where the trace goes, or None for a run that keeps no events."""
    # A long run keeps none: its memory would grow with every message, and so do many ranks unless they are asked.
    if trace is None and not fold and (ranks or resolve_dims(config).ranks) > MAX_TRACED_RANKS:
        say(
            f"more than {MAX_TRACED_RANKS} ranks: bytes, messages and peaks are counted, and no events are kept;"
            " --trace FILE keeps them all"
        )
        return None
    return None if fold or trace == Path("none") else trace or Path("runs/train.jsonl")


def _is_trained(config: TrainConfig, folder: Path, dry: bool) -> bool:
    """Check --save-hf before anything is trained, and return whether nothing is left to train."""
    from minidist.job.checkpoint.huggingface import check_saving_huggingface, only_written

    if dry:
        raise UsageError("--save-hf needs values, and a dry run has none; leave it out")
    # A rank that comes late would find the folder that rank 0 has finished.
    trained = only_written(config)
    if not trained or launched_rank() == 0:
        check_saving_huggingface(config, folder)
    return trained


def _written(config: TrainConfig, flags: HuggingFaceFlags) -> Result | None:
    """Write the last checkpoint as a folder of Hugging Face, where one is asked for; under mpiexec rank 0 does."""
    folder = flags.save_hf
    if folder is None or launched_rank() != 0:
        return None
    from minidist.job.checkpoint import Checkpoint
    from minidist.job.checkpoint.huggingface import write_huggingface

    assert config.save is not None
    checkpoint = Checkpoint(config.save)
    write_huggingface(checkpoint, folder, shards=flags.hf_shards)
    return Result(
        {"written": str(folder), "step": checkpoint.step},
        lambda: say(f"written: {folder}, as Hugging Face stores a model"),
    )
