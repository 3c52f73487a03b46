"""`minidist profile`: the time of each block of a model, measured on this machine.

Proved by: tests/planning/test_profiler.py
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from minidist.base.files import writing
from minidist.comm.launch import writable
from minidist.commands.options import takes_config
from minidist.commands.output import say
from minidist.config.train_config import TrainConfig


@takes_config
def profile(
    config: TrainConfig,
    rounds: Annotated[int, typer.Option(min=1, help="timed passes of each block")] = 5,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="a file instead of standard output")] = None,
) -> None:
    """Time each block of the model on this machine: a PROFILE.json for minidist partition and train --partition."""
    from minidist.planning.profiler import profile_layers

    text = json.dumps([vars(layer) for layer in profile_layers(config, rounds)], indent=1)
    if output is None:
        print(text)
    else:
        writable(output, "--output")
        with writing("the profile", output, "make room there, or choose another --output"):
            output.write_text(text + "\n", encoding="utf-8")
        say(f"written: {output}")
