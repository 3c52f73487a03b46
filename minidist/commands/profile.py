"""`minidist profile`: the time of each block of a model, measured on this machine.

Proved by: tests/planning/test_profiler.py
"""

import json
import time
from pathlib import Path
from typing import Annotated

from minidist.base.file_format import format_of
from minidist.base.files import writing
from minidist.comm.launching import writable
from minidist.commands.command import Option, Result, json_or_table, say
from minidist.commands.options import takes_config
from minidist.job.config.train_config import TrainConfig

SECONDS_BETWEEN_LINES = 2.0


@takes_config
@json_or_table
def profile(
    config: TrainConfig,
    rounds: Annotated[int, Option(min=1, help="timed passes of each block")] = 5,
    output: Annotated[
        Path | None, Option("--output", "-o", help="a .json file, for minidist partition and --partition")
    ] = None,
) -> Result:
    """Time each block of the model on this machine: a table, and with -o a PROFILE.json for minidist partition.

    `minidist train --partition PROFILE.json` cuts a pipeline by the measured times.
    """
    from minidist.planning.profiler import profile_layers

    if output is not None:
        format_of(output, None, {"profile": (".json",)})
        writable(output, "--output", '[\n {\n  "op": ')
    told = time.monotonic()

    def watch(done: int) -> None:
        nonlocal told
        if time.monotonic() - told > SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            say(f"profile: {done}/{rounds} rounds")

    layers = profile_layers(config, rounds, watch)
    value = [vars(layer) for layer in layers]
    if output is not None:
        with writing("the profile", output, "make room there, or choose another --output"):
            output.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    def show() -> None:
        print(f"{'block':24}{'forward':>12}{'backward':>12}{'output':>16}{'parameters':>16}")
        for layer in layers:
            times = f"{layer.fwd_ms:9.3f} ms{layer.bwd_ms:9.3f} ms"
            print(f"{layer.op:24}{times}{layer.act_bytes:14,.0f} B{layer.param_bytes:14,.0f} B")
        if output is not None:
            say(f"written: {output}")

    return Result(value, show)
