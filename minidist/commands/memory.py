"""`minidist memory`: the bytes of a rank on paper, for any number of parameters.

Proved by: tests/planning/test_memory_estimator.py
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from minidist.base.errors import UsageError, quoted, quoted_path
from minidist.base.file_format import format_of
from minidist.commands.flags import command_line
from minidist.commands.output import Result, json_or_table, say


@json_or_table
def memory(
    params: Annotated[str | None, typer.Option(help="number of parameters, such as 7.5e9")] = None,
    model: Annotated[
        str | None, typer.Option(help="a name, such as gpt3-175b or llama-3.1-8b, or a config.json")
    ] = None,
    dp: Annotated[int, typer.Option(help="data-parallel ranks")] = 1,
    tp: Annotated[int, typer.Option(help="with --model: tensor-parallel ranks (with sequence parallelism)")] = 1,
    pp: Annotated[int, typer.Option(help="with --model: pipeline ranks; the fullest one is shown")] = 1,
    cp: Annotated[int, typer.Option(help="with --model: context-parallel ranks")] = 1,
    ep: Annotated[int, typer.Option(help="with --model: expert-parallel ranks")] = 1,
    batch: Annotated[int, typer.Option(help="with --model: sequences per forward pass of a rank")] = 1,
    seq: Annotated[
        int | None, typer.Option(help="with --model: tokens per sequence (default: the model's maximum)")
    ] = None,
    accounting: Annotated[
        str | None, typer.Option(help="zero (default), fp32-accumulation (default of several axes) or deepspeed")
    ] = None,
    recompute: Annotated[str, typer.Option(help="with --model: none, selective, full or sqrt")] = "none",
    prefetch: Annotated[
        int, typer.Option(help="with --model and no axis but --dp: units that ZeRO 3 gathers ahead")
    ] = 1,
    form: Annotated[
        str | None, typer.Option("--format", help="on standard output: text (default) or svg (the ZeRO bars)")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="draw the ZeRO bars into an .svg, .pdf or .png file")
    ] = None,
) -> Result:
    """Calculate how many bytes a rank holds at each ZeRO stage, for some parameters or for a whole step of a model."""
    from minidist.planning.layout_memory import layout_peak
    from minidist.planning.memory_estimator import deepspeed_offload, model_peak, model_states, whole_number

    if (params is None) == (model is None):
        raise UsageError("give either --params NUMBER (model states) or --model NAME (the whole peak of a step)")
    form = _format(form, output)
    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
    split = [f"--{axis} {degree}" for axis, degree in degrees.items() if degree != 1]
    _check_accounting(accounting, split, 1 if model is None else prefetch)
    accounting = accounting or ("fp32-accumulation" if split else "zero")
    ranks = dp * tp * pp * cp
    title = f"{model or params}{{}} on {ranks} rank{'s' * (ranks != 1)}, {accounting} accounting"

    # A model's whole step, or the model states of a bare number of parameters, which has no activations.
    if model is not None and split:
        stages = layout_peak(model, {"dp": dp, **degrees}, batch, seq, recompute)
    elif model is not None:
        stages = model_peak(model, dp, batch, seq, accounting, recompute, prefetch)
    else:
        _refuse_activations({**degrees, "batch": batch, "seq": seq, "recompute": recompute, "prefetch": prefetch})
        number = whole_number(params or "")
        stages = dict(model_states(number, dp, accounting))
        if accounting == "deepspeed":
            stages["offload"] = deepspeed_offload(number, dp)

    # A file is written with --json, too.
    draw = partial(_draw, stages, title.format(" parameters"), output)
    if output is not None:
        draw()
        return Result(stages, lambda: None)
    if form == "svg":
        return Result(stages, draw)
    return Result(stages, partial(_print, stages, title.format(""), accounting))


def _format(form: str | None, output: Path | None) -> str:
    """Return the format of the output: text or svg."""
    from minidist.report.frame import SUFFIXES

    if form not in (None, "text", "svg"):
        raise UsageError(f"--format {quoted(form)}; it must be text or svg")
    if output is not None and form == "text":
        raise UsageError(f"--format text contradicts --output {quoted_path(output)}; leave one of them out")
    return format_of(output, None, {"svg": SUFFIXES}, form or "text")


def _check_accounting(accounting: str | None, split: list[str], prefetch: int) -> None:
    """Raise UsageError for what is not counted in some layouts. split: the flags of axes that divide the model."""
    if split and accounting not in (None, "fp32-accumulation"):
        raise UsageError(
            f"--accounting {quoted(accounting)} with {split[0]}: layouts are counted with float32 sums of gradients;"
            " leave out --accounting"
        )
    # Only ZeRO 3 on data-parallel ranks is counted with units that are gathered ahead.
    if prefetch != 1 and (split or accounting == "deepspeed"):
        other = split[0] if split else "--accounting deepspeed"
        raise UsageError(f"--prefetch {quoted(prefetch)} has no effect with {other}; leave one of them out")


def _refuse_activations(flags: dict[str, Any]) -> None:
    """Raise UsageError for the first flag that a bare number of parameters has no use for."""
    for name, value in flags.items():
        if value != {"seq": None, "recompute": "none"}.get(name, 1):
            raise UsageError(
                f"--{name} {value} is about a model's activations, which --params does not tell; give --model NAME"
            )


def _draw(stages: dict[str, Any], title: str, output: Path | None) -> None:
    """Draw the ZeRO bars into `output`, or write the SVG to standard output."""
    from minidist.report.frame import save
    from minidist.report.zero_bars import zero_bars

    figure = zero_bars(stages, title=title, command=command_line())
    if output:
        say(f"written: {save(figure, output)}")
        return
    with TemporaryDirectory() as folder:
        print(save(figure, Path(folder) / "bars.svg").read_text(encoding="utf-8"))


def _print(stages: dict[str, Any], title: str, accounting: str) -> None:
    """Print the stages as tables, and what the accounting leaves out."""
    from minidist.planning.memory_estimator import block_sentence, offload_table, table

    print(title)
    print(table(stages))
    if "offload" in stages:
        print(offload_table(stages["offload"]))
    if "activations_of_a_block" in stages:
        print(block_sentence(stages))
    if "not_counted" in stages:
        print(stages["not_counted"])
    elif accounting == "deepspeed":
        print(
            "DeepSpeed's stage 3 adds 4 bytes for each parameter of the largest layer, which --params cannot tell; use"
            " --model"
        )
