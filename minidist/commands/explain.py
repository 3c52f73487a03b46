"""`minidist explain`: what a DeepSpeed configuration file asks for.

Proved by: tests/config/test_deepspeed.py
"""

from pathlib import Path
from typing import Annotated

from minidist.commands.command import Argument, Option, Result, json_or_table
from minidist.commands.options import Ranks, given_settings, takes_config
from minidist.job.config.train_config import TrainConfig


@takes_config
@json_or_table
def explain(
    config: TrainConfig,
    file: Annotated[Path, Argument(help="a DeepSpeed configuration file")],
    ranks: Ranks = None,
    params: Annotated[str | None, Option(help="also the model states of this many parameters, such as 7.5e9")] = None,
    run: Annotated[bool, Option("--run", help="run a step on simulated ranks: messages and memory, too")] = False,
) -> Result:
    """Print what a DeepSpeed configuration asks for, in bytes, on a model that flags describe."""
    from minidist.commands.explanation import explain_job, table
    from minidist.job.config.deepspeed import apply_deepspeed, read_deepspeed

    translation = read_deepspeed(file)
    figures = explain_job(apply_deepspeed(config, translation, given_settings()), translation, ranks, params, run)
    return Result(figures, lambda: print(table(figures)))
