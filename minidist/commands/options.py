"""The flags of a training job that several commands share, and the job that flags and files describe together.

`@takes_config` gives a command one flag per field of TrainConfig. A setting comes from the first of: its flag, `--set`,
the file of `--config`, the default.

Proved by: tests/commands/test_cli.py, tests/config/test_config_file.py, tests/config/test_deepspeed.py
"""

import inspect
import json
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from minidist.base.device import creating_on, device_of
from minidist.commands.command import Option, parameter, say, with_parameters
from minidist.core.base.errors import UsageError
from minidist.job.config.train_config import TrainConfig, flag
from minidist.techniques import installed, own_loop

Ranks = Annotated[int | None, Option(help="virtual ranks (default: the product of the degrees); not under mpiexec")]
TraceFile = Annotated[Path | None, Option(help="where the trace goes")]
DeepSpeed = Annotated[Path | None, Option(help="a DeepSpeed configuration file; keys that do not apply are listed")]
DeviceName = Annotated[str, Option("--device", help="where arrays are: cpu, or cuda with CuPy")]
EagerBytes = Annotated[int, Option(help="simulated: sends of up to this many bytes are buffered")]


def on_device(name: str, config: TrainConfig) -> AbstractContextManager[None]:
    """Return the context in which arrays are made on the device of --device; UsageError where that is impossible."""
    if name == "cpu":
        return nullcontext()
    device, loop = device_of(name), own_loop(config)
    if loop is not None and loop.no_device:
        raise UsageError(loop.no_device)
    return creating_on(device)


# The first field of each panel of --help: the fields stand in this order in TrainConfig.
PANELS = {
    "model": "Model and data",
    "steps": "Optimization",
    "global_batch": "Batch",
    "dp": "Data parallelism",
    "pp": "Pipeline parallelism",
    "cp": "Context parallelism",
    "tp": "Tensor parallelism",
    "ep": "Expert parallelism",
    "zero": "Data parallelism",
    "precision": "Precision and memory",
    "save": "Checkpoints and checks",
}


def takes_config(function: Callable[..., Any]) -> Callable[..., None]:
    """Give a command `--config`, `--set`, `--print-config` and a flag for each field of TrainConfig.

    `function` receives the resulting TrainConfig as its first parameter, `config`, and its own flags by name.
    """
    defaults = [(name, info.default) for name, info in TrainConfig.model_fields.items()]
    own = list(inspect.signature(function).parameters.values())[1:]  # without the config

    def command(*, config: Path | None, overrides: list[str] | None, print_config: bool, **values: Any) -> Any:
        settings = {}
        for name, default in defaults:
            value = values.pop(name)
            if value != default:  # which needs no check
                settings[name] = value
        _written.set(frozenset())
        if config is not None or overrides:
            from minidist.job.config.config_file import read_config, read_overrides

            # The first of flag, --set and file gives the value.
            given, written = given_flags(), {} if config is None else read_config(config)
            written.update(read_overrides(overrides or ()))
            settings.update({name: value for name, value in written.items() if name not in given})
            _written.set(frozenset(written))
        job = TrainConfig(**settings)
        if print_config:
            print(as_toml(job, given_settings()))
            return None
        return function(config=job, **values)

    return with_parameters(command, function, [*_of_a_file(), *_of_a_config(), *own])


def _of_a_file() -> list[inspect.Parameter]:
    """Return `--config`, `--set` and `--print-config`."""
    panel = "Job file"
    file = Option("--config", help="a .toml or .json file of settings; flags override it", panel=panel)
    one = Option(
        "--set", help="KEY=VALUE with a setting's name in the file, such as axes.tp=4; overrides the file", panel=panel
    )
    shown = Option(
        "--print-config",
        help="print all settings as a file for --config (defaults as comments), and run nothing",
        panel=panel,
    )

    return [
        parameter("config", Annotated[Path | None, file], None),
        parameter("overrides", Annotated[list[str] | None, one], None),
        parameter("print_config", Annotated[bool, shown], False),
    ]


def _of_a_config() -> list[inspect.Parameter]:
    """Return a flag for each field of TrainConfig."""
    panel, parameters = "", []
    panels = {name: kind.panel for kind in installed() for name in kind.Settings.model_fields}
    for name, info in TrainConfig.model_fields.items():
        kind, text = info.annotation, info.description or ""
        # A Literal becomes a word whose choices are in the help; TrainConfig checks it, with its own error message.
        # With spaces between them, so that a narrow terminal wraps the choices instead of cutting them off.
        if get_origin(kind) is Literal:
            text, kind = f"{text} ({' | '.join(get_args(kind))})", str
        # A number or a word: the flag is a text, which TrainConfig reads.
        if Literal["auto"] in get_args(kind):
            kind = str | None
        # A bool has one flag only, without Typer's --no-FLAG.
        panel = panels.get(name) or PANELS.get(name, panel)
        option = Option(*((flag(name),) if kind is bool else ()), help=text, panel=panel)
        parameters.append(parameter(name, Annotated[kind, option], info.default))
    return parameters


def as_toml(config: TrainConfig, given: Collection[str]) -> str:
    """Return all settings as the text of a --config file; one that is not `given` is a comment.

    A command chooses what the user has not: `compare` adds in the order of one device, and `train` in a ring.
    """
    lines = []
    for name, value in config.model_dump().items():
        # One table for each panel of --help.
        if name in PANELS:
            lines += ["", f"[{PANELS[name].lower().replace(' ', '-')}]" if name != "zero" else "[data-axis]"]
        key = name.replace("_", "-")
        # A string, a number and a boolean of JSON are those of TOML.
        text = f"{key} =" if value is None else f"{key} = {json.dumps(value)}"
        lines.append(text if name in given and value is not None else f"# {text}")
    return "\n".join(lines[1:])


def with_deepspeed(config: TrainConfig, path: Path) -> TrainConfig:
    """Return the job with the settings of a DeepSpeed file; the first process names the keys that do not apply."""
    from minidist.comm.launched import launched_rank
    from minidist.job.config.deepspeed import apply_deepspeed, read_deepspeed

    translation = read_deepspeed(path)
    job = apply_deepspeed(config, translation, given_settings())
    if translation.ignored and launched_rank() == 0:
        say(translation.warning(job))
    return job


# The fields that --config and --set gave: like a flag, none of them is overridden without a message.
_written: ContextVar[frozenset[str]] = ContextVar("minidist_written_settings", default=frozenset())


def given_flags() -> set[str]:
    """Return the fields whose flags are on the command line."""
    # What was typed, because a parsed value does not tell whether it is the default.
    return {word.split("=")[0][2:].replace("-", "_") for word in sys.argv[1:] if word.startswith("--")}


def given_settings() -> set[str]:
    """Return the fields that a flag, --set or the file of --config gives."""
    return given_flags() | _written.get()
