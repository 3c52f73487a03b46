"""`minidist train`: train a model on virtual ranks or under mpiexec.

Proved by: tests/commands/test_cli.py
"""

from pathlib import Path
from typing import Annotated

import typer

from minidist.commands.options import (
    DeepSpeed,
    EagerBytes,
    Ranks,
    Timeout,
    above_zero,
    command_line,
    takes_config,
    with_deepspeed,
)
from minidist.commands.output import Result, json_or_table, say
from minidist.config.train_config import TrainConfig


@takes_config
@json_or_table
def train(
    config: TrainConfig,
    ranks: Ranks = None,
    timeout: Timeout = 60.0,
    trace: Annotated[
        Path | None, typer.Option(help="where the trace goes (default: runs/train.jsonl), or none: keep no events")
    ] = None,
    eager_bytes: EagerBytes = 0,
    metrics: Annotated[
        Path | None, typer.Option(help="a file of JSON lines, one per step; steps are numbered from 0")
    ] = None,
    deepspeed: DeepSpeed = None,
    memory_budget: Annotated[
        float | None,
        typer.Option(
            help="bytes of a rank: divide --global-batch into the largest micro-batches that fit", callback=above_zero
        ),
    ] = None,
) -> Result | None:
    """Train a model on virtual ranks, or, under mpiexec, as one of its ranks."""
    from minidist.commands.runner import run_training

    config = with_deepspeed(config, deepspeed)
    if memory_budget is not None:
        from minidist.commands.memory_budget import fit_micro_batch

        config, line = fit_micro_batch(config, ranks, memory_budget)
        say(line)
    # A long run keeps no events: its memory would grow with every message.
    path = None if trace == Path("none") else trace or Path("runs/train.jsonl")

    # Under mpiexec only rank 0 has a summary to print.
    summary = run_training(config, ranks, timeout, path, eager_bytes, command_line(), metrics)
    if summary is None:
        return None

    def show() -> None:
        print(summary.table())
        if path is not None:
            say(f"trace: {path}   picture: minidist report {path} --picture space-time -o runs/space-time.svg")

    return Result(summary.as_dict(), show)
